"""An HTTP server for this machine, in which idle or slow clients do not block others.

It listens on 127.0.0.1 and answers only to that name: a page of somebody else's, whose own name is made to lead here
(DNS rebinding), asks with another Host header and gets nothing.
"""

import contextlib
import dataclasses
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jaxscale.system.exits import BadInput

ADDRESS = "127.0.0.1"
MOST_CONNECTIONS = 32  # at a time; a browser opens six
REQUEST_SECONDS = 10.0  # for a client to say all that it wants
ANSWER_SECONDS = 60.0  # to take an answer whose length is known
STALL_SECONDS = 30.0  # for it to take anything of one whose length is not


@dataclasses.dataclass
class Client:
    """A connection: until when it must have moved on, and whether it has yet to say what it wants."""

    connection: socket.socket
    deadline: float
    asking: bool = True


class LocalServer(ThreadingHTTPServer):
    """Answers requests in threads; with too many connections, ends the one that takes longest to send its request."""

    daemon_threads = True
    request_queue_size = 128  # a client that finds no place waits 1, 3, 7, ... seconds before it tries again

    def __init__(
        self, handler: type["LocalHandler"], port: int, clock: Callable[[], float] = time.monotonic, **attributes: Any
    ):
        """attributes: of the server, for its handler. Raises BadInput where the port is not to be had."""
        self.clock, self.clients, self.lock = clock, {}, threading.RLock()
        for name, value in attributes.items():
            setattr(self, name, value)
        try:
            super().__init__((ADDRESS, port), handler)
        except OSError as error:
            raise BadInput(
                f"--serve={port}: the port cannot be had ({error.strerror or error}); give another one, or 0 for any"
            ) from None

    def process_request(self, request: Any, client_address: Any) -> None:
        """Takes a connection in, in the place of another one if need be."""
        with self.lock:
            if len(self.clients) >= MOST_CONNECTIONS:
                asking = [client for client in self.clients.values() if client.asking]
                if not asking:
                    self.shutdown_request(request)
                    return
                self.drop(min(asking, key=lambda client: client.deadline))
            self.clients[id(request)] = Client(request, self.clock() + REQUEST_SECONDS)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Ends the connections that are late; called twice a second."""
        with self.lock:
            now = self.clock()
            for client in [client for client in self.clients.values() if client.deadline < now]:
                self.drop(client)

    def drop(self, client: Client) -> None:
        """Ends a connection, whose thread finds it closed. To be called with the lock held."""
        self.clients.pop(id(client.connection), None)
        with contextlib.suppress(OSError):
            client.connection.shutdown(socket.SHUT_RDWR)

    def has_asked(self, connection: socket.socket, answer_seconds: float = float("inf")) -> None:
        """The client has said what it wants, and has so long to take what it gets."""
        with self.lock:
            if client := self.clients.get(id(connection)):
                client.asking, client.deadline = False, self.clock() + answer_seconds

    def shutdown_request(self, request: Any) -> None:
        """A connection has ended."""
        with self.lock:
            self.clients.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Shows a fault of ours; a client that went away, or was too slow, is none."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """Base handler of local pages: checks the Host header and sets security headers."""

    server: LocalServer
    server_version, sys_version = "jaxscale", ""
    timeout = STALL_SECONDS
    policy = "default-src 'none'"

    def is_for_us(self) -> bool:
        """True for a request to this machine's own address; any other is refused."""
        if self.command == "GET":
            self.server.has_asked(self.connection)
        port = self.server.server_address[1]
        end = "" if port == 80 else f":{port}"  # browsers leave out the port that http has
        hosts = self.headers.get_all("Host")
        if any(hosts == [f"{name}{end}"] for name in (ADDRESS, "localhost")):
            return True
        self.answer(403, "This page is for this machine alone, under its own address.", "text/plain")
        return False

    def begin(self, code: int, kind: str, length: int | None = None) -> None:
        """Sends the head of an answer. length: bytes; None: until the connection ends."""
        self.server.has_asked(self.connection, float("inf") if length is None else ANSWER_SECONDS)
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
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each look would bury what matters."""
