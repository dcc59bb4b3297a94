"""Agreements between the processes of a run, over jax's coordination service: no device takes part in them.

The service runs in the first process, so every request is work for that one host. Whatever is agreed costs each of the
others a few requests, however long it takes and however many they are, and nobody is sent what all have said: what
comes back to all is what the first process makes of it. benchmarks/hosts.py drives it with any number of hosts.

jax offers its client only under a private name, which Orbax uses as well; here it is used in this file alone.
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

WAIT_SECONDS = 300  # for another process to come to the same place; one that died is noticed long before
SEEN_SECONDS = 30  # for a file to be seen by other machines: network file systems remember that it was not there
ALL_SECONDS = 10
FIRST_PAUSE_SECONDS = 0.002  # between looks at what the others have given; doubled up to SLICE_SECONDS
SLICE_SECONDS = 0.25  # of waiting without a look at signals: the kernel may hand one to another thread
CAUSE_CHARACTERS = 300  # of an error that all processes get
T = TypeVar("T")
ALREADY, LATE = "ALREADY_EXISTS", "DEADLINE_EXCEEDED"  # how the service's errors begin


class Peer(NamedTuple):
    """A process among those that agree."""

    client: Any  # of the coordination service
    process: int
    count: int
    numbers: Iterator[int]  # of agreements, so that all processes give the n-th one the same key


OWN_NUMBERS = itertools.count(1)


def own_peer() -> Peer:
    """This process; touches no device where JAX's processes are not connected."""
    client = distributed.global_state.client
    process, count = (0, 1) if client is None else (jax.process_index(), jax.process_count())
    return Peer(client, process, count, OWN_NUMBERS)


def process_and_count() -> tuple[int, int]:
    """The number of this process, and how many there are; touches no device where they are not connected."""
    return own_peer()[1:3]


def agreed(
    decide: Callable[[], Any], seconds: float = WAIT_SECONDS, peer: Peer | None = None, key: str | None = None
) -> Any:
    """What decide() returns at the first process, on all of them. All must call it at the same place of the program.

    Args: decide: returns plain data that JSON can hold. Where it raises, it raises at the first process only, whose
    end then ends the others. seconds: how long the first process may take. peer: this process, unless given.
    key: of the caller's own, which it forgets.
    """
    peer = peer or own_peer()
    if peer.count == 1:
        return decide()
    key = key or next_key("agreed", peer)
    if peer.process == 0:
        line = json.dumps(decide())
        peer.client.key_value_set(key, line)
    else:
        line = waited(peer.client, key, seconds)
    if line is None:
        raise Stop(Exit.PEER_LOST, f"process 0 said nothing for {seconds:g} s; start all again")
    return json.loads(line)


class FailedElsewhere(Exception):
    """Raised by in_all() where the work failed in other processes only; the message has their causes."""


def in_all(work: Callable[[], T], seconds: float = WAIT_SECONDS) -> T:
    """Returns this process's work(), if it succeeds in all processes. All call it at the same place of the program.

    Raises: what work() raised, and FailedElsewhere in the other processes: none of them continues alone into a
    collective. seconds: for the slowest.
    """
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
    """Gives all processes the same next_key() again, after one of them left a block early. key: the same in all."""
    number = next(OWN_NUMBERS)
    for _ in range(gathered(key, number, made_of=max) - number):
        next(OWN_NUMBERS)


def all_here(peer: Peer | None = None) -> None:
    """Returns once all processes have come to this place of the program."""
    try:
        # jax's own barrier lets no handler of a signal run
        gathered(next_key("all_here", peer), None, made_of=lambda _: None, peer=peer)
    except TimeoutError as error:
        raise Stop(Exit.PEER_LOST, f"{error}; start all again") from None


def waited(client: Any, key: str, seconds: float) -> str | None:
    """The line under the key as soon as there is one, or None after so long: one request, however long it takes."""
    try:
        return beside_signals(lambda: client.blocking_key_value_get(key, max(1, round(seconds * 1000))))
    except jax.errors.JaxRuntimeError as error:
        if LATE not in str(error):
            raise
    return None


