"""Progress inside a notebook: a bar that is drawn anew in its place, with messages as plain lines around it."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from jaxscale import units
from jaxscale.monitor.console import Console, Style, training_values
from jaxscale.system.redact import in_html, shown

SECONDS_BETWEEN_DRAWS = 0.25  # each is a message to the browser
Display = Callable[..., Any]  # IPython.display.display


def find_display() -> Display | None:
    """What shows things in the notebook that this process computes for; None elsewhere. Imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return ipython.display.display if getattr(shell, "kernel", None) is not None else None


class Shown:
    """The bar at one moment: HTML for a notebook, text for what has no HTML."""

    def __init__(self, done: float, text: str):
        self.done, self.text = done, text

    def _repr_html_(self) -> str:
        style = "width:16em;vertical-align:middle"
        return (
            f'<div style="font-family:monospace;font-size:90%"><progress max="1" value="{self.done:.4f}" '
            f'style="{style}"></progress> {in_html(self.text)}</div>'
        )

    def __repr__(self) -> str:
        return self.text


class NotebookConsole(Console):
    """A console whose bar is an output of the cell."""

    def __init__(
        self,
        display: Display,
        total_steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__("bar", total_steps, stream, clock)
        self.display, self.handle, self.step, self.began = display, None, 0, clock()

    def tick(self, step: int) -> None:
        """Moves the bar to `step`, a few times a second at most."""
        self.step = step
        now = self.clock()
        if now - self.drawn_at >= SECONDS_BETWEEN_DRAWS:
            self.draw(step, now)

    def draw(self, step: int, now: float) -> None:
        """Draws the bar over itself."""
        self.step, self.drawn_at = step, now
        done = min(max(step / max(self.total_steps, 1), 0.0), 1.0)
        parts = [f"{done:4.0%} {step}/{self.total_steps}"]
        if "loss" in self.latest:
            parts.append(training_values(self.latest, names=("loss", "tokens_per_second", "mfu")))
        left = self.eta(step) if step < self.total_steps else f"in {units.duration(now - self.began)}"
        bar = Shown(done, shown("  ".join([*parts, left])))
        if self.handle is None:
            self.handle = self.display(bar, display_id=True)
        else:
            self.handle.update(bar)

    def close(self) -> None:
        """Leaves the bar as it is at the end."""
        if self.handle is not None:
            self.draw(self.step, self.clock())
            self.handle = None


def open_console(
    style: Style, total_steps: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Console:
    """The console of this style; a bar in a notebook is one of the notebook's own."""
    display = find_display() if style == "bar" else None
    return (
        NotebookConsole(display, total_steps, stream, clock) if display else Console(style, total_steps, stream, clock)
    )
