"""Placement of a batch's rows on the devices of several processes."""

from typing import Any

import jax
from jax.sharding import NamedSharding


def local_rows(sharding: NamedSharding, shape: tuple[int, int]) -> list[int]:
    """Returns the sorted rows of a [rows, T] array on this process's devices."""
    rows: set[int] = set()
    for index in sharding.addressable_devices_indices_map(shape).values():
        assert index is not None  # every addressable device holds a shard
        rows.update(range(*index[0].indices(shape[0])))
    return sorted(rows)


def put_rows(tree: Any, rows: list[int], num_rows: int, sharding: NamedSharding) -> Any:
    """Returns global arrays [num_rows, T] from this process's rows (numpy, in the order of `rows`) of each leaf."""
    if len(rows) == num_rows and jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    index_of = {row: index for index, row in enumerate(rows)}

    def put(leaf):
        def read(index):
            indices = [index_of[row] for row in range(*index[0].indices(num_rows))]
            return leaf[indices][:, index[1]]

        return jax.make_array_from_callback((num_rows, leaf.shape[1]), sharding, read)

    return jax.tree.map(put, tree)
