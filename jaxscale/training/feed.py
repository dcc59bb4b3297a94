"""Rows on the host become global arrays on the devices, by Grain's prefetch thread, two steps ahead of the loop."""

import threading
from collections.abc import Callable, Iterator, Sequence

import jax

from jaxscale.data.dataset import NumberedBatch, ReadRows, Transform, read_ahead, step_dataset
from jaxscale.sharding.shardings import local_rows, put_rows

CLOSE_SECONDS = 10.0


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
        num_rows: int,
        seq_len: int,
        transforms: Sequence[Transform] = (),
    ):
        """read(n, rows) -> those rows of batch n as numpy; batch_index(step) -> n."""
        rows = local_rows(sharding, (num_rows, seq_len))
        dataset = step_dataset(read, rows, batch_index=batch_index, num_steps=steps.stop, transforms=transforms)
        dataset = dataset[steps.start :].map(
            lambda item: item._replace(batch=put_rows(item.batch, rows, num_rows, sharding))
        )
        self.batches = read_ahead(dataset, self.AHEAD)

    def __iter__(self) -> Iterator[NumberedBatch]:
        return self

    def __next__(self) -> NumberedBatch:
        return next(self.batches)

    def close(self) -> None:
        """Ends the thread; or leaves it behind where it is stuck in a read, to end with the process."""
        closing = threading.Thread(target=self.batches.close, name="feed-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
