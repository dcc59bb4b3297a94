"""The one door for metrics: metrics.jsonl, TensorBoard and the console get the same numbers at the same step."""

import collections
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO

from jaxscale.monitor.alerts import Diagnosis
from jaxscale.monitor.appending import append
from jaxscale.monitor.console import choose_style
from jaxscale.monitor.health import HealthConfig
from jaxscale.monitor.notebook import find_display, open_console
from jaxscale.monitor.profile import parse_steps
from jaxscale.monitor.sinks import Sink, open_sinks
from jaxscale.monitor.tensorboard import Scalars
from jaxscale.monitor.upload import LAST_SECONDS, Uploader, take_up
from jaxscale.schema import setting
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Stop
from jaxscale.system.foreign import parse_json
from jaxscale.system.redact import redacted

REMOTE_SECONDS = 10.0  # an object cannot be appended to: it is written again whole, so not too often
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
SAMPLE_CHARACTERS = 70  # of a sample on the console
MOST_UNWRITTEN = 10_000  # lines that wait in memory for a disk that is full, about 10 MB


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """How often metrics are written, and where they are shown."""

    log_every_steps: int = setting(10, "steps between two lines of training metrics", may_change=True)
    statistics_every_steps: int = setting(
        100,
        "steps between two looks at activations, attention, gradients and updates of each layer; each costs about a "
        "step; 0: none",
        may_change=True,
    )
    tensorboard: bool = setting(True, "write TensorBoard event files to WORKDIR/tensorboard", may_change=True)
    progress: Literal["auto", "bar", "lines", "off"] = setting(
        "auto",
        "progress on the console; auto: a bar on a terminal and in a notebook, a line every log_every_steps elsewhere",
        may_change=True,
    )
    health: HealthConfig = setting(HealthConfig, may_change=True, read_if="monitor.health.on")

    writers: tuple[Literal["wandb", "trackio"], ...] = setting(
        (), "where metrics go besides metrics.jsonl and TensorBoard: wandb, trackio", may_change=True
    )
    profile_steps: str | None = setting(
        None, "steps to capture for XProf, FIRST:STOP such as 100:105 for 100 to 104", may_change=True
    )
    profile_processes: Literal["first", "all"] = setting(
        "first", "which processes capture profile_steps", may_change=True, read_if="monitor.profile_steps"
    )
    telemetry_seconds: float = setting(
        30.0, "seconds between two questions to the devices for power and temperature; 0: never", may_change=True
    )

    def __post_init__(self):
        parse_steps(self.profile_steps)
        if len(set(self.writers)) < len(self.writers):
            raise BadInput(f"writers={self.writers} names one twice")
        if self.telemetry_seconds != 0 and not 1 <= self.telemetry_seconds < math.inf:
            raise BadInput(f"telemetry_seconds={self.telemetry_seconds} must be 0 (never) or at least 1")
        if self.log_every_steps < 1:
            raise BadInput(f"log_every_steps={self.log_every_steps} must be at least 1")
        if self.statistics_every_steps < 0:
            raise BadInput(f"statistics_every_steps={self.statistics_every_steps} must not be negative; 0: none")


class Writer:
    """Writes metrics of steps (start_step, total_steps].

    Args: start_step: the step that the run goes on from, 0 for a new one. What metrics.jsonl and TensorBoard hold of
    later steps is dropped, since those steps are run again; of a new run, step 0 as well. primary: False on all
    processes but one, which stay silent. diagnosis: sees every record, those that are kept first.
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
        vitals: Callable[[], Mapping[str, Any]] = dict,
        diagnosis: Diagnosis | None = None,
    ):
        """vitals: more numbers for each record, of the moment when it is written: goodput, and what the devices say."""
        self.vitals = vitals
        self.sinks: list[Sink] = []
        self.cfg, self.total_steps, self.start_step, self.primary = cfg, total_steps, start_step, primary
        self.diagnosis = diagnosis if primary else None
        self.workdir = paths.as_path(workdir)
        notebook = stream is None and find_display() is not None
        style = choose_style(cfg.progress, stream or sys.stdout, notebook=notebook) if primary else "off"
        self.console = open_console(style, total_steps, stream, clock)
        self.lines, self.samples, self.events, self.told = None, None, None, set()
        self.clock = clock
        if not primary:
            return
        self.lines = JsonLines(self.workdir / METRICS, start_step, clock)
        if (self.workdir / SAMPLES).exists():  # what steps wrote that are run again is dropped there too
            self.samples = JsonLines(self.workdir / SAMPLES, start_step, clock)
        if self.diagnosis is not None:
            self.diagnosis.begin([parse_json(line) for line in self.lines.kept], self.say)
        self.lines.kept = []
        if self.lines.damaged:
            self.say(f"metrics.jsonl: dropped {self.lines.damaged} damaged lines")
        if self.lines.dropped_steps:
            first, last = min(self.lines.dropped_steps), max(self.lines.dropped_steps)
            self.say(f"metrics.jsonl: steps {first} to {last} are run again")
        self.sinks = open_sinks(cfg.writers, self.workdir, start_step)
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
        plain = redacted({name: plain_value(value) for name, value in (metrics | self.vitals()).items()})
        record = json_record(step, plain)
        self.lines.write(record)
        for sink in self.sinks:
            sink.write(step, plain)
            self.say_news(sink)
        if self.cfg.tensorboard and not paths.is_remote(self.workdir):
            if self.events is None:
                self.events = Scalars(self.workdir / "tensorboard", self.start_step)
            scalars = {name: float(value) for name, value in plain.items() if isinstance(value, (int, float))}
            self.events.write(step, scalars)
        self.console.metrics(step, plain)
        self.tell_problems()
        if self.diagnosis is not None:
            self.diagnosis.take(record)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Writes what the model has written to samples.jsonl and TensorBoard, and its beginning on the console."""
        if not self.primary:
            return
        record = redacted({"step": step, "prompt": prompt, "text": text})
        if self.samples is None:
            self.samples = JsonLines(self.workdir / SAMPLES, self.start_step, self.clock)
        self.samples.write(record)
        if self.events is not None:  # scalars came before
            self.events.write_text(step, "sample", record["text"])
        self.say(f"sample of step {step}: {' '.join(record['text'].split())[:SAMPLE_CHARACTERS]}")
        self.tell_problems()

    def tell_problems(self) -> None:
        """Says what could not be written, once for each cause."""
        problems = [sink.problem for sink in self.receivers() if sink.problem]
        for problem in problems:
            if problem not in self.told:
                self.say(problem)
        self.told = set(problems)

    def receivers(self) -> list[Any]:
        """All that records go to now."""
        return [sink for sink in (self.lines, self.samples, self.events, *self.sinks) if sink is not None]

    def say_news(self, sink: Sink) -> None:
        """Says once where a person finds the run."""
        if sink.news:
            self.say(sink.news)
            sink.news = ""

    def upload_soon(self) -> None:
        """Starts to bring what there is to a bucket now, as before a save that these metrics belong to. Never waits."""
        for lines in (self.lines, self.samples):
            if lines is not None:
                lines.upload_soon()

    def tick(self, step: int) -> None:
        """Moves the progress bar; costs nothing else."""
        self.console.tick(step)

    def say(self, text: str) -> None:
        """Prints a message without breaking the bar; control characters are taken out."""
        if self.primary:
            self.console.say(text)

    def close(self) -> None:
        """Writes out what is buffered and ends the bar. May be called twice."""
        for lines in (self.lines, self.samples):
            if lines is not None and not lines.flush(LAST_SECONDS):
                self.say(f"{lines.path} lacks the last lines: {lines.problem or 'no answer yet'}")
        for sink in self.receivers():
            sink.close()
        if self.events is not None and self.events.problem and self.events.problem not in self.told:
            self.say(self.events.problem)
        if self.diagnosis is not None:
            self.diagnosis.close()
        self.console.close()
        for sink in self.sinks:
            self.say_news(sink)
            if sink.problem and sink.problem not in self.told:
                self.say(sink.problem)
        self.lines, self.samples, self.events, self.sinks, self.diagnosis = None, None, None, [], None
        self.primary = False


