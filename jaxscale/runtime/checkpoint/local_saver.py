"""A thread that copies the state to the host's own folder, and to a neighbour's, every few seconds of training.

All processes copy the same steps; the first process chooses them by its clock, once the previous copy is complete
everywhere. A copy is valid once the metrics of its step have been read and passed the checks. A failure costs that copy
and is logged; training and the checkpoints of the work folder are not affected.
"""

import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxscale.runtime.checkpoint import local_copy
from jaxscale.runtime.checkpoint.config import LocalConfig
from jaxscale.runtime.checkpoint.fingerprint import take_snapshot
from jaxscale.runtime.checkpoint.local_copy import LocalStore, copy_name
from jaxscale.runtime.checkpoint.record import named_leaves
from jaxscale.runtime.checkpoint.saver import SaveJob, make_record
from jaxscale.runtime.checkpoint.storage_errors import clip, short_reason
from jaxscale.runtime.checkpoint.write import NoRoom, check_room
from jaxscale.runtime.hosts import exchange
from jaxscale.runtime.hosts.agree import agreed, forget, gathered, next_key
from jaxscale.runtime.monitor.events import Note
from jaxscale.system.faults import crash_point

WRITE_SECONDS = 600.0  # seconds for the slowest process to write its part; after that the copy has failed
JOIN_SECONDS = 10.0  # for a copy in progress when the run ends
KEYS_IN_USE = 6  # keys that a process one step behind may still read
MAX_SHOWN = 3  # processes whose failures are listed


@dataclasses.dataclass
class PendingCopy:
    """A copy in progress."""

    job: SaveJob
    base: int
    read: threading.Event = dataclasses.field(default_factory=threading.Event)  # set once its step's metrics are read
    good: bool = False  # the metrics passed the checks


