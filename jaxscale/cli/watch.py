"""Shows a run in a terminal while it trains.

  jaxscale watch --workdir=runs/first

Ctrl-C ends it. NO_COLOR turns colours off (https://no-color.org). Needs no device.
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from jaxscale.cli import run_verb
from jaxscale.cli.watch_frame import LEAST_HEIGHT, LEAST_WIDTH, Line, frame
from jaxscale.runtime.monitor.history import History, is_finite
from jaxscale.runtime.monitor.json_lines import Row, as_dict, clean_event, finite
from jaxscale.runtime.monitor.records import Follower
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, put_raw
from jaxscale.system.redact import printable

EVERY_SECONDS, EVERY_SECONDS_REMOTE = 2, 15
TICK_SECONDS = 0.2  # between checks of the terminal's size
MOST_RECORDS = 50_000
MOST_EVENTS = 10_000
COLOURS = {"red": "\x1b[31m", "green": "\x1b[32m", "yellow": "\x1b[33m"}
PLAIN = "\x1b[0m"
OPEN, CLOSE = (
    "\x1b[?1049h\x1b[?25l",
    "\x1b[?25h\x1b[?1049l",
)  # enter the alternate screen, hide the cursor; and back


@dataclasses.dataclass(frozen=True)
class WatchFlags:
    """The flags of `jaxscale watch`."""

    no_config = "the work folder has all data"

    workdir: str = flag("", "the folder of the run, local or gs://; read-only", "FOLDER")
    every: int | None = flag(None, "seconds between updates; default 2, and 15 for a bucket", "SECONDS", least=1)
    once: bool = flag(False, "prints one frame and exits; the default if the output is not a terminal")


class RunReader:
    """Reads the new records of a run in a work folder."""

    def __init__(self, workdir: str):
        self.workdir, self.folder = workdir, paths.as_path(workdir)
        self.metrics, self.log = Follower(self.folder / "metrics.jsonl"), Follower(self.folder / "events.jsonl")
        self.records: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.starts_seen = -1

    def read(self) -> History:
        """Returns the history so far. A storage error becomes a problem of the history."""
        problems = ()
        try:
            self.records = grown(self.records, self.metrics, MOST_RECORDS, clean_record)
            self.events = grown(self.events, self.log, MOST_EVENTS, clean_event)
            starts = sum(event.get("event") in ("started", "resumed") for event in self.events)
            if starts != self.starts_seen:  # each start may write a new one
                self.config = self.read_config()
                self.starts_seen = starts if self.config else -1
        except Exception as error:  # any storage client's errors, which may be temporary
            reason = str(error).splitlines()[0] if str(error) else ""
            problems = (f"cannot be read now: {type(error).__name__}: {reason}",)
        times = [follow.grown_at for follow in (self.metrics, self.log) if follow.grown_at is not None]
        return History(
            workdir=self.workdir, rows=tuple(self.records), events=tuple(self.events), config=self.config,
            written_at=max(times, default=None), problems=problems,
        )  # fmt: skip

    def read_config(self) -> dict[str, Any]:
        """Returns config.json, {} before it exists."""
        try:
            config = paths.read_json(self.folder / "config.json")
        except FileNotFoundError:
            return {}
        return finite(as_dict(config))


def clean_record(record: Row) -> Row | None:
    """Returns the record's numbers, None for non-finite ones; None for a record without a step."""
    if type(record.get("step")) is not int:
        return None
    numbers = {name: value for name, value in record.items() if value is None or isinstance(value, (int, float))}
    return {name: value if is_finite(value) else None for name, value in numbers.items()}


def grown(before: list[Row], follow: Follower, most: int, clean: Callable[[Row], Row | None]) -> list[Row]:
    """Returns the newest records, including the new ones of the file."""
    found, restarted = follow.poll()
    new = [row for record in found if (row := clean(record)) is not None]
    return (new if restarted else before + new)[-most:] if new or restarted else before


@command(WatchFlags)
def main(arguments: Arguments) -> int:
    """Shows the run until Ctrl-C, or once, and returns the exit code."""
    flags, workdir = arguments.flags, arguments.flags.workdir
    if not workdir:
        raise BadInput("--workdir must be given: the folder of a run, such as --workdir=runs/first")
    if not paths.is_remote(workdir) and not paths.as_path(workdir).is_dir():
        raise BadInput(f"--workdir={workdir} is not a folder; give that of a run, such as --workdir=runs/first")
    default = EVERY_SECONDS_REMOTE if paths.is_remote(workdir) else EVERY_SECONDS
    reader, stream = RunReader(workdir), sys.stdout
    if flags.once or not is_terminal(stream):
        size = shutil.get_terminal_size((LEAST_WIDTH, LEAST_HEIGHT))
        put_raw(frame_text(reader.read(), size, stream, colour=has_colour(stream)) + "\n")  # keeps the colour codes
        return 0
    with screen(stream), contextlib.suppress(KeyboardInterrupt):
        show(reader, stream, flags.every or default)
    return 0


def show(reader: RunReader, stream: TextIO, every: float) -> None:
    """Draws a frame every `every` seconds, and when the terminal is resized, until interrupted."""
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
    text = "\n".join(painted(lines, colour=colour))
    return text if unicode else text.encode(encoding, "replace").decode(encoding)


def painted(lines: Sequence[Line], *, colour: bool) -> Iterator[str]:
    """Yields the lines, with terminal codes of their colours if `colour`."""
    for line in lines:
        text = printable(line.text)
        yield f"{COLOURS[line.colour]}{text}{PLAIN}" if colour and line.colour else text.rstrip()


def is_terminal(stream: TextIO) -> bool:
    """Returns True if the stream can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def has_colour(stream: TextIO) -> bool:
    """Returns True for a terminal unless NO_COLOR is set."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


@contextlib.contextmanager
def screen(stream: TextIO) -> Iterator[None]:
    """Shows the terminal's alternate screen during the block. SIGTERM raises KeyboardInterrupt."""

    def leave(number: int, where: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    stream.write(OPEN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(OSError):  # the terminal may be closed
            stream.write(CLOSE)
            stream.flush()


if __name__ == "__main__":
    run_verb("watch")
