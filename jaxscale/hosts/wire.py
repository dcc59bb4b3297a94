"""Messages between processes: one JSON object a line over TCP, and a connection that notices a dead machine."""

import json
import socket
from typing import Any

LONGEST = 1 << 20  # bytes of a message: whoever sends more is none of ours
SEND_SECONDS = 5
# A machine without power answers nothing: found out after 3 + 2 x 2 s. The kernel answers for a process that is busy.
KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 7_000}


class Wire:
    """A connection to one other process."""

    def __init__(self, sock: socket.socket):
        self.sock, self.buffer = sock, b""
        sock.settimeout(SEND_SECONDS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # Linux has them all
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """For select."""
        return self.sock.fileno()

    def send(self, **message: Any) -> bool:
        """True if the message went out; False where nobody is there any more."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have come whole, once select says there is something; None when the other end is gone."""
        try:
            data = self.sock.recv(1 << 16)
        except OSError:
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        if not data or len(self.buffer) > LONGEST:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        """Ends the connection."""
        self.sock.close()
