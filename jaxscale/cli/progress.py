"""How far a run is, read from its work folder by another process. No device is asked for anything."""

import dataclasses
import statistics
from typing import Any

from jaxscale.checkpoint.config import CheckpointConfig
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json

TAIL_BYTES = 1 << 18  # of metrics.jsonl: some hundred steps, and a run may have written gigabytes


@dataclasses.dataclass(frozen=True)
class Progress:
    """One look at a work folder."""

    saved: dict[int, float]  # committed steps, and when each was written by the clock of the storage
    logged: int = 0  # the last step in metrics.jsonl
    last_line: str = ""  # of metrics.jsonl, to tell whether anything was added
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
        lines = tail(folder / "metrics.jsonl")
    except Exception as error:  # whatever the storage's client raises: to look is never worth an end
        return Progress({}, unknown=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    steps = [record for record in map(as_record, lines) if "tokens_hash" in record]
    seconds = [record["step_seconds"] for record in steps if record.get("step_seconds")]
    return Progress(
        saved,
        logged=max((record["step"] for record in steps), default=0),
        last_line=lines[-1] if lines else "",
        step_seconds=statistics.median(seconds) if seconds else 0.0,
    )


def written_at(folder: Any) -> float:
    """When the record of a step was written; 0.0 where it is missing, as in a damaged step."""
    try:
        stat = (folder / "run" / "metadata").stat()
    except (OSError, FileNotFoundError):
        return 0.0
    return float(getattr(stat, "st_mtime", None) or getattr(stat, "mtime", 0) or 0)


def tail(file: Any) -> list[str]:
    """The last lines of a file, without a torn one at either end; [] where there is none."""
    try:
        if paths.is_remote(file):
            content = file.read_bytes()[-TAIL_BYTES:]
        else:
            with paths.open_binary(file) as opened:
                size = opened.seek(0, 2)
                opened.seek(max(0, size - TAIL_BYTES))
                content = opened.read()
    except FileNotFoundError:
        return []
    pieces = content.decode("utf-8", "replace").split("\n")[:-1]
    return pieces[1:] if len(content) == TAIL_BYTES else pieces


def as_record(line: str) -> dict[str, Any]:
    """The JSON object of a line, {} where it is damaged."""
    try:
        record = parse_json(line)
    except BadInput:
        return {}
    return record if isinstance(record, dict) else {}
