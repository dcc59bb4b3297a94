"""Run services: lock, log of events, watchdog, exports, profiler and telemetry around a run in a work folder."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator

import jax

from jaxscale.checkpoint.folders import remove_leftovers
from jaxscale.checkpoint.lock import RunLock
from jaxscale.config import RunConfig
from jaxscale.hosts import cluster
from jaxscale.hosts.agree import Board
from jaxscale.hosts.reports import SharedReports
from jaxscale.hosts.watchdog import Watchdog
from jaxscale.interop.periodic import exporting
from jaxscale.monitor.config import MonitorConfig, parse_steps
from jaxscale.monitor.events import NAME, Events, Note
from jaxscale.monitor.goodput import TimeLedger, own_age_seconds
from jaxscale.monitor.profile import Profiler
from jaxscale.monitor.records import renew
from jaxscale.monitor.telemetry import Telemetry, reader_for
from jaxscale.monitor.writers import EXPERTS, METRICS, SAMPLES
from jaxscale.run.options import RunOptions
from jaxscale.system import paths
from jaxscale.system.exits import Stop, verdict
from jaxscale.training.services import Services

APPENDED = (NAME, METRICS, SAMPLES, EXPERTS)
REPLACED = (*APPENDED, "abandoned.jsonl", "config.json", "sample.txt")


@contextlib.contextmanager
def run_services(cfg: RunConfig, workdir: str, options: RunOptions, team: cluster.Team) -> Iterator[Services]:
    """The services of a run, while it holds the work folder's lock; its event log also learns how it ended.

    A start that is refused leaves no trace in the folder. Raises: Stop (LOCK_HELD) where another run is in it.
    """
    primary = jax.process_index() == 0
    board = Board() if jax.process_count() > 1 else None
    ledger = TimeLedger(age_seconds=own_age_seconds())
    events = Events(workdir, primary=primary)
    lock = RunLock(workdir, cfg.lock, steal=options.steal_lock, note=events.note, log=team)
    if primary:
        paths.make_run_dir(workdir, options.mode)
    with lock if primary else contextlib.nullcontext():  # what is noted is noted while the folder is ours
        clean_folder(workdir, team, primary=primary, stolen=lock.previous_owner is not None)
        profiler, telemetry = make_monitors(cfg.monitor, workdir, events.note, team)
        watchdog = Watchdog(workdir, cfg.hang, note=events.note, others=team, observers=(profiler, ledger))
        exports = exporting(cfg.export, workdir, events.note, team, primary=primary)
        with ending_noted(events, ledger):
            with watchdog, telemetry, profiler, exports as note:
                yield Services(
                    note,
                    watchdog,
                    lock.check,
                    lock.poll,
                    SharedReports(board) if board else None,
                    board,
                    ledger=ledger,
                    vitals=lambda: ledger.metrics() | telemetry.metrics(),
                    profiling=profiler.busy,
                )
            lock.poll()  # what the last lines of a run found out


@contextlib.contextmanager
def ending_noted(events: Events, ledger: TimeLedger) -> Iterator[None]:
    """Writes the event that a run has stopped, with its exit code and reason, however the block ends."""
    code, why = 0, "done"
    try:
        yield
    except BaseException as error:
        code, line = verdict(error)
        why = line or f"{type(error).__name__}: {str(error)[:500]}"
        raise
    finally:
        with contextlib.suppress(OSError, Stop):  # the outcome of the run is what counts
            if events.begun:
                events.note("stopped", code=int(code), why=why, goodput=ledger.facts())
            events.close()


def clean_folder(workdir: str, log: Callable[[str], None], *, primary: bool, stolen: bool) -> None:
    """Removes temporary files of processes that are gone, and shuts out the one that the lock was taken from.

    Raises BadInput where a file of the run is something else.
    """
    if not paths.is_remote(workdir):
        for name in REPLACED:
            paths.check_is_file(paths.as_path(workdir) / name)
    if primary:  # the others hold no lock, and may come to a folder that is another run's
        paths.remove_temporaries(workdir, REPLACED)
        if stolen and not paths.is_remote(workdir):
            shut_out(paths.as_path(workdir), log)


def shut_out(folder: pathlib.Path, log: Callable[[str], None]) -> None:
    """A process that wakes up in the middle of a line writes into the old file; one in a save finds no folder."""
    failed = []
    for put_away, name in (*((renew, name) for name in APPENDED), (remove_leftovers, "checkpoints")):
        try:
            put_away(folder / name)
        except OSError as error:
            failed.append(f"{name} ({error.strerror or error})")
    if failed:
        log(f"WARNING: {folder}: who had the lock before may still write into {', '.join(failed)}")


def make_monitors(
    cfg: MonitorConfig, workdir: str, note: Note, log: Callable[[str], None]
) -> tuple[Profiler, Telemetry]:
    """The profiler and the device telemetry that the config asks for on this process."""
    process, primary = jax.process_index(), jax.process_index() == 0
    profiler = Profiler(
        workdir,
        steps=parse_steps(cfg.profile_steps) if primary or cfg.profile_processes == "all" else None,
        process=process,
        note=note,
        say=log,
        start=jax.profiler.start_trace,
        stop=jax.profiler.stop_trace,
    )
    asked = primary and cfg.telemetry_seconds > 0  # the others' records go nowhere
    read = reader_for(jax.local_devices()[0].platform) if asked else None
    return profiler, Telemetry(read, every_seconds=cfg.telemetry_seconds, say=log)
