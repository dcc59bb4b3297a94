"""What lies in a folder of checkpoints, told without reading any array; those are read in stored.py."""

import contextlib
import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any

from jaxscale import paths
from jaxscale.checkpoint.cause import is_trouble, reached
from jaxscale.checkpoint.files import files_under
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.checkpoint.record import is_sealed
from jaxscale.checkpoint.retention import PINNED
from jaxscale.checkpoint.verified import LAST_GOOD
from jaxscale.exits import BadInput

RECORD, TIMES, COPIED = "run/metadata", "_CHECKPOINT_METADATA", "copied"


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """What is known of a committed step without reading its arrays."""

    step: int
    saved: str | None  # ISO time, UTC
    num_bytes: int
    health: str | None  # as training judged it; None: it did not (clean, then), or the record cannot be read
    validation_loss: float | None
    verified: bool  # read back whole and found as it was saved, by training or by `ckpt copy`
    pinned: bool
    problem: str = ""  # why the record cannot be read


def list_steps(checkpoints: Checkpoints) -> list[StepFacts]:
    """The facts of every committed step, oldest first. Reads the small files only."""
    folder = checkpoints.directory
    steps = checkpoints.all_steps()
    sizes = dict.fromkeys(steps, 0)
    others = set()
    for name, size in files_under(folder).items() if steps else ():
        top, _, rest = name.partition("/")
        if top.isdecimal() and int(top) in sizes:
            sizes[int(top)] += size
        else:
            others.add(name)
    good = read_last_good(folder)
    return [
        step_facts(folder, step, sizes[step], f"{PINNED}/{step}" in others, good, f"{COPIED}/{step}.json" in others)
        for step in steps
    ]


def step_facts(
    folder: Any, step: int, num_bytes: int, pinned: bool, last_good: Mapping[str, Any], copied: bool
) -> StepFacts:
    """The facts of one step. copied: there is a list of its files."""
    verified = bool(last_good.get("verified")) and last_good.get("step") == step
    try:
        record = read_record(folder / str(step))
    except BadInput as error:
        problem = str(error)
        return StepFacts(step, saved_at(folder / str(step)), num_bytes, None, None, False, pinned, problem)
    if copied and not verified:
        verified = read_optional(folder / COPIED / f"{step}.json").get("record") == record["sha256"]
    loss = (record.get("metrics") or {}).get("validation/loss")
    return StepFacts(step, saved_at(folder / str(step)), num_bytes, record.get("health"), loss, verified, pinned)


def read_record(folder: Any) -> dict[str, Any]:
    """The sealed record of a step's folder. Raises BadInput if it cannot be read or one bit of it changed."""
    try:
        record = paths.read_json(folder / RECORD)
    except Exception as error:
        if isinstance(error, ValueError) or not (isinstance(error, OSError) or is_trouble(error)):
            raise
        cause = getattr(error, "strerror", None) or type(error).__name__
        raise BadInput(f"{folder / RECORD} cannot be read: {cause}") from None
    if not is_sealed(record):
        raise BadInput(f"the sha256 of {folder / RECORD} does not match its content")
    return record


def read_optional(path: Any) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none. Raises Stop (STORAGE) where its bucket cannot be reached."""
    with contextlib.suppress(OSError, ValueError):
        value = reached(lambda: paths.read_json(path), path)
        return value if isinstance(value, dict) else {}
    return {}


def read_last_good(folder: Any) -> dict[str, Any]:
    """What training wrote of the last step that it read back; empty if there is none."""
    return read_optional(folder / LAST_GOOD)


def saved_at(folder: Any) -> str | None:
    """When the step was committed."""
    stamp = read_optional(folder / TIMES).get("commit_timestamp_nsecs")
    if not isinstance(stamp, int):
        return None
    return datetime.datetime.fromtimestamp(stamp // 10**9, datetime.UTC).isoformat().replace("+00:00", "Z")
