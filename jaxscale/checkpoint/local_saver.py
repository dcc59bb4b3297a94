"""The thread that copies the state to the host's own folder, and to a neighbour's, every few seconds of training.

All processes copy the same steps: the first one says when, by its clock, once the copy before is whole everywhere. A
copy counts when the metrics of its step have been read and called for nothing. A failure costs that copy, and is told;
training and the checkpoints of the work folder go on as they would without.
"""

import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxscale.checkpoint import local_copy
from jaxscale.checkpoint.config import LocalConfig
from jaxscale.checkpoint.local_store import LocalStore, name_of
from jaxscale.checkpoint.record import named_leaves
from jaxscale.checkpoint.saver import Job, record_of
from jaxscale.checkpoint.snapshot import take_snapshot
from jaxscale.checkpoint.storage_errors import clip, short_reason
from jaxscale.checkpoint.write import NoRoom, check_room
from jaxscale.hosts import exchange
from jaxscale.hosts.agree import agreed, forget, gathered, next_key
from jaxscale.monitor.events import Note
from jaxscale.system.faults import crash_point

PATIENCE = 600.0  # seconds for the slowest process to write its part; a slower one is a failure
JOIN_SECONDS = 10.0  # for a copy under way when the run ends
STILL_READ = 6  # keys: a process that is a step behind may ask for the last of them
SHOWN = 3  # processes whose failures are named


@dataclasses.dataclass
class Pending:
    """A copy that was begun."""

    job: Job
    base: int
    read: threading.Event = dataclasses.field(default_factory=threading.Event)  # the metrics of its step
    good: bool = False  # they called for nothing