class LocalSaver:
    """The local copies of one start of a run. All processes construct it at the same point of the program."""

    def __init__(
        self,
        cfg: LocalConfig,
        store: LocalStore,
        token: str,
        *,
        newest: str | None,
        base: Callable[[], int],
        note: Note,
        prepared: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Args:
        token: of this start. newest: name of the copy that it resumed from, which stays until there is a newer one.
        base: returns the newest step in the work folder, -1 for none.
        prepared: True once the copying program is compiled.
        """
        self.cfg, self.store, self.token, self.newest_copy = cfg, store, token, newest
        self.base, self.note, self.clock = base, note, clock
        self.prepared, self.owner = prepared, jax.process_index()
        self.root, self.next_step = next_key("local"), 0
        self.published_keys: list[str] = []  # keys that all processes have read by the time of the next copy
        self.last_copy_time, self.last_copy_step = clock(), None
        self.pending: PendingCopy | None = None
        self.cause = ""  # of the last failure
        self.jobs: queue.Queue[PendingCopy | None] = queue.Queue()
        self.thread = threading.Thread(target=self.work, name="local-copies", daemon=True)
        self.thread.start()

    def offer(self, step: int, state: Any, run: Callable[[int], Mapping[str, Any]], health: str) -> bool:
        """Dispatches a copy of the state if one is due after this step; True if so. Call in all processes."""
        if step < self.next_step:
            return False
        key = f"{self.root}/at/{step}"
        due, wait, base = agreed(lambda: self.decide(step), key=key)
        self.next_step = step + wait
        self.remember_key(key)
        if not due:
            return False
        key = f"{self.root}/whole/{step}"
        job = SaveJob(key, step, take_snapshot(named_leaves(state)), json.dumps(run(step)), health, {})
        self.pending = PendingCopy(job, base)
        self.jobs.put(self.pending)
        return True

    def decide(self, step: int) -> tuple[bool, int, int]:
        """Returns (copy now, steps until the next decision, base), by the first process's clock."""
        now, cfg = self.clock(), self.cfg
        if self.last_copy_step is None:
            self.last_copy_time, self.last_copy_step = now, step  # the time before includes compilation
            return False, cfg.every_steps or 1, -1
        since, passed = now - self.last_copy_time, step - self.last_copy_step
        pace = max(since / passed, 1e-9)
        due = passed >= cfg.every_steps if cfg.every_steps else since + pace / 2 >= cfg.every_seconds
        if due and (self.jobs.unfinished_tasks or not self.prepared()):
            return False, 1, -1
        if due:
            self.last_copy_time, self.last_copy_step = now, step
            for key in self.published_keys[:-KEYS_IN_USE]:  # all processes have read them: they wrote the last copy
                forget(key)
            self.published_keys = self.published_keys[-KEYS_IN_USE:]
            return True, cfg.every_steps or 1, self.base()
        # steps are dispatched ahead of the devices, so the first few say little about the time of the next
        left = cfg.every_steps - passed if cfg.every_steps else min((cfg.every_seconds - since) / pace, passed)
        return False, max(1, int(left)), -1

    def remember_key(self, key: str) -> None:
        """Remembers a key that the first process has written."""
        if self.owner == 0:
            self.published_keys.append(key)

    def confirm(self, step: int, good: bool) -> None:
        """Accepts or rejects the copy in progress. Call when the metrics of a step have been read."""
        if self.pending is not None and self.pending.job.step <= step:
            self.pending.good = good
            self.pending.read.set()
            self.pending = None

    def close(self) -> None:
        """Ends the thread after the copy in progress; one whose metrics are not read is dropped."""
        self.confirm(2**62, False)
        self.jobs.put(None)
        self.thread.join(JOIN_SECONDS)

    def work(self) -> None:
        """Makes the queued copies in order."""
        while (pending := self.jobs.get()) is not None:
            pending.read.wait()
            try:
                if pending.good:
                    self.make(pending)
            finally:
                pending = None  # frees the buffers before waiting for the next copy
                self.jobs.task_done()

    def make(self, pending: PendingCopy) -> None:
        """Writes a copy and exchanges the result with all processes. Raises nothing."""
        job, cause = pending.job, None
        name = copy_name(self.owner, job.step, self.token)
        try:
            self.write(pending, name)
        except (NoRoom, exchange.Refused) as error:
            cause = clip(str(error))
        except Exception as error:  # a failed copy must not stop training
            cause = short_reason(error)
        crash_point("local/here")
        try:
            failed = gathered(job.key, cause, WRITE_SECONDS, join_causes)
        except Exception as error:  # another process has died, and this one will be stopped
            failed = short_reason(error)
        if failed:
            if failed != self.cause:
                self.note("alarm", job.step, cause=f"no local copy: {failed}")
        else:
            self.newest_copy = name
        self.cause = failed
        self.remember_key(job.key)
        crash_point("local/everywhere")

    def write(self, pending: PendingCopy, name: str) -> None:
        """Writes this process's part, locally and at the neighbour. Raises the cause of a failure."""
        job, protected = pending.job, [self.newest_copy] if self.newest_copy else []
        record = make_record(job)

        self.store.keep_only(protected, self.owner)
        pieces = [local_copy.local_pieces(leaf).values() for leaf in job.snapshot.leaves.values()]
        check_room(self.store.folder, sum(piece.nbytes for leaf in pieces for piece in leaf))
        description = {"record": record, "owner": self.owner, "parts": jax.process_count(), "token": self.token}
        path = self.store.folder / name
        local_copy.write_copy(path, job.snapshot.leaves, description | {"base": pending.base})
        if self.store.neighbour is not None:
            exchange.put(self.store.neighbour, self.store.folder, name, [one.rpartition("/")[2] for one in protected])


def join_causes(found: list[str | None]) -> str:
    """Returns the failures by process in one line, '' if there are none."""
    failed = [(process, cause) for process, cause in enumerate(found) if cause]
    shown = [f"process {process}: {cause}" if len(found) > 1 else cause for process, cause in failed[:MAX_SHOWN]]
    return "; ".join(shown) + (f"; and {len(failed) - MAX_SHOWN} more" if len(failed) > MAX_SHOWN else "")
