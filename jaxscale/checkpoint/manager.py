"""Checkpoints of a run: saved in the background, found again after any crash, and never trusted unread.

A folder per step holds two items: `state`, the arrays as nested dicts of plain names that stock Orbax can read too, and
`run`, a JSON object with what else a run needs (resolved config, data position) and with the name, shape, dtype and
fingerprint of every array, sealed by a sha256. Orbax is the only heavy import of a run that is not needed before the
first save, so it is imported at first use; `prepare()` starts that in the background once the first step is running.

The step thread only hands over a copy of the state (snapshot.py); a thread writes it, commits it, reads it back and
removes what need not stay (saver.py). A save that fails is news for the loop one step later, and is tried again.
"""

import functools
import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxscale.checkpoint import folders, restore, write
from jaxscale.checkpoint.config import CheckpointConfig
from jaxscale.checkpoint.record import forget_last_good, named_leaves, read_last_good
from jaxscale.checkpoint.restore import log_lost
from jaxscale.checkpoint.retention import CLEAN, read_facts
from jaxscale.checkpoint.saver import Failures, Job, Saver
from jaxscale.checkpoint.snapshot import copy_program, layout, take_snapshot
from jaxscale.checkpoint.storage_errors import is_storage_error, short_reason
from jaxscale.checkpoint.write import import_orbax
from jaxscale.hosts.agree import agreed, next_key
from jaxscale.hosts.reports import SharedReports
from jaxscale.hosts.watchdog import UNWATCHED
from jaxscale.monitor.events import Note, ignore
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop

RETRY_SECONDS = 0.5  # between two attempts at the last save of a run
ASIDE_SECONDS = 3600.0  # for a step to be moved away: in a bucket every object of it is copied


