"""Meshes over several processes: rows of a batch, descriptions, and programs that must not overlap."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxscale.core.mesh import crossed_groups


def local_rows(sharding: NamedSharding, shape: tuple[int, int]) -> list[int]:
    """Returns the sorted row indices of a [rows, T] array that are on this process's devices."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return sorted({row for index in indices if index for row in range(*index[0].indices(shape[0]))})


def put_rows(tree: Any, rows: list[int], num_rows: int, sharding: NamedSharding) -> Any:
    """Returns global arrays [num_rows, T]. The numpy leaves of `tree` contain the local rows, listed in `rows`."""
    if len(rows) == num_rows and jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    index_of = {row: index for index, row in enumerate(rows)}

    def put(leaf):
        read = lambda index: leaf[[index_of[row] for row in range(*index[0].indices(num_rows))]][:, index[1]]
        return jax.make_array_from_callback((num_rows, leaf.shape[1]), sharding, read)

    return jax.tree.map(put, tree)


def one_at_a_time(f: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Returns a function that calls f and, on several simulated CPU devices, waits for its result.

    Used for independent programs with collectives, such as evaluation batches. In XLA:CPU, a device starts a program
    when a thread is free. Concurrent programs can occupy each other's threads, and then a collective waits forever for
    a device that never starts. In a test with 60 calls of a program with five gathers, 6 of 6 runs deadlocked with
    several calls in flight, and none with one call (jax 0.10.2, 8 devices on 2 cores, 2026-11-27).
    """
    if mesh.size == 1 or mesh.devices.flat[0].platform != "cpu":
        return f
    return functools.wraps(f)(lambda *args: jax.block_until_ready(f(*args)))


def mesh_layout(mesh: Mesh) -> str:
    """Returns a description such as 'data=2 (over 2 slices), fsdp=64, tensor=4', or 'one device'."""
    kind, outer = crossed_groups(mesh)
    words = [
        f"{axis}={size}" + (f" (over {outer[axis]} {kind}s)" if outer[axis] > 1 else "")
        for axis, size in mesh.shape.items()
        if size > 1
    ]
    return ", ".join(words) or "one device"
