"""Roll call: before jax.distributed starts, every process reports to process 0, which compares their programs.

Without it, jax waits silently for a process that never starts, and hangs if processes run different programs.

Messages are JSON lines over TCP. The connections stay open to detect dead machines.
"""

import ipaddress
import json
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.runtime.hosts.discovery import ProcessInfo
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.foreign import parse_json

AFTER_A_PROBLEM = 10.0  # seconds for further processes to report after the first mismatch
ANSWER_SECONDS = 20.0  # added to the roll call's timeout for the answer
MAX_LISTED = 8  # missing processes or differing facts in an error
MAX_MESSAGE_BYTES = 1 << 20
SEND_SECONDS = 5
HELLO: dict[str, type] = dict(process=int, of=int, host=str, pid=int, facts=dict)  # fields of the first message
# A machine without power is detected after 3 + 2 x 2 s. The kernel answers keepalives for a busy process.
KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 7_000}


class Connection:
    """A connection to another process."""

    def __init__(self, sock: socket.socket):
        self.sock, self.buffer = sock, b""
        sock.settimeout(SEND_SECONDS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # Linux has all of them
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """Returns the socket's file descriptor, for select."""
        return self.sock.fileno()

    def send(self, **message: Any) -> bool:
        """Sends a message; returns False if the connection is closed."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def read(self) -> list[dict[str, Any]] | None:
        """Reads available data and returns the complete messages, or None if the connection is closed or invalid."""
        try:
            data = self.sock.recv(1 << 16)
        except OSError:
            return None
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        if not data or len(self.buffer) > MAX_MESSAGE_BYTES:
            return None
        try:
            messages = [parse_json(line) for line in lines]
        except BadInput:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        """Closes the connection."""
        self.sock.close()


Wires = dict[int, tuple[Connection, str]]  # {process: (connection, name)}


def call_roll(place: ProcessInfo, facts: Mapping[str, Any], seconds: float) -> Wires:
    """Returns {process: (connection, name)} once all processes have reported the same `facts` {name: value}.

    Process 0 gets a connection to every other process; the others get only the connection to process 0. On failure,
    raises Stop in every process that has reported. PEER_LOST lists the missing processes, BAD_INPUT the differences.
    """
    facts = {name: str(value) for name, value in facts.items()}
    hello = dict(process=place.process_id, of=place.num_processes, host=socket.gethostname(), pid=os.getpid())
    return gather(place, hello, facts, seconds) if place.is_first else answer(place, hello, facts, seconds)


def roll_call_failure(
    place: ProcessInfo, hello: dict, present: Wires, problems: Sequence[str], seconds: float
) -> Stop | None:
    """Returns the error if facts differ or processes are missing, otherwise None."""
    if problems:
        listed = "; ".join(problems[:MAX_LISTED])
        return Stop(Exit.BAD_INPUT, f"roll call: {listed}; start all processes with the same command")
    if not (missing := [place.name(n) for n in range(1, place.num_processes) if n not in present]):
        return None
    names = ", ".join([place.name(0, hello["host"]), *(name for _, name in present.values())][:MAX_LISTED])
    more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
    listed = ", ".join(missing[:MAX_LISTED]) + more
    return Stop(Exit.PEER_LOST, f"roll call: after {seconds:g} s, missing {listed}; present: {names}")


def gather(place: ProcessInfo, hello: dict, facts: Mapping[str, str], seconds: float) -> Wires:
    """Runs on process 0: waits for the other processes, compares their facts, and sends them the result."""
    present: Wires = {}
    problems: list[str] = []
    deadline = time.monotonic() + seconds
    with listen(place) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(present) + 1 < place.num_processes and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                wire: Connection | None = key.data
                if wire is None:  # the listener
                    accepted = Connection(listener.accept()[0])
                    selector.register(accepted, selectors.EVENT_READ, accepted)
                    continue
                messages = wire.read()
                if messages == []:
                    continue
                # the connection is closed, or is not from a jaxscale process
                if messages is None or not all(isinstance(messages[0].get(name), kind) for name, kind in HELLO.items()):
                    selector.unregister(wire)
                    wire.close()
                    present = {process: known for process, known in present.items() if known[0] is not wire}
                    continue
                other, number = messages[0], messages[0]["process"]
                name = place.name(number, other["host"])
                if found := difference(place, hello, facts, other, present):
                    problems.append(f"{name}: {found}")
                    deadline = min(deadline, time.monotonic() + AFTER_A_PROBLEM)
                present.setdefault(number, (wire, name))
        wires: list[Connection] = [key.data for key in selector.get_map().values() if key.data is not None]
    if failure := roll_call_failure(place, hello, present, problems, seconds):
        for wire in wires:
            wire.send(roll="wrong", code=int(failure.code), line=str(failure))
            wire.close()
        raise failure
    for wire in wires:
        wire.send(roll="complete")
    for wire in set(wires) - {wire for wire, _ in present.values()}:  # connected without a hello
        wire.close()
    return present


def difference(place: ProcessInfo, first: Mapping, facts: Mapping[str, str], other: Mapping, present: Mapping) -> str:
    """Returns how another process differs from process 0, or '' if it does not."""
    if other["of"] != place.num_processes:
        return (
            f"it was started with {other['of']} processes, but process 0 ({first['host']}) with {place.num_processes}"
        )
    if not 0 < other["process"] < place.num_processes or other["process"] in present:
        known = present[other["process"]][1] if other["process"] in present else place.name(0, first["host"])
        return f"{known} has the same process_id; give each process a different one"
    theirs = other["facts"]
    names = [name for name in sorted(facts | theirs) if facts.get(name) != theirs.get(name)]
    differing = [f"{name} is {theirs.get(name)!r}, but {facts.get(name)!r} on process 0" for name in names[:MAX_LISTED]]
    return "; ".join(differing)


def listen(place: ProcessInfo) -> socket.socket:
    """Returns a socket for the roll call that listens on the interface of the coordinator's host name."""
    address, port = interface(place.host), place.port + 1
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=min(place.num_processes, 4096))
    except OSError as error:
        raise BadInput(
            f"process 0 cannot listen on {address} port {port} for the roll call: {error.strerror or error}; run it on "
            f"the coordinator {place.host} (from {place.found_in}), and free its ports {place.port} and {port}"
        ) from None


