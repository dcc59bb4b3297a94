"""HTTP server for this machine only, in which idle or slow clients do not block other clients.

It listens on 127.0.0.1 and rejects requests with any other Host header, so that a web page whose name resolves to this
address (DNS rebinding) gets no response.
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
MOST_CONNECTIONS = 32  # maximum number of open connections; a browser opens six
REQUEST_SECONDS = 10.0  # time limit for a client to send its request
ANSWER_SECONDS = 60.0  # time limit for a client to receive a response of known length
STALL_SECONDS = 30.0  # time limit without progress, for a response of unknown length


@dataclasses.dataclass
class Client:
    """A connection and its deadline. `asking` is True until the request is complete."""

    connection: socket.socket
    deadline: float
    asking: bool = True


class LocalServer(ThreadingHTTPServer):
    """Answers each request in a thread. If there are too many connections, closes the oldest idle connection."""

    daemon_threads = True
    request_queue_size = 128  # clients that exceed it retry after 1, 3, 7, ... seconds

    def __init__(
        self, handler: type["LocalHandler"], port: int, clock: Callable[[], float] = time.monotonic, **attributes: Any
    ):
        """Starts to listen. Sets `attributes` on the server for its handler. Raises BadInput if the port is in use."""
        self.clock, self.clients, self.lock = clock, {}, threading.RLock()
        for name, value in attributes.items():
            setattr(self, name, value)
        try:
            super().__init__((ADDRESS, port), handler)
        except OSError as error:
            raise BadInput(
                f"--serve={port}: cannot listen on this port: {error.strerror or error}; use a free port, or 0 for any"
            ) from None

    def process_request(self, request: Any, client_address: Any) -> None:
        """Accepts a connection. If there are too many, closes an older one that has not sent its request."""
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
        """Closes connections after their deadline. Called twice a second."""
        with self.lock:
            now = self.clock()
            for client in [client for client in self.clients.values() if client.deadline < now]:
                self.drop(client)

    def drop(self, client: Client) -> None:
        """Closes a connection, so that its thread ends. The caller must hold the lock."""
        self.clients.pop(id(client.connection), None)
        with contextlib.suppress(OSError):
            client.connection.shutdown(socket.SHUT_RDWR)

    def has_asked(self, connection: socket.socket, answer_seconds: float = float("inf")) -> None:
        """Marks a connection's request as complete, and sets the deadline for receiving the response."""
        with self.lock:
            if client := self.clients.get(id(connection)):
                client.asking, client.deadline = False, self.clock() + answer_seconds

    def shutdown_request(self, request: Any) -> None:
        """Removes a closed connection."""
        with self.lock:
            self.clients.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error of the server. Ignores disconnected and slow clients."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class LocalHandler(BaseHTTPRequestHandler):
    """Base handler of local pages. Checks the Host header and sets security headers."""

    server: LocalServer
    server_version, sys_version = "jaxscale", ""
    timeout = STALL_SECONDS
    policy = "default-src 'none'"

    def is_for_us(self) -> bool:
        """Returns True if the Host header is 127.0.0.1 or localhost. Otherwise sends an error response."""
        if self.command == "GET":
            self.server.has_asked(self.connection)
        port = self.server.server_address[1]
        end = "" if port == 80 else f":{port}"  # browsers omit the default port of http
        hosts = self.headers.get_all("Host")
        if any(hosts == [f"{name}{end}"] for name in (ADDRESS, "localhost")):
            return True
        self.answer(403, "This page is served to this machine only, at 127.0.0.1 or localhost.", "text/plain")
        return False

    def begin(self, code: int, kind: str, length: int | None = None) -> None:
        """Sends the headers of a response of `length` bytes. If it is None, the response ends with the connection."""
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
        """Sends a complete response."""
        content = text.encode("utf-8", "replace")
        self.begin(code, kind, len(content))
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, since a line for each request would hide other messages."""
