"""Host-level collectives (broadcast, gather, barrier) over jax's coordination service, without devices.

The service runs in process 0, so every request costs CPU time on that host. In each collective, every other process
makes a constant number of requests and receives a result that process 0 has reduced, not the values of all processes.
benchmarks/hosts.py measures the cost for any number of hosts.

jax's client has only a private name, which Orbax also uses; within jaxscale, only this file uses it.
"""

import concurrent.futures
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import jax
from jax._src import distributed

from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop

WAIT_SECONDS = 300  # timeout for slow processes; a dead process is noticed long before
SEEN_SECONDS = 30  # timeout until a file is visible on other machines: network file systems cache missing names
ALL_SECONDS = 10
FIRST_PAUSE_SECONDS = 0.002  # between polls; doubled up to SLICE_SECONDS
SLICE_SECONDS = 0.25  # between checks for signals, which the kernel may deliver to another thread
CAUSE_CHARACTERS = 300  # length of an error message that is sent to all processes
T = TypeVar("T")
ALREADY, LATE = "ALREADY_EXISTS", "DEADLINE_EXCEEDED"  # prefixes of the service's errors


class Peer(NamedTuple):
    """A participant in host-level collectives."""

    client: Any  # client of the coordination service
    process: int
    count: int
    numbers: Iterator[int]  # numbers of collectives: all processes use the same key for the n-th collective


KEY_NUMBERS = itertools.count(1)


def this_process() -> Peer:
    """Returns this process. Without jax.distributed, initializes no device."""
    client = distributed.global_state.client
    process, count = (0, 1) if client is None else (jax.process_index(), jax.process_count())
    return Peer(client, process, count, KEY_NUMBERS)


def agreed(
    decide: Callable[[], Any], seconds: float = WAIT_SECONDS, peer: Peer | None = None, key: str | None = None
) -> Any:
    """Broadcasts the result of decide() from process 0. Collective: all processes call it in the same order.

    decide: function that returns JSON data, called only on process 0. An exception ends process 0, then the others.
    peer: None for this process. key: None for a new key; a caller that passes a key must forget() the key.
    """
    peer = peer or this_process()
    if peer.count == 1:
        return decide()
    key = key or next_key("agreed", peer)
    if peer.process == 0:
        line = json.dumps(decide())
        peer.client.key_value_set(key, line)
    else:
        line = blocking_get(peer.client, key, seconds)
    if line is None:
        raise Stop(Exit.PEER_LOST, f"no response from process 0 for {seconds:g} s; restart all processes")
    return json.loads(line)


class FailedElsewhere(Exception):
    """Raised by in_all() if the work failed only in other processes. The message contains their errors."""


def in_all(work: Callable[[], T], seconds: float = WAIT_SECONDS) -> T:
    """Returns work() if it succeeds in all processes, else raises its exception or FailedElsewhere. Collective."""
    key, result, error = next_key("in_all"), None, None
    try:
        result = work()
    except Exception as failure:
        error = failure
    causes = gathered(key, error and f"{type(error).__name__}: {error}"[:CAUSE_CHARACTERS], seconds)
    if error is not None:
        raise error
    if failed := [f"process {process}: {cause}" for process, cause in enumerate(causes) if cause]:
        raise FailedElsewhere("; ".join(failed))
    return cast(T, result)


def align_keys(key: str) -> None:
    """Synchronizes next_key() after a process has skipped collectives. `key` must be equal in all processes."""
    number = next(KEY_NUMBERS)
    for _ in range(gathered(key, number, made_of=max) - number):
        next(KEY_NUMBERS)


def barrier(peer: Peer | None = None) -> None:
    """Waits until all processes have reached this call."""
    try:
        # jax's barrier would block signal handlers
        gathered(next_key("barrier", peer), None, made_of=lambda _: None, peer=peer)
    except TimeoutError as error:
        raise Stop(Exit.PEER_LOST, f"{error}; restart all processes") from None


def blocking_get(client: Any, key: str, seconds: float) -> str | None:
    """Waits for the value of a key in a single request. Returns None after a timeout."""
    try:
        return run_interruptible(lambda: client.blocking_key_value_get(key, max(1, round(seconds * 1000))))
    except jax.errors.JaxRuntimeError as error:
        if LATE not in str(error):
            raise
    return None


