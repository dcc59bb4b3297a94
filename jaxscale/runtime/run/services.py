"""Services around a run in a work folder: lock, event log, watchdog, exports, profiler and telemetry."""

import contextlib
from collections.abc import Iterator

import jax

from jaxscale.config import RunConfig
from jaxscale.runtime.checkpoint.folders import remove_leftovers
from jaxscale.runtime.checkpoint.lock import RunLock
from jaxscale.runtime.checkpoint.periodic_export import periodic_exports
from jaxscale.runtime.checkpoint.saver import SharedReports
from jaxscale.runtime.hosts import cluster
from jaxscale.runtime.hosts.agree import Board
from jaxscale.runtime.hosts.watchdog import Watchdog
from jaxscale.runtime.monitor.config import parse_steps
from jaxscale.runtime.monitor.events import NAME, Events
from jaxscale.runtime.monitor.goodput import TimeLedger, process_age_seconds
from jaxscale.runtime.monitor.machine import Telemetry, make_reader
from jaxscale.runtime.monitor.profile import Profiler
from jaxscale.runtime.monitor.records import replace_with_copy
from jaxscale.runtime.monitor.writers import EXPERTS, METRICS, SAMPLES
from jaxscale.runtime.run.options import Log, RunOptions
from jaxscale.runtime.training.loop_services import Services
from jaxscale.system import paths
from jaxscale.system.exits import Stop, verdict

APPENDED = (NAME, METRICS, SAMPLES, EXPERTS)
REPLACED = (*APPENDED, "abandoned.jsonl", "config.json", "sample.txt")


@contextlib.contextmanager
def run_services(cfg: RunConfig, workdir: str, options: RunOptions, team: cluster.Team) -> Iterator[Services]:
    """Yields a run's services while holding the lock on the work folder. Records the end in the event log.

    A rejected start leaves the folder unchanged. Raises Stop (LOCK_HELD) if another run holds the lock.
    """
    primary = jax.process_index() == 0
    board = Board() if jax.process_count() > 1 else None
    ledger = TimeLedger(age_seconds=process_age_seconds())
    events = Events(workdir, primary=primary)
    lock = RunLock(workdir, cfg.lock, steal=options.steal_lock, note=events.note, log=team)
    if primary:
        paths.make_run_dir(workdir, options.mode)
    with lock if primary else contextlib.nullcontext():  # events are noted only while the lock is held
        clean_folder(workdir, team, primary=primary, stolen=lock.previous_owner is not None)
        profiler = Profiler(
            workdir,
            steps=parse_steps(cfg.monitor.profile_steps) if primary or cfg.monitor.profile_processes == "all" else None,
            process=jax.process_index(),
            note=events.note,
            say=team,
            start=jax.profiler.start_trace,
            stop=jax.profiler.stop_trace,
        )
        seconds = cfg.monitor.telemetry_seconds
        read = make_reader(jax.local_devices()[0].platform) if primary and seconds > 0 else None  # process 0 only
        telemetry = Telemetry(read, every_seconds=seconds, say=team)
        watchdog = Watchdog(workdir, cfg.hang, note=events.note, others=team, observers=(profiler, ledger))
        exports = periodic_exports(cfg.export, workdir, events.note, team, primary=primary)
        with note_end(events, ledger):
            with watchdog, telemetry, profiler, exports as note:
                yield Services(
                    note,
                    watchdog,
                    lock.check,
                    lock.poll,
                    SharedReports(board) if board else None,
                    board,
                    ledger=ledger,
                    vitals=lambda: ledger.metrics() | telemetry.latest,
                    profiling=profiler.busy,
                )
            lock.poll()  # raises if the last writes found that the lock is lost


@contextlib.contextmanager
def note_end(events: Events, ledger: TimeLedger) -> Iterator[None]:
    """Records the stopped event, with exit code and reason, whether or not the block raises."""
    code, reason = 0, "done"
    try:
        yield
    except BaseException as error:
        code, line = verdict(error)
        reason = line or f"{type(error).__name__}: {str(error)[:500]}"
        raise
    finally:
        with contextlib.suppress(OSError, Stop):  # must not hide the outcome of the run
            if events.has_events:
                events.note("stopped", code=int(code), why=reason, goodput=ledger.facts())
            events.close()


def clean_folder(workdir: str, log: Log, *, primary: bool, stolen: bool) -> None:
    """Removes leftover files. If the lock was stolen, replaces files that its old owner may still write to."""
    if paths.is_remote(workdir):
        return
    folder, failed = paths.as_path(workdir), []
    for name in REPLACED:
        paths.check_is_file(folder / name)
    if primary:  # other processes hold no lock, and the folder may belong to another run
        paths.remove_temporaries(folder, REPLACED)
    if not (primary and stolen):
        return
    for detach, name in (*((replace_with_copy, name) for name in APPENDED), (remove_leftovers, "checkpoints")):
        try:
            detach(folder / name)
        except OSError as error:
            failed.append(f"{name} ({error.strerror or error})")
    if failed:
        log(f"WARNING: {folder}: the previous owner of the lock may still write to {', '.join(failed)}")
