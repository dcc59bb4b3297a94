"""Progress on the console: a bar on a terminal, a cell output in a notebook, and plain lines elsewhere."""

import collections
import dataclasses
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TextIO

from jaxscale import units
from jaxscale.system.exits import print_stderr
from jaxscale.system.redact import in_html, printable, redact, shown

Display = Callable[..., Any]  # IPython.display.display
Style = Literal["bar", "lines", "off"]
VALIDATION = "validation/"  # metrics with this prefix are printed on a separate line
EVALS = re.compile(r"evals/(.+/(?:bits_per_byte|acc|acc_norm|perplexity))")  # metrics of named evaluators
SHORT_NAMES = {"learning_rate": "lr", "grad_norm": "grad", "mfu": "MFU"}
ETA_WINDOW = 50  # reports over which the speed is averaged


def choose_style(progress: Literal["auto"] | Style, stream: TextIO | None, *, notebook: bool = False) -> Style:
    """Returns the style for `progress`. 'auto' is 'bar' in a notebook or on a terminal, otherwise 'lines'."""
    if progress != "auto":
        return progress
    is_terminal = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    return "bar" if notebook or is_terminal else "lines"


@dataclasses.dataclass(eq=False)
class Console:
    """Prints messages, and a progress bar below them. Output errors, such as a full disk, do not end the run."""

    style: Style
    total_steps: int
    stream: TextIO | None = None  # None: standard output
    clock: Callable[[], float] = time.monotonic
    width: Callable[[], int] = lambda: shutil.get_terminal_size().columns
    seconds_between_draws: ClassVar = 0.1

    def __post_init__(self):
        self.stream = self.stream or sys.stdout
        self.bar, self.latest, self.drawn_at, self.step = "", {}, float("-inf"), 0
        self.seen: collections.deque[tuple[int, float]] = collections.deque(maxlen=ETA_WINDOW)
        self.tokens_after: Callable[[int], int] = lambda step: step  # default: all steps are equal

    def tick(self, step: int) -> None:
        """Moves the bar to `step`. Redraws it at most every seconds_between_draws. Other styles ignore the call."""
        self.step, now = step, self.clock()
        if self.style == "bar" and now - self.drawn_at >= self.seconds_between_draws:
            self.draw(step, now)

    def metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of a step: training metrics on the bar or a line, validation metrics on a separate line."""
        if self.style == "off":
            return
        validation = {name.removeprefix(VALIDATION): v for name, v in metrics.items() if name.startswith(VALIDATION)}
        evals = {match[1]: value for name, value in metrics.items() if (match := EVALS.fullmatch(name))}
        for what, values in (("validation", validation), ("evals", evals)):
            if values:
                text = "  ".join(f"{name} {format_number(value)}" for name, value in values.items())
                self.say(f"step {step}/{self.total_steps}  {what}  {text}")
        if "loss" not in metrics:
            return
        self.seen.append((step, self.clock()))
        self.latest = metrics
        if self.style == "bar":
            self.draw(step, self.clock())
        else:
            self.emit(f"step {step}/{self.total_steps}  {training_values(metrics)}  {self.eta(step)}\n")

    def say(self, text: str) -> None:
        """Prints a message above the bar, without control characters."""
        if self.stream is None:
            return
        erase = "\r\x1b[K" if self.bar else ""
        self.emit(f"{erase}{printable(text)}\n{self.bar}")

    def close(self) -> None:
        """Ends the bar and moves the cursor to the next line."""
        if self.bar:
            self.bar = ""
            self.emit("\n")

    def eta(self, step: int) -> str:
        """Returns text such as 'eta 1m20s', from the speed over the last reports; 'eta ?' before the second report."""
        if len(self.seen) < 2:
            return "eta ?"
        (first_step, first_time), (last_step, last_time) = self.seen[0], self.seen[-1]
        if last_step <= first_step:
            return "eta ?"
        first, last, now, end = map(self.tokens_after, (first_step, last_step, step, self.total_steps))
        return f"eta {units.duration((end - now) * (last_time - first_time) / (last - first))}"

    def progress(self, step: int, left: str, fill: Callable[[float], str] = lambda done: "") -> tuple[float, str]:
        """Returns (fraction done, ' 51% 10200/20000  loss 2.314  12.3K tok/s  MFU n/a  LEFT')."""
        done = min(max(step / max(self.total_steps, 1), 0.0), 1.0)
        parts = [f"{done:4.0%} {fill(done)}{step}/{self.total_steps}"]
        if "loss" in self.latest:
            parts.append(training_values(self.latest, names=("loss", "tokens_per_second", "mfu")))
        return done, "  ".join([*parts, left])

    def draw(self, step: int, now: float) -> None:
        """Redraws the bar, truncated to the width of the terminal."""
        unicode = "utf" in (getattr(self.stream, "encoding", None) or "").lower()
        full, empty = ("█", "·") if unicode else ("#", ".")
        fill = lambda done: f"{full * int(done * 20)}{empty * (20 - int(done * 20))} "
        _, text = self.progress(step, self.eta(step), fill)
        self.bar, self.drawn_at = text[: max(self.width() - 1, 1)], now
        self.emit(f"\r{self.bar}\x1b[K")

    def emit(self, text: str) -> None:
        """Writes and flushes text. Redacts secrets, and replaces characters that the stream cannot encode with '?'."""
        if self.stream is None:
            return
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        text = redact(text).encode(encoding, "replace").decode(encoding)
        try:
            self.stream.write(text)
            self.stream.flush()
        except (BrokenPipeError, ValueError):  # the reader has gone, or the stream was closed in this process
            self.stream = None
        except OSError as error:
            self.stream = None
            cause = error.strerror or error
            print_stderr(f"WARNING: cannot write to standard output: {cause}; progress is still in metrics.jsonl")


class NotebookConsole(Console):
    """A console whose bar is a cell output, updated in place."""

    seconds_between_draws = 0.25  # each redraw is a message to the browser

    def __init__(self, display: Display, *settings: Any):
        super().__init__("bar", *settings)
        self.display, self.handle, self.began = display, None, self.clock()

    def draw(self, step: int, now: float) -> None:
        """Redraws the bar."""
        self.step, self.drawn_at = step, now
        left = self.eta(step) if step < self.total_steps else f"in {units.duration(now - self.began)}"
        done, text = self.progress(step, left)
        html = (
            f'<div style="font-family:monospace;font-size:90%"><progress max="1" value="{done:.4f}" '
            f'style="width:16em;vertical-align:middle"></progress> {in_html(shown(text))}</div>'
        )
        bar = {"text/html": html, "text/plain": shown(text)}
        if self.handle is None:
            self.handle = self.display(bar, raw=True, display_id=True)
        else:
            self.handle.update(bar, raw=True)

    def close(self) -> None:
        """Draws the bar a last time."""
        if self.handle is not None:
            self.draw(self.step, self.clock())
            self.handle = None


def find_display() -> Display | None:
    """Returns IPython's display function in a notebook kernel, else None. Imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return ipython.display.display if ipython and getattr(shell, "kernel", None) is not None else None


