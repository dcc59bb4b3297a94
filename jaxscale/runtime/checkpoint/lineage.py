"""Lineage of local copies: a list in the work folder of all starts of a run, each with a token and last valid step.

A local copy may belong to steps that the run has abandoned, for example if its host was disconnected while the run was
rewound to an older step. A copy is ignored if its token is not in the list, or if its step is above the last valid step
of its token.
"""

import secrets
from collections.abc import Mapping
from typing import Any

from jaxscale.runtime.checkpoint.storage_errors import read_optional
from jaxscale.system import paths

FILE = "local_copies.json"
MAX_STARTS = 50  # length of the list; local copies of earlier starts have been replaced by then

Starts = dict[str, int | None]  # {token of a start: last valid step}, oldest first; None for the newest start


def read_starts(workdir: Any) -> Starts:
    """Returns the recorded starts of the run, or {} if none are recorded."""
    recorded = read_optional(workdir / FILE).get("starts")
    if not isinstance(recorded, dict):
        return {}
    return {token: last for token, last in recorded.items() if last is None or type(last) is int}


def is_in_history(starts: Mapping[str, int | None], token: str, step: int) -> bool:
    """Returns True if step `step` of the start with this token is part of the run's history."""
    last = starts.get(token, -1)  # -1 if the token is not in the list
    return last is None or step <= last


def read_start_step(workdir: Any) -> int:
    """Returns the step, saved or from a local copy, at which the newest start resumed; 0 if not recorded."""
    recorded = read_optional(workdir / FILE).get("begun")
    return recorded if type(recorded) is int else 0


def invalidate_after(workdir: Any, step: int) -> None:
    """Invalidates existing local copies of steps after `step`. Call only in the first process, which has the lock."""
    if starts := read_starts(workdir):
        write_starts(workdir, starts, step, {}, min(step, read_start_step(workdir)))


def record_start(workdir: Any, step: int) -> str:
    """Records a start that resumes from `step`; returns its token. Call in the first process only."""
    token = secrets.token_hex(8)
    write_starts(workdir, read_starts(workdir), step, {token: None}, step)
    return token


def write_starts(workdir: Any, starts: Starts, step: int, new: Starts, begun: int) -> None:
    """Writes the starts, and limits their last valid steps to `step`. new: start to append without this limit."""
    starts = {token: step if last is None else min(last, step) for token, last in starts.items()} | new
    paths.write_json(workdir / FILE, {"starts": dict(list(starts.items())[-MAX_STARTS:]), "begun": begun})
