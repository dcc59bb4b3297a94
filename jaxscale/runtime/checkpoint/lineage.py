"""Lineage of local copies: each start of a run has a token, and the work folder lists the last valid step of each.

A host may be disconnected while the run goes back to an older step, and return with copies of the abandoned steps; a
process that has lost the work folder may write more of them. A token that is not in the list, or a step above the one
listed for its token, is ignored.
"""

import secrets
from collections.abc import Mapping
from typing import Any

from jaxscale.runtime.checkpoint.storage_errors import read_optional
from jaxscale.system import paths

FILE = "local_copies.json"
MAX_STARTS = 50  # starts in the list; copies of older ones have long been replaced

Starts = dict[str, int | None]  # token of each start, oldest first -> its last valid step, None for the newest start


def read_starts(workdir: Any) -> Starts:
    """Returns the starts whose local copies may be valid; {} if none are recorded."""
    recorded = read_optional(workdir / FILE).get("starts")
    if not isinstance(recorded, dict):
        return {}
    return {token: last for token, last in recorded.items() if last is None or type(last) is int}


def is_in_history(starts: Mapping[str, int | None], token: str, step: int) -> bool:
    """True if the copy that this start made after `step` steps is part of the run's history."""
    last = starts.get(token, -1)  # -1: not in the list
    return last is None or step <= last


def read_start_step(workdir: Any) -> int:
    """Returns the step from which the newest start resumed, also from a local copy; 0 if not recorded."""
    recorded = read_optional(workdir / FILE).get("begun")
    return recorded if type(recorded) is int else 0


def invalidate_after(workdir: Any, step: int) -> None:
    """Invalidates all copies made so far of steps after `step`. For the first process, with the lock."""
    if starts := read_starts(workdir):
        write_starts(workdir, starts, step, {}, min(step, read_start_step(workdir)))


def record_start(workdir: Any, step: int) -> str:
    """Records a start that resumes from `step`, after invalidate_after(step); returns its token. Same callers."""
    token = secrets.token_hex(8)
    write_starts(workdir, read_starts(workdir), step, {token: None}, step)
    return token


def write_starts(workdir: Any, starts: Starts, step: int, new: Starts, begun: int) -> None:
    """Writes the starts with no valid step after `step`, the new one, and the step from which the last one resumed."""
    starts = {token: step if last is None else min(last, step) for token, last in starts.items()} | new
    paths.write_json(workdir / FILE, {"starts": dict(list(starts.items())[-MAX_STARTS:]), "begun": begun})
