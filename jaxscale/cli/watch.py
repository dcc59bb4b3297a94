"""Shows a run in a terminal while it trains.

  jaxscale watch --workdir=runs/first

Ctrl-C exits. NO_COLOR turns off colours (https://no-color.org). Needs no device.
"""

import contextlib
import dataclasses
import datetime
import functools
import math
import os
import shutil
import signal
import statistics
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from jaxscale import units
from jaxscale.kernels.hardware import find_chip
from jaxscale.runtime.monitor.console import format_number
from jaxscale.runtime.monitor.goodput import measure_goodput, unix_time
from jaxscale.runtime.monitor.history import History, is_finite
from jaxscale.runtime.monitor.records import Follower
from jaxscale.runtime.monitor.run_files import Row, as_dict, clean_event, finite
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, first_line, put_raw
from jaxscale.system.redact import printable, shown
from jaxscale.tools.reporting.event_text import incidents
from jaxscale.tools.reporting.status import status_of

LEAST_WIDTH, LEAST_HEIGHT = 80, 24
LABEL = 12  # columns for a label
BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = "_.-~=+*#"
EXPERTS = {  # metrics of a mixture of experts
    "experts_busiest": "busiest {:.3g} times the mean".format,
    "experts_effective": "effective {:.3g}".format,
    "experts_dead": "dead {:.0f}".format,
    "expert_rounds": "rounds {:.0f}".format,
}
DEVICES = {  # metrics of telemetry
    "utilisation": "busy {:.0%}".format,
    "power_watts": "{:.0f} W".format,
    "temperature_c": "{:.0f} C".format,
}
STATES = {"running": "green", "finished": "green", "silent": "red", "failed": "red"}  # other states are yellow
EVERY_SECONDS, EVERY_SECONDS_REMOTE = 2, 15
TICK_SECONDS = 0.2  # interval of checking the terminal's size
MOST_RECORDS = 50_000
MOST_EVENTS = 10_000
COLOURS = {"red": "\x1b[31m", "green": "\x1b[32m", "yellow": "\x1b[33m"}
PLAIN = "\x1b[0m"
OPEN, CLOSE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # enter the alternate screen and hide the cursor; revert


class WatchLine(NamedTuple):
    """Text and the name of its colour, or '' for the default."""

    text: str
    colour: str = ""


def frame(run: History, now: float, width: int, height: int, *, unicode: bool = True) -> list[WatchLine]:
    """Returns at most `height` lines of at most `width` columns. `now` is in seconds since 1970."""
    training = [row for row in run.rows if "loss" in row]
    status = status_of(run, now)
    eta = status.left_seconds if status.state.name in ("running", "starting") else None
    room = max(8, width - LABEL - 42)
    words = status.state.words  # right-aligned; the text on the left is cut if it does not fit
    title = cut(shown(f"jaxscale watch  {run.workdir}"), max(0, width - columns_of(words) - 2))
    title += " " * (width - columns_of(title) - columns_of(words)) + words
    lines = [
        WatchLine(title, STATES.get(status.state.name, "yellow")),
        WatchLine(run_line(run.config)),
        WatchLine(bar(status.step, status.total_steps or 0, eta, width, unicode=unicode)),
        WatchLine(""),
        *curves(training, run.rows, room, unicode=unicode),
        *machine(training),
        *goodput_lines(run, now if status.state.name == "silent" else None, width),
        WatchLine(""),
    ]
    left = height - len(lines) - len(run.problems)
    lines += event_lines(run.events, max(left, 1), now)
    lines += [WatchLine(problem, "red") for problem in run.problems]
    return [WatchLine(cut(shown(line.text).replace("\n", " "), width), line.colour) for line in lines[:height]]


def run_line(config: Mapping[str, Any]) -> str:
    """Returns text such as 'llama (12 layers), 8 x TPU v5p'."""
    devices, model = as_dict(config.get("devices")), as_dict(as_dict(config.get("config")).get("model"))
    if not devices:
        return "no config.json yet"
    words = {"num_layers": "layers", "embed_dim": "wide"}
    sizes = ", ".join(f"{model[name]} {word}" for name, word in words.items() if model.get(name))
    chip = find_chip(str(devices.get("kind") or "?"))
    kind = chip.name if chip else devices.get("kind", "?")
    return f"{model.get('name', '?')} ({sizes}), {devices.get('number', '?')} x {kind}"