class LocalSaver:
    """Copies of one start of a run. To be made at the same place of the program by all processes."""

    def __init__(
        self,
        cfg: LocalConfig,
        store: LocalStore,
        token: str,
        *,
        newest: str | None,
        base: Callable[[], int],
        neighbour: Sequence | None,
        note: Note,
        prepared: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ):
        """token: of this start. newest: name of the copy that it began from, which stays until there is a newer one.

        base: the newest step in the work folder, -1 for none. neighbour: the address of who keeps a second copy.
        prepared: whether the copying program is compiled.
        """
        self.cfg, self.store, self.token, self.whole = cfg, store, token, newest
        self.base, self.neighbour, self.note, self.clock = base, neighbour, note, clock
        self.prepared, self.owner = prepared, jax.process_index()
        self.root, self.next_step = next_key("local"), 0
        self.said: list[str] = []  # keys of what all have heard by the time of the next copy
        self.taken_at, self.taken_step = clock(), None
        self.pending: Pending | None = None
        self.cause, self.num_bytes, self.seconds = "", 0, 0.0  # of the last failure; of the last copy
        self.jobs: queue.Queue[Pending | None] = queue.Queue()
        self.thread = threading.Thread(target=self.work, name="local-copies", daemon=True)
        self.thread.start()

    def offer(self, step: int, state: Any, run: Callable[[int], Mapping[str, Any]], health: str) -> bool:
        """True if a copy of the state after `step` steps was begun: it is dispatched, and nothing is waited for.

        To be called after every step by all processes alike. run: step -> what a checkpoint holds beside the state.
        """
        if step < self.next_step:
            return False
        key = f"{self.root}/at/{step}"
        wanted, wait, base = agreed(lambda: self.decide(step), key=key)
        self.next_step = step + wait
        self.say(key)
        if not wanted:
            return False
        key = f"{self.root}/whole/{step}"
        job = Job(key, step, take_snapshot(named_leaves(state)), json.dumps(run(step)), health, {})
        self.pending = Pending(job, base)
        self.jobs.put(self.pending)
        return True

    def decide(self, step: int) -> tuple[bool, int, int]:
        """(copy now, steps until this is asked again, base), by the first process's clock."""
        now, cfg = self.clock(), self.cfg
        if self.taken_step is None:
            self.taken_at, self.taken_step = now, step  # what came before was compiling
            return False, cfg.every_steps or 1, -1
        since, passed = now - self.taken_at, step - self.taken_step
        pace = max(since / passed, 1e-9)
        due = passed >= cfg.every_steps if cfg.every_steps else since + pace / 2 >= cfg.every_seconds
        if due and (self.jobs.unfinished_tasks or not self.prepared()):
            return False, 1, -1
        if due:
            self.taken_at, self.taken_step = now, step
            self.tidy()
            return True, cfg.every_steps or 1, self.base()
        # steps are dispatched ahead of the devices: a few in a burst say little of how long the next will take
        left = cfg.every_steps - passed if cfg.every_steps else min((cfg.every_seconds - since) / pace, passed)
        return False, max(1, int(left)), -1

    def say(self, key: str) -> None:
        """Remembers a key that the first process has said something under."""
        if self.owner == 0:
            self.said.append(key)

    def tidy(self) -> None:
        """Removes what was said of copies before the last: all have heard it, for they have written the last since."""
        for key in self.said[:-STILL_READ]:
            forget(key)
        self.said = self.said[-STILL_READ:]

    def confirm(self, step: int, good: bool) -> None:
        """To be called when the metrics of a step have been read; good: they called for nothing."""
        if self.pending is not None and self.pending.job.step <= step:
            self.pending.good = good
            self.pending.read.set()
            self.pending = None

    def close(self) -> None:
        """Ends the thread after the copy under way; one whose metrics are not read is left out."""
        self.confirm(2**62, False)
        self.jobs.put(None)
        self.thread.join(JOIN_SECONDS)

    def work(self) -> None:
        """Makes one copy after the other."""
        while (pending := self.jobs.get()) is not None:
            pending.read.wait()
            try:
                if pending.good:
                    self.make(pending)
            finally:
                pending = None  # the buffers of the copy go before the next one is waited for
                self.jobs.task_done()

    def make(self, pending: Pending) -> None:
        """Writes a copy and tells how it went, here and elsewhere. Raises nothing."""
        job, began, cause = pending.job, time.monotonic(), None
        name = name_of(self.owner, job.step, self.token)
        try:
            self.write(pending, name)
        except (NoRoom, exchange.Refused) as error:
            cause = clip(str(error))
        except Exception as error:  # whatever it was, training goes on
            cause = short_reason(error)
        crash_point("local/here")
        try:
            failed = gathered(job.key, cause, PATIENCE, causes)
        except Exception as error:  # another process is gone, and soon this one is
            failed = short_reason(error)
        if failed:
            if failed != self.cause:
                self.note("alarm", job.step, cause=f"no local copy: {failed}")
        else:
            self.whole, self.seconds = name, time.monotonic() - began
        self.cause = failed
        self.say(job.key)
        crash_point("local/everywhere")

    def write(self, pending: Pending, name: str) -> None:
        """Puts this process's part where it belongs, here and at the neighbour's. Raises what keeps it from there."""
        job, kept = pending.job, [self.whole] if self.whole else []
        record = record_of(job)
        self.store.make_owner(self.owner)
        self.store.keep_only(kept, self.owner)
        pieces = [local_copy.pieces_of(leaf).values() for leaf in job.snapshot.leaves.values()]
        check_room(self.store.folder, sum(piece.nbytes for leaf in pieces for piece in leaf))
        about = {"record": record, "owner": self.owner, "parts": jax.process_count(), "token": self.token}
        path = self.store.folder / name
        self.num_bytes = local_copy.write_copy(path, job.snapshot.leaves, about | {"base": pending.base})
        if self.neighbour is not None:
            exchange.put(self.neighbour, self.store.folder, name, [one.rpartition("/")[2] for one in kept])


def causes(found: list[str | None]) -> str:
    """What failed at which processes, '' if nothing did."""
    failed = [(process, cause) for process, cause in enumerate(found) if cause]
    said = [f"process {process}: {cause}" if len(found) > 1 else cause for process, cause in failed[:SHOWN]]
    return "; ".join(said) + (f"; and {len(failed) - SHOWN} more" if len(failed) > SHOWN else "")
