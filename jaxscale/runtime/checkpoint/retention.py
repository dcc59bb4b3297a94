"""Retention policy of checkpoints, and functions of `ckpt` that list, pin and delete steps.

The policy keeps the newest, periodic, best and pinned checkpoints, and the checkpoints to which a run may be rewound.
"""

import dataclasses
import datetime
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from jaxscale.runtime.checkpoint import folders
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.record import LAST_GOOD, RECORD, read_last_good, read_record, require_record
from jaxscale.runtime.checkpoint.storage_errors import errors_behind, is_storage_error, read_optional, short_reason
from jaxscale.runtime.checkpoint.verify import MAIN_LIST
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop

PINNED = "pinned"  # folder with a file for each pinned step
BEST_METRIC = "validation/loss"
CLEAN = "clean"
REQUIRED_FILES = (MAIN_LIST, folders.COMMITTED)
ORBAX_METADATA, COPIED = "_CHECKPOINT_METADATA", "copied"


class RetentionFacts(NamedTuple):
    """Facts of a checkpoint on which the retention policy depends."""

    health: str | None  # None: the record cannot be read
    loss: float | None


UNKNOWN = RetentionFacts(None, None)


def read_facts(folder: Any) -> RetentionFacts:
    """Returns the facts of a committed checkpoint; UNKNOWN if its record is damaged. Raises storage errors."""
    try:
        record = read_record(folder)
    except Exception as error:
        if not is_record_lost(error):
            raise
        return UNKNOWN
    loss = (record.get("metrics") or {}).get(BEST_METRIC)
    return RetentionFacts(record.get("health", CLEAN), loss)


def is_record_lost(error: Exception) -> bool:
    """Returns True if the error shows that a record is missing or damaged, so that a retry would also fail."""
    if is_storage_error(error) or not isinstance(error, OSError | ValueError):
        return False
    causes = [link for link in errors_behind(error) if isinstance(link, OSError)]
    return isinstance(error, FileNotFoundError) or all(
        isinstance(link, FileNotFoundError | NotADirectoryError | IsADirectoryError) for link in causes
    )


def pinned_steps(directory: Any) -> set[int]:
    """Returns the pinned steps, from the files pinned/<step>. Raises storage errors."""
    try:
        return {int(file.name) for file in (directory / PINNED).iterdir() if folders.is_step_name(file.name)}
    except FileNotFoundError:
        return set()


def retained_steps(
    steps: Iterable[int],
    cfg: CheckpointConfig,
    facts: Callable[[int], RetentionFacts] = lambda step: RetentionFacts(CLEAN, None),
    pinned: Iterable[int] = (),
    last_good: int | None = None,
) -> dict[int, str]:
    """Returns {step: reason} for the steps that settings, pins or health protect from deletion."""
    ordered = sorted(steps)
    clean = next((step for step in reversed(ordered) if facts(step).health == CLEAN), None)
    reasons = {clean: "newest clean", last_good: "last good"} | dict.fromkeys(pinned, "pinned")  # last one wins
    losses = {step: loss for step in ordered if cfg.keep_best and (loss := facts(step).loss) is not None}
    best = sorted(losses, key=lambda step: (losses[step], -step))[: cfg.keep_best]  # ties: newer first
    reasons |= {step: f"best {rank}" for rank, step in enumerate(best, 1)}
    if every := cfg.keep_every_steps:
        reasons |= {step: f"every {every}" for step in ordered if step % every == 0}
    reasons |= dict.fromkeys(ordered[-cfg.keep_last :], f"newest {cfg.keep_last}")
    return {step: reasons[step] for step in ordered if step in reasons}


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """Facts of a committed step that are known without reading its arrays."""

    step: int
    saved: str | None  # UTC time in ISO format
    num_bytes: int
    health: str | None  # None: not recorded, which counts as clean, or the record cannot be read
    validation_loss: float | None
    verified: bool  # training or `ckpt copy` has read the step back and found no difference
    pinned: bool
    problem: str = ""  # error of the record
    missing: tuple[str, ...] = ()  # required files that are missing


def list_steps(directory: Any) -> list[StepFacts]:
    """Returns the facts of all committed steps, oldest first. Reads only small files."""
    steps = folders.all_steps(directory)
    names = folders.files_under(directory) if steps else {}
    sizes = Counter[str]()
    for name, size in names.items():
        sizes[name.partition("/")[0]] += size
    good = read_last_good(directory) or {}
    good_sha256 = good.get("sha256") if good.get("verified") else None
    return [step_facts(directory, step, sizes[str(step)], names, good_sha256) for step in steps]