def run_interruptible(work: Callable[[], Any]) -> Any:
    """Runs work() in a thread, so that the main thread waits in Python, where signal handlers can run."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    outcome: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="waited", daemon=True).start()  # continues if a signal handler raises
    while not concurrent.futures.wait([outcome], SLICE_SECONDS).done:
        pass
    return outcome.result()


def gathered(
    key: str,
    mine: Any,
    seconds: float = WAIT_SECONDS,
    made_of: Callable[[list[Any]], Any] = list,
    peer: Peer | None = None,
) -> Any:
    """Gathers a value from each process, in order, and returns made_of(values) in all processes. Collective.

    Can be called in any thread. key: result of next_key(), called in the main thread, with a distinct suffix for each
    use. mine: JSON data of this process. made_of: reduction, called on process 0; its result is sent to every process
    and should be short. peer: None for this process.
    Raises TimeoutError with the number of a missing process.
    """
    peer = peer or this_process()
    if peer.count == 1:
        return made_of([mine])
    if peer.process == 0:
        answer = collected(key, mine, seconds, made_of, peer)
    else:
        peer.client.key_value_set(f"{key}/from/{peer.process}", json.dumps(mine))
        # process 0 waits for the slowest process before it answers
        line = blocking_get(peer.client, f"{key}/all", seconds + ALL_SECONDS)
        answer = {"late": late_message(0, seconds)} if line is None else json.loads(line)
    if "late" in answer:
        raise TimeoutError(answer["late"])
    return answer["all"]


def collected(key: str, mine: Any, seconds: float, made_of: Callable[[list[Any]], Any], peer: Peer) -> dict[str, Any]:
    """Collects the values on process 0 and publishes the answer for all processes.

    Polls at increasing intervals, with one request for all values. A blocking request for each process would take
    0.3 ms of CPU time per process (1,536 hosts, 2026-11-23).
    """
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
    while True:
        found = {int(name.rpartition("/")[2]): line for name, line in peer.client.key_value_dir_get(f"{key}/from/")}
        missing = next((other for other in range(1, peer.count) if other not in found), None)
        if missing is None:
            answer = {"all": made_of([mine, *(json.loads(found[other]) for other in range(1, peer.count))])}
            break
        if (left := deadline - time.monotonic()) <= 0:
            answer = {"late": late_message(missing, seconds)}
            break
        time.sleep(min(pause, left))
        pause = min(2 * pause, SLICE_SECONDS)
    peer.client.key_value_set(f"{key}/all", json.dumps(answer))
    peer.client.key_value_delete(f"{key}/from")  # all values, which the service would store until the run ends
    return answer


def late_message(process: int, seconds: float) -> str:
    """Returns the error message for a process that did not answer."""
    return f"no response from process {process} for {seconds:g} s"


def consulted(key: str, mine: Any, answer: Callable[[list[Any]], list[Any]], seconds: float = WAIT_SECONDS) -> Any:
    """Gathers a value from each process, and scatters answer(values), one item per process. Collective."""
    peer, local_answer = this_process(), []

    def scatter(values: list[Any]) -> None:
        answers = answer(values)
        local_answer.append(answers[0])
        for process in range(1, peer.count):
            peer.client.key_value_set(f"{key}/to/{process}", json.dumps(answers[process]))

    gathered(key, mine, seconds, scatter, peer)
    if peer.process == 0:
        return local_answer[0]
    if (line := blocking_get(peer.client, f"{key}/to/{peer.process}", ALL_SECONDS)) is None:
        raise TimeoutError(late_message(0, ALL_SECONDS))
    return json.loads(line)


def forget(key: str) -> None:
    """Deletes all values under a key. Process 0 must call this after all processes have read the key."""
    if (peer := this_process()).count > 1:
        peer.client.key_value_delete(key)


def coordinator_host() -> str | None:
    """Returns the host of process 0, or None for a single process."""
    address = distributed.global_state.coordinator_address if this_process().count > 1 else None
    return address.rpartition(":")[0].strip("[]") if address else None


def next_key(name: str, peer: Peer | None = None) -> str:
    """Returns a new key. Must be called in the main thread, in the same order in all processes."""
    return f"jaxscale/{name}/{next(peer.numbers if peer else KEY_NUMBERS)}"


def check_shared(folder: Any, prepare: Callable[[], None]) -> None:
    """Raises Stop unless all processes see the same folder, which prepare() creates on process 0."""
    _, process, count, _ = this_process()
    if count == 1:
        return prepare()

    def leave_mark() -> str:
        prepare()
        mark = f".roll-call-{time.time_ns():x}"
        paths.write_text_atomic(folder / mark, "")
        return mark

    mark = folder / agreed(leave_mark)
    deadline = time.monotonic() + SEEN_SECONDS
    while not mark.exists():
        if time.monotonic() > deadline:
            raise Stop(
                Exit.BAD_INPUT,
                f"workdir={folder} of process {process} is not the folder of process 0; use a folder that all "
                "hosts share: an absolute path on a network file system, or a gs:// URL",
            )
        time.sleep(0.2)
    barrier()
    if process == 0:
        mark.unlink(missing_ok=True)


class Board:
    """Named lines of text that all processes can write and read. The first write to a name wins."""

    def __init__(self, peer: Peer | None = None):
        """Collective: all processes create their boards in the same order."""
        self.peer = peer or this_process()
        self.root = next_key("board", self.peer) + "/"
        self.lines: dict[str, str] = {}

    def post(self, name: str, line: str) -> None:
        """Writes a line unless the name already has one. Thread-safe."""
        try:
            self.peer.client.key_value_set(self.root + name, line)
        except jax.errors.JaxRuntimeError as error:
            if ALREADY not in str(error):
                raise

    def refresh(self) -> None:
        """Reads all lines with one request. Must be called by the thread that calls read(), after each step."""
        found = self.peer.client.key_value_dir_get(self.root)
        self.lines = {key.removeprefix(self.root): line for key, line in found}

    def read(self, name: str) -> str | None:
        """Returns the line that had this name at the last refresh, or None."""
        return self.lines.get(name)

    def remove(self, name: str) -> None:
        """Removes a line that all processes have read."""
        self.peer.client.key_value_delete(self.root + name)
