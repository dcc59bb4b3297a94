"""Options of one start of a run that are not part of its config."""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from jaxscale import schema
from jaxscale.config import RunConfig
from jaxscale.settings.command_line import flag
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.process import folder_mode

Log = Callable[[str], None]  # prints a line, on one process
# Settings that determine the rows of each step, so that a recorded data position is valid only for the same values.
NEVER = ("seed", "seq_len", "batch_tokens", "batch_ramp", "seq_len_ramp")


def allowed_names(name: str, text: str) -> tuple[str, ...]:
    """Parses a list of settings or groups of settings. Raises BadInput if one is unknown or may never change."""
    known = {part for setting, *_ in schema.describe(RunConfig) for part in groups_of(setting)}
    names = tuple(one.strip() for one in text.split(","))
    for one in names:
        if one in NEVER:
            raise BadInput(
                f"{name}={one} is not possible, because the data of each step depend on {one}; to change it, start a "
                "new run in another work folder"
            )
        if one not in known:
            leaf = {other.rpartition(".")[2]: other for other in sorted(known, reverse=True)}
            close = difflib.get_close_matches(one, known, n=1) or [leaf[n] for n in [one] if n in leaf]
            hint = f"; did you mean {close[0]}?" if close else "; write names as in --config.NAME, separated by commas"
            raise BadInput(f"{name}={one} is not a setting{hint}")
    return names


def groups_of(name: str) -> list[str]:
    """Returns a setting and its groups: 'optim.peak_lr' -> ['optim', 'optim.peak_lr']."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of one start that are not part of the config."""

    stop_after: int | None = flag(
        None,
        "saves and exits after this step (counted from 1); the learning rate schedule is unchanged",
        "STEP",
        least=1,
    )
    allow_change: tuple[str, ...] = flag(
        (),
        "comma-separated settings, or groups of settings, that may differ when a run resumes: "
        "--allow_change=optim.peak_lr. Changes are recorded. Settings of the data order may not change",
        "NAMES",
        read=lambda name, text: allowed_names(f"--{name}", text),
    )
    replay: str | None = flag(
        None,
        "starts a new run that repeats the decisions of another run: skipped steps, learning rate cuts, rewinds",
        "OLD_WORKDIR",
    )
    steal_lock: bool = flag(False, "takes over the lock of the work folder from a process that no longer runs")
    mode: int = flag(
        paths.PRIVATE,
        "permissions of the run's folders on a local disk, as for chmod",
        "0700",
        read=lambda _, text: folder_mode(text),
        name="run_dir_mode",
    )

    @property
    def facts(self) -> dict[str, Any]:
        """{flag: value} of all options. They must be equal in all processes of a run."""
        return {f"--{field.name}": getattr(self, field.name) for field in dataclasses.fields(RunOptions)}


DEFAULT_OPTIONS = RunOptions()