def step_facts(directory: Any, step: int, num_bytes: int, names: Collection[str], good_sha256: str | None) -> StepFacts:
    """Returns the facts of a step. names: all files in `directory`. good_sha256: sha256 of the last verified record."""
    saved, stamp = None, read_optional(directory / str(step) / ORBAX_METADATA).get("commit_timestamp_nsecs")
    if isinstance(stamp, int):
        saved = datetime.datetime.fromtimestamp(stamp // 10**9, datetime.UTC).isoformat().replace("+00:00", "Z")
    pinned = f"{PINNED}/{step}" in names
    try:
        record = require_record(directory / str(step))
    except BadInput as error:
        return StepFacts(step, saved, num_bytes, None, None, False, pinned, str(error))
    verified = good_sha256 == record["sha256"]
    if f"{COPIED}/{step}.json" in names and not verified:
        verified = read_optional(directory / COPIED / f"{step}.json").get("record") == record["sha256"]
    loss = (record.get("metrics") or {}).get(BEST_METRIC)
    is_listed = "step" in record and f"{step}/{RECORD}" in names  # False for links and older versions
    missing = tuple(name for name in REQUIRED_FILES if is_listed and f"{step}/{name}" not in names)
    return StepFacts(step, saved, num_bytes, record.get("health"), loss, verified, pinned, missing=missing)


def retention_reasons(facts: Sequence[StepFacts], last_good: int | None, cfg: CheckpointConfig) -> dict[int, str]:
    """Returns {step: reason} for the steps that training would keep with these settings.

    Always includes last_good (the newest step that training read back), pinned steps, the newest clean step, and steps
    whose record cannot be read, because these could be clean.
    """
    unread = {fact.step for fact in facts if fact.problem}
    health = lambda fact: None if fact.problem else fact.health or CLEAN
    known = {fact.step: RetentionFacts(health(fact), fact.validation_loss) for fact in facts}
    pinned = {fact.step for fact in facts if fact.pinned}
    reasons = retained_steps(known, cfg, known.__getitem__, pinned, last_good)
    reasons |= {step: "its record cannot be read" for step in unread if reasons.get(step) in (None, "last good")}
    return dict(sorted(reasons.items()))


def last_good_step(directory: Any) -> int | None:
    """Returns the step named in last_good.json, or None. Raises Stop (STORAGE) if the file cannot be read."""
    path = directory / LAST_GOOD
    try:
        found = paths.read_json(path)
    except Exception as error:
        if is_record_lost(error):
            return None
        raise Stop(Exit.STORAGE, f"{path} cannot be read: {short_reason(error)}; nothing was deleted") from None
    return found.get("step") if isinstance(found, dict) else None


def delete_step(folder: Any, step: int) -> None:
    """Deletes a step. After an interruption, the remaining files are not listed as a step. Raises Stop (STORAGE)."""
    try:
        folders.remove_step(folder, step)
    except FileNotFoundError:
        return  # training has removed the step
    except Exception as error:
        if not isinstance(error, OSError) and not is_storage_error(error):
            raise
        raise Stop(Exit.STORAGE, f"{folder / str(step)} cannot be deleted: {short_reason(error)}") from None


def remove_half_deleted(folder: Any) -> None:
    """Removes remaining files of killed deletions from a disk; ignores unfinished saves."""
    for path in folder.iterdir() if not paths.is_remote(folder) else ():
        if path.name.endswith(folders.REMOVED_SUFFIX) and path.name.removesuffix(folders.REMOVED_SUFFIX).isdecimal():
            folders.remove_tree(path)


def pin(directory: Any, step: int, content: str | None = None) -> bool:
    """Protects a step from deletion; returns False if it is already pinned. content: text of the pin file."""
    mark = directory / PINNED / str(step)
    if mark.exists():
        return False
    paths.make_run_dir(mark.parent)
    paths.write_text_atomic(mark, content or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds") + "\n")
    return True


def unpin(directory: Any, step: int) -> bool:
    """Removes a pin; returns True if the step was pinned."""
    mark = directory / PINNED / str(step)
    if not mark.exists():
        return False
    mark.unlink(missing_ok=True)
    return True
