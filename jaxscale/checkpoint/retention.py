"""Which checkpoints stay: the newest, the regular, the best, the pinned, and those that a run may go back to."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jaxscale.checkpoint.cause import errors_behind, is_trouble
from jaxscale.checkpoint.config import CheckpointConfig
from jaxscale.checkpoint.folders import is_step_name
from jaxscale.checkpoint.record import read_record

PINNED = "pinned"  # a folder with an empty file for each step that must stay
BEST_BY = "validation/loss"


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
    return Facts(record.get("health", "clean"), loss)


def is_lost(error: Exception) -> bool:
    """True if the record is missing or damaged, and another look will not find it either."""
    if is_trouble(error) or not isinstance(error, OSError | ValueError):
        return False
    causes = [link for link in errors_behind(error) if isinstance(link, OSError)]
    return all(isinstance(link, FileNotFoundError | NotADirectoryError | IsADirectoryError) for link in causes)


def pinned_steps(directory: Any) -> set[int]:
    """The steps that somebody has pinned: pinned/<step> is there. Raises what keeps it from being known."""
    try:
        return {int(file.name) for file in (directory / PINNED).iterdir() if is_step_name(file.name)}
    except FileNotFoundError:
        return set()


def kept_steps(
    steps: Iterable[int],
    cfg: CheckpointConfig,
    facts: Callable[[int], Facts] = lambda step: Facts("clean", None),
    pinned: Iterable[int] = (),
    last_good: int | None = None,
) -> set[int]:
    """The steps that stay: by the settings, pinned ones, the last that was verified, and the newest clean one.

    facts: asked only where the answer matters.
    """
    ordered = sorted(steps)
    kept = set(ordered[-cfg.keep_last :]) | set(pinned) | {last_good}
    kept |= {step for step in ordered if cfg.keep_every_steps and step % cfg.keep_every_steps == 0}
    kept |= set(best_steps(ordered, cfg.keep_best, facts))
    newest_clean = next((step for step in reversed(ordered) if facts(step).health == "clean"), None)
    return (kept | {newest_clean}) & set(ordered)


def best_steps(steps: Iterable[int], count: int, facts: Callable[[int], Facts]) -> list[int]:
    """So many steps of the lowest validation loss, the best first; of equal ones the newer. Asks nothing for 0."""
    if not count:
        return []
    losses: Mapping[int, float] = {step: facts(step).loss for step in steps if facts(step).loss is not None}
    return sorted(losses, key=lambda step: (losses[step], -step))[:count]
