"""Saves, lists, verifies and restores the checkpoints of a run.

The folder of a step has two items. `state` contains the arrays as nested dicts, which Orbax can also read. `run` is a
JSON object with the resolved config, the data position, the name, shape, dtype and fingerprint of every array, and a
sha256 of this content. Orbax is slow to import and needed only for saving, so `prepare()` imports it in the background
while the first steps run.

The training thread only dispatches a copy of the state (fingerprint.py). A background thread writes and commits the
copy, reads it back and applies the retention policy (saver.py). Failed saves are reported and retried.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxscale.runtime.checkpoint import folders, restore, write
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.fingerprint import array_formats, copy_program, take_snapshot
from jaxscale.runtime.checkpoint.record import named_leaves, remove_last_good
from jaxscale.runtime.checkpoint.restore import warn_if_last_good_lost
from jaxscale.runtime.checkpoint.retention import CLEAN, read_facts
from jaxscale.runtime.checkpoint.saver import SaveJob, Saver, SharedReports
from jaxscale.runtime.checkpoint.storage_errors import is_storage_error, short_reason
from jaxscale.runtime.checkpoint.write import import_orbax
from jaxscale.runtime.hosts.agree import agreed, next_key
from jaxscale.runtime.hosts.watchdog import UNWATCHED
from jaxscale.runtime.monitor.events import Note, ignore
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop

RETRY_SECONDS = 0.5  # pause between two attempts at the last save of a run
ASIDE_SECONDS = 3600.0  # timeout of moving a step, which copies every object in a bucket


class Checkpoints:
    """Saves and restores the checkpoints in a folder. The constructor reads no file and does not import Orbax.

    All methods may raise Stop, with the code STORAGE if saves fail repeatedly, CHECKPOINT_CORRUPT if a step differs
    from what was saved, and CONFIG_MISMATCH if a step does not fit the abstract state.
    """

    def __init__(
        self,
        directory: Any,
        cfg: CheckpointConfig,
        *,
        note: Note = ignore,
        may_commit: Callable[[], None] = lambda: None,
        reports: SharedReports | None = None,
        phase: Callable[..., Any] = UNWATCHED.phase,
    ):
        """Args:
        note: receives every event. may_commit: raises Stop if the run's lock is lost. reports: makes poll() report a
        failure after the same step in all processes; may be None for a single process, or if poll() is not called.
        phase: context manager of the watchdog that the saving thread enters.
        """
        self.directory, self.cfg, self.note = paths.absolute(directory), cfg, note
        self.reports = reports or SharedReports()
        self.saver = Saver(self.directory, cfg, note, may_commit, self.reports, phase)
        self.preparing: threading.Thread | None = None
        self.due, self.postponed = False, False
        self.failed_in_row, self.last_failed = 0, -1
        self.reported: set[int] = set()  # steps whose failed save was reported in this process

    def prepare(self, state: Any = None) -> None:
        """Starts a thread that imports Orbax (0.5 to 2 s) and compiles the copy of `state` for the first save."""
        arrays = [leaf for leaf in named_leaves(state).values() if isinstance(leaf, jax.Array)]
        described = array_formats(arrays)  # the arrays themselves may be donated before the thread runs

        def work() -> None:
            import_orbax()
            if described:
                copy_program(described)

        self.preparing = threading.Thread(target=work, name="prepare-saving", daemon=True)
        self.preparing.start()

    def wait_prepared(self) -> None:
        """Waits until the thread of prepare() has ended."""
        if self.preparing is not None:
            self.preparing.join()

    # Listing and restoring.

    def latest_step(self) -> int | None:
        """Returns the newest committed step from a fresh listing, or None."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """Returns all committed steps in ascending order from a fresh listing."""
        return folders.all_steps(self.directory)

    def newest(self, before: int | None = None, health: str | None = None) -> int | None:
        """Returns the newest step with a valid record (and below `before`, and with this health, if given), or None."""
        for step in reversed([step for step in self.all_steps() if before is None or step < before]):
            folder = self.directory / str(step)
            try:
                found = read_facts(folder).health
            except Exception as error:
                if is_storage_error(error):
                    restore.raise_read_error(folder, "run", short_reason(error), is_storage=True)
                continue
            if found is not None and health in (None, found):
                return step
        return None

    def read_run(self, step: int) -> dict[str, Any]:
        """Returns the `run` data that was passed to `save`. Raises Stop (CHECKPOINT_CORRUPT)."""
        return self.read_record(step)["run"]

    def read_record(self, step: int) -> dict[str, Any]:
        """Returns the record of a step: {run, leaves: {name: [shape, dtype, fingerprint]}, health, metrics}."""
        try:
            return restore.load_record(self.directory / str(step))
        except restore.UnreadableCheckpoint as error:
            raise self.corrupt(step, *error.args) from None

    def restore(self, step: int, abstract_state: Any, *, partial: bool = False) -> Any:
        """Returns the saved state with the structure and shardings of `abstract_state`, bitwise equal on any mesh.

        abstract_state: pytree of jax.ShapeDtypeStruct, arrays or Python numbers; a leaf without a sharding is restored
        to the first local device. partial: ignore leaves that are only in the checkpoint, such as optimizer moments.
        """
        try:
            return restore.restore_state(self.directory / str(step), abstract_state, partial)
        except restore.UnreadableCheckpoint as error:
            raise self.corrupt(step, *error.args) from error

    def newest_readable(self, log: Callable[[str], None] = print) -> int | None:
        """Returns the newest step with a readable record, or None; sets damaged steps aside. Call in all processes."""
        warn_if_last_good_lost(self, log)
        return self.next_readable(log)

    def next_readable(self, log: Callable[[str], None]) -> int | None:
        """Same as newest_readable, without the check for a missing last good step."""
        step = agreed(self.latest_step)  # a single listing, because hosts may see a new step at different times

        def problem() -> list | None:
            try:
                self.read_record(step)
            except Stop as stop:
                return [int(stop.code), str(stop)]

        if step is not None and (found := agreed(problem)):
            return self.fall_back(step, Stop(Exit(found[0]), found[1]), log)
        return step

    def fall_back(self, step: int | None, error: Stop, log: Callable[[str], None] = print) -> int | None:
        """Moves a damaged step aside, with a warning and an event; returns the newest readable older step.

        Raises `error` if no older step exists, if the code of `error` is not CHECKPOINT_CORRUPT, or if on_corrupt=stop.
        The only step is not moved, so that a run never silently starts from scratch. Call in all processes.
        """
        if step is None or error.code != Exit.CHECKPOINT_CORRUPT or self.cfg.on_corrupt == "stop":
            raise error
        older = agreed(lambda: self.newest(step))
        if older is None:
            raise error
        moved = self.set_aside(step, "damaged")
        cause = str(error).removesuffix(self.way_out(step, older))  # the step is moved here, so the fix is not shown
        self.note("fallback", step, to=older, cause=cause, moved_to=moved)
        log(f"WARNING: {cause}; moved to {moved}; resuming from step {older}, {step - older} steps before it")
        return self.next_readable(log)

    def log_changed_files(self, step: int, log: Callable[[str], None], small: bool = False) -> None:
        """Logs damaged files of a step whose arrays are correct. small: skip the array files."""
        if changed := restore.changed_files_message(self.directory / str(step), small):
            self.warn(step, changed, log)

    def warn(self, step: int | None, cause: str, log: Callable[[str], None]) -> None:
        """Logs a warning and writes an event."""
        self.note("alarm", step, cause=cause)
        log(f"WARNING: {cause}")

    def set_aside(self, step: int, reason: str) -> str:
        """Moves a step to the folder '<reason>-<step>-<UTC time>'; returns this folder. Call in all processes."""
        self.join()

        def move() -> str:
            self.saver.may_commit()
            remove_last_good(self.directory, step)
            return str(folders.set_aside(self.directory, step, reason))

        moved = agreed(move, ASIDE_SECONDS)
        self.note("set_aside", step, why=reason, place=moved)
        return moved

    def set_aside_after(self, step: int, reason: str) -> list[int]:
        """Moves all steps after `step` aside, newest first, so that a crash leaves no gap. Returns their numbers."""
        self.join()
        later = agreed(lambda: [found for found in self.all_steps() if found > step])
        for found in reversed(later):
            self.set_aside(found, reason)
        return later

    def check_room(self, abstract_state: Any, log: Callable[[str], None] = print) -> None:
        """Warns if the disk lacks space for the checkpoints. Raises the errors of write.check_before_run()."""
        needed = write.state_bytes(named_leaves(abstract_state).values())
        check = lambda: write.check_before_run(self.directory, needed, self.cfg.keep_last, self.all_steps())
        if (warning := agreed(check)) and jax.process_index() == 0:
            log(f"WARNING: {warning}")

    # Saving.

    @property
    def busy(self) -> bool:
        """Returns True while a save is in progress in this process."""
        return self.saver.busy

    @property
    def retry_due(self) -> bool:
        """Returns True if a save is due outside the schedule, because the last save failed or was postponed."""
        return self.due and not self.postponed

    def save(
        self,
        step: int,
        state: Any,
        run: Mapping[str, Any],
        *,
        health: str = CLEAN,
        metrics: Mapping[str, float] | None = None,
        wait: bool = False,
    ) -> float:
        """Starts a save in the background; returns the seconds for which the caller was blocked.

        The state may be donated after the call. The call waits up to wait_seconds for a save in progress. If that save
        has not ended, the new save is postponed, and `retry_due` becomes true when the save in progress ends, so
        training continues while storage is slow or unreachable. `poll` reports failures.
        state: any pytree of arrays and Python numbers. run: JSON data. health: "clean" or "suspect". metrics: metrics
        of this state, such as validation/loss. wait: wait for the commit, and retry if necessary, as in the last save
        of a run.
        """
        began = time.monotonic()

        def start() -> None:
            self.due = self.postponed = False
            self.wait_prepared()
            snapshot = take_snapshot(named_leaves(state))
            self.saver.start(SaveJob(next_key("save"), step, snapshot, json.dumps(run), health, dict(metrics or {})))

        if wait:
            self.save_now(step, start)
            return time.monotonic() - began
        late, waiting = self.busy, 0.0 if self.postponed else self.cfg.wait_seconds
        if agreed(lambda: not self.saver.join(waiting)):
            self.due = self.postponed = True
            self.note("alarm", step, cause="the previous save is still in progress; this step is saved after it")
            return time.monotonic() - began
        if late:
            waited = round(time.monotonic() - began, 3)
            self.note("alarm", step, cause="the previous save was still in progress", waited=waited)
        start()
        return time.monotonic() - began

    def save_now(self, step: int, start: Callable[[], None]) -> None:
        """Saves and waits for the commit, with up to max_failed_saves attempts. Raises Stop (STORAGE) if all fail."""
        self.join()
        self.take_failure()
        for attempt in range(1, self.cfg.max_failed_saves + 1):
            self.reported.discard(step)
            start()
            self.join()
            if (failure := self.take_failure()) is None:
                return
            if attempt < self.cfg.max_failed_saves:
                time.sleep(RETRY_SECONDS)
        raise self.storage_error(failure[0], failure[1])

    def poll(self, step: int) -> None:
        """Reports failed saves. Call after every step; the cost is negligible.

        Raises Stop (STORAGE) with the original cause after max_failed_saves consecutive failures, or if a save takes
        longer than max_save_seconds. Errors that a retry cannot fix are raised at once.
        """
        if self.saver.fatal:
            raise self.saver.fatal
        if self.busy and time.monotonic() - self.saver.began > self.cfg.max_save_seconds:
            raise self.timeout_error()
        if news := self.reports.news(step):
            self.record_failure(*news)
            if self.failed_in_row >= self.cfg.max_failed_saves:
                raise self.storage_error(*news)
        if self.postponed:
            self.postponed = agreed(lambda: self.busy)

    def record_failure(self, step: int, cause: str) -> None:
        """Records a failed save, at most once per step."""
        if step in self.reported:
            return
        self.reported.add(step)
        last_saved = -1 if self.saver.last_saved is None else self.saver.last_saved
        self.failed_in_row = 1 if last_saved > self.last_failed else self.failed_in_row + 1
        self.last_failed, self.due = step, True
        self.note("save_failed", step, cause=cause, in_row=self.failed_in_row)

    def wait(self) -> None:
        """Waits until no save is in progress. Raises Stop (STORAGE) for a failure that poll() has not reported."""
        self.join()
        if failure := self.take_failure():
            raise self.storage_error(*failure)

    def join(self) -> None:
        """Waits until no save is in progress. Raises Stop after max_save_seconds, or if the error is permanent."""
        left = self.cfg.max_save_seconds - (time.monotonic() - self.saver.began)
        if not self.saver.join(max(0.0, left)):
            raise self.timeout_error()
        if self.saver.fatal:
            raise self.saver.fatal

    def take_failure(self) -> tuple[int, str] | None:
        """Records and returns the failure (step, cause) of the last save; None if all failures were reported."""
        failure, self.saver.failure = self.saver.failure, None
        if failure is None or failure[0] in self.reported:
            return None
        self.record_failure(*failure)
        return failure

    def close(self, most_seconds: float | None = None) -> None:
        """Waits for the save in progress, unless it has taken more than max_save_seconds. Raises the errors of wait().

        most_seconds: timeout after which the method returns without an error.
        """
        self.wait_prepared()  # exiting the interpreter during compilation would end in a crash
        if self.busy and time.monotonic() - self.saver.began > self.cfg.max_save_seconds:
            return  # poll() has raised this error
        if most_seconds is not None and not self.saver.join(most_seconds):
            return
        if not self.saver.fatal:
            self.wait()

    # Errors.

    def corrupt(self, step: int, item: str, cause: str) -> Stop:
        """Returns the error for an unreadable checkpoint, with the step, item, path, cause and fix."""
        folder = self.directory / str(step)
        way_out = self.way_out(step, self.newest(before=step))
        return Stop(Exit.CHECKPOINT_CORRUPT, f"step {step} cannot be read: {item} in {folder / item}: {cause}{way_out}")

    def way_out(self, step: int, older: int | None) -> str:
        """Returns the fix for an unreadable step, as the end of an error message. older: newest readable older step."""
        if older is None:
            return "; no older step exists"
        return f"; move {self.directory / str(step)} away to resume from step {older}"

    def storage_error(self, step: int, cause: str) -> Stop:
        """Returns the error for failed saves, with the newest complete step."""
        times = f" {self.failed_in_row} consecutive times" if self.failed_in_row > 1 else ""
        try:
            found = self.newest()
            safe = "no earlier checkpoint exists" if found is None else f"step {found} is the newest complete one"
        except (OSError, BadInput, Stop):
            safe = "the existing steps cannot be listed"
        return Stop(Exit.STORAGE, f"saving step {step} to {self.directory} failed{times}: {cause}; {safe}")

    def timeout_error(self) -> Stop:
        """Returns the error for a save that exceeds max_save_seconds."""
        seconds = time.monotonic() - self.saver.began
        return Stop(
            Exit.STORAGE,
            f"a save to {self.directory} has not ended after {seconds:.0f} s (checkpoint.max_save_seconds); check "
            "the storage, and restart when it responds",
        )