def interface(host: str, resolve: Any = socket.getaddrinfo) -> str:
    """Returns the address of the coordinator's host name, so that process 0 listens on one interface only.

    Returns 0.0.0.0 if the name resolves to a loopback address, which other machines cannot reach. Many systems resolve
    their local host name in this way.
    """
    try:
        address = resolve(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise BadInput(f"the host {host} cannot be resolved: {error.strerror or error}; use another name") from None
    literal = host == "localhost" or host.replace(".", "").isdecimal() or ":" in host
    return address if literal or not ipaddress.ip_address(address.partition("%")[0]).is_loopback else "0.0.0.0"


def answer(place: ProcessInfo, hello: dict, facts: Mapping[str, str], seconds: float) -> Wires:
    """Connects to process 0, sends the hello message, and waits for the result."""
    deadline, cause = time.monotonic() + seconds, "no connection was attempted"
    while time.monotonic() < deadline:
        try:
            wire = Connection(socket.create_connection((place.host, place.port + 1), timeout=5))
        except OSError as error:  # not listening yet
            cause = error.strerror or str(error)
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
            continue
        reply = receive(wire, seconds + ANSWER_SECONDS) if wire.send(**hello, facts=facts) else None
        if reply is None:
            cause = "the connection ended without a response"
            wire.close()
            time.sleep(0.2)
        elif reply.get("roll") == "complete":
            return {0: (wire, place.name(0))}
        else:
            wire.close()
            raise Stop(Exit(reply.get("code", Exit.ERROR)), str(reply.get("line")))
    raise Stop(
        Exit.PEER_LOST,
        f"roll call: {place.name(place.process_id, hello['host'])} got no answer from {place.name(0)} at port "
        f"{place.port + 1} in {seconds:g} s: {cause}; start all processes, and allow connections to this port",
    )


def receive(wire: Connection, seconds: float) -> dict[str, Any] | None:
    """Returns the next message, or None after a timeout or if the connection is closed."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(wire, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            messages = wire.read()
            if messages is None:
                return None
            if messages:
                return messages[0]
    return None
