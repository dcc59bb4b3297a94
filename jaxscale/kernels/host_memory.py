"""Shardings of arrays that are in host memory between steps, and copies to the device inside a step."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxscale.system.exits import BadInput

HOST = "pinned_host"  # JAX's name for host memory with DMA access from the device


def check_host_memory(setting: str, mesh: Mesh) -> None:
    """Raises BadInput for the setting if the devices of the mesh cannot address host memory.

    GPUs of an ahead-of-time topology list no memories, and jax 0.10.2 assumes that all arrays are on the device.
    """
    device = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST not in kinds:
        raise BadInput(
            f"{setting} needs devices with {HOST} memory, but {device.device_kind} has "
            f"{', '.join(kinds) or 'none in an ahead-of-time topology'}; remove the setting"
        )


def on_host(shardings: Any, exclude: Callable[[str], bool] = lambda name: False) -> Any:
    """Returns the shardings with host memory, except for scalars and leaves for which exclude(dotted name) is True."""
    dotted = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    move = lambda path, one: one.with_memory_kind(HOST) if len(one.spec) and not exclude(dotted(path)) else one
    return jax.tree_util.tree_map_with_path(move, shardings)


def is_on_host(x: Any) -> bool:
    """Returns True for an array in host memory. Works inside jitted functions."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Offloaded:
    """A weight in host memory, and an array of zeros on the device that receives its gradient.

    JAX requires the gradient of an array to be in the memory space of the array.
    """

    weight: jax.Array
    zeros: jax.Array


def device_zeros(params: Any) -> Any:
    """Returns zeros on the device, which are differentiated instead of offloaded parameters. XLA removes them."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, w.dtype), params)


def fetch_outside_blocks(params: dict, zeros: dict, stacks: Collection[str]) -> dict:
    """Copies parameters outside of `stacks` to the device. The others remain offloaded, for make_fetching_gather()."""
    offloaded = jax.tree.map(Offloaded, params, zeros)
    is_offloaded = lambda leaf: isinstance(leaf, Offloaded)
    fetched = lambda tree: jax.tree.map(lambda leaf: fetch(leaf.weight, leaf.zeros), tree, is_leaf=is_offloaded)
    return {name: tree if name in stacks else fetched(tree) for name, tree in offloaded.items()}


def make_fetching_gather(gather: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `gather` extended to offloaded weights, which are first copied to the device."""
    fetched = lambda w: fetch(w.weight, w.zeros) if isinstance(w, Offloaded) else w
    return lambda w, axes, dtype: gather(fetched(w), axes, dtype)


@jax.custom_vjp
def fetch(weight: jax.Array, zeros: jax.Array) -> jax.Array:
    """Copies the weight to the device. Its gradient is returned as the gradient of `zeros`."""
    return jax.device_put(weight, jax.memory.Space.Device)


fetch.defvjp(lambda weight, zeros: (fetch(weight, zeros), None), lambda _, grad: (None, grad))
