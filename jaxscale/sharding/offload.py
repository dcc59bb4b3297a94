"""Arrays that live in the host's memory between steps: how they are placed there, and how a step reads them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxscale.sharding.place import Gather
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


def on_host(shardings: Any) -> Any:
    """The same shardings in the host's memory, but for scalars."""
    return jax.tree.map(lambda place: place.with_memory_kind(HOST) if len(place.spec) else place, shardings)


def is_on_host(x: Any) -> bool:
    """True for an array in the host's memory, inside a jitted function."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Away:
    """A weight in the host's memory, and what takes its gradient: zeros on the device that nothing reads.

    jax wants the gradient of an array to be in the array's own memory.
    """

    weight: jax.Array
    stand_in: jax.Array


def stand_ins(params: Any) -> Any:
    """Zeros on the device like the parameters; the compiler leaves them out."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), params)


def call_in(params: dict, stand_ins: dict) -> dict:
    """Parameters for a model whose gather is fetching(...): those of the blocks stay away, the others are here."""
    away = jax.tree.map(Away, params, stand_ins)
    is_away = lambda leaf: isinstance(leaf, Away)
    here = lambda tree: jax.tree.map(lambda leaf: fetch(leaf.weight, leaf.stand_in), tree, is_leaf=is_away)
    return {name: tree if name == "blocks" else here(tree) for name, tree in away.items()}


def fetching(gather: Gather) -> Gather:
    """`gather` for weights that may be away: each is fetched just before."""
    here = lambda w: fetch(w.weight, w.stand_in) if isinstance(w, Away) else w
    return lambda w, axes, dtype: gather(here(w), axes, dtype)


@jax.custom_vjp
def fetch(weight: jax.Array, stand_in: jax.Array) -> jax.Array:
    """The weight on the device. Its gradient is that of the stand-in."""
    return jax.device_put(weight, jax.memory.Space.Device)


fetch.defvjp(lambda weight, stand_in: (fetch(weight, stand_in), None), lambda _, grad: (None, grad))
