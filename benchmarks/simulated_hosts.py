"""Simulated hosts for benchmarks/hosts.py, which are clients of jax's coordination service."""

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]  jax.distributed allows one per process

from jaxscale.runtime.checkpoint.saver import SharedReports, stage_result
from jaxscale.runtime.hosts.agree import Board, Peer, agreed, barrier, gathered, next_key
from jaxscale.runtime.hosts.config import host_budgets
from jaxscale.runtime.hosts.discovery import ProcessInfo
from jaxscale.runtime.hosts.roll_call import call_roll
from jaxscale.runtime.hosts.watch import Watch
from jaxscale.runtime.training.stopping import StopRequest
from jaxscale.system.exits import Exit
from jaxscale.system.open_files import check_open_files

# Stages of a save, which all hosts finish together (runtime/checkpoint/saver.py).
STAGES = ("folder", "arrays", "commit", "verify")
FAILED = "OSError: [Errno 28] No space left on device: '/bucket/run/checkpoints/1000.tmp/state/ocdbt.process_7/d/0a1b'"
FACTS = {f"fact {number}": "0.10.2" for number in range(16)}  # as many facts as a run compares
SUMS = {f"layers.mlp.w_{name}": [0xDEADBEEF, 234_881_024] for name in ("gate", "up", "down")}  # checked by a host
CLOSED_SECONDS = 30.0
LOOPBACK = "127.0.0.1"


