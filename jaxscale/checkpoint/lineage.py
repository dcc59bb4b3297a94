"""Which local copies belong to a run's history: each start has a token, and the work folder says how far each counts.

A host may have been away while the run went back to an older step, and come back with copies of what was left behind;
a process that had lost the work folder may have written some more. Their tokens are in the list with the step from
which a later start went on, or not at all, and nothing above that step is taken.
"""

import secrets
from collections.abc import Mapping
from typing import Any

from jaxscale.checkpoint.storage_errors import read_optional
from jaxscale.system import paths

FILE = "local_copies.json"
MOST = 50  # starts that are remembered: older ones left their copies long ago

Starts = dict[str, int | None]  # token of each start, oldest first: the last step that counts, None for the newest


def read_starts(workdir: Any) -> Starts:
    """The starts that local copies may be of; {} where nothing is known."""
    found = read_optional(workdir / FILE).get("starts")
    if not isinstance(found, dict):
        return {}
    return {token: last for token, last in found.items() if last is None or type(last) is int}


def belongs(starts: Mapping[str, int | None], token: str, step: int) -> bool:
    """True if a copy that the start with this token made after `step` steps is of the run as it went on."""
    if token not in starts:
        return False
    last = starts[token]
    return last is None or step <= last


def read_begun(workdir: Any) -> int:
    """The step from which the newest start went on, be it a local copy's; 0 where nothing is known."""
    found = read_optional(workdir / FILE).get("begun")
    return found if type(found) is int else 0


def cut(workdir: Any, step: int) -> None:
    """Nothing after `step` counts any more of what was copied before now. For the first process, with the lock."""
    if starts := read_starts(workdir):
        write(workdir, shortened(starts, step), min(step, read_begun(workdir)))


def begin(workdir: Any, step: int) -> str:
    """The token of a start that goes on from `step`, after a cut there. For the first process, with the lock."""
    token = secrets.token_hex(8)
    write(workdir, shortened(read_starts(workdir), step) | {token: None}, step)
    return token


def shortened(starts: Mapping[str, int | None], step: int) -> Starts:
    """The starts, none of which counts beyond the step."""
    return {token: step if last is None else min(last, step) for token, last in starts.items()}


def write(workdir: Any, starts: Starts, begun: int) -> None:
    """Writes the newest of them down, and from which step the last went on."""
    paths.write_json(workdir / FILE, {"starts": dict(list(starts.items())[-MOST:]), "begun": begun})
