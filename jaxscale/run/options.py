"""Run options: what a start is asked for beyond its config."""

import dataclasses
import difflib
from typing import Any

from jaxscale import schema
from jaxscale.command_line import flag
from jaxscale.config import RunConfig
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.process import folder_mode

# The rows of each step follow from these: with another value, the position in the data would mean other rows.
NEVER = ("seed", "seq_len", "batch_tokens")


def allowed_names(text: str | None) -> tuple[str, ...]:
    """The settings, or groups of them, that --allow_change names. Raises BadInput for one that may never change."""
    names = tuple(name.strip() for name in text.split(",")) if text is not None else ()
    known = {part for name, *_ in schema.describe(RunConfig) for part in groups_of(name)}
    for name in names:
        if name in NEVER:
            raise BadInput(
                f"--allow_change={name}: which rows each step reads follows from {name}, so that a run cannot go on "
                "with another; begin another --workdir"
            )
        if name not in known:
            leaf = {other.rpartition(".")[2]: other for other in sorted(known, reverse=True)}
            close = difflib.get_close_matches(name, known, n=1) or [leaf[n] for n in [name] if n in leaf]
            hint = f"; did you mean {close[0]}?" if close else "; write names as in --config.NAME, with commas between"
            raise BadInput(f"--allow_change={name} is no setting{hint}")
    return names


def groups_of(name: str) -> list[str]:
    """'optim.peak_lr' -> ['optim', 'optim.peak_lr']."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def step_of(name: str, text: str) -> int:
    """The step that a flag names. Raises BadInput for one that is none."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise BadInput(f"--{name}={text} must be a step, 1 or more")
    return int(text)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What a start is asked for beyond its config; of this start alone."""

    stop_after: int | None = flag(
        None,
        "saves and leaves after this step (counted from 1); the learning rate's horizon stays as it is",
        "STEP",
        read=step_of,
    )
    allow_change: tuple[str, ...] = flag(
        (),
        "settings, or groups of them, with commas between, in which a run that goes on may differ from how it began: "
        "--allow_change=optim.peak_lr. Recorded; never for the order of the data",
        "NAMES",
        read=lambda _, text: allowed_names(text),
    )
    replay: str | None = flag(
        None,
        "a new run that repeats what another one decided: skipped steps, cuts, rewinds' batches",
        "OLD_WORKDIR",
    )
    steal_lock: bool = flag(False, "takes the work folder from a process that holds it and is known to be gone")
    mode: int = flag(
        paths.PRIVATE,
        "who may read the run's files on a local disk, as chmod says it of a folder",
        "0700",
        read=lambda _, text: folder_mode(text),
        name="run_dir_mode",
    )

    @property
    def facts(self) -> dict[str, Any]:
        """The options by flag: they must be the same in all processes of a run."""
        return {f"--{field.name}": getattr(self, field.name) for field in dataclasses.fields(RunOptions)}


DEFAULT_OPTIONS = RunOptions()