def beside_signals(work: Callable[[], Any]) -> Any:
    """What work() returns or raises. Handlers of signals run meanwhile, as they do not where the main thread is in C++.

    So it leaves the main thread, which waits in Python.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    outcome: concurrent.futures.Future = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="waited", daemon=True).start()  # a handler that raises leaves it behind
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
    """What made_of makes of what each process gave under this key, in their order: the same for all, once all have.

    May be called in any thread. Args: key: from next_key in the main thread, so that all have the same, and with an
    ending of its own for each use. mine: plain data that JSON can hold. seconds: how long the slowest may take.
    made_of: called by the first process; what it returns is sent to all, so let it be short: a list of what all have
    said is as many times as long as there are processes, sent as often. peer: this process, unless given.
    Raises: TimeoutError that names the process that said nothing.
    """
    peer = peer or own_peer()
    if peer.count == 1:
        return made_of([mine])
    if peer.process == 0:
        answer = collected(key, mine, seconds, made_of, peer)
    else:
        peer.client.key_value_set(f"{key}/from/{peer.process}", json.dumps(mine))
        # the first process waits for the slowest, and only then speaks
        line = waited(peer.client, f"{key}/all", seconds + ALL_SECONDS)
        answer = {"late": late(0, seconds)} if line is None else json.loads(line)
    if "late" in answer:
        raise TimeoutError(answer["late"])
    return answer["all"]


def collected(key: str, mine: Any, seconds: float, made_of: Callable[[list[Any]], Any], peer: Peer) -> dict[str, Any]:
    """The first process's part of gathered: the answer that all of them get.

    It looks at all that is there in one request, at longer and longer intervals: its own service, and nobody else's
    time. One request for each of the others, waited for in turn, took 0.3 ms of its CPU each (1,536 hosts, 2026-11-23).
    """
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
    while True:
        found = {int(name.rpartition("/")[2]): line for name, line in peer.client.key_value_dir_get(f"{key}/from/")}
        missing = next((other for other in range(1, peer.count) if other not in found), None)
        if missing is None:
            answer = {"all": made_of([mine, *(json.loads(found[other]) for other in range(1, peer.count))])}
            break
        if (left := deadline - time.monotonic()) <= 0:
            answer = {"late": late(missing, seconds)}
            break
        time.sleep(min(pause, left))
        pause = min(2 * pause, SLICE_SECONDS)
    peer.client.key_value_set(f"{key}/all", json.dumps(answer))
    peer.client.key_value_delete(f"{key}/from")  # all of them; the service would keep them for as long as the run lasts
    return answer


def late(process: int, seconds: float) -> str:
    """That a process has not come."""
    return f"process {process} said nothing for {seconds:g} s"


def consulted(key: str, mine: Any, answer: Callable[[list[Any]], list[Any]], seconds: float = WAIT_SECONDS) -> Any:
    """This process's own of the answers that the first one gives to what all have said, one for each.

    So what is sent grows with the processes, not with their square. Raises TimeoutError as gathered does.
    Args: as of gathered. answer: what all gave, in their order -> an answer for each; called by the first process.
    """
    peer, own = own_peer(), []

    def hand_out(found: list[Any]) -> None:
        answers = answer(found)
        own.append(answers[0])
        for process in range(1, peer.count):
            peer.client.key_value_set(f"{key}/to/{process}", json.dumps(answers[process]))

    gathered(key, mine, seconds, hand_out, peer)
    if peer.process == 0:
        return own[0]
    if (line := waited(peer.client, f"{key}/to/{peer.process}", ALL_SECONDS)) is None:
        raise TimeoutError(late(0, ALL_SECONDS))
    return json.loads(line)


def forget(key: str) -> None:
    """Removes all that was said under a key, once no process asks for it any more. For the first process."""
    if (peer := own_peer()).count > 1:
        peer.client.key_value_delete(key)


def coordinator_host() -> str | None:
    """The name or address of the first process's machine; None for a process that is alone."""
    address = distributed.global_state.coordinator_address if own_peer().count > 1 else None
    return address.rpartition(":")[0].strip("[]") if address else None


def next_key(name: str, peer: Peer | None = None) -> str:
    """A key that no earlier agreement had. To be called in the main thread, at the same place in all processes."""
    return f"jaxscale/{name}/{next(peer.numbers if peer else OWN_NUMBERS)}"


def check_shared(folder: Any, prepare: Callable[[], None]) -> None:
    """Raises Stop unless every process sees the same folder. prepare(): makes it, at the first process only.

    Of a checkpoint each process writes its part: into folders of their own they would leave none that is whole.
    """
    process, count = process_and_count()
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
                f"workdir={folder} of process {process} is not the folder of process 0; name one that all "
                "hosts share: an absolute path on a network file system, or gs://",
            )
        time.sleep(0.2)
    all_here()
    if process == 0:
        mark.unlink(missing_ok=True)


class Board:
    """Lines that all processes can read, each written by whoever is first. All of them are looked at in one request."""

    def __init__(self, peer: Peer | None = None):
        """To be made at the same place of the program by all processes."""
        self.peer = peer or own_peer()
        self.root = next_key("board", self.peer) + "/"
        self.lines: dict[str, str] = {}

    def post(self, name: str, line: str) -> None:
        """Writes the line, if there is none of this name yet. In any thread."""
        try:
            self.peer.client.key_value_set(self.root + name, line)
        except jax.errors.JaxRuntimeError as error:
            if ALREADY not in str(error):
                raise

    def look(self) -> None:
        """Reads what is there now; to be called after each step, by the thread that asks."""
        found = self.peer.client.key_value_dir_get(self.root)
        self.lines = {key.removeprefix(self.root): line for key, line in found}

    def read(self, name: str) -> str | None:
        """The line of this name at the last look, or None."""
        return self.lines.get(name)

    def remove(self, name: str) -> None:
        """Takes a line away that all have read."""
        self.peer.client.key_value_delete(self.root + name)
