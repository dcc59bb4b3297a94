"""Serves the report page on this machine, and renders the page again when the run's files change."""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale.runtime.monitor.history import LEDGERS, OPTIONAL_FILES, RUN_FILES
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Stop, print_stderr
from jaxscale.system.local_server import LocalHandler, LocalServer
from jaxscale.tools.reporting.page import POLICY, SERVED
from jaxscale.tools.reporting.page_text import escape
from jaxscale.tools.reporting.status import QUIET_SECONDS

CHECK_SECONDS = 2.0  # shortest time between checks of the files


class Pages:
    """The newest page and its version. Thread-safe."""

    def __init__(self, make: Callable[[str], str], workdirs: Sequence[Any], clock: Callable[[], float] = time.time):
        """Opens the work folders. make: returns the page for a version."""
        self.make, self.clock = make, clock
        self.folders = [paths.as_path(workdir) for workdir in workdirs]
        self.lock = threading.RLock()
        self.checked_at, self.current, self.made, self.content = float("-inf"), "", "", ""

    def version(self) -> str:
        """Returns an id that changes when a file changes, and at increasing intervals when no file changes."""
        with self.lock:
            now = self.clock()
            if now - self.checked_at >= CHECK_SECONDS:
                marks = [mark for folder in self.folders for mark in sizes_and_times(folder)]
                newest = max((mark[1] for mark in marks if mark), default=0.0)
                # the page of a silent run also changes, and is rendered again after 3, 6, 12, ... minutes
                quiet = max(0, int((now - newest) / QUIET_SECONDS)).bit_length()
                state = repr((marks, quiet))
                self.current, self.checked_at = hashlib.sha256(state.encode()).hexdigest()[:16], now
            return self.current

    def page(self) -> str:
        """Returns the newest page."""
        with self.lock:
            version = self.version()
            if version != self.made:
                self.content = self.make(version)
                self.made = version
            return self.content


def sizes_and_times(folder: Any) -> list[tuple[int, float] | None]:
    """Returns (bytes, modification time), or None if missing, for each file of a work folder that the page reads."""
    files, found = [folder / name for name in (*RUN_FILES, *OPTIONAL_FILES)], []
    with contextlib.suppress(OSError):  # the page reports unreadable folders
        files += sorted(folder.glob(LEDGERS))
    for file in files:
        stat = None
        with contextlib.suppress(OSError):
            stat = file.stat()
        found.append(stat and (stat.st_size, stat.st_mtime))
    return found


class ReportServer(LocalServer):
    """A server for one page."""

    pages: Pages


class ReportHandler(LocalHandler):
    """Request handler. GET / returns the page, and GET /version returns the version of the page."""

    server: ReportServer
    policy = f"{POLICY}{SERVED}"

    def do_GET(self) -> None:
        """Answers a request."""
        if not self.is_for_us():
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/version"):
            self.answer(404, "There is only one page: /", "text/plain")
            return
        try:
            found = self.server.pages.page() if path == "/" else self.server.pages.version()
        except (BadInput, OSError, Stop) as error:
            print_stderr(f"report: {error}")
            self.answer(503, f"<!doctype html><title>jaxscale</title><p>{escape(error)}</p>", "text/html")
            return
        self.answer(200, found, "text/html" if path == "/" else "text/plain")
