"""The metrics writer, which sends each record to metrics.jsonl, TensorBoard, the console and external services."""

import dataclasses
import io
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TextIO

from jaxscale import units
from jaxscale.runtime.monitor.alerts import Diagnosis
from jaxscale.runtime.monitor.config import MonitorConfig
from jaxscale.runtime.monitor.console import choose_style, find_display, open_console
from jaxscale.runtime.monitor.records import Damage, Record, RecordFile, append, parse_file, read_lines, write_lines
from jaxscale.runtime.monitor.sinks import Sink, TensorBoard, open_sinks
from jaxscale.runtime.monitor.upload import LAST_SECONDS
from jaxscale.system import paths
from jaxscale.system.redact import redacted

REMOTE_SECONDS = 10.0  # between uploads, each of which rewrites the whole object
METRICS, SAMPLES, EXPERTS = "metrics.jsonl", "samples.jsonl", "experts.jsonl"
SAMPLE_CHARACTERS = 70  # length of a sample on the console


@dataclasses.dataclass(eq=False)
class Writer:
    """Writes the metrics of steps start_step + 1 to total_steps.

    Drops existing records after start_step from metrics.jsonl and hides them in TensorBoard, since those steps are
    repeated. A new run (start_step=0) also drops records of step 0.
    """

    workdir: Any
    cfg: MonitorConfig
    total_steps: int
    start_step: int = 0
    _: dataclasses.KW_ONLY
    primary: bool = True  # the one process that writes
    stream: TextIO | None = None
    vitals: Callable[[], Mapping[str, Any]] = dict  # returns values to add to each record: goodput and telemetry
    diagnosis: Diagnosis | None = None  # receives every record, existing records first

    def __post_init__(self):
        self.sinks: list[Sink | TensorBoard] = []
        self.workdir = paths.as_path(self.workdir)
        notebook = self.stream is None and find_display() is not None
        style = choose_style(self.cfg.progress, self.stream or sys.stdout, notebook=notebook) if self.primary else "off"
        self.console = open_console(style, self.total_steps, self.stream)
        self.metrics_file, self.reported = None, set()
        self.other_files: dict[str, RecordFile] = {}  # samples and expert counts, once there are any
        if not self.primary:
            self.diagnosis = None
            return
        self.metrics_file, existing = open_records(self.workdir / METRICS, self.start_step)
        for name in (SAMPLES, EXPERTS):
            if (self.workdir / name).exists():  # drop records of repeated steps
                self.other_files[name], _ = open_records(self.workdir / name, self.start_step)
        if self.diagnosis is not None:
            self.diagnosis.replay(existing.records, self.say)
        if existing.damaged:
            self.say(f"metrics.jsonl: dropped {units.plural(existing.damaged, 'damaged line')}")
        if existing.dropped_steps:
            first, last = min(existing.dropped_steps), max(existing.dropped_steps)
            self.say(f"metrics.jsonl: dropped steps {first} to {last}, which are repeated")
        self.sinks += open_sinks(self.cfg.writers, self.workdir)
        self.open_tensorboard()

    def open_tensorboard(self) -> None:
        """Opens TensorBoard in a local work folder."""
        if self.cfg.tensorboard and paths.is_remote(self.workdir):
            self.say("TensorBoard events are written to local folders only; metrics.jsonl has every number")
        elif self.cfg.tensorboard:
            self.sinks.append(TensorBoard(self.workdir / "tensorboard", self.start_step))

    def due(self, step: int) -> bool:
        """Returns True for steps whose metrics are written: the first, the last, and multiples of log_every_steps."""
        return step in (self.start_step + 1, self.total_steps) or step % self.cfg.log_every_steps == 0

    def write(self, step: int, metrics: Mapping[str, float | int | None | str]) -> None:
        """Writes one record to all outputs. Non-finite values are null in metrics.jsonl and listed in "nonfinite"."""
        if self.metrics_file is None:  # not the primary process
            return
        to_python = lambda value: value.item() if hasattr(value, "item") else value
        values = redacted({name: to_python(value) for name, value in {**metrics, **self.vitals()}.items()})
        record = json_record(step, values)
        self.metrics_file.write(record)
        for sink in self.sinks:
            sink.write(step, values)
        self.console.metrics(step, values)
        self.log_problems()
        if self.diagnosis is not None:
            self.diagnosis.update(record)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Writes generated text to samples.jsonl and all writers, and its first characters to the console."""
        if not self.primary:
            return
        record = redacted({"step": step, "prompt": prompt, "text": text})
        self.append(SAMPLES, record)
        for sink in self.sinks:
            sink.write_text(step, "sample", record["text"])
        self.say(f"sample of step {step}: {' '.join(record['text'].split())[:SAMPLE_CHARACTERS]}")
        self.log_problems()

    def experts(self, step: int, counts: Mapping[str, Any]) -> None:
        """Writes expert counts to experts.jsonl."""
        if self.primary:
            self.append(EXPERTS, {"step": step, **counts})
            self.log_problems()

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Appends a record to a file in the work folder."""
        if name not in self.other_files:
            self.other_files[name], _ = open_records(self.workdir / name, self.start_step)
        self.other_files[name].write(record)

    def log_problems(self) -> None:
        """Logs the addresses of runs in external services, and each write error once."""
        for sink in self.sinks:
            if sink.announcement:
                self.say(sink.announcement)
                sink.announcement = ""
        problems = [output.problem for output in (*self.files(), *self.sinks) if output.problem]
        for problem in problems:
            if problem not in self.reported:
                self.say(problem)
        self.reported = set(problems)

    def files(self) -> list[RecordFile]:
        """Returns the open JSON Lines files."""
        return [file for file in (self.metrics_file, *self.other_files.values()) if file is not None]

    def upload_soon(self) -> None:
        """Starts pending uploads now, for example before a checkpoint of the same step. Does not block."""
        for file in self.files():
            file.upload_soon()

    def tick(self, step: int) -> None:
        """Moves the progress bar to this step."""
        self.console.tick(step)

    def say(self, text: str) -> None:
        """Prints a message above the progress bar, without control characters."""
        if self.primary:
            self.console.say(text)

    def close(self) -> None:
        """Flushes and closes all outputs. May be called twice."""
        for file in self.files():
            if not file.flush(LAST_SECONDS):
                self.say(f"{file.path} lacks the last records: {file.problem or 'no response yet'}")
        for output in (*self.files(), *self.sinks):
            output.close()
        if self.diagnosis is not None:
            self.diagnosis.close()
        self.console.close()
        self.metrics_file, self.other_files = None, {}  # their problems are logged above
        self.log_problems()
        self.sinks, self.diagnosis, self.primary = [], None, False


class ExistingRecords(NamedTuple):
    """Records in a file before this process started."""

    records: list[Record]  # up to start_step
    dropped_steps: list[int]
    damaged: int  # number of damaged lines, which are dropped


def open_records(path: Any, start_step: int) -> tuple[RecordFile, ExistingRecords]:
    """Drops records after start_step, or all records if it is 0. Returns (file to append to, existing records)."""
    file, damage = RecordFile(path, every_seconds=REMOTE_SECONDS), Damage()
    uploader = None
    if paths.is_remote(path):
        content, uploader = file.open_object()
        found = parse_file(io.BytesIO(content), damage)
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
    return file, ExistingRecords(records, dropped, damaged)


def json_record(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one record of metrics.jsonl."""
    assert "step" not in metrics and "nonfinite" not in metrics, f"reserved names in {sorted(metrics)}"
    nonfinite = [name for name, value in metrics.items() if isinstance(value, float) and not math.isfinite(value)]
    record = {"step": step} | {name: None if name in nonfinite else value for name, value in metrics.items()}
    if nonfinite:
        record["nonfinite"] = nonfinite
    return record
