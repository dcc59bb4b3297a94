"""The roll call: before jax waits for anybody, every process says that it is there, and what it is about to run.

Messages between processes are JSON objects, one a line over TCP; the connections notice a dead machine, and stay open.

jax by itself waits in silence for a process that never comes, and hangs where two processes run different programs.
"""

import ipaddress
import json
import os
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any

from jaxscale.hosts.place import Place
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.foreign import parse_json

AFTER_A_PROBLEM = 10.0  # seconds for the others to come and show theirs, once one does not fit
ANSWER_SECONDS = 20.0  # beyond the roll call's own, for an answer to be on its way
SHOWN = 8  # missing processes or differing facts that are named
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
            messages = [parse_json(line) for line in lines]
        except BadInput:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        """Ends the connection."""
        self.sock.close()


def call_roll(place: Place, facts: Mapping[str, Any], seconds: float) -> dict[int, tuple[Wire, str]]:
    """{process: (connection, name)} once all are there and run the same: of all others at the first, of it elsewhere.

    Args: facts: plain values by name that must be the same everywhere.
    Raises: Stop on every process that is there: PEER_LOST naming those that are missing, BAD_INPUT for what differs.
    """
    facts = {name: str(value) for name, value in facts.items()}
    hello = dict(process=place.process_id, of=place.num_processes, host=socket.gethostname(), pid=os.getpid())
    return gather(place, hello, facts, seconds) if place.is_first else answer(place, hello, facts, seconds)


def gather(place: Place, hello: dict, facts: Mapping[str, str], seconds: float) -> dict[int, tuple[Wire, str]]:
    """The first process's part: waits for all others, compares them with itself, and tells all of them the result."""
    here: dict[int, tuple[Wire, str]] = {}
    problems: list[str] = []
    deadline = time.monotonic() + seconds
    with listen(place) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(here) + 1 < place.num_processes and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                wire: Wire | None = key.data
                if wire is None:  # the listener
                    accepted = Wire(listener.accept()[0])
                    selector.register(accepted, selectors.EVENT_READ, accepted)
                    continue
                messages = wire.read()
                if messages == []:
                    continue
                if messages is None or not is_hello(messages[0]):  # gone again, or none of ours
                    selector.unregister(wire)
                    wire.close()
                    here = {process: known for process, known in here.items() if known[0] is not wire}
                    continue
                other, number = messages[0], messages[0]["process"]
                name = place.name(number, other["host"])
                if found := difference(place, hello, facts, other, here):
                    problems.append(f"{name}: {found}")
                    deadline = min(deadline, time.monotonic() + AFTER_A_PROBLEM)
                here.setdefault(number, (wire, name))
        wires: list[Wire] = [key.data for key in selector.get_map().values() if key.data is not None]
    missing = [place.name(n) for n in range(1, place.num_processes) if n not in here]
    code = None
    if problems:
        code, line = Exit.BAD_INPUT, f"roll call: {'; '.join(problems[:SHOWN])}; start all of them the same way"
    elif missing:
        present = ", ".join([place.name(0, hello["host"]), *(name for _, name in here.values())][:SHOWN])
        code = Exit.PEER_LOST
        line = f"roll call: after {seconds:g} s, missing {listed(missing)}; here: {present}"
    if code is not None:
        for wire in wires:
            wire.send(roll="wrong", code=int(code), line=line)
            wire.close()
        raise Stop(code, line)
    for wire in wires:
        wire.send(roll="complete")
    for wire in set(wires) - {wire for wire, _ in here.values()}:  # a stranger that has said nothing
        wire.close()
    return here


def is_hello(message: Mapping[str, Any]) -> bool:
    """True if the message has the form of a hello."""
    kinds: dict[str, type] = dict(process=int, of=int, host=str, pid=int, facts=dict)
    return all(isinstance(message.get(name), kind) for name, kind in kinds.items())


def difference(place: Place, own: Mapping, facts: Mapping[str, str], other: Mapping, here: Mapping) -> str:
    """How another process does not fit to this first one; '' where it does."""
    if other["of"] != place.num_processes:
        return f"it says there are {other['of']} processes, and process 0 ({own['host']}) says {place.num_processes}"
    if not 0 < other["process"] < place.num_processes or other["process"] in here:
        known = here[other["process"]][1] if other["process"] in here else place.name(0, own["host"])
        return f"this number is taken by {known}; give every process its own"
    theirs = other["facts"]
    names = [name for name in sorted(facts | theirs) if facts.get(name) != theirs.get(name)]
    differing = [f"{name} is {theirs.get(name)!r} there and {facts.get(name)!r} on process 0" for name in names[:SHOWN]]
    return "; ".join(differing)


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def listen(place: Place) -> socket.socket:
    """A socket that listens for the roll call on the interface that the coordinator's name stands for."""
    address, port = interface(place.host), place.port + 1
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=min(place.num_processes, 4096))
    except OSError as error:
        raise BadInput(
            f"the roll call cannot listen on {address} port {port}: {error.strerror or error}; process 0 must run on "
            f"{place.host} itself, with ports {place.port} and {port} free (from {place.found_in})"
        ) from None


def interface(host: str, resolve: Any = socket.getaddrinfo) -> str:
    """The address to listen on: that of the coordinator's name, and no other interface of the machine.

    Many systems give their own name a loopback address, on which no other machine could call: then all interfaces.
    """
    try:
        address = resolve(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise BadInput(f"the coordinator's name {host} has no address: {error.strerror or error}") from None
    literal = host == "localhost" or host.replace(".", "").isdecimal() or ":" in host
    return address if literal or not ipaddress.ip_address(address.partition("%")[0]).is_loopback else "0.0.0.0"


def answer(place: Place, hello: dict, facts: Mapping[str, str], seconds: float) -> dict[int, tuple[Wire, str]]:
    """Another process's part: finds the first one, says hello, and hears whether all are there and alike."""
    deadline, cause = time.monotonic() + seconds, "no connection was tried"
    while time.monotonic() < deadline:
        try:
            wire = Wire(socket.create_connection((place.host, place.port + 1), timeout=5))
        except OSError as error:  # not there yet
            cause = error.strerror or str(error)
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
            continue
        reply = hear(wire, seconds + ANSWER_SECONDS) if wire.send(**hello, facts=facts) else None
        if reply is None:
            cause = "the connection ended without an answer"
            wire.close()
            time.sleep(0.2)
        elif reply.get("roll") == "complete":
            return {0: (wire, place.name(0))}
        else:
            wire.close()
            raise Stop(Exit(reply.get("code", Exit.ERROR)), str(reply.get("line")))
    raise Stop(
        Exit.PEER_LOST,
        f"roll call: after {seconds:g} s, missing {place.name(0)} at port {place.port + 1}, which calls the roll: "
        f"{cause}; this is {place.name(place.process_id, hello['host'])}",
    )


def hear(wire: Wire, seconds: float) -> dict[str, Any] | None:
    """The next message, or None where the other end is gone or says nothing for so long."""
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
