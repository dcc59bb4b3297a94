"""The metrics writer: metrics.jsonl, TensorBoard, the console and other services get the same numbers at each step."""

import io
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TextIO

from jaxscale import units
from jaxscale.monitor.alerts import Diagnosis
from jaxscale.monitor.config import MonitorConfig
from jaxscale.monitor.console import choose_style, find_display, open_console
from jaxscale.monitor.records import Damage, Record, RecordFile, append, lines_of, read_lines, write_lines
from jaxscale.monitor.sinks import Sink, open_sinks
from jaxscale.monitor.tensorboard import Scalars
from jaxscale.monitor.upload import LAST_SECONDS
from jaxscale.system import paths
from jaxscale.system.redact import redacted

REMOTE_SECONDS = 10.0  # an object cannot be appended to: it is written again whole, so not too often
METRICS, SAMPLES, EXPERTS = "metrics.jsonl", "samples.jsonl", "experts.jsonl"
SAMPLE_CHARACTERS = 70  # of a sample on the console


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
        self.lines, self.events, self.told = None, None, set()
        self.others: dict[str, RecordFile] = {}  # samples and counts, once there are any
        self.clock = clock
        if not primary:
            return
        self.lines, earlier = open_records(self.workdir / METRICS, start_step, clock)
        for name in (SAMPLES, EXPERTS):
            if (self.workdir / name).exists():  # what steps wrote that are run again is dropped there too
                self.others[name], _ = open_records(self.workdir / name, start_step, clock)
        if self.diagnosis is not None:
            self.diagnosis.begin(earlier.records, self.say)
        if earlier.damaged:
            self.say(f"metrics.jsonl: dropped {units.plural(earlier.damaged, 'damaged line')}")
        if earlier.dropped_steps:
            first, last = min(earlier.dropped_steps), max(earlier.dropped_steps)
            self.say(f"metrics.jsonl: steps {first} to {last} are run again")
        self.sinks = open_sinks(cfg.writers, self.workdir)
        if cfg.tensorboard and paths.is_remote(workdir):
            self.say("TensorBoard events are written to local folders only; metrics.jsonl has every number")

    def due(self, step: int) -> bool:
        """True if training metrics of this step are to be written: the first, the last and every log_every_steps."""
        return step in (self.start_step + 1, self.total_steps) or step % self.cfg.log_every_steps == 0

    def write(self, step: int, metrics: Mapping[str, float | int | None | str]) -> None:
        """Writes one record everywhere. Names with slashes are groups; 'validation/...' gets a console line of its own.

        A value that is not finite becomes null in metrics.jsonl, which has no NaN, and is named in "nonfinite".
        """
        if self.lines is None:  # of the first process alone
            return
        plain_value = lambda value: value.item() if hasattr(value, "item") else value  # of arrays of one number
        plain = redacted({name: plain_value(value) for name, value in {**metrics, **self.vitals()}.items()})
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
        self.append(SAMPLES, record)
        if self.events is not None:  # scalars came before
            self.events.write_text(step, "sample", record["text"])
        self.say(f"sample of step {step}: {' '.join(record['text'].split())[:SAMPLE_CHARACTERS]}")
        self.tell_problems()

    def experts(self, step: int, counts: Mapping[str, Any]) -> None:
        """Writes how often each expert was chosen to experts.jsonl."""
        if self.primary:
            self.append(EXPERTS, {"step": step, **counts})
            self.tell_problems()

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Writes a record to a file of this name beside metrics.jsonl."""
        if name not in self.others:
            self.others[name], _ = open_records(self.workdir / name, self.start_step, self.clock)
        self.others[name].write(record)

    def tell_problems(self) -> None:
        """Says what could not be written, once for each cause."""
        problems = [sink.problem for sink in self.receivers() if sink.problem]
        for problem in problems:
            if problem not in self.told:
                self.say(problem)
        self.told = set(problems)

    def receivers(self) -> list[Any]:
        """All that records go to now."""
        return [sink for sink in (self.lines, *self.others.values(), self.events, *self.sinks) if sink is not None]

    def say_news(self, sink: Sink) -> None:
        """Says once where a person finds the run."""
        if sink.news:
            self.say(sink.news)
            sink.news = ""

    def upload_soon(self) -> None:
        """Starts to bring what there is to a bucket now, as before a save that these metrics belong to. Never waits."""
        for lines in (self.lines, *self.others.values()):
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
        for lines in (self.lines, *self.others.values()):
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
        self.lines, self.others, self.events, self.sinks, self.diagnosis = None, {}, None, [], None
        self.primary = False


class Earlier(NamedTuple):
    """What a file of records holds from before this start."""

    records: list[Record]  # that stay
    dropped_steps: list[int]
    damaged: int  # lines, which are dropped


def open_records(path: Any, start_step: int, clock: Callable[[], float]) -> tuple[RecordFile, Earlier]:
    """(metrics.jsonl or one beside it to append to, what it holds of the steps up to start_step).

    Where start_step is 0 nothing stays: the validation before the first step is run again.
    """
    file, damage = RecordFile(path, every_seconds=REMOTE_SECONDS, clock=clock), Damage()
    uploader = None
    if paths.is_remote(path):
        content, uploader = file.take_up()
        found = lines_of(io.BytesIO(content), damage)
    else:
        found = read_lines(path, damage)
    lines, records, dropped, without_step = [], [], [], 0
    for line, record in found:
        step = record.get("step")
        if not isinstance(step, (int, float)):
            without_step += 1
        elif 0 < start_step and step <= start_step:
            lines.append(line)
            records.append(record)
        else:
            dropped.append(int(step))
    damaged = damage.lines + damage.torn + without_step
    if uploader is not None:
        uploader.put("".join(f"{line.decode()}\n" for line in lines))
    elif dropped or damaged:
        write_lines(path, lines)
    else:
        append(path, b"")
    return file, Earlier(records, dropped, damaged)


def json_record(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """What a line of metrics.jsonl holds."""
    assert "step" not in metrics and "nonfinite" not in metrics, f"reserved names in {sorted(metrics)}"
    nonfinite = [name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
    record = {"step": step} | {name: None if name in nonfinite else value for name, value in metrics.items()}
    if nonfinite:
        record["nonfinite"] = nonfinite
    return record
