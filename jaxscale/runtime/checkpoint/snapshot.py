"""Copies the state, so that the next step may overwrite it, and fingerprints every array, in one compiled program.

The caller only dispatches it: the step thread continues at once, the devices copy between two steps, and the next step
may donate the old buffers. If the platform has host memory that devices can write (TPU, GPU), the copy goes there and
uses no device memory; on a CPU both are the same memory.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.kernels.compiler_options import fast_compile_options
from jaxscale.runtime.checkpoint.fingerprint import fingerprint, fingerprint_on_host, on_device, replicated_sharding

HOST = "pinned_host"


@dataclasses.dataclass
class Snapshot:
    """Copies of leaves, which may still be computed."""

    leaves: dict[str, Any]
    device_fingerprints: jax.Array | None  # fingerprints of the device arrays, in order

    def fingerprints(self) -> dict[str, int]:
        """Returns {name: fingerprint}; waits for the devices."""
        found = iter(np.asarray(self.device_fingerprints).tolist() if self.device_fingerprints is not None else ())
        return {
            name: next(found) if isinstance(leaf, jax.Array) else fingerprint_on_host(leaf)
            for name, leaf in self.leaves.items()
        }


def take_snapshot(leaves: Mapping[str, Any]) -> Snapshot:
    """Dispatches the copy of all arrays. Python numbers and numpy arrays are copied at once."""
    arrays = [leaf for leaf in leaves.values() if isinstance(leaf, jax.Array)]
    copies, fingerprints = (), None
    if arrays:
        copies, fingerprints = copy_program(array_formats(arrays))(arrays)
    made = iter(copies)
    copied = {
        name: next(made) if isinstance(leaf, jax.Array) else leaf.copy() if isinstance(leaf, np.ndarray) else leaf
        for name, leaf in leaves.items()
    }
    return Snapshot(copied, fingerprints)


def array_formats(arrays: Sequence[Any]) -> tuple:
    """Returns the key of the compiled program, which holds no reference to the arrays."""
    return tuple((tuple(array.shape), array.dtype, array.sharding) for array in arrays)


@functools.lru_cache(maxsize=8)
def copy_program(described: tuple) -> Any:
    """Returns the compiled function (arrays) -> (copies, uint32[number of arrays])."""
    abstract = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in described]
    shardings = [snapshot_sharding(sharding) for *_, sharding in described]

    def copy(arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        arrays = [on_device(array) for array in arrays]
        return [jnp.copy(array) for array in arrays], jnp.stack([fingerprint(array) for array in arrays])

    program = jax.jit(copy, out_shardings=(shardings, replicated_sharding(abstract)))
    platform = next(iter(described[0][2].device_set)).platform
    options = fast_compile_options(platform) or None
    return program.lower(abstract).compile(options)  # now, in any thread: jit would compile at its first call


def snapshot_sharding(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Returns the sharding in pinned host memory, if the platform has one apart from device memory."""
    device = next(iter(sharding.device_set))
    if device.platform == "cpu" or HOST not in {memory.kind for memory in device.addressable_memories()}:
        return sharding
    return sharding.with_memory_kind(HOST)
