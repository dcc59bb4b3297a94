"""Progress line of a preparation: documents/s, MB/s, fraction dropped, and remaining time."""

import contextlib
import pathlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from jaxscale.system.exits import BadInput, print_stderr
from jaxscale.system.foreign import parse_json
from jaxscale.system.redact import shown

SECONDS = 0.5  # interval of updates on a terminal
RUNNING = "running"  # folder with the progress of pieces that have several blocks
LINE_SECONDS = 30.0  # interval of lines if the output is not a terminal


class RunningPiece(NamedTuple):
    """Progress of an unfinished piece of the input."""

    share: float  # fraction of the piece that was read
    resumed: float  # fraction of the piece that an earlier process finished
    documents: int  # number of documents read by this process
    bytes: int


def read_running(folder: pathlib.Path) -> list[RunningPiece]:
    """Returns the progress of the unfinished pieces that report it. folder: the work folder."""
    found = []
    for path in (folder / RUNNING).glob("*.json"):
        with contextlib.suppress(OSError, BadInput):  # the piece was finished in the meantime
            found.append(RunningPiece(*parse_json(path.read_bytes())))
    return found


class PrepareProgress:
    """Prints progress: one updated line on a terminal, or a line every 30 seconds elsewhere."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self.stream: TextIO | None = stream or sys.stdout
        self.clock = clock
        self.on_terminal = self.stream is not None and self.stream.isatty()
        self.title, self.total, self.since, self.shown = "", 0, 0.0, 0.0
        self.counts: Counter[str] = Counter()
        self.status: Callable[[], str] | None = None
        self.running: Callable[[], Sequence[RunningPiece]] = lambda: ()
        self.lock = threading.Lock()  # serializes ticks and other output

    @contextlib.contextmanager
    def ticking(self, status: Callable[[], str], running: Callable[[], Sequence[RunningPiece]]) -> Iterator[None]:
        """Updates the line periodically, since one piece can be a large file. status: returns text to append."""
        self.status, self.running, stop = status, running, threading.Event()

        def tick() -> None:
            while not stop.wait(SECONDS if self.on_terminal else LINE_SECONDS):
                with self.lock:
                    self.show()

        thread = threading.Thread(target=tick, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.status, self.running = None, lambda: ()

    def say(self, line: str) -> None:
        """Prints a separate line."""
        self.wipe()
        self.write(f"{shown(line)}\n")

    def begin(self, title: str, total: int) -> None:
        """Starts a phase of `total` pieces."""
        self.end()
        self.title, self.total, self.counts = title, total, Counter()
        self.since = self.shown = self.clock()
        if self.on_terminal:
            self.show()
        else:
            self.say(title)

    def add(self, result: Mapping[str, Any] | None) -> None:
        """Counts a finished piece, and prints the line if enough time has passed. result: result of work.run_task."""
        result = result or {}
        with self.lock:
            self.counts["done"] += 1
            if result.get("was_done"):  # finished by an earlier process, so excluded from the speed
                self.counts["was done"] += 1
            elif result:
                for *name, number in result["tally"]["counts"]:
                    if name[:2] == ["in", "read"]:
                        self.counts[name[-1]] += number
                        self.counts["judged"] += number if name[-1] == "documents" else 0
                    elif name[0] == "dropped" and name[-1] == "documents":
                        self.counts["dropped"] += number
                self.counts.subtract(result.get("earlier", {}))  # documents and bytes read by an earlier process
            if self.clock() - self.shown > (SECONDS if self.on_terminal else LINE_SECONDS):
                self.show()

    def show(self) -> None:
        """Prints the line now."""
        self.shown = self.clock()
        if self.on_terminal:
            self.write(f"\r\033[K{shown(self.line())}")
        else:
            self.write(f"  {shown(self.line())}\n")

    def line(self) -> str:
        """Returns e.g. 'pass 1: reading: 12 of 40, 81,000 documents (2,700/s, 8.9 MB/s), 31% dropped, 1:10 left'."""
        seconds = max(self.clock() - self.since, 1e-9)
        counts, done = self.counts, self.counts["done"]
        is_running = done < self.total
        facts = [f"{self.title}: {done:,} of {self.total:,}"]
        running = self.running() if is_running else ()
        seen = counts["documents"] + sum(one.documents for one in running)
        size = counts["bytes"] + sum(one.bytes for one in running)
        if seen:
            facts.append(f"{seen:,} documents ({seen / seconds:,.0f}/s, {size / 1e6 / seconds:,.1f} MB/s)")
        if counts["judged"]:
            facts.append(f"{counts['dropped'] / counts['judged']:.0%} dropped")
        if self.status is not None and is_running:
            facts.append(self.status())
        fresh = done - counts["was done"] + sum(one.share - one.resumed for one in running)  # finished by this process
        if fresh > 0 and is_running:
            left = seconds * (self.total - done - sum(one.share for one in running)) / fresh
            facts.append(f"{clock_time(max(left, 0))} left")
        return ", ".join(facts)

    def end(self) -> None:
        """Ends the current phase."""
        if self.title and (self.total > 1 or self.counts["documents"]):
            self.wipe()
            seconds = self.clock() - self.since
            self.write(f"  {shown(self.line())}, {clock_time(seconds)}\n")
        self.title = ""

    def write(self, text: str) -> None:
        """Writes text that is safe for a terminal. If writing fails, as on a full disk, disables progress output."""
        if self.stream is None:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.stream = None
            print_stderr(f"WARNING: progress output on stdout has stopped: {error.strerror or error}")

    def wipe(self) -> None:
        """Clears the line on a terminal."""
        if self.on_terminal and self.title:
            self.write("\r\033[K")


def clock_time(seconds: float) -> str:
    """Returns e.g. '4:05' or '1:02:03'."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
