"""Files that the processes of a run hand to one another, straight from host to host.

Each listens where the roll call reaches it, on a port that is free, and takes and gives files of one folder to whoever
knows its secret, which it tells over the coordination service to the processes of its own run.
"""

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

from jaxscale.hosts.agree import coordinator_host, process_and_count
from jaxscale.hosts.roll_call import interface
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json

NAME = re.compile(r"\d{1,7}/\d{1,15}-[0-9a-f]{16}")  # of a file: its owner's folder, and below it step and start
SILENCE_SECONDS = 20.0  # without a byte, after which a connection is given up
LONGEST_LINE = 4096  # bytes
PIECE_BYTES = 1 << 20
MOST_AT_ONCE = 8  # connections; more wait
GROWING = ".growing"


class Refused(OSError):
    """What another process could not do; the message names its host and the cause."""


class Address(NamedTuple):
    """Where a process takes and gives files."""

    host: str
    port: int
    secret: str


class Exchange:
    """Takes and gives the files of a folder, in threads, until it is closed."""

    def __init__(self, folder: pathlib.Path, host: str | None = None):
        """host: the address to listen on, and under which the others find it; that of the roll call unless given."""
        bound, named = (host, host) if host else own_address()
        family = socket.AF_INET6 if ":" in bound else socket.AF_INET
        self.folder, self.listener = folder, socket.create_server((bound, 0), family=family, backlog=MOST_AT_ONCE)
        self.address = Address(named, self.listener.getsockname()[1], secrets.token_hex(16))
        self.slots = threading.Semaphore(MOST_AT_ONCE)
        threading.Thread(target=self.work, name="exchange", daemon=True).start()

    def close(self) -> None:
        """Takes and gives nothing any more."""
        try:
            self.listener.shutdown(socket.SHUT_RDWR)  # a close alone would leave accept() waiting
        except OSError:
            pass
        self.listener.close()

    def work(self) -> None:
        """Serves one connection after the other, each in a thread."""
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.slots.acquire()
            threading.Thread(target=self.serve, args=(sock,), name="exchange-one", daemon=True).start()

    def serve(self, sock: socket.socket) -> None:
        """Does what one connection asks for. Whoever does not know the secret is told nothing."""
        try:
            with sock:
                sock.settimeout(SILENCE_SECONDS)
                asked = read_line(sock)
                if not hmac.compare_digest(str(asked.get("secret")).encode(), self.address.secret.encode()):
                    return
                try:
                    self.answer(sock, asked)
                except (OSError, BadInput) as error:
                    send_line(sock, error=f"{getattr(error, 'strerror', None) or error}")
        except (OSError, BadInput):  # the other end is gone, or none of ours
            return
        finally:
            self.slots.release()

    def answer(self, sock: socket.socket, asked: dict[str, Any]) -> None:
        """Takes a file, or gives one."""
        name = str(asked.get("name"))
        if not NAME.fullmatch(name):
            raise BadInput(f"{name!r} is no name of a file here")
        path = self.folder / name
        if asked.get("put") is not True:
            with path.open("rb") as file:
                send_line(sock, bytes=os.fstat(file.fileno()).st_size)
                sock.sendfile(file)
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = {f"{path.parent.name}/{one}" for one in asked.get("keep", ())}
        for old in path.parent.iterdir():  # first, so that never more than two of an owner are here
            if f"{path.parent.name}/{old.name}" not in kept:
                old.unlink(missing_ok=True)
        size = int(asked["bytes"])
        check_room(path.parent, size)
        send_line(sock, ready=True)  # before a byte comes: what is left unread would cost the other end the cause
        receive(sock, path, size)
        send_line(sock, ok=True)


def put(to: Sequence, folder: pathlib.Path, name: str, keep: Sequence[str] = ()) -> None:
    """Hands a file of the folder to a neighbour, who removes all others of its owner but `keep`. Raises OSError."""
    with connect(to) as sock, (folder / name).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        send_line(sock, secret=to[2], put=True, name=name, bytes=size, keep=list(keep))
        told(sock, to)
        sock.sendfile(file)
        told(sock, to)


def get(of: Sequence, folder: pathlib.Path, name: str) -> None:
    """Brings a file that another process has into the folder. Raises OSError."""
    with connect(of) as sock:
        send_line(sock, secret=of[2], name=name)
        size = told(sock, of)["bytes"]
        (folder / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_room(folder, size)
        receive(sock, folder / name, size)


def connect(to: Sequence) -> socket.socket:
    """A connection to an Address. Raises OSError."""
    sock = socket.create_connection((to[0], to[1]), timeout=SILENCE_SECONDS)
    sock.settimeout(SILENCE_SECONDS)
    return sock


def told(sock: socket.socket, by: Sequence) -> dict[str, Any]:
    """The other end's answer. Raises Refused with its cause where it could not do what it was asked for."""
    try:
        answer = read_line(sock)
    except BadInput as error:
        raise ConnectionError(str(error)) from None
    if "error" in answer:
        raise Refused(f"{by[0]}: {answer['error']}")
    return answer


def check_room(folder: pathlib.Path, size: int) -> None:
    """Raises OSError where a folder has less than so many bytes left."""
    if (free := shutil.disk_usage(folder).free) < size:
        raise OSError(f"No space left on device: {folder} has {free} bytes, and {size} are needed")


def receive(sock: socket.socket, path: pathlib.Path, size: int) -> None:
    """Writes the next bytes into a file, which appears whole or not at all. Raises OSError."""
    growing = path.with_name(f"{path.name}.{secrets.token_hex(4)}{GROWING}")
    try:
        with open(growing, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            left, buffer = size, memoryview(bytearray(PIECE_BYTES))
            while left:
                count = sock.recv_into(buffer, min(left, PIECE_BYTES))
                if not count:
                    raise ConnectionError(f"the connection ended {left} bytes before the end of {path.name}")
                file.write(buffer[:count])
                left -= count
        growing.rename(path)
    finally:
        growing.unlink(missing_ok=True)


def send_line(sock: socket.socket, **message: Any) -> None:
    """Sends a JSON object in a line."""
    sock.sendall(json.dumps(message).encode() + b"\n")


def read_line(sock: socket.socket) -> dict[str, Any]:
    """The JSON object in the next line, and no byte after it. Raises BadInput for anything else."""
    line = b""
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte or len(line) >= LONGEST_LINE:
            raise BadInput("the connection ended, or sent no line")
        line += byte
    message = parse_json(line)
    if not isinstance(message, dict):
        raise BadInput("a JSON object was awaited")
    return message


def own_address() -> tuple[str, str]:
    """(the address to listen on, the one under which the other processes reach it): where the roll call was."""
    host = coordinator_host() or "localhost"
    if process_and_count()[0] == 0:
        return interface(host), host
    address = interface(host) if interface(host) != "0.0.0.0" else host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:  # sends nothing: asks which own address leads there
        sock.connect((address, 1))
        own = sock.getsockname()[0]
    return own, own
