"""What a supervisor did, one JSON object a line, in the run's own folder; and where the time went."""

import dataclasses
import datetime
import json
import time
from collections.abc import Callable
from typing import Any

from jaxscale.monitor.records import append
from jaxscale.system import paths

PARTS = ("up", "waiting", "keeping")  # the command ran; a pause before the next start; folder read, ledger written


@dataclasses.dataclass
class Totals:
    """Where the seconds since the start went. Each part is measured by itself, so that their sum can be held against
    the wall."""

    up: float = 0.0
    waiting: float = 0.0
    keeping: float = 0.0
    starts: int = 0
    steps_won: int = 0
    steps_lost: int = 0
    lost: float = 0.0  # of `up`: spent on steps that have to be run again

    def record(self, wall: float) -> dict[str, Any]:
        """The totals, rounded, with the fraction of the wall time in which the command ran and nothing was lost."""
        seconds = {f"{name}_seconds": round(getattr(self, name), 3) for name in (*PARTS, "lost")}
        steps = {"starts": self.starts, "steps_won": self.steps_won, "steps_lost": self.steps_lost}
        good = (self.up - self.lost) / wall if wall > 0 else 0.0
        return {"wall_seconds": round(wall, 3), **seconds, **steps, "goodput": round(good, 4)}


class SuperviseLedger:
    """Appends lines to a file. What cannot be written yet, as before the run has made its folder, is kept for later.

    A ledger that cannot be written is told once and stops nothing.
    """

    def __init__(self, file: Any, say: Callable[[str], None], clock: Callable[[], float] = time.time):
        self.file, self.say, self.clock = paths.as_path(file), say, clock
        self.held: list[str] = []
        self.told = False

    def note(self, event: str, **facts: Any) -> None:
        """Adds a line with the time, and is on the disk when it returns, if the folder is there."""
        now = datetime.datetime.fromtimestamp(self.clock(), datetime.UTC).isoformat(timespec="milliseconds")
        self.held.append(json.dumps({"time": now, "event": event, **facts}, allow_nan=False) + "\n")
        try:
            self.write()
        except Exception as error:  # of any storage's client
            if not self.told:
                self.told = True
                self.say(f"supervise: {self.file} cannot be written: {type(error).__name__}: {error}; going on without")

    def write(self) -> None:
        """Writes out what is held, if the folder is there."""
        if paths.is_remote(self.file) or self.file.parent.is_dir():
            append(self.file, "".join(self.held).encode(), mode=0o600, durable=True)
            self.held.clear()
