"""The one door for metrics: metrics.jsonl, TensorBoard and the console get the same numbers at the same step."""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO

from jaxscale import paths
from jaxscale.monitor.console import Console, choose_style
from jaxscale.monitor.tensorboard import EventFile
from jaxscale.schema import setting

REMOTE_SECONDS = 60.0  # an object cannot be appended to: it is written again whole, so not too often


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """How often metrics are written, and where they are shown."""

    log_every_steps: int = setting(10, "steps between two lines of training metrics", may_change=True)
    tensorboard: bool = setting(True, "write TensorBoard event files to WORKDIR/tensorboard", may_change=True)
    progress: Literal["auto", "bar", "lines", "off"] = setting(
        "auto",
        "progress on the console; auto: a bar on a terminal, a line every log_every_steps elsewhere",
        may_change=True,
    )

    def __post_init__(self):
        if self.log_every_steps < 1:
            raise ValueError(f"log_every_steps={self.log_every_steps} must be at least 1")


class Writer:
    """Writes metrics of steps (start_step, total_steps].

    Args: start_step: the step that the run goes on from, 0 for a new one. What metrics.jsonl and TensorBoard hold of
    later steps is dropped, since those steps are run again; of a new run, step 0 as well. primary: False on all
    processes but one, which stay silent.
    """

    def __init__(
        self,
        workdir: Any,
        cfg: MonitorConfig,
        total_steps: int,
        start_step: int = 0,
        *,
        primary: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.cfg, self.total_steps, self.start_step, self.primary = cfg, total_steps, start_step, primary
        self.workdir = paths.as_path(workdir)
        style = choose_style(cfg.progress, stream or sys.stdout) if primary else "off"
        self.console = Console(style, total_steps, stream, clock)
        self.lines, self.events = None, None
        if not primary:
            return
        self.lines = JsonLines(self.workdir / "metrics.jsonl", start_step, clock)
        if self.lines.damaged:
            self.say(f"metrics.jsonl: dropped {self.lines.damaged} damaged lines")
        if self.lines.dropped_steps:
            first, last = min(self.lines.dropped_steps), max(self.lines.dropped_steps)
            self.say(f"metrics.jsonl: steps {first} to {last} are run again")
        if cfg.tensorboard and paths.is_remote(workdir):
            self.say("TensorBoard events are written to local folders only; metrics.jsonl has every number")

    def due(self, step: int) -> bool:
        """True if training metrics of this step are to be written: the first, the last and every log_every_steps."""
        return step in (self.start_step + 1, self.total_steps) or step % self.cfg.log_every_steps == 0

    def write(self, step: int, metrics: Mapping[str, float | int | None | str]) -> None:
        """Writes one record everywhere. Names with slashes are groups; 'validation/...' gets a console line of its own.

        A value that is not finite becomes null in metrics.jsonl, which has no NaN, and is named in "nonfinite".
        """
        if not self.primary:
            return
        plain = {name: plain_value(value) for name, value in metrics.items()}
        self.lines.write(step, plain)
        if self.cfg.tensorboard and not paths.is_remote(self.workdir):
            if self.events is None:
                self.events = EventFile(self.workdir / "tensorboard", self.start_step)
            scalars = {name: float(value) for name, value in plain.items() if isinstance(value, (int, float))}
            self.events.write(step, scalars)
        self.console.metrics(step, plain)

    def tick(self, step: int) -> None:
        """Moves the progress bar; costs nothing else."""
        self.console.tick(step)

    def say(self, text: str) -> None:
        """Prints a message without breaking the bar; control characters are taken out."""
        if self.primary:
            self.console.say(text)

    def close(self) -> None:
        """Writes out what is buffered and ends the bar. May be called twice."""
        self.console.close()
        for sink in (self.lines, self.events):
            if sink is not None:
                sink.close()
        self.lines = self.events = None
        self.primary = False


class JsonLines:
    """metrics.jsonl: one JSON object a line, the step first, then names in the order given; flushed at each write."""

    def __init__(self, path: Any, start_step: int, clock: Callable[[], float]):
        self.path, self.clock, self.written_at, self.file = path, clock, clock(), None
        kept, self.dropped_steps, self.damaged, changed = kept_lines(path, start_step)
        if changed:
            paths.write_text_atomic(path, "".join(kept))
        if paths.is_remote(path):
            self.text = kept  # a bucket's copy is at most REMOTE_SECONDS behind
        else:
            self.file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends a record."""
        line = json_line(step, metrics)
        if self.file is not None:
            self.file.write(line)
            self.file.flush()
            return
        self.text.append(line)
        if self.clock() - self.written_at >= REMOTE_SECONDS:
            self.upload()

    def upload(self) -> None:
        """Replaces the object in the bucket by all lines so far."""
        paths.write_text_atomic(self.path, "".join(self.text))
        self.written_at = self.clock()

    def close(self) -> None:
        """Ends the file."""
        if self.file is not None:
            self.file.close()
        else:
            self.upload()


def json_line(step: int, metrics: Mapping[str, Any]) -> str:
    """One line of metrics.jsonl with its newline."""
    assert "step" not in metrics and "nonfinite" not in metrics, f"reserved names in {sorted(metrics)}"
    nonfinite = [name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
    record = {"step": step} | {name: None if name in nonfinite else value for name, value in metrics.items()}
    if nonfinite:
        record["nonfinite"] = nonfinite
    return json.dumps(record, allow_nan=False) + "\n"


def kept_lines(path: Any, start_step: int) -> tuple[list[str], list[int], int, bool]:
    """(lines that stay, steps of those that go, number of damaged lines that go, whether the file changes).

    Steps up to start_step stay, but nothing does where that is 0: the validation before the first step is run again.
    A process killed while it wrote leaves a torn last line; a power cut can leave others.
    """
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return [], [], 0, False
    kept, dropped, damaged = [], [], 0
    for line in filter(None, text.split("\n")):
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError):
            damaged += 1
            continue
        if 0 < start_step and step <= start_step:
            kept.append(line + "\n")
        else:
            dropped.append(step)
    return kept, dropped, damaged, "".join(kept) != text


def plain_value(value: Any) -> Any:
    """A Python number, text, bool or None; arrays of one number are turned into it."""
    return value.item() if hasattr(value, "item") else value
