"""The history of a run, finished or not: metrics, events, config and samples, read from its work folder.

Reports and tools read runs through this module. It modifies no file and does not raise for damaged files: `problems`
lists what was skipped. Lines are read one by one and thinned, so that memory is bounded.
"""

import collections
import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

from jaxscale.runtime.monitor import run_files
from jaxscale.runtime.monitor.run_files import ExpertCounts, Row, as_dict, as_list, clean_event, is_number, read_lines
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.units import BatchSizes, recorded_sizes

MOST_VALUES = 1_000_000  # values of metrics.jsonl in memory, about 80 MB
MOST_EVENTS = 20_000  # newest events in memory, about 20 MB
MOST_SAMPLES = 200
LONGEST_TEXT = 20_000  # characters of a sample
RUN_FILES = ("metrics.jsonl", "events.jsonl", "config.json")
OPTIONAL_FILES = ("abandoned.jsonl", "samples.jsonl", "experts.jsonl", "sample.txt", "forecast.json", "evals.jsonl")
LEDGERS = "supervise*.jsonl"  # one for each host that runs `jaxscale supervise`


class TextSample(NamedTuple):
    """Text that the model wrote."""

    step: int | None
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """A run, as read from its work folder. Non-finite numbers are None; "nonfinite" in a row lists their names."""

    workdir: str
    rows: tuple[Row, ...] = ()  # training and validation rows of metrics.jsonl, by step
    abandoned: tuple[Row, ...] = ()  # rows of steps undone by a rewind; "rewind" is its number or None
    events: tuple[Row, ...] = ()  # oldest first
    config: dict[str, Any] = dataclasses.field(default_factory=dict)  # config.json, or {} if missing
    problems: tuple[str, ...] = ()  # messages about missing, damaged or skipped data
    samples: tuple[TextSample, ...] = ()
    forecast: dict[str, Any] | None = None  # forecast.json: tokens, low, middle, high, made_from
    evals: tuple[Row, ...] = ()  # rows of evals.jsonl (evaluations outside the run), sorted by step
    supervised: tuple[Row, ...] = ()  # the ledgers of `jaxscale supervise`, oldest first
    experts: ExpertCounts | None = None  # from experts.jsonl, for models with experts
    written_at: float | None = None  # Unix time of the last write of metrics or events, by the storage's clock
    label: str = ""  # name to show instead of the folder's name
    lines: int = 0  # number of lines in metrics.jsonl; more than len(rows) if the rows are thinned

    @property
    def name(self) -> str:
        """The label, or the name of the work folder."""
        return self.label or self.workdir.rstrip("/").rpartition("/")[2] or self.workdir

    def part(self, *names: str) -> dict[str, Any]:
        """Returns the group of config.json at the path `names`, outermost first; {} if it is missing."""
        return functools.reduce(lambda found, name: as_dict(found.get(name)), names, self.config)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Returns (steps, values) of a metric, from the rows in which it is finite."""
        return series_of(self.rows, name)

    def names(self) -> list[str]:
        """Returns the names of all numeric metrics, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name, value in row.items() if is_number(value)))

    def eval_names(self) -> list[str]:
        """Returns the metric names of all named evaluators, from the rows and from evals.jsonl."""
        found = [name for name in self.names() if name.startswith(("evals/", "evals_ema/"))]
        return list(dict.fromkeys([*found, *(name for row in self.evals for name in row if name != "step")]))

    def evaluated(self, name: str) -> tuple[list[int], list[float]]:
        """Returns (steps, values) of an evaluator's metric. Values in evals.jsonl take precedence over the rows."""
        found = dict(zip(*self.series(name))) | dict(zip(*series_of(self.evals, name)))
        return sorted(found), [found[step] for step in sorted(found)]

    @property
    def batches(self) -> BatchSizes | None:
        """Tokens of each batch according to config.json, or None if unknown."""
        budget = self.part("budget")
        pairs = [part for part in as_list(budget.get("ramp")) if isinstance(part, list) and len(part) == 2]
        numbers = [budget.get("batch_tokens"), *(number for _, number in pairs)]
        is_whole = all(is_number(number) and number >= 1 for number in numbers)
        return recorded_sizes(budget | {"ramp": pairs}) if is_whole and all(is_number(n) for n, _ in pairs) else None

    def latest(self, name: str) -> float | None:
        """Returns the last finite value of a metric, or None."""
        return next((row[name] for row in reversed(self.rows) if is_number(row.get(name))), None)

    @property
    def last_step(self) -> int:
        """The newest step in metrics.jsonl, or 0 if there is none."""
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def reached_step(self) -> int:
        """Newest step known to be completed: from the metrics, or saved since the last start or rewind."""
        return reached_step(self.last_step, self.events)


def reached_step(reported: int, events: Iterable[Mapping[str, Any]]) -> int:
    """Returns the newest completed step: from the metrics, or saved since the last start or rewind."""
    saved = 0
    for event in events:
        kind, step = event.get("event"), event.get("to" if event.get("event") == "rewind" else "step")
        if kind in ("started", "resumed", "rewind"):
            saved = 0
        elif kind == "saved" and is_number(step):
            saved = max(saved, int(step))
    return max(reported, saved)