class JsonLines:
    """metrics.jsonl, samples.jsonl: one JSON object a line with its step; there after each write.

    Where the disk fails, the lines wait in memory for the next write.
    """

    def __init__(self, path: Any, start_step: int, clock: Callable[[], float]):
        self.path, self.uploader, self.cause = path, None, None
        self.unwritten: collections.deque[str] = collections.deque(maxlen=MOST_UNWRITTEN)
        found, replace = take_up(path)
        kept, self.dropped_steps, self.damaged, changed = kept_lines(found, start_step)
        self.kept = kept  # until whoever made this has looked at them
        if paths.is_remote(path):
            self.uploader = Uploader(path, every_seconds=REMOTE_SECONDS, clock=clock, write=replace)
            self.uploader.put("".join(kept))
        elif changed:
            paths.write_text_atomic(path, "".join(kept))
        else:
            append(path, b"")

    @property
    def problem(self) -> str | None:
        """Why the file is behind, if it is so for other reasons than the pause between uploads to a bucket."""
        if self.uploader is not None:
            return self.uploader.problem
        if self.cause is None:
            return None
        lost = "; the oldest of its lines are lost" if len(self.unwritten) == MOST_UNWRITTEN else ""
        return f"{self.path} is behind and tried again: {self.cause}{lost}"

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record."""
        line = json.dumps(record, allow_nan=False) + "\n"
        if self.uploader is not None:
            self.uploader.append(line)
            return
        self.unwritten.append(line)
        self.write_out()

    def write_out(self) -> None:
        """Brings the lines that wait to the disk, if it takes them."""
        try:
            append(self.path, "".join(self.unwritten).encode())
        except Stop:  # the file is another's now
            self.unwritten.clear()
            raise
        except OSError as error:
            self.cause = error.strerror or str(error)
        else:
            self.unwritten.clear()
            self.cause = None

    def upload_soon(self) -> None:
        """Leaves out the pause between uploads, once."""
        if self.uploader is not None:
            self.uploader.hurry()

    def flush(self, seconds: float) -> bool:
        """True if all lines are where they belong within so many seconds."""
        if self.uploader is not None:
            return self.uploader.flush(seconds)
        if self.unwritten:
            self.write_out()
        return not self.unwritten

    def close(self) -> None:
        """Ends the file: nothing is written any more."""
        if self.uploader is not None:
            self.uploader.close()


def json_record(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What a line of metrics.jsonl holds."""
    assert "step" not in metrics and "nonfinite" not in metrics, f"reserved names in {sorted(metrics)}"
    nonfinite = [name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
    record = {"step": step} | {name: None if name in nonfinite else value for name, value in metrics.items()}
    if nonfinite:
        record["nonfinite"] = nonfinite
    return record


def kept_lines(content: bytes, start_step: int) -> tuple[list[str], list[int], int, bool]:
    """(lines that stay, steps of those that go, number of damaged lines that go, whether the file changes).

    Steps up to start_step stay, but nothing does where that is 0: the validation before the first step is run again.
    A process killed while it wrote leaves a torn last line; a power cut can leave others.
    """
    text = content.decode("utf-8", "replace")
    kept, dropped, damaged = [], [], 0
    for line in filter(None, text.split("\n")):
        try:
            step = int(parse_json(line)["step"])
        except (BadInput, TypeError, KeyError):
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
