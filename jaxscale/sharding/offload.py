"""Arrays that live in the host's memory between steps: how they are placed there, and how a step reads them."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxscale.sharding.shardings import Gather
from jaxscale.system.exits import BadInput

HOST = "pinned_host"  # JAX's name for memory of the host that a device copies to and from by itself


def check_host_memory(setting: str, mesh: Mesh) -> None:
    """Raises BadInput naming the setting if the devices of the mesh do not reach the host's memory.

    GPUs that are compiled for and not there list no memory, and jax 0.10.2 takes all their arrays for the device's.
    """
    device = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST not in kinds:
        raise BadInput(
            f"{setting} needs devices that reach {HOST} memory, and {device.device_kind} has "
            f"{', '.join(kinds) or 'none that can be compiled for ahead'}; leave it out here"
        )


def on_host(shardings: Any, but: Callable[[str], bool] = lambda name: False) -> Any:
    """The same shardings in the host's memory, but for scalars, and leaves whose dotted names `but` holds of."""
    dotted = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    put = lambda path, place: place.with_memory_kind(HOST) if len(place.spec) and not but(dotted(path)) else place
    return jax.tree_util.tree_map_with_path(put, shardings)


def is_on_host(x: Any) -> bool:
    """True for an array in the host's memory, inside a jitted function."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Offloaded:
    """A weight in the host's memory, and the device-side zeros that take its gradient.

    JAX wants the gradient of an array to be in the array's own memory.
    """

    weight: jax.Array
    zeros: jax.Array


def device_zeros(params: Any) -> Any:
    """Device-side zeros that stand in for offloaded parameters so that jax.grad has something to differentiate; XLA
    removes them."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), params)


def fetch_outside_blocks(params: dict, zeros: dict, stacks: Collection[str]) -> dict:
    """Parameters for a model whose gather is fetch_then(...): those of these stacks of blocks stay offloaded, the
    others are fetched."""
    offloaded = jax.tree.map(Offloaded, params, zeros)
    is_offloaded = lambda leaf: isinstance(leaf, Offloaded)
    fetched = lambda tree: jax.tree.map(lambda leaf: fetch(leaf.weight, leaf.zeros), tree, is_leaf=is_offloaded)
    return {name: tree if name in stacks else fetched(tree) for name, tree in offloaded.items()}


def fetch_then(gather: Gather) -> Gather:
    """`gather` for weights that may be offloaded: each is fetched just before."""
    fetched = lambda w: fetch(w.weight, w.zeros) if isinstance(w, Offloaded) else w
    return lambda w, axes, dtype: gather(fetched(w), axes, dtype)


@jax.custom_vjp
def fetch(weight: jax.Array, zeros: jax.Array) -> jax.Array:
    """The weight on the device. Its gradient goes to the zeros."""
    return jax.device_put(weight, jax.memory.Space.Device)


fetch.defvjp(lambda weight, zeros: (fetch(weight, zeros), None), lambda _, grad: (None, grad))
