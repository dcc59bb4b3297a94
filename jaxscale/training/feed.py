"""Rows on the host become global arrays on the devices, by Grain's prefetch thread, two steps ahead of the loop."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from jaxscale.data.batch import Batch
from jaxscale.data.dataset import ReadRows, map_dataset, read_ahead, read_batch
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
        seq_len: int,
        transforms: Sequence[Transform] = (),
    ):
        """read(n, rows) -> those rows of batch n as numpy; batch_index(step) -> n; num_rows(n): of the whole batch."""
        own_rows = functools.cache(lambda number: local_rows(sharding, (number, seq_len)))

        def element(i: int) -> NumberedBatch:
            n = batch_index(steps[i])
            number = num_rows(n)
            rows = own_rows(number)
            return NumberedBatch(put_rows(read_batch(read, rows, transforms, n), rows, number, sharding), n)

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