def bar(step: int, total: float, eta: float | None, width: int, *, unicode: bool) -> str:
    """Returns text such as ' 51% ██████····  step 10,200 of 20,000  eta 3h12m'."""
    done = min(max(step / total, 0.0), 1.0) if total else 0.0
    label = f"step {step:,} of {total:,}" if total else f"step {step:,}"
    label += "" if eta is None else f"  eta {units.duration(eta)}"
    columns = max(10, width - len(label) - 8)
    full, empty = ("█", "·") if unicode else ("#", ".")
    filled = int(done * columns)
    return f"{done:4.0%} {full * filled}{empty * (columns - filled)}  {label}"


def curves(training: Sequence[Mapping], records: Sequence[Mapping], room: int, *, unicode: bool) -> list[WatchLine]:
    """Returns lines with value, curve and range of loss, validation loss, gradient norm, learning rate and tokens/s."""
    last = training[-1] if training else {}
    validation = [record for record in records if "validation/loss" in record]
    where = f"at step {validation[-1].get('step')}" if validation else ""
    draw = functools.partial(curve, room=room, unicode=unicode)
    column = lambda name: [row.get(name) for row in training]
    lines = [
        draw("loss", column("loss"), alarm=last.get("loss") is None),
        draw("validation", [row["validation/loss"] for row in validation], note=where),
        draw("grad norm", column("grad_norm")),
        draw("learn. rate", column("learning_rate"), format_value="{:.2e}".format),
        draw("tokens/s", column("tokens_per_second"), format_value=units.count),
    ]
    if skipped := last.get("skipped_total"):
        lines.append(WatchLine(f"{'skipped':<{LABEL}}{int(skipped)} steps of this run", "yellow"))
    return lines if training or validation else [WatchLine("no metrics yet")]


def curve(
    label: str, values: Sequence, room: int, *, unicode: bool, format_value: Any = format_number, note="", alarm=False
) -> WatchLine:
    """Returns text such as 'loss        2.314      ▇▆▅▄▃▂▁  2.31 to 4.16'."""
    numbers = [value for value in values if is_finite(value)]
    if not numbers:
        return WatchLine(f"{label:<{LABEL}}n/a")
    newest = next((value for value in reversed(values) if is_finite(value)), None)
    shown_value = "not finite" if alarm and values[-1] is None else format_value(newest)
    note = note or f"{format_value(min(numbers))} to {format_value(max(numbers))}"
    line = f"{label:<{LABEL}}{shown_value:<11} {sparkline(values, room, unicode=unicode):<{room}}  {note}"
    return WatchLine(line, "red" if shown_value == "not finite" else "")


