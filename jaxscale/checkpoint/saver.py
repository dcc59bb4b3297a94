"""The thread in which a save happens, so that nothing of it, not even a list of names in a bucket, holds up a step.

The processes of a run go through the same stages; at the end of each they tell one another how it went. So a failure of
one is a failure of all, with its cause in words, and nothing is committed that one of them has not written.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxscale.checkpoint import folders, read_back, retention, write
from jaxscale.checkpoint.config import CheckpointConfig
from jaxscale.checkpoint.record import describe_leaf, seal, write_last_good
from jaxscale.checkpoint.snapshot import Snapshot
from jaxscale.checkpoint.storage_errors import NO_INODES, clip, missing_grant, no_inodes_message, short_reason
from jaxscale.hosts.agree import gathered
from jaxscale.hosts.reports import SharedReports
from jaxscale.monitor.events import Note
from jaxscale.system import paths
from jaxscale.system.exits import Stop
from jaxscale.system.faults import crash_point

DAMAGED = read_back.Damaged.__name__


class SaveFailed(Exception):
    """A save that failed, here or in another process; the message is the cause."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A checkpoint to be written."""

    key: str  # the same in all processes, and new for every save
    step: int
    snapshot: Snapshot
    run_text: str  # JSON
    health: str
    metrics: dict[str, float]


class Failures:
    """How a single process learns of a failed save; SharedReports is that of several."""

    def __init__(self):
        self.lock = threading.Lock()
        self.waiting: list[tuple[int, str]] = []

    def failed(self, step: int, cause: str) -> None:
        """Says that the save of `step` has failed. In any thread."""
        with self.lock:
            self.waiting.append((step, cause))

    def news(self, now_step: int) -> tuple[int, str] | None:
        """(step, cause) of a save that failed, once; asked after every step."""
        if not self.waiting:  # without the lock
            return None
        with self.lock:
            return self.waiting.pop(0)


