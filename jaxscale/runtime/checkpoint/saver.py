"""Saves checkpoints in a background thread, so that storage requests do not delay training steps.

The processes of a run execute the same stages and exchange their results after each stage. A failure in one process is
a failure in all processes, with the same cause, and a step is committed only after all processes have written it.
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
# All processes read after step n + 2 what was posted between steps n and n + 1 (see runtime/training/stopping.py).
STEPS_AHEAD = 2


class SaveFailed(Exception):
    """Raised in all processes when a save fails in any process; the message is the cause."""


@dataclasses.dataclass(frozen=True)
class SaveJob:
    """A checkpoint to write."""

    key: str  # unique for each save, and equal in all processes
    step: int
    snapshot: Snapshot
    run_text: str  # JSON
    health: str
    metrics: dict[str, float]


class SharedReports:
    """Reports failed saves to the training threads of all processes at the same step.

    The saving threads of the processes detect a failure at different times. The training threads receive the report at
    the same step, so that all processes retry or stop together.
    """

    def __init__(self, board: Board | None = None):
        """board: the training thread refreshes it after each step, before it calls news(); None for one process."""
        self.board = board
        self.local: collections.deque[tuple[int, str]] = collections.deque()  # failures, if there is a single process
        self.reported = 0  # number of failures delivered to all processes
        self.last_step = -1  # step of the last delivered failure
        self.pending: list[int] = []  # steps of local failures that are not delivered yet
        self.lock = threading.Lock()

    def failed(self, step: int, cause: str) -> None:
        """Reports a failed save; thread-safe. If several causes are reported, only the first one is delivered."""
        if self.board is None:
            return self.local.append((step, cause))
        name = f"process {self.board.peer.process} of {self.board.peer.count}"
        self.board.post(f"failed/{step}", cause if cause.startswith("process ") else f"{name}: {cause}")
        with self.lock:
            self.pending.append(step)

    def news(self, now_step: int) -> tuple[int, str] | None:
        """Returns (step, cause) of a failed save, or None. All processes receive a failure once, after the same step.

        The training thread calls this method after each step, after reading the metrics of the previous step.
        Raises: Stop (PEER_LOST) if this process has already passed that step.
        """
        if self.board is None:
            return self.local.popleft() if self.local else None
        name = f"news/{self.reported}"
        with self.lock:
            failed_step = self.pending[0] if self.pending else None
        line = self.board.read(name)
        if line is None:
            # if the cause is not on the board yet, it is after the next refresh
            if failed_step is not None and (cause := self.board.read(f"failed/{failed_step}")):
                self.board.post(name, json.dumps([now_step + STEPS_AHEAD, failed_step, cause]))
            return None
        when, step, cause = json.loads(line)
        if now_step > when:
            raise Stop(
                Exit.PEER_LOST,
                f"all processes must report at step {when} that saving step {step} failed ({cause}), but this process "
                f"is already at step {now_step}; restart all processes",
            )
        if now_step < when:
            return None
        if self.reported and self.board.peer.process == 0:  # all have read the previous failure
            self.board.remove(f"news/{self.reported - 1}")
            self.board.remove(f"failed/{self.last_step}")
        self.reported, self.last_step = self.reported + 1, step
        with self.lock:
            self.pending = [other for other in self.pending if other != step]
        return step, cause


@dataclasses.dataclass(eq=False)
class Saver:
    """Writes checkpoints in order, each in a new thread. Sends failures to `reports` and events to `note`."""

    directory: Any
    cfg: CheckpointConfig
    note: Note
    may_commit: Callable[[], None]
    reports: SharedReports
    phase: Callable[..., Any]

    def __post_init__(self) -> None:
        self.lock, self.unfinished = threading.Lock(), 0  # number of unfinished jobs
        self.thread: threading.Thread | None = None
        self.began = 0.0  # start time of the last job
        self.failure: tuple[int, str] | None = None  # (step, cause) if the last job failed
        self.fatal: Stop | None = None
        self.last_saved: int | None = None
        self.facts: dict[int, retention.RetentionFacts] = {}  # facts of the steps read so far
        self.last_verified: int | None = None

    @property
    def busy(self) -> bool:
        """Returns True while a save is in progress."""
        return self.unfinished > 0

    def start(self, job: SaveJob) -> None:
        """Starts a thread that writes a checkpoint after all previous jobs."""
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
            finally:  # a save succeeds only if write() returns
                self.failure = failure
                with self.lock:  # `busy` must be False before the report, because the report causes a retry
                    self.unfinished -= 1
                if failure:
                    self.reports.failed(*failure)

        self.thread = threading.Thread(target=work, name=f"save-{job.step}", daemon=True)
        self.thread.start()

    def join(self, seconds: float) -> bool:
        """Waits for all jobs, with a timeout; returns False if a job is unfinished."""
        if self.thread is not None:
            self.thread.join(seconds)
        return not self.busy

    def write(self, job: SaveJob) -> None:
        """Executes all stages of a save. Raises SaveFailed, or Stop for a permanent error."""
        began = time.time()
        started, first = time.monotonic(), jax.process_index() == 0
        step, leaves, record = job.step, job.snapshot.leaves, {}
        crash_point("save/start")

        def prepare() -> bool:
            self.may_commit()
            if folders.is_committed(self.directory / str(step)):  # by an earlier attempt
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
                raise  # a different run has the lock, and may own the unfinished folder
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
        """Removes the files of a failed save, to free space for the next save. Raises Stop if the lock is lost."""
        folder = folders.unfinished_folder(self.directory, step)
        try:
            self.may_commit()
            if not (paths.is_remote(self.directory) and (folder / folders.COMMITTED).exists()):
                folders.remove_tree(folder)
        except Stop:
            raise
        except Exception:  # noqa: S110 - the failed save is reported, and the next save removes the files
            return

    def verify(self, job: SaveJob, record: dict[str, Any]) -> bool:
        """Verifies this process's share of a step; returns True if all shares are correct. Sets damaged steps aside."""
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
        """Writes last_good.json and applies the retention policy. Logs failures; raises Stop if the lock is lost."""
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
        """Applies the retention policy. Keeps checkpoints whose record cannot be read. newest: step to always keep."""
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
        """Runs `work` and waits for all processes; returns True if `work` returned True in the first process.

        damage: called in the first process with the results of all processes; returns a description of damage, or ''.
        Raises: SaveFailed in all processes if `work` fails in any process; damage takes precedence over other causes.
        If `work` raises Stop in a process, that process raises the Stop, and the other processes raise SaveFailed.
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
        """Returns the cause of a failed save. Adds the required disk space or the missing permission."""
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
    """Returns the record of a checkpoint, with a sha256. Waits until the devices have computed the fingerprints."""
    fingerprints = job.snapshot.fingerprints()
    leaves = {name: [*describe_leaf(leaf), fingerprints[name]] for name, leaf in job.snapshot.leaves.items()}
    content = {"step": job.step, "run": json.loads(job.run_text), "leaves": leaves}
    return seal(content | {"health": job.health, "metrics": job.metrics})


def stage_result(parts: list[dict[str, Any]], damage: Callable[[list[Any]], str]) -> dict[str, Any]:
    """Returns {"failure": [cause, type]} if a process failed, else {"result": whether process 0 returned True}."""
    failed = [(process, *part["failure"]) for process, part in enumerate(parts) if "failure" in part]
    for process, cause, kind in sorted(failed, key=lambda failure: failure[2] != DAMAGED):
        return {"failure": [f"process {process}: {cause}" if len(parts) > 1 else cause, kind]}
    results = [part.get("result") for part in parts]
    if wrong := damage(results):
        return {"failure": [clip(wrong), DAMAGED]}
    return {"result": results[0] is True}
