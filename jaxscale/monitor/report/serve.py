"""The page over HTTP for this machine alone, made anew when the run has written something.

It listens on 127.0.0.1 and answers only to that name: a page of somebody else's, whose own name is made to lead here
(DNS rebinding), asks with another Host header and gets nothing.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jaxscale import paths
from jaxscale.exits import BadInput, Stop, tell
from jaxscale.monitor.history import KNOWN, LEDGERS, OTHERS
from jaxscale.monitor.report.page import POLICY, SERVED
from jaxscale.monitor.report.text import escape
from jaxscale.monitor.silence import QUIET_SECONDS

ADDRESS = "127.0.0.1"
LOOK_SECONDS = 2.0  # between two looks at the files, however many ask
REQUEST_SECONDS = 30.0  # for a client to say what it wants


class Pages:
    """The newest page and its version. Any thread may ask."""

    def __init__(self, make: Callable[[str], str], workdirs: Sequence[Any], clock: Callable[[], float] = time.time):
        """make: the page of a version. Raises BadInput or Stop where the folders cannot be read."""
        self.make, self.clock = make, clock
        self.folders = [paths.as_path(workdir) for workdir in workdirs]
        self.lock = threading.Lock()
        self.looked_at, self.current, self.made, self.content = float("-inf"), "", "", ""

    def version(self) -> str:
        """A name for what the files hold now; another one when they have changed, or have not for long."""
        with self.lock:
            return self.look()

    def page(self) -> str:
        """The page of the newest version."""
        with self.lock:
            version = self.look()
            if version != self.made:
                self.content = self.make(version)
                self.made = version
            return self.content

    def look(self) -> str:
        """The version, from the files' sizes and times."""
        now = self.clock()
        if now - self.looked_at >= LOOK_SECONDS:
            marks = [mark_of(file) for folder in self.folders for file in watched(folder)]
            newest = max((mark[1] for mark in marks if mark), default=0.0)
            # a run that falls silent changes its page too: looked at after 3 minutes, 6, 12, ...
            quiet = max(0, int((now - newest) / QUIET_SECONDS)).bit_length()
            told = repr((marks, quiet))
            self.current, self.looked_at = hashlib.sha256(told.encode()).hexdigest()[:16], now
        return self.current


def watched(folder: Any) -> list[Any]:
    """The files of a work folder that the page is made of, those that may come included."""
    try:
        ledgers = sorted(folder.glob(LEDGERS))
    except OSError:  # the page itself tells of a folder that cannot be listed
        ledgers = []
    return [*(folder / name for name in (*KNOWN, *OTHERS)), *ledgers]


def mark_of(path: Any) -> tuple[int, float] | None:
    """(bytes, time of the last change) of a file; None where there is none, or it cannot be asked."""
    try:
        found = path.stat()
    except OSError:
        return None
    size = getattr(found, "st_size", None)
    changed = getattr(found, "st_mtime", None)
    return (size if size is not None else found.length, float(changed if changed is not None else found.mtime or 0.0))


class Server(ThreadingHTTPServer):
    """Answers each request in a thread that ends with the program."""

    daemon_threads = True
    pages: Pages


def open_server(pages: Pages, port: int) -> Server:
    """A server that listens; serve_forever() runs it. Raises BadInput where the port is not to be had."""
    try:
        server = Server((ADDRESS, port), Handler)
    except OSError as error:
        raise BadInput(
            f"--serve={port}: the port cannot be had ({error.strerror or error}); give another one, or 0 for any"
        ) from None
    server.pages = pages
    return server


class LocalHandler(BaseHTTPRequestHandler):
    """What every page of ours for this machine alone does: it knows its own name, and says what a page may do."""

    server_version, sys_version = "jaxscale", ""
    timeout = REQUEST_SECONDS
    policy = POLICY

    def is_for_us(self) -> bool:
        """True for a request to this machine's own address; any other is refused."""
        port = self.server.server_address[1]
        if self.headers.get_all("Host") in ([f"{name}:{port}"] for name in (ADDRESS, "localhost")):
            return True
        self.answer(403, "This page is for this machine alone, under its own address.", "text/plain")
        return False

    def begin(self, code: int, kind: str, length: int | None = None) -> None:
        """Sends the head of an answer. length: bytes; None: until the connection ends."""
        self.send_response(code)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            **({} if length is None else {"Content-Length": str(length)}),
            "Content-Security-Policy": f"{self.policy}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()

    def answer(self, code: int, text: str, kind: str) -> None:
        """Sends a whole answer."""
        content = text.encode("utf-8", "replace")
        self.begin(code, kind, len(content))
        try:
            self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the reader went away

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each look would bury what matters."""


class Handler(LocalHandler):
    """GET / is the page, GET /version what it asks to see whether there is a newer one."""

    server: Server
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
        except (ValueError, OSError, Stop) as error:
            tell(f"report: {error}")
            self.answer(503, f"<!doctype html><title>jaxscale</title><p>{escape(error)}</p>", "text/html")
            return
        self.answer(200, found, "text/html" if path == "/" else "text/plain")