class Saver:
    """Writes one checkpoint after the other in a thread. What it finds out goes to `reports` and `note`."""

    def __init__(
        self,
        directory: Any,
        cfg: CheckpointConfig,
        note: Note,
        may_commit: Callable[[], None],
        reports: Failures | SharedReports,
        phase: Callable[..., Any],
    ):
        self.directory, self.cfg, self.note = directory, cfg, note
        self.may_commit, self.reports, self.phase = may_commit, reports, phase
        self.thread: threading.Thread | None = None
        self.working, self.began = 0, 0.0  # jobs that are not done; when the last of them was given
        self.lock = threading.Lock()
        self.failure: tuple[int, str] | None = None  # of the last job
        self.fatal: Stop | None = None
        self.last_saved: int | None = None
        self.facts: dict[int, retention.Facts] = {}  # of steps that this process has looked at
        self.last_verified: int | None = None

    @property
    def busy(self) -> bool:
        """True while a save is under way."""
        return self.working > 0

    def start(self, job: Job) -> None:
        """Begins to write, after the job before it."""
        before, self.began = self.thread, time.monotonic()
        with self.lock:
            self.working += 1

        def work() -> None:
            if before is not None:
                before.join()
            self.do(job)

        self.thread = threading.Thread(target=work, name=f"save-{job.step}", daemon=True)
        self.thread.start()

    def join(self, seconds: float) -> bool:
        """Waits until nothing is under way, at most so long; False if something still is."""
        if self.thread is not None:
            self.thread.join(seconds)
        return not self.busy

    def do(self, job: Job) -> None:
        """Writes a checkpoint and tells how it went. Raises nothing."""
        failure = None
        try:
            with self.phase("save", job.step):
                self.write(job)
            self.failure, self.last_saved = None, job.step
        except Stop as stop:
            self.fatal = stop
        except Exception as error:
            failure = self.failure = (job.step, self.cause_of(error, job))
        with self.lock:
            self.working -= 1
        if failure:
            self.reports.failed(*failure)

    def write(self, job: Job) -> None:
        """All of a save. Raises SaveFailed, or Stop where trying again would not help."""
        began = time.time()
        started, first = time.monotonic(), jax.process_index() == 0
        step, leaves, record = job.step, job.snapshot.leaves, {}
        crash_point("save/start")

        def prepare() -> bool:
            self.may_commit()
            if folders.is_committed(self.directory / str(step)):  # though the attempt seemed to fail
                record.update(record_of(job))
                if write.holds(self.directory / str(step), record):
                    return True
                record.clear()
            gone = self.last_saved is not None and not self.directory.exists()
            if gone:
                self.note("alarm", step, cause=f"{self.directory} was removed while the run went on; it is made anew")
            write.check_room(self.directory, write.state_bytes(leaves.values()))
            write.prepare_step(self.directory, step)
            return False

        def commit() -> None:
            record.update(record_of(job))
            write.commit(self.directory, step, record, self.may_commit, began)

        if not self.stage(job, "folder", prepare if first else None):
            try:
                self.stage(job, "arrays", lambda: write.write_arrays(self.directory, step, leaves, jax.process_index()))
                self.stage(job, "commit", commit if first else None)
            except Stop:
                raise  # another run has the folder, and what lies there may be its own
            except Exception:
                if first:
                    self.give_up(step)
                raise
        good = self.verify(job, record)
        if first:
            self.note(
                "saved", step, seconds=round(time.monotonic() - started, 3), health=job.health,
                bytes=write.state_bytes(leaves.values()), verified=good,
            )  # fmt: skip
            self.tidy(job, record, good)

    def give_up(self, step: int) -> None:
        """Removes what a failed save has written, where the folder is known to be ours. Raises Stop if it is not."""
        try:
            self.may_commit()
        except Stop:
            raise
        except Exception:  # the storage does not answer; the next save cleans up
            return
        write.give_up(self.directory, step)

    def verify(self, job: Job, record: dict[str, Any]) -> bool:
        """Reads this process's share of a committed step back; True if all processes found what was saved.

        What is damaged is moved aside before SaveFailed is raised. Where storage cannot be asked, the save counts all
        the same: it is only not called verified.
        """
        if not self.cfg.verify_saved:
            return False
        folder, share, shares = self.directory / str(job.step), jax.process_index(), jax.process_count()

        def read() -> dict[str, list[int]]:
            leaves = (record or read_back.sealed_record(folder, write.wait_for_record))["leaves"]
            return read_back.piece_sums(folder, leaves, share, shares)

        crash_point("verify/before")
        try:
            self.stage(job, "verify", read, lambda sums: read_back.what_differs(record["leaves"], sums))
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

    def tidy(self, job: Job, record: dict[str, Any], good: bool) -> None:
        """Writes down the last good step and removes the checkpoints that need not stay; a failure is only noted.

        good: this one was read back. Raises Stop where the folder is another run's.
        """
        self.facts[job.step] = retention.Facts(job.health, job.metrics.get(retention.BEST_BY))
        self.last_verified = job.step if good else self.last_verified
        try:
            self.may_commit()
            write_last_good(self.directory, job.step, verified=good, health=job.health, sha256=record["sha256"])
            self.remove_old(job.step)
        except Stop:
            raise
        except Exception as error:
            self.note("alarm", job.step, cause=f"after the save: {short_reason(error)}")

    def remove_old(self, newest: int) -> None:
        """Removes what need not stay. A step of which nothing can be learnt now stays until it can."""
        unknown: dict[int, Exception] = {}

        def fact(step: int) -> retention.Facts:
            try:
                if step not in unknown:
                    return self.fact(step)
            except Exception as error:
                unknown[step] = error
            return retention.UNKNOWN

        pinned = retention.pinned_steps(self.directory)
        if self.last_verified is not None:
            pinned = pinned | {self.last_verified}
        steps = folders.all_steps(self.directory)
        kept = retention.kept_steps(steps, self.cfg, fact, pinned, newest)
        for step in sorted(set(steps) - set(kept) - set(unknown)):
            folders.remove_step(self.directory, step)
        for step, error in unknown.items():
            self.note("alarm", newest, cause=f"step {step} stays, its record cannot be read: {short_reason(error)}")

    def fact(self, step: int) -> retention.Facts:
        """What retention asks of a step, read once. Raises what keeps it from being read."""
        if step not in self.facts:
            self.facts[step] = retention.read_facts(self.directory / str(step))
        return self.facts[step]

    def stage(
        self,
        job: Job,
        name: str,
        work: Callable[[], Any] | None,
        damage: Callable[[list[Any]], str] = lambda results: "",
    ) -> bool:
        """Does this process's part and returns when all have done theirs: True if the first one's work said so.

        damage: what is damaged, in words, by what the work of all has returned; asked at the first process.
        Raises: SaveFailed with the cause of any, damage before all else. A Stop is raised here as it is; the others
        hear of it as of a failure.
        """
        stop, mine = None, {}
        try:
            if work is not None:
                mine = {"result": work()}
        except Stop as error:
            stop, mine = error, {"failure": [str(error), "Stop"]}
        except Exception as error:
            kept = isinstance(error, read_back.Damaged | FileExistsError)
            mine = {"failure": [clip(str(error)) if kept else short_reason(error), type(error).__name__]}
        made_of = lambda parts: outcome(parts, damage)
        found = gathered(f"{job.key}/{name}", mine, self.cfg.max_save_seconds, made_of)
        if stop:
            raise stop
        if "failure" in found:
            raise SaveFailed(*found["failure"])
        return found["result"]

    def cause_of(self, error: Exception, job: Job) -> str:
        """The cause of a failed save with what it needs and has, and what permission is missing."""
        cause = str(error.args[0]) if isinstance(error, SaveFailed) else short_reason(error)
        cause += missing_grant(cause, self.directory)
        full = "No space left" in cause or NO_INODES in cause
        if full and not paths.is_remote(self.directory) and (message := no_inodes_message(self.directory)):
            return message
        try:
            return f"{cause} ({write.room_text(self.directory, write.state_bytes(job.snapshot.leaves.values()))})"
        except OSError:
            return cause


def record_of(job: Job) -> dict[str, Any]:
    """What the checkpoint says of itself; waits for the devices."""
    prints = job.snapshot.prints()
    leaves = {name: [*describe_leaf(leaf), prints[name]] for name, leaf in job.snapshot.leaves.items()}
    content = {"step": job.step, "run": json.loads(job.run_text), "leaves": leaves}
    return seal(content | {"health": job.health, "metrics": job.metrics})


def outcome(parts: list[dict[str, Any]], damage: Callable[[list[Any]], str]) -> dict[str, Any]:
    """What a stage comes to: {"failure": [cause, kind]}, or {"result": True if the first process's work said so}."""
    failed = [(process, *part["failure"]) for process, part in enumerate(parts) if "failure" in part]
    for process, cause, kind in sorted(failed, key=lambda failure: failure[2] != DAMAGED):
        return {"failure": [f"process {process}: {cause}" if len(parts) > 1 else cause, kind]}
    results = [part.get("result") for part in parts]
    if wrong := damage(results):
        return {"failure": [clip(wrong), DAMAGED]}
    return {"result": results[0] is True}