def series_of(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Returns (steps, values) of a metric, from the rows in which it is finite."""
    found = [(row["step"], row[name]) for row in rows if is_number(row.get(name))]
    return [step for step, _ in found], [value for _, value in found]


def read_history(workdir: Any, most_values: int | None = MOST_VALUES) -> History:
    """Reads the history of a run from its work folder, local or in a bucket.

    `most_values` approximately limits the number of values from metrics.jsonl (see `notable`); None: no limit. Raises
    BadInput if the folder does not exist or has no run.
    """
    folder = paths.as_path(workdir)
    if not any((folder / name).exists() for name in RUN_FILES):
        raise BadInput(missing_run_message(workdir, folder))
    problems: list[str] = []
    metrics = run_files.read_metrics(folder, most_values, problems)
    abandoned = run_files.read_abandoned(folder, metrics, most_values, problems)  # may remove rows from `metrics`
    written_at = []
    for name in ("metrics.jsonl", "events.jsonl"):
        with contextlib.suppress(OSError):
            written_at.append((folder / name).stat().st_mtime)
    ledgers = [row for file in sorted(folder.glob(LEDGERS)) for row in read_newest(file, problems)]
    return History(
        workdir=os.fspath(workdir),
        rows=tuple(metrics.rows),
        abandoned=tuple(abandoned),
        events=tuple(read_newest(folder / "events.jsonl", problems)),
        config=run_files.read_object(folder / "config.json", problems, "settings, total steps and chips are unknown"),
        samples=read_samples(folder, problems),
        forecast=read_forecast(folder, problems),
        evals=tuple(read_evals(folder, problems)),
        experts=run_files.read_expert_counts(folder, problems),
        supervised=tuple(sorted(ledgers, key=lambda record: str(record.get("time", "")))),
        lines=metrics.lines,
        written_at=max(written_at, default=None),
        problems=tuple(problems),
    )


def missing_run_message(workdir: Any, folder: Any) -> str:
    """Returns the error message for a folder without a run."""
    if not os.fspath(workdir).strip():
        return f"workdir={workdir!r} is empty; give the work folder of a run, such as --workdir=runs/first"
    if not folder.exists() and not paths.is_remote(workdir):
        return f"workdir={workdir} does not exist; give the --workdir of the training"
    if not paths.is_remote(workdir) and not folder.is_dir():
        return f"workdir={workdir} is a file; give the work folder of a run"
    return f"workdir={workdir} is not a work folder: it has none of {', '.join(RUN_FILES)}"


def read_newest(path: Any, problems: list[str]) -> list[Row]:
    """Returns the newest MOST_EVENTS events of a JSON Lines file."""
    newest: collections.deque[Row] = collections.deque(maxlen=MOST_EVENTS)
    count = 0
    for count, record in enumerate(read_lines(path, problems), 1):
        if event := clean_event(record):
            newest.append(event)
    if count > MOST_EVENTS:
        problems.append(f"{path.name} has {count:,} lines; only the newest {MOST_EVENTS:,} are used")
    return list(newest)


def read_evals(folder: Any, problems: list[str]) -> list[Row]:
    """Returns the finite numbers of evals.jsonl, sorted by step. Records of the same step stay in file order."""
    found: collections.deque[Row] = collections.deque(maxlen=MOST_EVENTS)
    for record in read_lines(folder / "evals.jsonl", problems):
        step = record.get("step")
        if type(step) is int and 0 <= step < run_files.LARGEST:
            numbers = {n: value for n, value in record.items() if n.startswith("evals") and is_finite(value)}
            found.append({"step": step} | numbers)
    return sorted(found, key=lambda row: row["step"])


def read_forecast(folder: Any, problems: list[str]) -> dict[str, Any] | None:
    """Returns forecast.json, or None if missing or if its columns are not equally long lists of finite numbers."""
    if not (folder / "forecast.json").exists():
        return None
    found = run_files.read_object(folder / "forecast.json", problems, "no forecast is shown")
    columns = [as_list(found.get(name)) for name in ("tokens", "low", "middle", "high")]
    good = all(column and all(map(is_finite, column)) for column in columns)
    if good and len(set(map(len, columns))) == 1:
        return found
    if found:
        problems.append("forecast.json needs lists of equal length named tokens, low, middle and high; it is not shown")
    return None


def is_finite(value: Any) -> TypeGuard[float]:
    """Returns True for a finite number whose magnitude is at most LARGEST_NUMBER."""
    return is_number(value) and abs(value) <= run_files.LARGEST_NUMBER


def read_samples(folder: Any, problems: list[str]) -> tuple[TextSample, ...]:
    """Returns generated texts, oldest first: those in samples.jsonl, one per step, then the final sample.txt."""
    found: list[TextSample] = []
    for record in read_lines(folder / "samples.jsonl", problems):
        if isinstance(record.get("text"), str):
            step = record["step"] if is_number(record.get("step")) else None
            while step is not None and found and (found[-1].step or 0) >= step:
                found.pop()  # from steps that were repeated
            found = [*found[1 - MOST_SAMPLES :], TextSample(step, record["text"][:LONGEST_TEXT])]
    try:
        with paths.open_binary(folder / "sample.txt") as file:
            text = file.read(4 * LONGEST_TEXT).decode("utf-8", "replace")[:LONGEST_TEXT]
        if text not in [sample.text for sample in found]:
            found.append(TextSample(None, text))
    except FileNotFoundError:
        pass
    except BadInput as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"sample.txt cannot be read: {error.strerror or error}")
    return tuple(found[-MOST_SAMPLES:])
