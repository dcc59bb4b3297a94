"""Services of the training loop: events, watchdog, lock, goodput. By default they do nothing."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxscale.runtime.hosts.agree import Board
from jaxscale.runtime.hosts.watchdog import UNWATCHED, Watchdog
from jaxscale.runtime.monitor.events import Note, ignore
from jaxscale.runtime.monitor.goodput import TimeLedger


class Services(NamedTuple):
    """Services of an open work folder, made by runtime/run/services.py."""

    note: Note = ignore
    watchdog: Watchdog = UNWATCHED
    may_commit: Callable[[], None] = lambda: None  # raises if this process has lost the folder's lock
    poll: Callable[[], None] = lambda: None  # like may_commit, but cheap enough for every step
    reports: Any = None  # failed saves of all processes
    board: Board | None = None  # shared by several processes, refreshed after every step
    ledger: TimeLedger | None = None  # goodput
    vitals: Callable[[], dict[str, Any]] = dict  # values added to each record: goodput and device telemetry
    clock: Callable[[], float] = time.time  # seconds since 1970, for limits
    profiling: Callable[[], bool] = lambda: False  # True if a profile was captured during the last step


NO_SERVICES = Services()
