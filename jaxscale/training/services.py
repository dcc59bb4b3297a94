"""The services that the loop uses: events, watchdog, lock, goodput. By default they do nothing."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxscale.hosts.agree import Board
from jaxscale.hosts.watchdog import UNWATCHED, Watchdog
from jaxscale.monitor.events import Note, ignore
from jaxscale.monitor.goodput import TimeLedger


class Services(NamedTuple):
    """Run services, from the opening of a work folder to its end; run/services.py makes them."""

    note: Note = ignore
    watchdog: Watchdog = UNWATCHED
    may_commit: Callable[[], None] = lambda: None  # raises if the folder is no longer ours
    poll: Callable[[], None] = lambda: None  # the same, asked after every step at no cost
    reports: Any = None  # of saves that failed in any of several processes
    board: Board | None = None  # of several processes, looked at after every step
    ledger: TimeLedger | None = None  # of where the time goes
    vitals: Callable[[], dict[str, Any]] = dict  # for each record: goodput, and what the devices say
    clock: Callable[[], float] = time.time  # seconds since 1970, for limits
    profiling: Callable[[], bool] = lambda: False  # whether the step that has just finished was slowed by a capture


UNATTENDED = Services()
