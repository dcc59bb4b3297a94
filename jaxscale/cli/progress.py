"""How far a run is, read from its work folder by another process. No device is asked for anything."""

import dataclasses
import statistics
from typing import Any

from jaxscale.checkpoint.config import CheckpointConfig
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.monitor.records import Record, tail_records
from jaxscale.system import paths


@dataclasses.dataclass(frozen=True)
class Progress:
    """One look at a work folder."""

    saved: dict[int, float]  # committed steps, and when each was written by the clock of the storage
    logged: int = 0  # the last step in metrics.jsonl
    last_record: Record | None = None  # of metrics.jsonl, to tell whether anything was added
    step_seconds: float = 0.0  # median over the last steps; 0: unknown
    unknown: str = ""  # why the folder could not be read

    @property
    def newest(self) -> int:
        """The newest committed step, 0 if there is none."""
        return max(self.saved, default=0)

    def won(self, before: "Progress") -> bool:
        """True if a checkpoint is here that was not there before, be it of an earlier step after a rewind."""
        return bool(set(self.saved.items()) - set(before.saved.items()))


def look(workdir: Any) -> Progress:
    """The progress of the run in `workdir`; empty where there is none yet, with the cause where it cannot be read."""
    folder = paths.as_path(workdir)
    try:
        checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
        saved = {step: written_at(checkpoints.directory / str(step)) for step in checkpoints.all_steps()}
        records = tail_records(folder / "metrics.jsonl")
    except Exception as error:  # whatever the storage's client raises: to look is never worth an end
        return Progress({}, unknown=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    steps = [record for record in records if "tokens_hash" in record]
    seconds = [record["step_seconds"] for record in steps if record.get("step_seconds")]
    return Progress(
        saved,
        logged=max((record["step"] for record in steps), default=0),
        last_record=records[-1] if records else None,
        step_seconds=statistics.median(seconds) if seconds else 0.0,
    )


def written_at(folder: Any) -> float:
    """When the record of a step was written; 0.0 where it is missing, as in a damaged step."""
    try:
        return (folder / "run" / "metadata").stat().st_mtime
    except OSError:
        return 0.0
