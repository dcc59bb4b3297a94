"""Which checkpoints stay: the newest, the regular, the best, the pinned, and those that a run may go back to.

The rule, what is known of each step without reading its arrays, and what `ckpt` pins and deletes.
"""

import dataclasses
import datetime
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.checkpoint.config import CheckpointConfig
from jaxscale.checkpoint.folders import (
    COMMITTED,
    REMOVED,
    all_steps,
    files_under,
    is_step_name,
    remove_step,
    remove_tree,
)
from jaxscale.checkpoint.record import LAST_GOOD, RECORD, read_last_good, read_record, require_record
from jaxscale.checkpoint.storage_errors import errors_behind, is_storage_error, read_optional, short_reason
from jaxscale.checkpoint.verify import LISTS, REST
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop

PINNED = "pinned"  # a folder with an empty file for each step that must stay
BEST_BY = "validation/loss"
CLEAN = "clean"
ALWAYS = (f"{LISTS}/{REST}", COMMITTED)
TIMES, COPIED = "_CHECKPOINT_METADATA", "copied"


class Facts(NamedTuple):
    """What retention asks of a checkpoint."""

    health: str | None  # None: it cannot be read
    loss: float | None


UNKNOWN = Facts(None, None)


def read_facts(folder: Any) -> Facts:
    """The facts of a committed checkpoint, from its record. Raises what says nothing of the record itself."""
    try:
        record = read_record(folder)
    except Exception as error:
        if not is_lost(error):
            raise
        return UNKNOWN
    loss = (record.get("metrics") or {}).get(BEST_BY)
    return Facts(record.get("health", CLEAN), loss)


def is_lost(error: Exception) -> bool:
    """True if the record is missing or damaged, and another look will not find it either."""
    if is_storage_error(error) or not isinstance(error, OSError | ValueError):
        return False
    causes = [link for link in errors_behind(error) if isinstance(link, OSError)]
    return isinstance(error, FileNotFoundError) or all(
        isinstance(link, FileNotFoundError | NotADirectoryError | IsADirectoryError) for link in causes
    )


def pinned_steps(directory: Any) -> set[int]:
    """The steps that somebody has pinned: pinned/<step> is there. Raises what keeps it from being known."""
    try:
        return {int(file.name) for file in (directory / PINNED).iterdir() if is_step_name(file.name)}
    except FileNotFoundError:
        return set()


def kept_steps(
    steps: Iterable[int],
    cfg: CheckpointConfig,
    facts: Callable[[int], Facts] = lambda step: Facts(CLEAN, None),
    pinned: Iterable[int] = (),
    last_good: int | None = None,
) -> dict[int, str]:
    """{step: why it stays}: by the settings, pinned ones, the last that was verified, and the newest clean one.

    facts: asked only where the answer matters.
    """
    ordered = sorted(steps)
    clean = next((step for step in reversed(ordered) if facts(step).health == CLEAN), None)
    why = {clean: "newest clean", last_good: "last good"} | dict.fromkeys(pinned, "pinned")  # a later reason goes first
    why |= {step: f"best {rank}" for rank, step in enumerate(best_steps(ordered, cfg.keep_best, facts), 1)}
    if every := cfg.keep_every_steps:
        why |= {step: f"every {every}" for step in ordered if step % every == 0}
    why |= dict.fromkeys(ordered[-cfg.keep_last :], f"newest {cfg.keep_last}")
    return {step: why[step] for step in ordered if step in why}


def best_steps(steps: Iterable[int], count: int, facts: Callable[[int], Facts]) -> list[int]:
    """So many steps of the lowest validation loss, the best first; of equal ones the newer. Asks nothing for 0."""
    if not count:
        return []
    losses = {step: loss for step in steps if (loss := facts(step).loss) is not None}
    return sorted(losses, key=lambda step: (losses[step], -step))[:count]


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


def list_steps(directory: Any) -> list[StepFacts]:
    """The facts of every committed step, oldest first. Reads the small files only."""
    folder = directory
    steps = all_steps(folder)
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


def why_kept(facts: Sequence[StepFacts], last_good: int | None, cfg: CheckpointConfig) -> dict[int, str]:
    """{step: why it stays}: what training itself would keep by these settings. All others may go.

    Args: last_good: the newest step that training read back; it stays, as do pinned steps, the newest clean one, and
    those whose record cannot be read, for they may be any of these.
    """
    unread = {fact.step for fact in facts if fact.problem}
    health = lambda fact: None if fact.problem else fact.health or CLEAN
    known = {fact.step: Facts(health(fact), fact.validation_loss) for fact in facts}
    pinned = {fact.step for fact in facts if fact.pinned}
    kept = kept_steps(known, cfg, known.__getitem__, pinned, last_good)
    kept |= {step: "its record cannot be read" for step in unread if kept.get(step) in (None, "last good")}
    return dict(sorted(kept.items()))


def last_good_step(directory: Any) -> int | None:
    """The newest step that training read back, if it says so. Raises Stop (STORAGE) where that cannot be known."""
    path = directory / LAST_GOOD
    try:
        found = paths.read_json(path)
    except Exception as error:
        if is_lost(error):
            return None
        raise Stop(Exit.STORAGE, f"{path} cannot be read: {short_reason(error)}; nothing was deleted") from None
    return found.get("step") if isinstance(found, dict) else None


def delete_step(folder: Any, step: int) -> None:
    """Deletes a step. Killed half-way, what is left no longer counts as a step. Raises Stop (STORAGE) if it cannot."""
    try:
        remove_step(folder, step)
    except FileNotFoundError:
        return  # training was faster
    except Exception as error:
        if not isinstance(error, OSError) and not is_storage_error(error):
            raise
        raise Stop(Exit.STORAGE, f"{folder / str(step)} cannot be deleted: {short_reason(error)}") from None


def sweep(folder: Any) -> None:
    """Removes what deletions that were killed half-way have left on a disk; what a save has begun is not touched."""
    for path in folder.iterdir() if not paths.is_remote(folder) else ():
        if path.name.endswith(REMOVED) and path.name.removesuffix(REMOVED).isdecimal():
            remove_tree(path)


def pin(directory: Any, step: int) -> bool:
    """True if the step, which must be there, was not pinned before. Neither training nor prune deletes it."""
    mark = directory / PINNED / str(step)
    if mark.exists():
        return False
    paths.make_run_dir(mark.parent)
    paths.write_text_atomic(mark, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds") + "\n")
    return True


def unpin(directory: Any, step: int) -> bool:
    """True if the step was pinned."""
    mark = directory / PINNED / str(step)
    if not mark.exists():
        return False
    mark.unlink()
    return True
