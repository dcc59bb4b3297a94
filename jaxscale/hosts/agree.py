"""Agreements between the processes of a run, over jax's coordination service: no device takes part in them.

jax offers its client only under a private name, which Orbax uses as well; here it is used in this file alone.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed

from jaxscale import paths
from jaxscale.exits import Exit, Stop

WAIT_SECONDS = 300  # for another process to come to the same place; one that died is noticed long before
SEEN_SECONDS = 30  # for a file to be seen by other machines: network file systems remember that it was not there
BOARD = "jaxscale/board"
ALREADY, NOTHING = "ALREADY_EXISTS", "NOT_FOUND"  # how the service's errors begin


class Count:
    """Numbers agreements, so that all processes give the n-th one the same key."""

    number = 0


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
    return json.loads(client.blocking_key_value_get(key, round(seconds * 1000)))


def all_here() -> None:
    """Returns once all processes have come to this place of the program."""
    if jax.process_count() > 1:
        distributed.global_state.client.wait_at_barrier(next_key("all_here"), WAIT_SECONDS * 1000)


def next_key(name: str) -> str:
    """A key that no earlier agreement had."""
    Count.number += 1
    return f"jaxscale/{name}/{Count.number}"


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


class Board:
    """One line that all processes can read, written by whoever is first."""

    def post(self, line: str) -> None:
        """Writes the line if there is none yet."""
        try:
            distributed.global_state.client.key_value_set(BOARD, line)
        except jax.errors.JaxRuntimeError as error:
            if ALREADY not in str(error):
                raise

    def read(self) -> str | None:
        """The line, or None: one question to the first process, and none to a device."""
        try:
            return distributed.global_state.client.key_value_try_get(BOARD)
        except jax.errors.JaxRuntimeError as error:
            if NOTHING not in str(error):
                raise
            return None


def open_board() -> Board | None:
    """The board of this run; None for a single process, which needs none."""
    return Board() if jax.process_count() > 1 else None
