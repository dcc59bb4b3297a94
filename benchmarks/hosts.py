"""Cost of the control plane of many hosts, simulated on this machine, and its growth with the number of hosts.

  python -m benchmarks.hosts --hosts=16,256,1536

Every simulated host is a real client of jax's coordination service with a separate roll call connection. It runs the
same code as a process of a run: the roll call, collectives, the board after each step, and the watch. Devices, storage
and the network between machines are not simulated. The first host runs in a separate process, whose CPU time is that of
the first process of a run. The other hosts share processes.
"""

import contextlib
import dataclasses
import datetime
import itertools
import math
import multiprocessing
import os
import platform
import socket
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

from benchmarks import run_main, show
from benchmarks.simulated_hosts import LOOPBACK, expect, serve
from jaxscale import units
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system.exits import BadInput, Exit

USUAL = (16, 256, 1536)  # hosts; 1536 hosts with 4 chips each are the largest v5p slice
AT_ONCE = 20  # number of calls of a fast part, which are averaged
STEPS = 3  # steps until all hosts have seen a signal or a failed save in the first step


class Elsewhere:
    """A group of hosts in a separate process."""

    def __init__(self, numbers: Sequence[int], count: int):
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, numbers, count), daemon=True)
        self.process.start()
        other.close()

    def tell(self, *told: Any) -> None:
        """Sends a command; `answer` waits for its result."""
        self.connection.send(told)

    def answer(self) -> Any:
        """Returns the result of the last command. Raises BadInput if the process has ended."""
        try:
            found = self.connection.recv()
        except EOFError:
            raise BadInput("a process of the simulation ended, most likely for lack of memory or threads; use fewer "
                           "--hosts") from None  # fmt: skip
        if isinstance(found, AssertionError):
            raise found
        return found

    def leave(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(10)
        self.process.kill()


@contextlib.contextmanager
def groups(count: int, workers: int) -> Iterator[list[Any]]:
    """Starts the processes of a simulation of `count` hosts: one for the first host, `workers` for the others."""
    others = [range(start + 1, count, workers) for start in range(min(workers, count - 1))]
    made = [Elsewhere(numbers, count) for numbers in ([0], *others)]
    try:
        yield made
    finally:
        for group in made:
            group.leave()


@dataclasses.dataclass
class Part:
    """One measured part of the control plane, once on each host."""

    name: str
    hosts: int
    seconds: float
    first_cpu_seconds: float  # CPU time of the first host's process
    requests: float
    characters: float  # keys and values sent and received by all hosts except the first

    def record(self) -> dict[str, Any]:
        """Returns the part as a dict for JSON."""
        return dataclasses.asdict(self)


class Simulation:
    """Sends commands to all groups and measures them."""

    def __init__(self, made: Sequence[Any], count: int):
        self.made, self.count, self.parts = made, count, []

    def all(self, *told: Any) -> list[Any]:
        """Sends a command to all groups and returns their answers."""
        for group in self.made:
            group.tell(*told)
        return [group.answer() for group in self.made]

    def part(self, name: str, method: str, times: int = 1, *args: Any) -> list[Any]:
        """Measures a part and returns its result on each host."""
        before = self.all("cpu_seconds")[0]
        outcomes = self.all("run", method, times, *args)
        cpu = self.all("cpu_seconds")[0] - before  # also serves other hosts after its own part is done
        seconds = max(found.ended for found in outcomes) - min(found.began for found in outcomes)
        requests, sent = sum(one.requests for one in outcomes), sum(one.characters for one in outcomes[1:])
        self.parts.append(Part(name, self.count, *(value / times for value in (seconds, cpu, requests, sent))))
        return [one for outcome in outcomes for one in outcome.found]

    def start(self, prefix: str = "") -> None:
        """Simulates a start: the roll call, and joining jax's service."""
        self.all("open", free_port())
        self.part(f"{prefix}roll call", "roll_call")
        self.part(f"{prefix}joining jax's service", "connect")
        self.all("run", "prepare")

    def work(self) -> None:
        """Runs the collectives of training, up to a failed save and a signal that all hosts handle."""
        self.part("a decision", "agree", AT_ONCE)
        self.part("all are here", "barrier", 5)
        self.part("a step", "step", AT_ONCE)
        self.part("a save", "save", 3)
        self.part("a save that fails on one host", "failed_save")
        heard = [self.all("run", "hear", 1, step) for step in range(1, STEPS + 1)]
        steps = [[one for outcome in outcomes for one in outcome.found] for outcomes in heard]
        news = [[step for step, found in enumerate(steps, 1) if found[host][0]] for host in range(self.count)]
        left = [[step for step, found in enumerate(steps, 1) if found[host][1]] for host in range(self.count)]
        expect(all(found == [3] for found in [*news, *left]), f"hosts must see both at step 3, not {news} and {left}")

    def run(self) -> list[Part]:
        """Simulates a run that starts, works, loses a host, restarts and ends."""
        self.start()
        self.work()
        codes = set(self.part("a host is lost: until all know", "lost"))
        expect(codes == {int(Exit.PEER_LOST)}, f"the others ended with {codes}")
        self.all("run", "disconnect")
        self.all("close")
        self.start("restart: ")
        self.part("leaving jax's service", "disconnect")
        self.all("close")
        return self.parts


def free_port() -> int:
    """Returns a port that is free together with the next port."""
    for port in itertools.count(20_000 + os.getpid() % 10_000 + next(PORTS), 2):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for one in (port, port + 1):
                stack.enter_context(socket.create_server((LOOPBACK, one)))
            return port
    raise AssertionError


PORTS = itertools.count(0, 2)


def measure_hosts(counts: Iterable[int], workers: int) -> dict[str, Any]:
    """Returns the record of --json: the parts of the control plane for each number of hosts (at least 2)."""
    parts = []
    for count in counts:
        with groups(count, workers) as made:
            parts += Simulation(made, count).run()
    return {
        "parts": [part.record() for part in parts],
        "workers": workers,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": {name: version(name) for name in ("jax", "jaxlib")} | {"python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
    }


def slope(rows: Sequence[dict[str, Any]], what: str) -> float | None:
    """Returns the exponent p of growth as hosts**p between the two largest numbers of hosts, or None."""
    if len(rows) < 2 or not (rows[-2][what] and rows[-1][what]):
        return None
    return math.log(rows[-1][what] / rows[-2][what]) / math.log(rows[-1]["hosts"] / rows[-2]["hosts"])


def host_lines(record: dict[str, Any]) -> list[str]:
    """Returns the record as a Markdown table. Columns without a number of hosts are for the largest number."""
    versions = ", ".join(f"{name} {text}" for name, text in record["versions"].items())
    counts = list(dict.fromkeys(row["hosts"] for row in record["parts"]))
    heads = [f"{count:,} hosts" for count in counts] + [
        "a host", "requests a host", "requests/s", "sent a host", "first host's CPU", "grow as: seconds, CPU, sent"
    ]  # fmt: skip
    lines = [
        f"{record['cores']} cores, the first host and {record['workers']} processes of others; {versions}; "
        f"{record['date']}",
        "",
        f"| part | {' | '.join(heads)} |",
        "|---" * (1 + len(heads)) + "|",
    ]
    for name in dict.fromkeys(row["name"] for row in record["parts"]):
        rows = [row for row in record["parts"] if row["name"] == name]
        last = rows[-1]
        asks = last["requests"] > 0
        powers = [slope(rows, what) for what in ("seconds", "first_cpu_seconds", "characters")]
        cells = [f"{row['seconds']:.3f} s" for row in rows] + [
            f"{last['seconds'] / last['hosts'] * 1e3:.2f} ms",
            f"{last['requests'] / last['hosts']:.2f}" if asks else "",
            f"{last['requests'] / last['seconds']:,.0f}" if asks else "",
            units.size(round(last["characters"] / (last["hosts"] - 1))) if asks else "",
            f"{last['first_cpu_seconds']:.3f} s",
            ", ".join(f"n^{power:.2f}" for power in powers if power is not None),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def read_hosts(_: str, text: str) -> list[int]:
    """Parses numbers of hosts such as '16,256'. Raises BadInput if they are invalid."""
    numbers = text.split(",")
    if not all(number.isdecimal() and 2 <= int(number) <= 20_000 for number in numbers):
        raise BadInput(f"--hosts={text} must be numbers from 2 to 20,000, such as 16,256,1536")
    return sorted({int(number) for number in numbers})


@dataclasses.dataclass(frozen=True)
class HostsFlags:
    """Flags of this benchmark."""

    hosts: list[int] | None = flag(
        None, "numbers of hosts, simulated one after the other", "16,256,1536", read=read_hosts
    )
    workers: int = flag(4, "number of processes for all hosts except the first", least=1)
    json: bool = flag(False, "one line of JSON")


@command(HostsFlags)
def main(arguments: Arguments) -> None:
    """Measures the control plane for each number of hosts."""
    flags = arguments.flags
    record = measure_hosts(flags.hosts or USUAL, flags.workers)
    show(record, host_lines(record), as_json=flags.json)


if __name__ == "__main__":
    run_main(main)
