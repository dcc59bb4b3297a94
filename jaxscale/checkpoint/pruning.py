"""Which steps may go and which stay, by the rules of training; pins; and deletion that a crash cannot half do."""

import datetime
from collections.abc import Sequence
from typing import Any

from jaxscale.checkpoint.cause import is_trouble, short_cause
from jaxscale.checkpoint.config import CheckpointConfig
from jaxscale.checkpoint.folders import REMOVED, remove_step, remove_tree
from jaxscale.checkpoint.manager import CLEAN, Checkpoints
from jaxscale.checkpoint.reading import StepFacts
from jaxscale.checkpoint.record import LAST_GOOD
from jaxscale.checkpoint.retention import PINNED, Facts, best_steps, is_lost, kept_steps
from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop


def why_kept(facts: Sequence[StepFacts], last_good: int | None, cfg: CheckpointConfig) -> dict[int, str]:
    """{step: why it stays}: what training itself would keep by these settings. All others may go.

    Args: last_good: the newest step that training read back; it stays, as do pinned steps, the newest clean one, and
    those whose record cannot be read, for they may be any of these.
    """
    unread = {fact.step for fact in facts if fact.problem}
    health = lambda fact: None if fact.problem else fact.health or CLEAN
    known = {fact.step: Facts(health(fact), fact.validation_loss) for fact in facts}
    pinned = {fact.step for fact in facts if fact.pinned}
    best = best_steps(known, cfg.keep_best, known.get)
    kept = {}
    for step in sorted(kept_steps(known, cfg, known.get, pinned, last_good) | unread):
        if step in sorted(known)[-cfg.keep_last :]:
            kept[step] = f"newest {cfg.keep_last}"
        elif cfg.keep_every_steps and step % cfg.keep_every_steps == 0:
            kept[step] = f"every {cfg.keep_every_steps}"
        elif step in best:
            kept[step] = f"best {best.index(step) + 1}"
        elif step in pinned:
            kept[step] = "pinned"
        elif step in unread:
            kept[step] = "its record cannot be read"
        else:
            kept[step] = "last good" if step == last_good else "newest clean"
    return kept


def last_good_step(checkpoints: Checkpoints) -> int | None:
    """The newest step that training read back, if it says so. Raises Stop (STORAGE) where that cannot be known."""
    place = checkpoints.directory / LAST_GOOD
    try:
        found = paths.read_json(place)
    except Exception as error:
        if is_lost(error):
            return None
        raise Stop(Exit.STORAGE, f"{place} cannot be read: {short_cause(error)}; nothing was deleted") from None
    return found.get("step") if isinstance(found, dict) else None


def delete_step(folder: Any, step: int) -> None:
    """Deletes a step. Killed half-way, what is left no longer counts as a step. Raises Stop (STORAGE) if it cannot."""
    try:
        remove_step(folder, step)
    except FileNotFoundError:
        return  # training was faster
    except Exception as error:
        if not isinstance(error, OSError) and not is_trouble(error):
            raise
        raise Stop(Exit.STORAGE, f"{folder / str(step)} cannot be deleted: {short_cause(error)}") from None


def sweep(folder: Any) -> None:
    """Removes what deletions that were killed half-way have left on a disk; what a save has begun is not touched."""
    for path in folder.iterdir() if not paths.is_remote(folder) else ():
        if path.name.endswith(REMOVED) and path.name.removesuffix(REMOVED).isdecimal():
            remove_tree(path)


def pin(checkpoints: Checkpoints, step: int) -> bool:
    """True if the step, which must be there, was not pinned before. Neither training nor prune deletes it."""
    mark = checkpoints.directory / PINNED / str(step)
    if mark.exists():
        return False
    paths.make_run_dir(mark.parent)
    paths.write_text_atomic(mark, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds") + "\n")
    return True


def unpin(checkpoints: Checkpoints, step: int) -> bool:
    """True if the step was pinned."""
    mark = checkpoints.directory / PINNED / str(step)
    if not mark.exists():
        return False
    mark.unlink()
    return True
