"""Agreements between the processes of a run, over jax's coordination service: no device takes part in them.

jax offers its client only under a private name, which Orbax uses as well; here it is used in this file alone.
"""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed

from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop

WAIT_SECONDS = 300  # for another process to come to the same place; one that died is noticed long before
SEEN_SECONDS = 30  # for a file to be seen by other machines: network file systems remember that it was not there
ALL_SECONDS = 10
SLICE_SECONDS = 1.0  # of waiting in C++, where a signal has no effect
BOARD = "jaxscale/board"
ALREADY, NOTHING, LATE = "ALREADY_EXISTS", "NOT_FOUND", "DEADLINE_EXCEEDED"  # how the service's errors begin


numbers = itertools.count(1)  # of agreements, so that all processes give the n-th one the same key


def agreed(decide: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
    """What decide() returns at the first process, on all of them. All must call it at the same place of the program.

    Args: decide: returns plain data that JSON can hold. Where it raises, it raises at the first process only, whose
    end then ends the others. seconds: how long the first process may take.
    """
    if jax.process_count() == 1:
        return decide()
    client, key = distributed.global_state.client, next_key("agreed")
    if jax.process_index() == 0:
        client.key_value_set(key, json.dumps(decide()))
    line = waited(client, key, seconds)
    if line is None:
        raise Stop(Exit.PEER_LOST, f"process 0 said nothing for {seconds:g} s; start all again")
    return json.loads(line)


def all_here() -> None:
    """Returns once all processes have come to this place of the program."""
    try:
        gathered(next_key("all_here"), None)  # jax's own barrier lets no handler of a signal run
    except TimeoutError as error:
        raise Stop(Exit.PEER_LOST, f"{error}; start all again") from None


def waited(client: Any, key: str, seconds: float) -> str | None:
    """The line under the key as soon as there is one, or None after so long.

    In slices: no handler of a signal runs while the main thread waits in C++. After the first one it asks and sleeps,
    for the service would keep what a slice asked until the key is there.
    """
    deadline = time.monotonic() + seconds
    try:
        return client.blocking_key_value_get(key, max(1, round(min(seconds, SLICE_SECONDS) * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if LATE not in str(error):
            raise
    keys = Keys(client)
    while (line := keys.read(key)) is None and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, SLICE_SECONDS / 4))
    return line


def process_and_count() -> tuple[int, int]:
    """The number of this process, and how many there are; touches no device where JAX's processes are not connected."""
    return (0, 1) if distributed.global_state.client is None else (jax.process_index(), jax.process_count())


def gathered(
    key: str, mine: Any, seconds: float = WAIT_SECONDS, made_of: Callable[[list[Any]], Any] = lambda parts: parts
) -> Any:
    """What each process gave under this key, in their order: the same list for all, once all have given theirs.

    May be called in any thread. Args: key: from next_key in the main thread, so that all have the same, and with an
    ending of its own for each use. mine: plain data that JSON can hold. seconds: how long the slowest may take.
    made_of: what the first process makes of the list, which all then get in its place: what is sent grows with the
    square of the number of processes otherwise.
    Raises: TimeoutError that names the process that said nothing.
    """
    index, count = process_and_count()
    if count == 1:
        return made_of([mine])
    client = distributed.global_state.client
    deadline = time.monotonic() + seconds

    def get(name: str, whom: int) -> Any:
        line = waited(client, f"{key}/{name}", deadline - time.monotonic())
        if line is None:
            raise TimeoutError(f"process {whom} said nothing for {seconds:g} s")
        return json.loads(line)

    if index:
        client.key_value_set(f"{key}/from/{index}", json.dumps(mine))
        deadline += ALL_SECONDS  # the first process waits for the slowest, and only then speaks
        answer = get("all", 0)
    else:
        try:
            answer = {"all": made_of([mine, *(get(f"from/{other}", other) for other in range(1, count))])}
        except TimeoutError as error:
            answer = {"late": str(error)}
        client.key_value_set(f"{key}/all", json.dumps(answer))
        client.key_value_delete(f"{key}/from")  # all of them; the service would keep them for as long as the run lasts
    if "late" in answer:
        raise TimeoutError(answer["late"])
    return answer["all"]


def next_key(name: str) -> str:
    """A key that no earlier agreement had. To be called in the main thread, at the same place in all processes."""
    return f"jaxscale/{name}/{next(numbers)}"


def check_shared(folder: Any, prepare: Callable[[], None]) -> None:
    """Raises Stop unless every process sees the same folder. prepare(): makes it, at the first process only.

    Of a checkpoint each process writes its part: into folders of their own they would leave none that is whole.
    """
    if jax.process_count() == 1:
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
                f"workdir={folder} of process {jax.process_index()} is not the folder of process 0; name one that all "
                "hosts share: an absolute path on a network file system, or gs://",
            )
        time.sleep(0.2)
    all_here()
    if jax.process_index() == 0:
        mark.unlink(missing_ok=True)


class Keys:
    """A few lines that all processes can read and write under keys of their own, kept by the first process."""

    def __init__(self, client: Any = None):
        """client: jax's own, unless another is given."""
        self.client = client or distributed.global_state.client

    def post(self, key: str, line: str) -> bool:
        """True if the line was written; False if there is one already, which stays."""
        try:
            self.client.key_value_set(key, line)
        except jax.errors.JaxRuntimeError as error:
            if ALREADY not in str(error):
                raise
            return False
        return True

    def read(self, key: str) -> str | None:
        """The line, or None: one question to the first process, and none to a device."""
        try:
            return self.client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if NOTHING not in str(error):
                raise
            return None


class Board:
    """One line that all processes can read, written by whoever is first."""

    def __init__(self):
        self.keys = Keys()

    def post(self, line: str) -> None:
        """Writes the line if there is none yet."""
        self.keys.post(BOARD, line)

    def read(self) -> str | None:
        """The line, or None."""
        return self.keys.read(BOARD)
