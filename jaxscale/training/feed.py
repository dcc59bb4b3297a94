"""Rows on the host become global arrays on the devices, one step ahead of the loop, in a thread of their own."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from jaxscale.data.batch import Batch
from jaxscale.sharding.shardings import local_rows, put_rows

CLOSE_SECONDS = 10.0


class Fed(NamedTuple):
    """One step's data."""

    batch: Batch  # global jax arrays
    batch_index: int


class Feed:
    """Batches for steps start, start + 1, ...: an iterator to be closed, two steps ahead of who reads it."""

    AHEAD = 2  # one batch in use, one on its way

    def __init__(
        self,
        read: Callable[[int, list[int]], Batch],
        batch_index: Callable[[int], int],
        sharding: jax.sharding.NamedSharding,
        *,
        num_rows: int,
        seq_len: int,
        start: int,
        stop: int,
    ):
        """read(n, rows) -> those rows of batch n as numpy; batch_index(step) -> n."""
        self.queue: queue.Queue = queue.Queue(maxsize=self.AHEAD)
        self.closed = threading.Event()
        rows = local_rows(sharding, (num_rows, seq_len))

        def work() -> None:
            try:
                for step in range(start, stop):
                    n = batch_index(step)
                    batch = read(n, rows)
                    self.put(Fed(put_rows(batch, rows, num_rows, sharding), n))
                    if self.closed.is_set():
                        return
                self.put(None)
            except BaseException as error:  # raised again where the batch is asked for
                self.put(error)

        self.thread = threading.Thread(target=work, name="feed", daemon=True)
        self.thread.start()

    def put(self, item: Fed | BaseException | None) -> None:
        """Waits for a place in the queue, or for the end."""
        while not self.closed.is_set():
            try:
                return self.queue.put(item, timeout=0.2)
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[Fed]:
        return self

    def __next__(self) -> Fed:
        item = self.queue.get()
        if item is None:
            raise StopIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Ends the thread."""
        self.closed.set()
        self.thread.join(CLOSE_SECONDS)  # it may be stuck in a read, and ends with the process
