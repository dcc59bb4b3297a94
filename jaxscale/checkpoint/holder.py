"""Who holds a run's folder: a process, named so that another one can tell whether it is still there."""

import dataclasses
import datetime
import json
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json

PADDED = 512  # bytes: a renewal writes over the last one in one call, and is never longer or shorter
GONE, STOPPED = "ZXx", "Tt"  # states of a process in /proc


@dataclasses.dataclass(frozen=True)
class Holder:
    """A process at one start. Times are for people: nothing is decided by comparing clocks of two machines."""

    token: str
    host: str
    pid: int
    ticks: int | None  # when the process began, in the kernel's own count: pids are used again
    kernel: str  # differs for each boot of each machine; '' where the system has no such thing
    namespace: str  # of pids: containers on one machine number their processes by themselves
    started: str
    beats: int = 0  # renewals so far
    lease_seconds: float | int | None = None  # between two renewals; None: of an older version, which did not say

    def renewed(self) -> "Holder":
        """The same, one beat later."""
        return dataclasses.replace(self, beats=self.beats + 1)

    def content(self) -> bytes:
        """The text of the lock."""
        return json.dumps(dataclasses.asdict(self)).ljust(PADDED - 1).encode() + b"\n"

    def same_kernel(self, other: "Holder") -> bool:
        """True if both run under one kernel, which then knows of both."""
        return bool(self.kernel) and self.kernel == other.kernel

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"


def this_process() -> Holder:
    """The process that asks, with a new token."""
    state = process_state(os.getpid())
    return Holder(
        token=secrets.token_hex(16),
        host=socket.gethostname(),
        pid=os.getpid(),
        ticks=state[1] if state else None,
        kernel=first_line("/proc/sys/kernel/random/boot_id"),
        namespace=link("/proc/self/ns/pid"),
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def read_holder(content: bytes) -> Holder | None:
    """The holder that a lock names; None for anything else, such as a lock that is just being written."""
    try:
        values = parse_json(content)
        kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Holder)}
        values = {"lease_seconds": None} | values
        if set(values) != set(kinds) or not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            return None
        return Holder(**values)
    except (BadInput, TypeError):
        return None


def lives(holder: Holder, me: Holder, state_of: Callable[[int], tuple[str, int] | None] | None = None) -> bool | None:
    """True if the holder's process is there and may run, False if it is gone, None if that cannot be told from here.

    A stopped process (SIGSTOP) is neither: whether it will ever go on nobody knows.
    """
    if not holder.same_kernel(me) or holder.namespace != me.namespace:
        return None
    state = (state_of or process_state)(holder.pid)
    if state is None or state[0] in GONE or state[1] != holder.ticks:
        return False
    return None if state[0] in STOPPED else True


def process_state(pid: int) -> tuple[str, int] | None:
    """(state letter, start in kernel ticks) of a process of this machine; None if there is none, or no /proc."""
    text = first_line(f"/proc/{pid}/stat")
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return (fields[0], int(fields[19])) if len(fields) > 19 else None


def first_line(path: str) -> str:
    """The first line of a file of the system, '' if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def link(path: str) -> str:
    """What a link of the system says, '' if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
