"""What stands around a run while it trains, and does nothing where nobody has asked for it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxscale.hosts.watchdog import UNWATCHED, Watchdog
from jaxscale.monitor.events import Note, ignore


class Services(NamedTuple):
    """Of a work folder, from main's first look at it to its end."""

    note: Note = ignore
    watchdog: Watchdog = UNWATCHED
    may_commit: Callable[[], None] = lambda: None  # raises if the folder is no longer ours
    poll: Callable[[], None] = lambda: None  # the same, asked after every step at no cost
    reports: Any = None  # of saves that failed in any of several processes


UNATTENDED = Services()
