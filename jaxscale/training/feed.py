"""Rows on the host become global arrays on the devices, by Grain's prefetch thread, two steps ahead of the loop."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from jaxscale.data.batch import Batch, ReadRows, cut_rows
from jaxscale.data.dataset import map_dataset, read_ahead, read_batch
from jaxscale.data.order import Transform
from jaxscale.sharding.shardings import local_rows, put_rows

CLOSE_SECONDS = 10.0


class NumberedBatch(NamedTuple):
    """A global batch and its number n."""

    batch: Batch
    batch_index: int


class Feed:
    """The global batches of the steps in a range, with their numbers: an iterator to be closed.

    Its position is the step, or the number of the batch, which is arithmetic: no state of Grain is ever saved.
    """

    AHEAD = 2  # one batch in use, one on its way

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
        """read(n, rows) -> those rows of batch n as numpy, each of seq_len tokens; batch_index(step) -> n; num_rows(n):
        of the whole batch; row_tokens(n): in a row, as the devices get it."""
        own_rows = functools.cache(lambda number, length: local_rows(sharding, (number, length)))

        def element(i: int) -> NumberedBatch:
            n = batch_index(steps[i])
            length = row_tokens(n)
            parts = seq_len // length  # of a row as it is read
            number = num_rows(n) * parts
            rows = sorted({row // parts for row in own_rows(number, length)})
            batch = read_batch(read, rows, transforms, n)
            cut = [row * parts + part for row in rows for part in range(parts)]
            return NumberedBatch(put_rows(cut_rows(batch, length) if parts > 1 else batch, cut, number, sharding), n)

        self.batches = read_ahead(map_dataset(element, len(steps)), self.AHEAD)

    def __iter__(self) -> Iterator[NumberedBatch]:
        return self

    def __next__(self) -> NumberedBatch:
        return next(self.batches)

    def close(self) -> None:
        """Ends the thread; or leaves it behind where it is stuck in a read, to end with the process."""
        closing = threading.Thread(target=self.batches.close, name="feed-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
