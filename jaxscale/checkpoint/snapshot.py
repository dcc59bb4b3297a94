"""A copy of the state that the next step cannot touch, with a fingerprint of every array, by one compiled program.

The caller only dispatches it: the step thread goes on at once, the devices copy between two steps, and the next step
may have the old buffers. Where the platform has memory of the host that devices can write (TPU, GPU), the copy goes
there and costs no device memory; on a CPU both are the same memory.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.checkpoint.fingerprint import fingerprint, fingerprint_on_host, on_device, replicated
from jaxscale.sharding.compiler_options import options_of_rare_programs

HOST = "pinned_host"


@dataclasses.dataclass
class Snapshot:
    """Copies of leaves, perhaps still being made."""

    leaves: dict[str, Any]
    device_prints: jax.Array | None  # of the device arrays, in order

    def prints(self) -> dict[str, int]:
        """{name: fingerprint}; waits for the devices."""
        found = iter(np.asarray(self.device_prints).tolist() if self.device_prints is not None else ())
        return {
            name: next(found) if isinstance(leaf, jax.Array) else fingerprint_on_host(leaf)
            for name, leaf in self.leaves.items()
        }


def take_snapshot(leaves: Mapping[str, Any]) -> Snapshot:
    """Dispatches the copy of all arrays. Numbers and numpy arrays are copied at once."""
    arrays = [leaf for leaf in leaves.values() if isinstance(leaf, jax.Array)]
    copies, prints = (), None
    if arrays:
        copies, prints = copy_program(layout(arrays))(arrays)
    made = iter(copies)
    copied = {
        name: next(made) if isinstance(leaf, jax.Array) else leaf.copy() if isinstance(leaf, np.ndarray) else leaf
        for name, leaf in leaves.items()
    }
    return Snapshot(copied, prints)


def layout(arrays: Sequence[Any]) -> tuple:
    """What the program depends on: may be kept after the arrays are gone."""
    return tuple((tuple(array.shape), array.dtype, array.sharding) for array in arrays)


@functools.lru_cache(maxsize=8)
def copy_program(described: tuple) -> Any:
    """The compiled function (arrays) -> (copies, uint32[number of arrays])."""
    abstract = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in described]
    shardings = [snapshot_sharding(sharding) for *_, sharding in described]

    def copy(arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        near = [on_device(array) for array in arrays]
        return [jnp.copy(array) for array in near], jnp.stack([fingerprint(array) for array in near])

    program = jax.jit(copy, out_shardings=(shardings, replicated(abstract)))
    platform = next(iter(described[0][2].device_set)).platform
    options = options_of_rare_programs(platform) or None
    return program.lower(abstract).compile(options)  # now, in whichever thread: a jit would compile at its first call


def snapshot_sharding(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """The same sharding in the memory of the host, where the platform tells them apart."""
    device = next(iter(sharding.device_set))
    if device.platform == "cpu" or HOST not in {memory.kind for memory in device.addressable_memories()}:
        return sharding
    return sharding.with_memory_kind(HOST)
