"""Direct file transfers between the hosts of a run.

Each process listens on a free port of the interface of the roll call. It serves the files of one folder to clients that
know its secret, which it shares with the other processes of its run over the coordination service.
"""

import contextlib
import hmac
import json
import os
import pathlib
import re
import secrets
import shutil
import socket
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxscale.runtime.hosts.agree import coordinator_host, this_process
from jaxscale.runtime.hosts.roll_call import interface
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json

NAME = re.compile(r"\d{1,7}/\d{1,15}-[0-9a-f]{16}")  # OWNER/STEP-START of a file
SILENCE_SECONDS = 20.0  # timeout of a connection that transfers no data
MAX_LINE_BYTES = 4096
CHUNK_BYTES = 1 << 20
MAX_CONNECTIONS = 8  # further connections wait
GROWING = ".growing"


class Refused(OSError):
    """Raised if another process refused a transfer. The message has the host and the cause."""


class Address(NamedTuple):
    """Address of a process's file server."""

    host: str
    port: int
    secret: str


class Exchange:
    """Serves the files of a folder, in threads, until it is closed."""

    def __init__(self, folder: pathlib.Path, host: str | None = None):
        """`host` is the address to listen on and to publish. The default is the address that the roll call uses."""
        bound, named = (host, host) if host else listen_addresses()
        family = socket.AF_INET6 if ":" in bound else socket.AF_INET
        self.folder, self.listener = folder, socket.create_server((bound, 0), family=family, backlog=MAX_CONNECTIONS)
        self.address = Address(named, self.listener.getsockname()[1], secrets.token_hex(16))
        self.slots = threading.Semaphore(MAX_CONNECTIONS)
        threading.Thread(target=self.work, name="exchange", daemon=True).start()

    def close(self) -> None:
        """Stops the server."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # close() does not interrupt accept()
        self.listener.close()

    def work(self) -> None:
        """Accepts connections and serves each of them in a thread."""
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.slots.acquire()
            threading.Thread(target=self.serve, args=(sock,), name="exchange-one", daemon=True).start()

    def serve(self, sock: socket.socket) -> None:
        """Serves one request. Clients without the secret get no reply."""
        try:
            with sock:
                sock.settimeout(SILENCE_SECONDS)
                request = read_line(sock)
                if not hmac.compare_digest(str(request.get("secret")).encode(), self.address.secret.encode()):
                    return
                try:
                    self.answer(sock, request)
                except (OSError, BadInput) as error:
                    send_line(sock, error=f"{getattr(error, 'strerror', None) or error}")
        except (OSError, BadInput):  # the client has disconnected, or is not a jaxscale process
            return
        finally:
            self.slots.release()

    def answer(self, sock: socket.socket, request: dict[str, Any]) -> None:
        """Receives or sends the requested file."""
        name = str(request.get("name"))
        if not NAME.fullmatch(name):
            raise BadInput(f"{name!r} is not a valid file name; use OWNER/STEP-START")
        path = self.folder / name
        if request.get("put") is not True:
            with path.open("rb") as file:
                send_line(sock, bytes=os.fstat(file.fileno()).st_size)
                sock.sendfile(file)
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        remaining = {f"{path.parent.name}/{one}" for one in request.get("keep", ())}
        for old in path.parent.iterdir():  # first, so that an owner never has more than two files
            if f"{path.parent.name}/{old.name}" not in remaining:
                old.unlink(missing_ok=True)
        size = int(request["bytes"])
        check_room(path.parent, size)
        send_line(sock, ready=True)  # before any data: unread data would reset the connection and lose an error reply
        receive(sock, path, size)
        send_line(sock, ok=True)


def put(to: Sequence, folder: pathlib.Path, name: str, keep: Sequence[str] = ()) -> None:
    """Sends a file. The receiver first deletes the owner's other files, except those in `keep`. Raises OSError."""
    with socket.create_connection((to[0], to[1]), SILENCE_SECONDS) as sock, (folder / name).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        send_line(sock, secret=to[2], put=True, name=name, bytes=size, keep=list(keep))
        read_reply(sock, to)
        sock.sendfile(file)
        read_reply(sock, to)


def get(source: Sequence, folder: pathlib.Path, name: str) -> None:
    """Fetches a file of another process into the folder. Raises OSError."""
    with socket.create_connection((source[0], source[1]), SILENCE_SECONDS) as sock:
        send_line(sock, secret=source[2], name=name)
        size = read_reply(sock, source)["bytes"]
        (folder / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_room(folder, size)
        receive(sock, folder / name, size)


def read_reply(sock: socket.socket, peer: Sequence) -> dict[str, Any]:
    """Returns the reply of another process. Raises Refused if it reports an error."""
    try:
        answer = read_line(sock)
    except BadInput as error:
        raise ConnectionError(str(error)) from None
    if "error" in answer:
        raise Refused(f"{peer[0]}: {answer['error']}")
    return answer


def check_room(folder: pathlib.Path, size: int) -> None:
    """Raises OSError if the folder's disk has less than `size` bytes free."""
    if (free := shutil.disk_usage(folder).free) < size:
        raise OSError(f"No space left on device: {folder} has {free} bytes, but {size} are needed")


def receive(sock: socket.socket, path: pathlib.Path, size: int) -> None:
    """Writes the next `size` bytes to a file, atomically. Raises OSError."""
    growing = path.with_name(f"{path.name}.{secrets.token_hex(4)}{GROWING}")
    try:
        with open(growing, "xb", opener=paths.open_private) as file:
            left, buffer = size, memoryview(bytearray(CHUNK_BYTES))
            while left:
                count = sock.recv_into(buffer, min(left, CHUNK_BYTES))
                if not count:
                    raise ConnectionError(f"the connection ended {left} bytes before the end of {path.name}")
                file.write(buffer[:count])
                left -= count
        growing.rename(path)
    finally:
        growing.unlink(missing_ok=True)


def send_line(sock: socket.socket, **message: Any) -> None:
    """Sends a JSON object as a line."""
    sock.sendall(json.dumps(message).encode() + b"\n")


def read_line(sock: socket.socket) -> dict[str, Any]:
    """Reads one line and parses it as a JSON object. Raises BadInput for an incomplete or invalid line."""
    line = b""
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte or len(line) >= MAX_LINE_BYTES:
            raise BadInput("the connection ended before the end of the message")
        line += byte
    message = parse_json(line)
    if not isinstance(message, dict):
        raise BadInput("the message is not a JSON object")
    return message


def listen_addresses() -> tuple[str, str]:
    """Returns (address to listen on, address for the other processes), on the interface that the roll call uses."""
    host = coordinator_host() or "localhost"
    if this_process().process == 0:
        return interface(host), host
    address = interface(host) if interface(host) != "0.0.0.0" else host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:  # sends nothing: asks the kernel for the source address
        sock.connect((address, 1))
        local = sock.getsockname()[0]
    return local, local