def made(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Combines the results of all hosts in a stage, as a save does."""
    return stage_result(parts, lambda results: "")


def expect(condition: bool, message: str = "") -> None:
    """Raises AssertionError unless the condition holds, also with python -O."""
    if not condition:
        raise AssertionError(message)


class Counted:
    """A client of the coordination service that counts its requests and the characters of keys and values."""

    def __init__(self, client: Any):
        self.client, self.requests, self.characters = client, 0, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.client, name)

        def counted(*args: Any) -> Any:
            self.requests += 1
            found = call(*args)
            self.characters += characters(args) + characters(found)
            return found

        return counted


def characters(value: Any) -> int:
    """Returns the total length of all strings in a nested list or tuple."""
    if isinstance(value, str):
        return len(value)
    return sum(map(characters, value)) if isinstance(value, list | tuple) else 0


class Host:
    """A simulated host. Its methods are the measured parts; each runs on all hosts at the same time."""

    def __init__(self, place: ProcessInfo):
        self.place, self.over, self.code = place, threading.Event(), 0

    def roll_call(self) -> None:
        """Joins the roll call of all hosts."""
        self.wires = call_roll(self.place, FACTS, host_budgets(self.place.num_processes).roll_call_seconds)

    def connect(self) -> None:
        """Joins jax's coordination service, as jax.distributed does."""
        number, count = self.place.process_id, self.place.num_processes
        client = _jax.get_distributed_runtime_client(
            f"{self.place.host}:{self.place.port}",
            number,
            init_timeout=round(host_budgets(count).roll_call_seconds),
            heartbeat_timeout=100,  # a real host uses host_budgets; here all hosts share a few cores
            shutdown_on_destruction=False,
        )
        client.connect()
        self.client = Counted(client)
        self.peer = Peer(self.client, number, count, itertools.count(1))
        self.watch = Watch(self.place, self.wires, end=self.end)

    def prepare(self) -> None:
        """Creates the board, which a run creates once."""
        self.board = Board(self.peer)
        self.reports, self.stop = SharedReports(self.board), StopRequest(self.board)

    def agree(self) -> None:
        """Broadcasts a decision of the first host."""
        expect(agreed(lambda: {"step": 1000}, peer=self.peer) == {"step": 1000})

    def barrier(self) -> None:
        """Waits for all hosts at a barrier."""
        barrier(self.peer)

    def step(self) -> None:
        """Runs the checks after each step."""
        self.board.refresh()
        expect(self.reports.news(1) is None and self.stop.stop_after(1) is None)

    def save(self) -> None:
        """Runs the collectives of one save."""
        key = next_key("save", self.peer)
        for stage in STAGES:
            found = gathered(
                f"{key}/{stage}", {"result": SUMS if stage == "verify" else True}, made_of=made, peer=self.peer
            )
            expect("failure" not in found)

    def failed_save(self) -> None:
        """Runs a save in which one host cannot write, so that all hosts fail with its error."""
        is_last = self.place.process_id == self.place.num_processes - 1
        mine = {"failure": [FAILED, "OSError"]} if is_last else {"result": None}
        found = gathered(next_key("failed", self.peer), mine, made_of=made, peer=self.peer)
        self.reports.failed(1000, found["failure"][0])

    def hear(self, step: int) -> list[Any]:
        """Returns the failed saves and signals that this host sees after a step. One host gets a signal in step 1."""
        if step == 1 and self.place.process_id == self.place.num_processes // 2:
            self.stop.request("SIGTERM")
        self.board.refresh()
        return [self.reports.news(step), self.stop.stop_after(step)]

    def lost(self) -> int:
        """Simulates the death of the last host. Returns the exit code with which each other host then ends."""
        if self.place.process_id == self.place.num_processes - 1:
            self.watch.leaving.set()
            self.cut()
            return int(Exit.PEER_LOST)
        expect(self.over.wait(CLOSED_SECONDS), "the host has not detected the loss")
        return self.code

    def disconnect(self) -> None:
        """Leaves the coordination service together with all other hosts, as jax does at the end."""
        self.client.client.shutdown()
        self.cut()

    def end(self, code: int) -> None:
        """Handles the exit of the process by the watch: closes its connections."""
        self.code = code
        self.cut()
        self.over.set()

    def cut(self) -> None:
        """Ends the connections of the roll call."""
        for wire, _ in self.wires.values():
            with contextlib.suppress(OSError):
                wire.sock.shutdown(socket.SHUT_RDWR)


class Outcome(NamedTuple):
    """Times and results of a part in one process. Times are from the machine's monotonic clock."""

    began: float
    ended: float
    requests: int
    characters: int
    found: list[Any]


class Group:
    """The hosts of one process, each with a thread. The process of the first host runs the coordination service."""

    def __init__(self, numbers: Sequence[int], count: int):
        self.numbers, self.count, self.service = numbers, count, None
        self.pool = ThreadPoolExecutor(len(numbers))
        check_open_files(3 * (count if 0 in numbers else len(numbers)), "connections")

    def open(self, port: int) -> None:
        """Creates the hosts of a start, and the coordination service."""
        self.hosts = [
            Host(ProcessInfo(host=LOOPBACK, port=port, num_processes=self.count, process_id=number, found_in="bench"))
            for number in self.numbers
        ]
        if 0 in self.numbers:
            self.service = _jax.get_distributed_runtime_service(f"{LOOPBACK}:{port}", self.count, heartbeat_timeout=100)

    def close(self) -> None:
        """Ends the service after all hosts have left it."""
        if self.service is not None:
            self.service.shutdown()
            self.service = None

    def run(self, name: str, times: int = 1, *args: Any) -> Outcome:
        """Calls the method `name` of every host `times` times, in parallel."""
        before, began = self.counts(), time.monotonic()
        work = lambda host: [getattr(host, name)(*args) for _ in range(times)][-1]
        found = list(self.pool.map(work, self.hosts))
        ended = time.monotonic()
        requests, sent = (now - then for now, then in zip(self.counts(), before))
        return Outcome(began, ended, requests, sent, found)

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of this process, in Python and C++."""
        return time.process_time()

    def counts(self) -> tuple[int, int]:
        """Returns (requests, characters) of all hosts so far."""
        clients = [host.client for host in self.hosts if hasattr(host, "client")]
        return sum(client.requests for client in clients), sum(client.characters for client in clients)


def serve(connection: Any, numbers: Sequence[int], count: int) -> None:
    """Runs a process of the simulation: executes commands until None."""
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # every host would print how it ended
    group = Group(numbers, count)
    while (command := connection.recv()) is not None:
        name, *args = command
        try:
            connection.send(getattr(group, name)(*args))
        except BaseException:
            connection.send(AssertionError(traceback.format_exc()))
    os._exit(0)  # does not wait for thousands of C++ threads
