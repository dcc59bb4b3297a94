"""What stands around a run while it is in a work folder: the lock, the log of events, and the watchdog."""

import contextlib
from collections.abc import Iterator

import jax

from jaxscale import hosts
from jaxscale.checkpoint.lock import RunLock
from jaxscale.config import RunConfig
from jaxscale.exits import verdict
from jaxscale.hosts.reports import open_reports
from jaxscale.hosts.watchdog import Watchdog
from jaxscale.monitor.events import Events
from jaxscale.start import Wishes
from jaxscale.train.services import Services


@contextlib.contextmanager
def attended(cfg: RunConfig, workdir: str, wishes: Wishes, team: hosts.Team) -> Iterator[Services]:
    """Gives what the run asks of its surroundings; its log also learns how it ended.

    A start that is refused leaves no trace in the folder. Raises: Stop (LOCK_HELD) where another run is in it.
    """
    primary = jax.process_index() == 0
    events = Events(workdir, primary=primary)
    lock = RunLock(
        workdir, cfg.lock, steal=wishes.steal_lock, primary=primary, note=events.note, say=team, mode=wishes.mode
    )
    with lock:  # what is noted is noted while the folder is ours
        code, why = 0, "done"
        try:
            with Watchdog(workdir, cfg.hang, note=events.note, others=team) as watchdog:
                yield Services(events.note, watchdog, lock.check, lock.poll, open_reports())
        except BaseException as error:
            code, line = verdict(error)
            why = line or f"{type(error).__name__}: {str(error)[:500]}"
            raise
        finally:
            with contextlib.suppress(OSError):  # how the run ended is told all the same
                if events.begun:
                    events.note("stopped", code=int(code), why=why)
                events.close()
