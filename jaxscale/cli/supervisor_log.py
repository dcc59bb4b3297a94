"""The supervisor's log, JSON lines in the run's folder, and its time accounting."""

import dataclasses
import datetime
import json
import time
from collections.abc import Callable
from typing import Any

from jaxscale.runtime.monitor.records import append
from jaxscale.system import paths

PARTS = ("up", "waiting", "keeping")  # the command runs; pause before a restart; reading the folder, writing the log


@dataclasses.dataclass
class Totals:
    """Seconds since the start by activity. Each is measured separately, so that their sum can be checked against the
    wall time."""

    up: float = 0.0
    waiting: float = 0.0
    keeping: float = 0.0
    starts: int = 0
    steps_won: int = 0
    steps_lost: int = 0
    lost: float = 0.0  # part of `up`: steps that must be repeated

    def record(self, wall: float) -> dict[str, Any]:
        """Returns the rounded totals and goodput, the fraction of wall time that was `up` and not lost."""
        seconds = {f"{name}_seconds": round(getattr(self, name), 3) for name in (*PARTS, "lost")}
        steps = {"starts": self.starts, "steps_won": self.steps_won, "steps_lost": self.steps_lost}
        good = (self.up - self.lost) / wall if wall > 0 else 0.0
        return {"wall_seconds": round(wall, 3), **seconds, **steps, "goodput": round(good, 4)}


class SuperviseLedger:
    """Appends JSON lines to a file, buffering them until the run has made its folder.

    A write error is reported once and otherwise ignored.
    """

    def __init__(self, file: Any, say: Callable[[str], None], clock: Callable[[], float] = time.time):
        self.file, self.say, self.clock = paths.as_path(file), say, clock
        self.pending: list[str] = []
        self.reported = False

    def note(self, event: str, **facts: Any) -> None:
        """Appends a line with the time, durably if the folder exists."""
        now = datetime.datetime.fromtimestamp(self.clock(), datetime.UTC).isoformat(timespec="milliseconds")
        self.pending.append(json.dumps({"time": now, "event": event, **facts}, allow_nan=False) + "\n")
        try:
            self.write()
        except Exception as error:  # any storage client's errors
            if not self.reported:
                self.reported = True
                self.say(f"supervise: continuing without {self.file}: {type(error).__name__}: {error}")

    def write(self) -> None:
        """Writes the pending lines if the folder exists."""
        if paths.is_remote(self.file) or self.file.parent.is_dir():
            append(self.file, "".join(self.pending).encode(), mode=0o600, durable=True)
            self.pending.clear()
