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
NEVER = ("seed", "seq_len", "batch_tokens", "batch_ramp", "seq_len_ramp")


def allowed_names(name: str, text: str) -> tuple[str, ...]:
    """The settings, or groups of them, that `name` lists in `text`. Raises BadInput for one that may never change."""
    known = {part for setting, *_ in schema.describe(RunConfig) for part in groups_of(setting)}
    names = tuple(one.strip() for one in text.split(","))
    for one in names:
        if one in NEVER:
            raise BadInput(
                f"{name}={one}: which rows each step reads follows from {one}, so that a run cannot go on with "
                "another; begin a new run in another work folder"
            )
        if one not in known:
            leaf = {other.rpartition(".")[2]: other for other in sorted(known, reverse=True)}
            close = difflib.get_close_matches(one, known, n=1) or [leaf[n] for n in [one] if n in leaf]
            hint = f"; did you mean {close[0]}?" if close else "; write names as in --config.NAME, with commas between"
            raise BadInput(f"{name}={one} is not a setting{hint}")
    return names


def groups_of(name: str) -> list[str]:
    """'optim.peak_lr' -> ['optim', 'optim.peak_lr']."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What a start is asked for beyond its config; of this start alone."""

    stop_after: int | None = flag(
        None,
        "saves and leaves after this step (counted from 1); the learning rate's horizon stays as it is",
        "STEP",
        least=1,
    )
    allow_change: tuple[str, ...] = flag(
        (),
        "settings, or groups of them, with commas between, in which a run that goes on may differ from how it began: "
        "--allow_change=optim.peak_lr. Recorded; never for the order of the data",
        "NAMES",
        read=lambda name, text: allowed_names(f"--{name}", text),
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