class Checkpoints:
    """The checkpoints in a folder. Making one touches no file and imports nothing heavy.

    Raises (all methods): Stop with code STORAGE if saves fail for good, CHECKPOINT_CORRUPT if what was saved cannot be
    read back as it was, CONFIG_MISMATCH if it does not fit the state that is asked for.
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
        """note: takes every event. may_commit: raises Stop if the run's lock is not ours any more.

        reports: makes poll() report a failure after the same step in all processes; None for a single process, and
        where nothing polls: wait() raises in all processes alike. phase: the watchdog's, for the thread that saves.
        """
        self.directory, self.cfg, self.note = paths.absolute(directory), cfg, note
        self.reports = reports or Failures()
        self.saver = Saver(self.directory, cfg, note, may_commit, self.reports, phase)
        self.preparing: threading.Thread | None = None
        self.due, self.postponed = False, False
        self.failed_in_row, self.last_failed = 0, -1
        self.reported: set[int] = set()  # steps whose failure is known here

    def prepare(self, state: Any = None) -> None:
        """Starts in a thread what the first save needs: Orbax imported (0.5 to 2 s), the copy of `state` compiled."""
        arrays = [leaf for leaf in named_leaves(state).values() if isinstance(leaf, jax.Array)]
        described = layout(arrays)  # the arrays themselves may be gone by then

        def work() -> None:
            import_orbax()
            if described:
                copy_program(described)

        self.preparing = threading.Thread(target=work, name="prepare-saving", daemon=True)
        self.preparing.start()

    def wait_prepared(self) -> None:
        """Returns when what prepare() started has ended."""
        if self.preparing is not None:
            self.preparing.join()

    # What is there.

    def latest_step(self) -> int | None:
        """The newest committed step from a fresh look at the folder, or None if there is none."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """All committed steps, ascending, from a fresh look. Unfinished saves and foreign folders do not count."""
        return folders.all_steps(self.directory)

    def newest(self, before: int | None = None, health: str | None = None) -> int | None:
        """The newest step whose record can be believed, below `before` and of that health if given; None if none is."""
        for step in reversed(self.all_steps()):
            if before is None or step < before:
                found = self.health_of(step)
                if found is not None and health in (None, found):
                    return step
        return None

    def health_of(self, step: int) -> str | None:
        """The health in a step's record; None if it cannot be read. Raises Stop (STORAGE) where that may pass."""
        try:
            return read_facts(self.directory / str(step)).health
        except Exception as error:
            if is_storage_error(error):
                restore.raise_for(self.directory / str(step), "run", short_reason(error), trouble=True)
            return None

    def last_good(self) -> dict[str, Any] | None:
        """{step, verified, health, sha256} of the last step that was written whole, if it is still there."""
        found = read_last_good(self.directory)
        return found if found and folders.is_committed(self.directory / str(found["step"])) else None

    def read_run(self, step: int) -> dict[str, Any]:
        """What `save` was given as `run`. Needs no Orbax. Raises Stop (CHECKPOINT_CORRUPT) if one bit of it changed."""
        return self.read_record(step)["run"]

    def read_record(self, step: int) -> dict[str, Any]:
        """The sealed JSON object of a step: {run, leaves: {name: [shape, dtype, fingerprint]}, health, metrics}."""
        try:
            return restore.load_record(self.directory / str(step))
        except restore.Unreadable as error:
            raise self.corrupt(step, *error.args) from None

    def restore(self, step: int, abstract_state: Any, *, partial: bool = False) -> Any:
        """The saved state, in the structure of `abstract_state` and placed as the shardings of its leaves say.

        The mesh may be another than the one it was saved from; the values are the same bit for bit.
        Args: abstract_state: pytree of jax.ShapeDtypeStruct (without a sharding: the first local device), arrays or
        Python numbers. partial: leaves that only the checkpoint has are left out, as when sampling needs no moments.
        """
        try:
            return restore.restore_state(self.directory / str(step), abstract_state, partial)
        except restore.Unreadable as error:
            raise self.corrupt(step, *error.args) from error

    def newest_readable(self, log: Callable[[str], None] = print) -> int | None:
        """The newest step whose record can be read; None where there never was one. For all processes.

        A step whose record is damaged is set aside, as fall_back says.
        """
        log_lost(self, log)
        return self.next_readable(log)

    def next_readable(self, log: Callable[[str], None]) -> int | None:
        """As newest_readable, which says first what is lost."""
        step = agreed(self.latest_step)  # one look at the folder: another host may see a save a moment later
        if step is None:
            return None
        try:
            agreed_record(functools.partial(self.read_record, step))
        except Stop as error:
            return self.fall_back(step, error, log)
        return step

    def fall_back(self, step: int | None, error: Stop, log: Callable[[str], None] = print) -> int | None:
        """The newest readable step below a damaged one, which is moved aside, with a line and an event that say so.

        The oldest is left where it is: what was lost is never made up for by beginning anew in silence. For all
        processes. Raises: the error, where there is no older step, or it is another than CHECKPOINT_CORRUPT.
        """
        if step is None or error.code != Exit.CHECKPOINT_CORRUPT or self.cfg.on_corrupt == "stop":
            raise error
        older = agreed(functools.partial(self.newest, step))
        if older is None:
            raise error
        moved = self.set_aside(step, "damaged")
        cause = str(error).removesuffix(self.way_out(step, older))  # it is taken
        self.note("fallback", step, to=older, cause=cause, moved_to=moved)
        log(f"WARNING: {cause}. It is now {moved}; going on from step {older}, {step - older} steps before it")
        return self.next_readable(log)

    def log_changed_files(self, step: int, log: Callable[[str], None], small: bool = False) -> None:
        """Says, in an event as well, if files of a step that was restored bit for bit are not as they were written.

        small: of a step whose arrays will be read; only the files beside them are looked at. For all processes.
        """
        if changed := restore.changed_files_of(self.directory / str(step), small):
            self.note("alarm", step, cause=changed)
            log(f"WARNING: {changed}")

    def set_aside(self, step: int, why: str) -> str:
        """Moves a step to '<why>-<step>-<UTC time>', where it does not count; the new place. For all processes."""
        self.join()
        moved = agreed(lambda: self.move_away(step, why), ASIDE_SECONDS)
        self.note("set_aside", step, why=why, place=moved)
        return moved

    def move_away(self, step: int, why: str) -> str:
        """The new place of a step, if the folder is this run's. Raises as may_commit does."""
        self.saver.may_commit()
        forget_last_good(self.directory, step)
        return str(folders.set_aside(self.directory, step, why))

    def set_aside_after(self, step: int, why: str) -> list[int]:
        """Moves all later steps aside; their numbers. The newest goes first, so that a crash leaves no gap."""
        self.join()
        later = agreed(lambda: [found for found in self.all_steps() if found > step])
        for found in reversed(later):
            self.set_aside(found, why)
        return later

    def check_room(self, abstract_state: Any, log: Callable[[str], None] = print) -> None:
        """Says of a run that goes on if not all checkpoints that stay would have room, and how to make some.

        Raises Stop (NO_GO) if that is so of a new run, or if checkpoints of this state cannot be written at all.
        """
        needed = write.state_bytes(named_leaves(abstract_state).values())
        check = functools.partial(write.check_before_run, self.directory, needed, self.cfg.keep_last)
        if warning := agreed(lambda: check(self.all_steps())):
            if jax.process_index() == 0:
                log(f"WARNING: {warning}")

    # Saving.

    @property
    def busy(self) -> bool:
        """True while a save is under way in this process."""
        return self.saver.busy

    @property
    def retry_due(self) -> bool:
        """True if this step should be saved, whatever the schedule says: the last save failed, or was put off."""
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
        """Starts to save in the background; seconds for which the caller was blocked.

        The state may be donated right afterwards. If the save before still runs, the call waits for its end; after
        wait_seconds it starts nothing, and `retry_due` becomes true when that one has ended: training goes on while
        storage is slow or away. `poll` reports a failure.
        Args: state: any pytree of arrays and Python numbers. run: plain data that JSON can hold. health: "clean" or
        "suspect". metrics: of this state, such as validation/loss. wait: for the last save of a run: returns when it is
        committed, after several attempts if need be.
        """
        began = time.monotonic()
        if wait:
            self.save_now(step, state, run, health, dict(metrics or {}))
            return time.monotonic() - began
        late, waiting = self.busy, 0.0 if self.postponed else self.cfg.wait_seconds
        if agreed(lambda: not self.saver.join(waiting)):
            self.due = self.postponed = True
            self.note("alarm", step, cause="the save before is still under way; this one is made when it has ended")
            return time.monotonic() - began
        if late:
            waited = round(time.monotonic() - began, 3)
            self.note("alarm", step, cause="the save before was still under way", waited=waited)
        self.start(step, state, run, health, dict(metrics or {}))
        return time.monotonic() - began

    def save_now(self, step: int, state: Any, run: Mapping[str, Any], health: str, metrics: dict[str, float]) -> None:
        """Saves and waits, up to max_failed_saves times. Raises Stop (STORAGE) if none of them worked."""
        self.join()
        self.take_failure()
        for attempt in range(1, self.cfg.max_failed_saves + 1):
            self.reported.discard(step)
            self.start(step, state, run, health, metrics)
            self.join()
            if (failure := self.take_failure()) is None:
                return
            if attempt < self.cfg.max_failed_saves:
                time.sleep(RETRY_SECONDS)
        raise self.storage_error(failure[0], failure[1])

    def start(self, step: int, state: Any, run: Mapping[str, Any], health: str, metrics: dict[str, float]) -> None:
        """Hands a copy of the state over to the thread that saves."""
        self.due = self.postponed = False
        self.wait_prepared()
        snapshot = take_snapshot(named_leaves(state))
        self.saver.start(Job(next_key("save"), step, snapshot, json.dumps(run), health, metrics))

    def poll(self, step: int) -> None:
        """To be called after every step: learns of a save that has failed since, and costs next to nothing.

        Raises Stop (STORAGE) with the true cause after max_failed_saves failures in a row, or at once where trying
        again cannot help, or when a save takes longer than max_save_seconds.
        """
        if self.saver.fatal:
            raise self.saver.fatal
        if self.busy and time.monotonic() - self.saver.began > self.cfg.max_save_seconds:
            raise self.no_answer()
        if news := self.reports.news(step):
            self.learn(*news)
            if self.failed_in_row >= self.cfg.max_failed_saves:
                raise self.storage_error(*news)
        if self.postponed:
            self.postponed = agreed(lambda: self.busy)

    def learn(self, step: int, cause: str) -> None:
        """Takes note of a failed save, once."""
        if step in self.reported:
            return
        self.reported.add(step)
        last_saved = -1 if self.saver.last_saved is None else self.saver.last_saved
        self.failed_in_row = 1 if last_saved > self.last_failed else self.failed_in_row + 1
        self.last_failed, self.due = step, True
        self.note("save_failed", step, cause=cause, in_row=self.failed_in_row)

    def wait(self) -> None:
        """Returns when no save is under way. Raises Stop (STORAGE) if one has failed and poll has not said so."""
        self.join()
        if failure := self.take_failure():
            raise self.storage_error(*failure)

    def join(self) -> None:
        """Returns when no save is under way. Raises Stop where the storage does not answer, or all is in vain."""
        left = self.cfg.max_save_seconds - (time.monotonic() - self.saver.began)
        if not self.saver.join(max(0.0, left)):
            raise self.no_answer()
        if self.saver.fatal:
            raise self.saver.fatal

    def take_failure(self) -> tuple[int, str] | None:
        """(step, cause) if the last save failed and has not been reported; it is noted then."""
        failure, self.saver.failure = self.saver.failure, None
        if failure is None or failure[0] in self.reported:
            return None
        self.learn(*failure)
        return failure

    def close(self, most_seconds: float | None = None) -> None:
        """Waits for the save in the background, unless the storage does not answer. Raises as wait does.

        most_seconds: give up on the save after so long, without an error: the caller has one already.
        """
        self.wait_prepared()  # an interpreter that ends while it compiles dies of a signal
        if self.busy and time.monotonic() - self.saver.began > self.cfg.max_save_seconds:
            return  # poll has said so
        if most_seconds is not None and not self.saver.join(most_seconds):
            return
        if not self.saver.fatal:
            self.wait()

    # Errors.

    def corrupt(self, step: int, item: str, cause: str) -> Stop:
        """The error for a checkpoint that cannot be read: step, item, path, cause, and what can be done."""
        folder = self.directory / str(step)
        way_out = self.way_out(step, self.newest(before=step))
        return Stop(Exit.CHECKPOINT_CORRUPT, f"step {step} cannot be read: {item} in {folder / item}: {cause}{way_out}")

    def way_out(self, step: int, older: int | None) -> str:
        """What can be done about a step that cannot be read, as the end of a line."""
        if older is None:
            return "; there is no older step"
        return f"; move {self.directory / str(step)} away to go on from step {older}"

    def storage_error(self, step: int, cause: str) -> Stop:
        """The error for saves that failed, with the newest step that is safe."""
        times = f" {self.failed_in_row} times in a row" if self.failed_in_row > 1 else ""
        return Stop(
            Exit.STORAGE, f"saving step {step} to {self.directory} failed{times}: {cause}; {self.what_is_safe()}"
        )

    def no_answer(self) -> Stop:
        """The error for a save that does not end."""
        seconds = time.monotonic() - self.saver.began
        return Stop(
            Exit.STORAGE,
            f"a save to {self.directory} has not ended after {seconds:.0f} s (checkpoint.max_save_seconds); is the "
            "storage well? start again when it answers",
        )

    def what_is_safe(self) -> str:
        """The newest step that is there, in words."""
        try:
            safe = self.newest()
        except (OSError, BadInput, Stop):
            return "what is there cannot be listed"
        return f"step {safe} is the newest that is safe" if safe is not None else "there is no earlier checkpoint"


def agreed_record(read: Callable[[], Any]) -> None:
    """Reads a record at the first process and raises its Stop (CHECKPOINT_CORRUPT) in all of them alike."""

    def attempt() -> list | None:
        try:
            read()
        except Stop as stop:
            return [int(stop.code), str(stop)]
        return None

    if found := agreed(attempt):
        raise Stop(Exit(found[0]), found[1])
