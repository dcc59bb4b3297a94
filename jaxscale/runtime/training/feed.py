"""Global batches on the devices, read and transferred by Grain's prefetch thread two steps ahead of the loop."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from jaxscale.core.batch import Batch, ReadRows
from jaxscale.runtime.data.dataset import map_dataset, read_ahead, read_batch
from jaxscale.runtime.data.order import Transform
from jaxscale.runtime.data.stacking import split_rows
from jaxscale.runtime.hosts.meshes import local_rows, put_rows

CLOSE_SECONDS = 10.0


class NumberedBatch(NamedTuple):
    """A global batch and its index n."""

    batch: Batch
    batch_index: int


class Feed:
    """Iterator over the global batches of a range of steps, with their indices. Call close() at the end.

    The data position depends only on the step, so the state of Grain is not saved.
    """

    AHEAD = 2  # one batch in use, one in transfer

    def __init__(
        self,
        read: ReadRows,
        batch_index: Callable[[int], int],
        sharding: jax.sharding.NamedSharding,
        steps: range,
        *,
        num_rows: Callable[[int], int],
        row_tokens: Callable[[int], int],
        seq_len: int,
        transforms: Sequence[Transform] = (),
    ):
        """Batch n = batch_index(step) has num_rows(n) sequences of seq_len tokens, which `read(n, rows)` returns as
        NumPy arrays. On the devices, each is split into sequences of row_tokens(n) tokens, a divisor of seq_len."""
        local = functools.cache(lambda number, length: local_rows(sharding, (number, length)))

        def element(i: int) -> NumberedBatch:
            n = batch_index(steps[i])
            length = row_tokens(n)
            parts = seq_len // length  # rows on the devices per row that is read
            number = num_rows(n) * parts
            rows = sorted({row // parts for row in local(number, length)})
            batch = read_batch(read, rows, transforms, n)
            cut = [row * parts + part for row in rows for part in range(parts)]
            return NumberedBatch(put_rows(split_rows(batch, length) if parts > 1 else batch, cut, number, sharding), n)

        self.batches = read_ahead(map_dataset(element, len(steps)), self.AHEAD)

    def __iter__(self) -> Iterator[NumberedBatch]:
        return self

    def __next__(self) -> NumberedBatch:
        return next(self.batches)

    def close(self) -> None:
        """Ends the thread, or abandons it after CLOSE_SECONDS if a read hangs."""
        closing = threading.Thread(target=self.batches.close, name="feed-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
