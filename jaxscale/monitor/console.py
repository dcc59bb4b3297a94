"""What a person sees: a one-line progress bar on a terminal, and plain lines elsewhere."""

import collections
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO

from jaxscale import units
from jaxscale.system.redact import printable, redact

Style = Literal["bar", "lines", "off"]
VALIDATION = "validation/"  # metrics under this name are printed on a line of their own
EVALS = re.compile(r"evals/(.+/(?:bits_per_byte|acc|acc_norm|perplexity))")  # and so are these, of named evaluators
SHORT_NAMES = {"learning_rate": "lr", "grad_norm": "grad"}
ETA_WINDOW = 50  # reports over which the speed is averaged: long enough to smooth, short enough to follow a change


def choose_style(progress: Literal["auto", "bar", "lines", "off"], stream: TextIO, *, notebook: bool = False) -> Style:
    """'bar' in a notebook and on a terminal whose cursor moves, 'lines' elsewhere, unless the setting says which."""
    if progress != "auto":
        return progress
    if notebook:
        return "bar"
    return "bar" if stream.isatty() and os.environ.get("TERM") != "dumb" else "lines"


class Console:
    """Prints progress and messages, and keeps the bar below the messages.

    A reader that goes away (a closed terminal, `| head`) silences the console and does not end the run.
    """

    def __init__(
        self,
        style: Style,
        total_steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        width: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ):
        self.style, self.total_steps, self.clock, self.width = style, total_steps, clock, width
        self.stream: TextIO | None = stream or sys.stdout
        self.bar, self.latest, self.drawn_at = "", {}, float("-inf")
        self.seen: collections.deque[tuple[int, float]] = collections.deque(maxlen=ETA_WINDOW)

    def tick(self, step: int) -> None:
        """Moves the bar to `step`, at most ten times a second; plain lines wait for metrics."""
        now = self.clock()
        if self.style == "bar" and now - self.drawn_at >= 0.1:
            self.draw(step, now)

    def metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows the metrics of a step: training on the bar or a line, validation always on a line of its own."""
        if self.style == "off":
            return
        validation = {name.removeprefix(VALIDATION): v for name, v in metrics.items() if name.startswith(VALIDATION)}
        if validation:
            self.say(f"step {step}/{self.total_steps}  validation  {named_values(validation)}")
        evals = {match[1]: value for name, value in metrics.items() if (match := EVALS.fullmatch(name))}
        if evals:
            self.say(f"step {step}/{self.total_steps}  evals  {named_values(evals)}")
        if "loss" not in metrics:
            return
        self.seen.append((step, self.clock()))
        self.latest = metrics
        if self.style == "bar":
            self.draw(step, self.clock())
        else:
            self.emit(f"step {step}/{self.total_steps}  {training_values(metrics)}  {self.eta(step)}\n")

    def say(self, text: str) -> None:
        """Prints a message above the bar, control characters taken out."""
        if self.stream is None:
            return
        erase = "\r\x1b[K" if self.bar else ""
        self.emit(f"{erase}{printable(text)}\n{self.bar}")

    def close(self) -> None:
        """Leaves the bar where it is and the cursor on the next line."""
        if self.bar:
            self.bar = ""
            self.emit("\n")

    def eta(self, step: int) -> str:
        """'eta 1m20s' from the speed over the last reports; 'eta ?' until there are two."""
        if len(self.seen) < 2:
            return "eta ?"
        (first_step, first_time), (last_step, last_time) = self.seen[0], self.seen[-1]
        if last_step <= first_step:
            return "eta ?"
        seconds_per_step = (last_time - first_time) / (last_step - first_step)
        return f"eta {units.duration((self.total_steps - step) * seconds_per_step)}"

    def draw(self, step: int, now: float) -> None:
        """Draws the bar over itself, cut to the width of the terminal so that it never wraps."""
        done = min(max(step / max(self.total_steps, 1), 0.0), 1.0)
        unicode = "utf" in (getattr(self.stream, "encoding", None) or "").lower()
        full, empty = ("█", "·") if unicode else ("#", ".")
        filled = int(done * 20)
        parts = [f"{done:4.0%} {full * filled}{empty * (20 - filled)} {step}/{self.total_steps}"]
        if "loss" in self.latest:
            parts.append(training_values(self.latest, names=("loss", "tokens_per_second", "mfu")))
        parts.append(self.eta(step))
        self.bar, self.drawn_at = "  ".join(parts)[: max(self.width() - 1, 1)], now
        self.emit(f"\r{self.bar}\x1b[K")

    def emit(self, text: str) -> None:
        """Writes and flushes, without secrets, and with '?' for characters that the stream cannot encode."""
        if self.stream is None:
            return
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        try:
            self.stream.write(redact(text).encode(encoding, "replace").decode(encoding))
            self.stream.flush()
        except OSError:
            self.stream = None  # nobody is reading any more; metrics.jsonl still has everything


def training_values(
    metrics: Mapping[str, Any],
    names: tuple[str, ...] = ("loss", "tokens_per_second", "mfu", "learning_rate", "grad_norm"),
) -> str:
    """'loss 2.314  12.3K tok/s  MFU n/a  lr 3.0e-04  grad 0.92' from those of the names that are there."""
    shown = []
    for name in names:
        if name not in metrics:
            continue
        value = metrics[name]
        if name == "tokens_per_second":
            shown.append(f"{'n/a' if value is None else units.count(value)} tok/s")
        elif name == "mfu":
            shown.append("MFU n/a" if value is None else f"MFU {value:.1%}")
        elif name == "learning_rate":
            shown.append("lr n/a" if value is None else f"lr {value:.1e}")
        else:
            shown.append(f"{SHORT_NAMES.get(name, name)} {plain_number(value)}")
    if metrics.get("skipped"):
        shown.append("SKIPPED")
    return "  ".join(shown)


def named_values(metrics: Mapping[str, Any]) -> str:
    """'loss 2.314  bits_per_byte 1.205', names printed as they are in metrics.jsonl."""
    return "  ".join(f"{name} {plain_number(value)}" for name, value in metrics.items())


def plain_number(value: Any) -> str:
    """Four significant digits, 'n/a' for None."""
    if value is None:
        return "n/a"
    return f"{value:#.4g}".rstrip(".") if isinstance(value, float) else str(value)