def sparkline(values: Sequence[Any], room: int, *, unicode: bool = True) -> str:
    """Returns block characters that plot means of `room` equal parts of the values. Parts without numbers are
    spaces."""
    blocks = BLOCKS if unicode else PLAIN_BLOCKS
    columns = min(room, len(values))
    edges = [round(column * len(values) / columns) for column in range(columns + 1)] if columns else []
    parts = [[value for value in values[a:b] if is_finite(value)] for a, b in zip(edges, edges[1:])]
    means = [statistics.fmean(part) if part else None for part in parts]
    known = [mean for mean in means if mean is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    top = len(blocks) - 1
    level = lambda mean: 0 if not (span > 0 and math.isfinite(span)) else min(top, int((mean - low) / span * (top + 1)))
    return "".join(" " if mean is None else blocks[level(mean)] for mean in means)


def machine(training: Sequence[Mapping]) -> list[WatchLine]:
    """Returns lines with the step time, MFU, data wait, expert metrics, memory and device metrics."""
    last = training[-1] if training else {}
    if not last:
        return []
    newest = lambda name: next((row[name] for row in reversed(training[-5:]) if is_finite(row.get(name))), None)
    seconds, wait, mfu = map(newest, ("step_seconds", "data_wait_seconds", "mfu"))
    parts = [f"{seconds:.3g} s" if seconds else "n/a", f"MFU {mfu:.1%}" if mfu else "MFU n/a"]
    if seconds and wait is not None:
        parts.append(f"data wait {wait / seconds:.1%}")
    lines = [WatchLine(f"{'step':<{LABEL}}{'  '.join(parts)}")]
    lines += numbers_line("experts", last, "train/", EXPERTS)
    used, limit, host = map(last.get, ("device_peak_bytes", "device_bytes_limit", "host_peak_bytes"))
    memory = [f"host {units.size(host)}"] if host else []
    if used:
        memory.append(f"device {units.size(used)}" + (f" of {units.size(limit)} ({used / limit:.0%})" if limit else ""))
    lines.append(WatchLine(f"{'peak memory':<{LABEL}}{'  '.join(memory) or 'n/a'}"))
    return lines + numbers_line("device", last, "device/", DEVICES)


def numbers_line(
    label: str, last: Mapping, prefix: str, formats: Mapping[str, Callable[[float], str]]
) -> list[WatchLine]:
    """Returns one line with the finite numbers of a record, or [] if there are none."""
    known = {name: last[prefix + name] for name in formats if is_finite(last.get(prefix + name))}
    parts = [formats[name](value) for name, value in known.items()]
    return [WatchLine(f"{label:<{LABEL}}{'  '.join(parts)}")] if parts else []


def goodput_lines(run: History, now: float | None, width: int) -> list[WatchLine]:
    """Returns text such as 'goodput 91.2% of 3d04h compile 2% save 1%'. It includes all starts of the run."""
    goodput = measure_goodput(run.rows, run.events, now)
    if goodput.fraction is None:
        return []
    wall = goodput.wall_seconds
    overheads = [
        f"{kind} {seconds / wall:.1%}"
        for kind, seconds in sorted(goodput.seconds.items(), key=lambda item: -item[1])
        if kind != "step" and seconds / wall >= 0.001
    ]
    starts = f", {goodput.starts} starts" if goodput.starts > 1 else ""
    starts += f", {units.plural(goodput.rewinds, 'rewind')}" if goodput.rewinds else ""
    first = f"{'goodput':<{LABEL}}{goodput.fraction:.1%} of {units.duration(wall)}{starts}"
    while overheads and LABEL + len("  ".join(overheads)) > width:
        overheads.pop()  # the smallest overhead
    return [WatchLine(first), WatchLine(" " * LABEL + "  ".join(overheads))]


def event_lines(events: Sequence[Mapping[str, Any]], most: int, now: float) -> list[WatchLine]:
    """Returns lines such as '12:01:33 step 200: checkpoint saved, 1.2s'. Events of other days have a date."""
    found, today = [], datetime.datetime.fromtimestamp(now).date()
    for event in events[-most:]:
        when = unix_time(event.get("time"))
        local = None if when is None else datetime.datetime.fromtimestamp(when)
        form = "%H:%M:%S" if local is None or local.date() == today else "%Y-%m-%d %H:%M"
        clock = "??:??:??" if local is None else local.strftime(form)
        (incident,), _ = incidents([event])
        step = f"step {incident.step}: " if incident.step else ""
        found.append(WatchLine(f"{clock}  {step}{incident.what}", "red" if incident.is_trouble else ""))
    return found


def cut(text: str, width: int) -> str:
    """Returns the text, truncated to `width` columns."""
    used = 0
    for number, character in enumerate(text):
        used += columns_of(character)
        if used > width:
            return text[:number]
    return text


def columns_of(text: str) -> int:
    """Returns the number of terminal columns of a text: two for wide characters, none for combining characters."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


@dataclasses.dataclass(frozen=True)
class WatchFlags:
    no_config = "everything is read from the work folder"

    workdir: str = flag("", "the folder of the run, local or gs://; read-only", "FOLDER")
    every: int | None = flag(None, "seconds between updates; default 2, and 15 for a bucket", "SECONDS", least=1)
    once: bool = flag(False, "prints one frame and exits; the default if the output is not a terminal")


class RunReader:
    """Reads new records of a run from its work folder."""

    def __init__(self, workdir: str):
        self.workdir, self.folder = workdir, paths.as_path(workdir)
        self.metrics, self.log = Follower(self.folder / "metrics.jsonl"), Follower(self.folder / "events.jsonl")
        self.records: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.starts_seen = -1

    def read(self) -> History:
        """Returns the history so far. A storage error is included in its problems."""
        problems = ()
        try:
            self.records = grown(self.records, self.metrics, MOST_RECORDS, clean_record)
            self.events = grown(self.events, self.log, MOST_EVENTS, clean_event)
            starts = sum(event.get("event") in ("started", "resumed") for event in self.events)
            if starts != self.starts_seen:  # each start may write a new config.json
                self.config = self.read_config()
                self.starts_seen = starts if self.config else -1
        except Exception as error:  # errors of any storage client, which may be temporary
            problems = (f"the run cannot be read: {first_line(error)}",)
        times = [follow.grown_at for follow in (self.metrics, self.log) if follow.grown_at is not None]
        return History(
            workdir=self.workdir, rows=tuple(self.records), events=tuple(self.events), config=self.config,
            written_at=max(times, default=None), problems=problems,
        )  # fmt: skip

    def read_config(self) -> dict[str, Any]:
        """Returns the content of config.json, or {} if it does not exist yet. Raises BadInput if it is damaged."""
        try:
            return finite(as_dict(paths.read_json(self.folder / "config.json")))
        except FileNotFoundError:
            return {}


def clean_record(record: Row) -> Row | None:
    """Returns the numbers of a record. Non-finite numbers become None. Returns None for a record without a step."""
    if type(record.get("step")) is not int:
        return None
    numbers = {name: value for name, value in record.items() if value is None or isinstance(value, (int, float))}
    return {name: value if is_finite(value) else None for name, value in numbers.items()}


def grown(before: list[Row], follow: Follower, most: int, clean: Callable[[Row], Row | None]) -> list[Row]:
    """Returns the newest records, including new ones in the file."""
    found, restarted = follow.poll()
    new = [row for record in found if (row := clean(record)) is not None]
    return (new if restarted else before + new)[-most:] if new or restarted else before


@command(WatchFlags)
def main(arguments: Arguments) -> None:
    """Shows the run until Ctrl-C, or once."""
    flags, workdir = arguments.flags, arguments.flags.workdir
    if not workdir:
        raise BadInput("--workdir must be given: the work folder of a run, such as --workdir=runs/first")
    if not paths.is_remote(workdir) and not paths.as_path(workdir).is_dir():
        raise BadInput(
            f"--workdir={workdir} is not a folder; set the work folder of a run, such as --workdir=runs/first"
        )
    default = EVERY_SECONDS_REMOTE if paths.is_remote(workdir) else EVERY_SECONDS
    reader, stream = RunReader(workdir), sys.stdout
    if flags.once or not is_terminal(stream):
        size = shutil.get_terminal_size((LEAST_WIDTH, LEAST_HEIGHT))
        put_raw(frame_text(reader.read(), size, stream, colour=has_colour(stream)) + "\n")  # does not remove colours
        return
    with screen(stream), contextlib.suppress(KeyboardInterrupt):
        show(reader, stream, flags.every or default)


def show(reader: RunReader, stream: TextIO, every: float) -> None:
    """Draws a frame every `every` seconds, and when the terminal is resized, until it is interrupted."""
    history, read_at, drawn = None, float("-inf"), None
    while True:
        now, size = time.monotonic(), shutil.get_terminal_size((LEAST_WIDTH, LEAST_HEIGHT))
        if now - read_at >= every:
            history, read_at, drawn = reader.read(), now, None
        if history is not None and drawn != size:
            text = frame_text(history, size, stream, colour=has_colour(stream)).replace("\n", "\x1b[K\r\n")
            stream.write(f"\x1b[H{text}\x1b[K\x1b[J")
            stream.flush()
            drawn = size
        time.sleep(TICK_SECONDS)


def frame_text(history: History, size: os.terminal_size, stream: TextIO, *, colour: bool) -> str:
    """Returns a frame as text for the stream, without a final newline."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    unicode = "utf" in encoding.lower()
    lines = frame(history, time.time(), size.columns, size.lines - 1, unicode=unicode)
    paint = lambda text, name: f"{COLOURS[name]}{text}{PLAIN}" if colour and name else text.rstrip()
    text = "\n".join(paint(printable(line.text), line.colour) for line in lines)
    return text if unicode else text.encode(encoding, "replace").decode(encoding)


def is_terminal(stream: TextIO) -> bool:
    """Returns True if the stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def has_colour(stream: TextIO) -> bool:
    """Returns True for a terminal unless NO_COLOR is set."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


@contextlib.contextmanager
def screen(stream: TextIO) -> Iterator[None]:
    """Shows the terminal's alternate screen during the block. SIGTERM raises KeyboardInterrupt."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    stream.write(OPEN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(OSError):  # the terminal may be closed
            stream.write(CLOSE)
            stream.flush()
