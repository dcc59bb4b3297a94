"""Runs the tasks of a preparation on all cores of this machine, in processes that end with their parent."""

import concurrent.futures
import contextlib
import itertools
import multiprocessing.context
import multiprocessing.process
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from jaxscale.system.exits import BadInput
from jaxscale.system.open_files import require_open_files

WATCH_SECONDS = 1.0
PIPES = 2  # pipes per process: one to start it, and one that signals its end
TASKS_AHEAD = 4  # submitted tasks per process: processes do not idle, and few results accumulate
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "ARROW_NUM_THREADS")


class LocalExecutor(contextlib.AbstractContextManager):
    """Implements dedup.Executor with `workers` processes on this machine. Close it after use."""

    def __init__(self, workers: int):
        self.workers = workers
        self.context = RecordedContext()
        self.pool: concurrent.futures.ProcessPoolExecutor | None = None

    def run_all(self, function: Callable[[Any], Any], task: Any, count: int) -> Iterator[Any]:
        """Runs tasks in worker processes, or in this process if workers is 1. Raises BadInput if a worker is killed."""
        tasks = (task._replace(number=number) for number in range(count))
        if self.workers == 1 or count == 1:
            yield from map(function, tasks)
            return
        try:
            self.pool = self.pool or start_pool(self.workers, self.context)
            yield from run_windowed(self.pool, function, tasks, TASKS_AHEAD * self.workers)
        except BrokenProcessPool:
            raise BadInput(
                "a worker process was killed by a signal or ran out of memory; run the same command again to resume. "
                "If it happens again, use fewer --workers or a smaller --config.block_bytes"
            ) from None

    def __exit__(self, kind: type | None, *_: Any) -> None:
        """Stops the processes. After an error, running tasks are terminated."""
        if self.pool is None:
            return
        self.pool.shutdown(wait=kind is None, cancel_futures=True)
        for process in self.context.started if kind else ():
            if process.is_alive():
                process.terminate()


class RecordedContext(multiprocessing.context.SpawnContext):
    """Spawn context that records its processes, since the caller may have other child processes."""

    def __init__(self):
        self.started: list[multiprocessing.process.BaseProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> multiprocessing.process.BaseProcess:
        """Returns a new process, which is not yet started, and records it."""
        self.started.append(super().Process(*args, **kwargs))
        return self.started[-1]


def start_pool(workers: int, context: RecordedContext) -> concurrent.futures.ProcessPoolExecutor:
    """Returns a pool of single-threaded processes. Raises BadInput if the limit on open files is too low."""
    require_open_files(PIPES * workers, f"pipes to {workers} --workers")
    saved = {name: os.environ.get(name) for name in (*THREADS, "TOKENIZERS_PARALLELISM")}
    os.environ.update(dict.fromkeys(THREADS, "1") | {"TOKENIZERS_PARALLELISM": "false"})
    try:
        pool = concurrent.futures.ProcessPoolExecutor(workers, context, init_worker, (os.getpid(),))
        for future in [pool.submit(os.getpid) for _ in range(workers)]:  # starts the processes with this environment
            future.result()
        return pool
    finally:
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def run_windowed(
    pool: concurrent.futures.Executor, function: Callable[[Any], Any], tasks: Iterator[Any], window: int
) -> Iterator[Any]:
    """Yields results in order of completion. Submits at most `window` tasks at a time. Raises exceptions of tasks."""
    waiting = set()
    while True:
        waiting |= {pool.submit(function, task) for task in itertools.islice(tasks, window - len(waiting))}
        if not waiting:
            return
        done, waiting = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
        while done:
            yield done.pop().result()


def init_worker(parent: int) -> None:
    """Ignores Ctrl-C, which the parent process handles. Ends this process when the parent has exited."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
