"""What lies in a folder of checkpoints, told without reading any array; those are in array_store.py."""

import dataclasses
import datetime
from collections.abc import Collection, Mapping
from typing import Any

from jaxscale.checkpoint.files import files_under
from jaxscale.checkpoint.folders import COMMITTED
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.checkpoint.record import RECORD, read_last_good, read_optional, require_record
from jaxscale.checkpoint.retention import PINNED
from jaxscale.checkpoint.verify import LISTS, REST
from jaxscale.system.exits import BadInput

ALWAYS = (f"{LISTS}/{REST}", COMMITTED)
TIMES, COPIED = "_CHECKPOINT_METADATA", "copied"


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
    problem: str = ""  # why the record cannot be read, or is of another step
    missing: tuple[str, ...] = ()  # files that every step has


def list_steps(checkpoints: Checkpoints) -> list[StepFacts]:
    """The facts of every committed step, oldest first. Reads the small files only."""
    folder = checkpoints.directory
    steps = checkpoints.all_steps()
    sizes = dict.fromkeys(steps, 0)
    names = files_under(folder) if steps else {}
    for name, size in names.items():
        top = name.partition("/")[0]
        if top.isdecimal() and int(top) in sizes:
            sizes[int(top)] += size
    good = read_last_good(folder) or {}
    return [step_facts(folder, step, sizes[step], names, good) for step in steps]


def step_facts(
    folder: Any, step: int, num_bytes: int, names: Collection[str], last_good: Mapping[str, Any]
) -> StepFacts:
    """The facts of one step. names: of all files below the folder of checkpoints."""
    pinned, copied = f"{PINNED}/{step}" in names, f"{COPIED}/{step}.json" in names
    try:
        record = require_record(folder / str(step))
    except BadInput as error:
        problem = str(error)
        return StepFacts(step, saved_at(folder / str(step)), num_bytes, None, None, False, pinned, problem)
    verified = bool(last_good.get("verified")) and last_good.get("sha256") == record["sha256"]
    if copied and not verified:
        verified = read_optional(folder / COPIED / f"{step}.json").get("record") == record["sha256"]
    loss = (record.get("metrics") or {}).get("validation/loss")
    wanted = ALWAYS if "step" in record and f"{step}/{RECORD}" in names else ()  # not behind a link, nor of old
    missing = tuple(name for name in wanted if f"{step}/{name}" not in names)
    return StepFacts(
        step, saved_at(folder / str(step)), num_bytes, record.get("health"), loss, verified, pinned, missing=missing
    )


def saved_at(folder: Any) -> str | None:
    """When the step was committed."""
    stamp = read_optional(folder / TIMES).get("commit_timestamp_nsecs")
    if not isinstance(stamp, int):
        return None
    return datetime.datetime.fromtimestamp(stamp // 10**9, datetime.UTC).isoformat().replace("+00:00", "Z")
