"""The thread that saves, so that no part of a save, not even a listing of a bucket, delays a step.

The processes of a run go through the same stages and exchange their results at the end of each. So a failure of one is
a failure of all, with its cause, and nothing is committed that one of them has not written.
"""

import collections
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxscale.runtime.checkpoint import folders, retention, verify, write
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.fingerprint import Snapshot
from jaxscale.runtime.checkpoint.record import describe_leaf, seal, write_last_good
from jaxscale.runtime.checkpoint.storage_errors import NO_INODES, clip, no_inodes_message, permission_hint, short_reason
from jaxscale.runtime.hosts.agree import Board, gathered
from jaxscale.runtime.monitor.events import Note
from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop
from jaxscale.system.faults import crash_point

DAMAGED = verify.DamagedCheckpoint.__name__
# As for a signal (runtime/training/stopping.py): all read after step n + 2 what was posted between steps n and n + 1.
STEPS_AHEAD = 2


class SaveFailed(Exception):
    """A save that failed, in any process; the message is the cause."""


@dataclasses.dataclass(frozen=True)
class SaveJob:
    """A checkpoint to write."""

    key: str  # the same in all processes, and unique to the save
    step: int
    snapshot: Snapshot
    run_text: str  # JSON
    health: str
    metrics: dict[str, float]


class SharedReports:
    """Failed saves of a run, reported to the training threads of all processes at the same step.

    Saves are collective, and the saving threads learn of a failure at different times. The training threads get it at
    one step, so that all retry or give up together.
    """

    def __init__(self, board: Board | None = None):
        """board: the training thread refreshes it after each step, before it calls `news`; None: a single process."""
        self.board = board
        self.local: collections.deque[tuple[int, str]] = collections.deque()  # failures of a single process
        self.reported = 0  # failures delivered to all processes
        self.last_step = -1  # step of the last delivered failure
        self.pending: list[int] = []  # steps of local failures that are not delivered yet
        self.lock = threading.Lock()

    def failed(self, step: int, cause: str) -> None:
        """Reports a failed save, from any thread; later causes may be consequences of the first, which wins."""
        if self.board is None:
            return self.local.append((step, cause))
        name = f"process {self.board.peer.process} of {self.board.peer.count}"
        self.board.post(f"failed/{step}", cause if cause.startswith("process ") else f"{name}: {cause}")
        with self.lock:
            self.pending.append(step)

    def news(self, now_step: int) -> tuple[int, str] | None:
        """Returns (step of a failed save, cause with the process), once for each, at the same step in all processes.

        The training thread calls it after each step, when the metrics of the previous step have been read.
        Raises: Stop (PEER_LOST) in a process that is too far ahead.
        """
        if self.board is None:
            return self.local.popleft() if self.local else None
        name = f"news/{self.reported}"
        with self.lock:
            failed_step = self.pending[0] if self.pending else None
        line = self.board.read(name)
        if line is None:
            # without a cause yet, the next refresh has it
            if failed_step is not None and (cause := self.board.read(f"failed/{failed_step}")):
                self.board.post(name, json.dumps([now_step + STEPS_AHEAD, failed_step, cause]))
            return None
        when, step, cause = json.loads(line)
        if now_step > when:
            raise Stop(
                Exit.PEER_LOST,
                f"all processes were to report at step {when} that saving step {step} failed ({cause}), but this one "
                f"is at step {now_step}; restart all",
            )
        if now_step < when:
            return None
        if self.reported and self.board.peer.process == 0:  # all have read the previous failure since two steps ago
            self.board.remove(f"news/{self.reported - 1}")
            self.board.remove(f"failed/{self.last_step}")
        self.reported, self.last_step = self.reported + 1, step
        with self.lock:
            self.pending = [other for other in self.pending if other != step]
        return step, cause