def open_console(style: Style, total_steps: int, stream: TextIO | None = None) -> Console:
    """Returns a console with this style. In a notebook, a bar is a cell output."""
    if style == "bar" and (display := find_display()):
        return NotebookConsole(display, total_steps, stream)
    return Console(style, total_steps, stream)


def training_values(
    metrics: Mapping[str, Any],
    names: tuple[str, ...] = ("loss", "tokens_per_second", "mfu", "learning_rate", "grad_norm"),
) -> str:
    """Returns text such as 'loss 2.314  12.3K tok/s  MFU n/a  lr 3.0e-04  grad 0.92'. Omits missing metrics."""
    formats = {"tokens_per_second": units.count, "mfu": "{:.1%}".format, "learning_rate": "{:.1e}".format}
    parts = []
    for name, value in ((name, metrics[name]) for name in names if name in metrics):
        text = "n/a" if value is None else formats.get(name, format_number)(value)
        parts.append(f"{text} tok/s" if name == "tokens_per_second" else f"{SHORT_NAMES.get(name, name)} {text}")
    if metrics.get("skipped"):
        parts.append("SKIPPED")
    return "  ".join(parts)


def format_number(value: Any) -> str:
    """Returns four significant digits, or 'n/a' for None."""
    if value is None:
        return "n/a"
    return f"{value:#.4g}".rstrip(".") if isinstance(value, float) else str(value)
