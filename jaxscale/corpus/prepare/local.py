"""Runs the tasks of a preparation on all cores of this machine, each in a process that ends with its parent."""

import concurrent.futures
import itertools
import multiprocessing.context
import multiprocessing.process
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from jaxscale.corpus.prepare.dedup import Join, pairs_by_exchange
from jaxscale.corpus.prepare.exchange import Exchange
from jaxscale.corpus.prepare.tokens import shards_by_exchange
from jaxscale.system.exits import BadInput
from jaxscale.system.open_files import require_open_files

WATCH_SECONDS = 1.0
PIPES = 2  # to each process: one to start it, one that shows when it has ended
AHEAD = 4  # calls given out for each process: none waits, and few results pile up
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "ARROW_NUM_THREADS")


class LocalExecutor:
    """All cores of this machine, or as many processes as are wanted; see dedup.Executor. To be closed."""

    def __init__(self, workers: int):
        self.workers = workers
        self.context = RecordedContext()
        self.pool: concurrent.futures.ProcessPoolExecutor | None = None

    def run_all(self, function: Callable[[Any], Any], calls: Sequence[Any]) -> Iterator[Any]:
        """Yields function(call) of all calls as they are done, in any order. With one worker, in this process.

        Raises: BadInput where a call raised one for people, or a process was killed; whatever else a call raised.
        """
        if self.workers == 1 or len(calls) == 1:
            yield from map(function, calls)
            return
        try:
            self.pool = self.pool or start_pool(self.workers, self.context)
            yield from in_window(self.pool, function, calls, AHEAD * self.workers)
        except BrokenProcessPool:
            raise BadInput(
                "a worker process was killed, by hand or for want of memory; run the same command again to go on, with "
                "fewer --workers or a smaller --config.block_bytes if it happens again"
            ) from None

    def find_pairs(self, join: Join) -> None:
        """Leaves the pairs of a join below join.pairs."""
        pairs_by_exchange(self.run_all, join)

    def write_shards(self, shards: Exchange) -> Iterator[str]:
        """Yields the name of each shard when it is written."""
        return shards_by_exchange(self.run_all, shards)

    def __enter__(self) -> "LocalExecutor":
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        """Ends the processes: at once where something went wrong."""
        if self.pool is None:
            return
        self.pool.shutdown(wait=kind is None, cancel_futures=True)
        for process in self.context.started if kind else ():
            if process.is_alive():
                process.terminate()


class RecordedContext(multiprocessing.context.SpawnContext):
    """Spawns processes, and knows which: whoever calls us from Python may have others of its own."""

    def __init__(self):
        self.started: list[multiprocessing.process.BaseProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> multiprocessing.process.BaseProcess:
        """A process that is not started yet."""
        self.started.append(super().Process(*args, **kwargs))
        return self.started[-1]


def start_pool(workers: int, context: RecordedContext) -> concurrent.futures.ProcessPoolExecutor:
    """A pool of processes with one thread each: the processes are the parallelism.

    Raises BadInput where the system allows fewer open files than so many processes need.
    """
    require_open_files(PIPES * workers, f"pipes to {workers} --workers")
    saved = {name: os.environ.get(name) for name in (*THREADS, "TOKENIZERS_PARALLELISM")}
    os.environ.update(dict.fromkeys(THREADS, "1") | {"TOKENIZERS_PARALLELISM": "false"})
    try:
        pool = concurrent.futures.ProcessPoolExecutor(workers, context, prepare_worker, (os.getpid(),))
        for future in [pool.submit(os.getpid) for _ in range(workers)]:  # they start, and read the environment, now
            future.result()
        return pool
    finally:
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def in_window(
    pool: concurrent.futures.Executor, function: Callable[[Any], Any], calls: Sequence[Any], window: int
) -> Iterator[Any]:
    """Yields results as they complete, with at most `window` calls submitted at a time; raises what a call raised."""
    left, waiting = iter(calls), set()
    while True:
        waiting |= {pool.submit(function, call) for call in itertools.islice(left, window - len(waiting))}
        if not waiting:
            return
        done, waiting = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
        while done:
            yield done.pop().result()


def prepare_worker(parent: int) -> None:
    """Leaves Ctrl-C to the parent process, and ends this one when that is gone, however it went and however soon."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