@dataclasses.dataclass(eq=False)
class Saver:
    """Writes one checkpoint after the other in a thread, and reports to `reports` and `note`."""

    directory: Any
    cfg: CheckpointConfig
    note: Note
    may_commit: Callable[[], None]
    reports: SharedReports
    phase: Callable[..., Any]

    def __post_init__(self) -> None:
        self.lock, self.unfinished = threading.Lock(), 0  # jobs
        self.thread: threading.Thread | None = None
        self.began = 0.0  # start time of the last job
        self.failure: tuple[int, str] | None = None  # of the last job
        self.fatal: Stop | None = None
        self.last_saved: int | None = None
        self.facts: dict[int, retention.RetentionFacts] = {}  # of the steps read so far
        self.last_verified: int | None = None

    @property
    def busy(self) -> bool:
        """True while a save is in progress."""
        return self.unfinished > 0

    def start(self, job: SaveJob) -> None:
        """Starts a thread that writes the job after the one before it."""
        before, self.began = self.thread, time.monotonic()
        with self.lock:
            self.unfinished += 1

        def work() -> None:
            if before is not None:
                before.join()
            failure: tuple[int, str] | None = (job.step, "the save ended without a result")
            try:
                with self.phase("save", job.step):
                    self.write(job)
                failure, self.last_saved = None, job.step
            except Stop as stop:
                failure, self.fatal = None, stop
            except Exception as error:
                failure = (job.step, self.cause_of(error, job))
            finally:  # a save is a success only if write() has returned
                self.failure = failure
                with self.lock:  # not busy any more when others learn of the failure, because they retry
                    self.unfinished -= 1
                if failure:
                    self.reports.failed(*failure)

        self.thread = threading.Thread(target=work, name=f"save-{job.step}", daemon=True)
        self.thread.start()

    def join(self, seconds: float) -> bool:
        """Waits for all jobs, with a timeout; False if one is unfinished."""
        if self.thread is not None:
            self.thread.join(seconds)
        return not self.busy

    def write(self, job: SaveJob) -> None:
        """Performs all stages of a save. Raises SaveFailed, or Stop if a retry would not help."""
        began = time.time()
        started, first = time.monotonic(), jax.process_index() == 0
        step, leaves, record = job.step, job.snapshot.leaves, {}
        crash_point("save/start")

        def prepare() -> bool:
            self.may_commit()
            if folders.is_committed(self.directory / str(step)):  # by an attempt that was reported as failed
                record.update(make_record(job))
                if write.has_record(self.directory / str(step), record):
                    return True
                record.clear()
            gone = self.last_saved is not None and not self.directory.exists()
            if gone:
                self.note("alarm", step, cause=f"{self.directory} was removed during the run; it is created again")
            write.check_room(self.directory, write.state_bytes(leaves.values()))
            write.prepare_step(self.directory, step)
            return False

        def commit() -> None:
            record.update(make_record(job))
            write.commit(self.directory, step, record, self.may_commit, began)

        if not self.stage(job, "folder", prepare if first else None):
            try:
                self.stage(job, "arrays", lambda: write.write_arrays(self.directory, step, leaves, jax.process_index()))
                self.stage(job, "commit", commit if first else None)
            except Stop:
                raise  # another run has the lock, and the unfinished folder may be its own
            except Exception:
                if first:
                    self.remove_unfinished(step)
                raise
        good = self.verify(job, record)
        if first:
            self.note(
                "saved", step, seconds=round(time.monotonic() - started, 3), health=job.health,
                bytes=write.state_bytes(leaves.values()), verified=good,
            )  # fmt: skip
            self.finish(job, record, good)

    def remove_unfinished(self, step: int) -> None:
        """Removes the files of a failed save, to free space for the next one. Raises Stop if the lock is lost."""
        folder = folders.unfinished_folder(self.directory, step)
        try:
            self.may_commit()
            if not (paths.is_remote(self.directory) and (folder / folders.COMMITTED).exists()):
                folders.remove_tree(folder)
        except Stop:
            raise
        except Exception:  # noqa: S110 - the cause of the failed save is reported; the next save removes the files
            return

    def verify(self, job: SaveJob, record: dict[str, Any]) -> bool:
        """Reads this process's share of a step back; True if all found it correct. Sets a damaged step aside."""
        if not self.cfg.verify_saved:
            return False
        folder, share, shares = self.directory / str(job.step), jax.process_index(), jax.process_count()

        def read() -> dict[str, list[int]]:
            leaves = (record or write.wait_for_record(folder))["leaves"]
            return verify.piece_sums(folder, leaves, share, shares)

        crash_point("verify/before")
        try:
            self.stage(job, "verify", read, lambda sums: verify.first_difference(record["leaves"], sums))
        except (SaveFailed, TimeoutError) as failed:
            if failed.args[1:] == (DAMAGED,):
                if jax.process_index() == 0:
                    self.may_commit()
                    moved = folders.set_aside(self.directory, job.step, "damaged")
                    self.note("set_aside", job.step, why="damaged", place=str(moved), cause=str(failed.args[0]))
                raise
            if jax.process_index() == 0:
                self.note("alarm", job.step, cause=f"saved, but it could not be read back: {failed.args[0]}")
            return False
        crash_point("verify/after")
        return True

    def finish(self, job: SaveJob, record: dict[str, Any], good: bool) -> None:
        """Writes last_good.json and applies retention; failures are only logged. Raises Stop without the lock."""
        self.facts[job.step] = retention.RetentionFacts(job.health, job.metrics.get(retention.BEST_METRIC))
        self.last_verified = job.step if good else self.last_verified
        try:
            self.may_commit()
            write_last_good(self.directory, job.step, verified=good, health=job.health, sha256=record["sha256"])
            self.apply_retention(job.step)
        except Stop:
            raise
        except Exception as error:
            self.note("alarm", job.step, cause=f"after the save: {short_reason(error)}")

    def apply_retention(self, newest: int) -> None:
        """Applies the retention policy. Checkpoints whose record cannot be read now are kept."""
        unknown: dict[int, Exception] = {}

        def fact(step: int) -> retention.RetentionFacts:
            try:
                if step not in self.facts and step not in unknown:
                    self.facts[step] = retention.read_facts(self.directory / str(step))
            except Exception as error:
                unknown[step] = error
            return self.facts.get(step, retention.UNKNOWN)

        pinned = retention.pinned_steps(self.directory)
        if self.last_verified is not None:
            pinned = pinned | {self.last_verified}
        steps = folders.all_steps(self.directory)
        retained = retention.retained_steps(steps, self.cfg, fact, pinned, newest)
        for step in sorted(set(steps) - set(retained) - set(unknown)):
            folders.remove_step(self.directory, step)
        for step, error in unknown.items():
            self.note(
                "alarm", newest, cause=f"step {step} is kept, because its record cannot be read: {short_reason(error)}"
            )

    def stage(
        self,
        job: SaveJob,
        name: str,
        work: Callable[[], Any] | None,
        damage: Callable[[list[Any]], str] = lambda results: "",
    ) -> bool:
        """Runs this process's part and returns when all have run theirs: True if the first process's `work` did so.

        damage: called in the first process with the results of all; returns what is damaged, or ''.
        Raises: SaveFailed with the cause from any process, damage before others. A Stop is raised unchanged in its own
        process; in the others it is a failure.
        """
        stop, mine = None, {}
        try:
            mine = {"result": work() if work is not None else None}
        except Stop as error:
            stop, mine = error, {"failure": [str(error), "Stop"]}
        except Exception as error:
            has_message = isinstance(error, verify.DamagedCheckpoint | FileExistsError)
            mine = {"failure": [clip(str(error)) if has_message else short_reason(error), type(error).__name__]}
        made_of = lambda parts: stage_result(parts, damage)
        found = gathered(f"{job.key}/{name}", mine, self.cfg.max_save_seconds, made_of)
        if stop:
            raise stop
        if "failure" in found:
            raise SaveFailed(*found["failure"])
        return found["result"]

    def cause_of(self, error: Exception, job: SaveJob) -> str:
        """Returns the cause of a failed save, with the space it needs or the permission it lacks."""
        cause = str(error.args[0]) if isinstance(error, SaveFailed) else short_reason(error)
        cause += permission_hint(cause, self.directory)
        full = "No space left" in cause or NO_INODES in cause
        if full and not paths.is_remote(self.directory) and (message := no_inodes_message(self.directory)):
            return message
        try:
            return f"{cause} ({write.room_text(self.directory, write.state_bytes(job.snapshot.leaves.values()))})"
        except OSError:
            return cause


def make_record(job: SaveJob) -> dict[str, Any]:
    """Returns the sealed record of a checkpoint; waits for the devices."""
    fingerprints = job.snapshot.fingerprints()
    leaves = {name: [*describe_leaf(leaf), fingerprints[name]] for name, leaf in job.snapshot.leaves.items()}
    content = {"step": job.step, "run": json.loads(job.run_text), "leaves": leaves}
    return seal(content | {"health": job.health, "metrics": job.metrics})


def stage_result(parts: list[dict[str, Any]], damage: Callable[[list[Any]], str]) -> dict[str, Any]:
    """Returns {"failure": [cause, kind]}, or {"result": True if the first process's work returned True}."""
    failed = [(process, *part["failure"]) for process, part in enumerate(parts) if "failure" in part]
    for process, cause, kind in sorted(failed, key=lambda failure: failure[2] != DAMAGED):
        return {"failure": [f"process {process}: {cause}" if len(parts) > 1 else cause, kind]}
    results = [part.get("result") for part in parts]
    if wrong := damage(results):
        return {"failure": [clip(wrong), DAMAGED]}
    return {"result": results[0] is True}
