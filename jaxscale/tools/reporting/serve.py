"""Serves the page on this machine, and renders it again when the run's files change."""

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

CHECK_SECONDS = 2.0  # between two looks at the files, however many ask


class Pages:
    """The newest page and its version. Any thread may ask."""

    def __init__(self, make: Callable[[str], str], workdirs: Sequence[Any], clock: Callable[[], float] = time.time):
        """make: the page of a version. Raises BadInput or Stop where the folders cannot be read."""
        self.make, self.clock = make, clock
        self.folders = [paths.as_path(workdir) for workdir in workdirs]
        self.lock = threading.RLock()
        self.checked_at, self.current, self.made, self.content = float("-inf"), "", "", ""

    def version(self) -> str:
        """A name for what the files hold now; another one when they have changed, or have not for long."""
        with self.lock:
            now = self.clock()
            if now - self.checked_at >= CHECK_SECONDS:
                marks = [mark for folder in self.folders for mark in sizes_and_times(folder)]
                newest = max((mark[1] for mark in marks if mark), default=0.0)
                # a run that falls silent changes its page too: looked at after 3 minutes, 6, 12, ...
                quiet = max(0, int((now - newest) / QUIET_SECONDS)).bit_length()
                state = repr((marks, quiet))
                self.current, self.checked_at = hashlib.sha256(state.encode()).hexdigest()[:16], now
            return self.current

    def page(self) -> str:
        """The page of the newest version."""
        with self.lock:
            version = self.version()
            if version != self.made:
                self.content = self.make(version)
                self.made = version
            return self.content


def sizes_and_times(folder: Any) -> list[tuple[int, float] | None]:
    """(bytes, time of the last change) of each file of the page in a work folder; None for a missing one."""
    files, found = [folder / name for name in (*RUN_FILES, *OPTIONAL_FILES)], []
    with contextlib.suppress(OSError):  # the page reports a folder that cannot be listed
        files += sorted(folder.glob(LEDGERS))
    for file in files:
        stat = None
        with contextlib.suppress(OSError):
            stat = file.stat()
        found.append(stat and (stat.st_size, stat.st_mtime))
    return found


class ReportServer(LocalServer):
    """A server of one page."""

    pages: Pages


class ReportHandler(LocalHandler):
    """GET / is the page, GET /version what it asks to see whether there is a newer one."""

    server: ReportServer
    policy = f"{POLICY}{SERVED}"

    def do_GET(self) -> None:
        """Answers, or refuses."""
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
