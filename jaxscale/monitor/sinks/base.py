"""A service that shows metrics, behind a queue of limited length and a thread of its own.

It can end no run and keeps no step waiting: what it does not take in time is left out there, told once, and is in
metrics.jsonl all the same.
"""

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxscale.system import paths
from jaxscale.system.redact import redacted, shown

MOST_WAITING = 10_000  # records, some 10 MB
CLOSE_SECONDS = 10.0  # for what is still on its way when a run ends
FOLDER = "writers"  # in the work folder: NAME.json is {"id": ..., "attempt": ...}


class Service(Protocol):
    """An open run of a service. Any of its methods may raise, or take its time."""

    place: str  # where a person finds it

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes a record."""

    def finish(self) -> None:
        """Sends what is left."""


class Begin:
    """What a service is told of the run that it shows."""

    def __init__(self, workdir: Any, name: str, start_step: int):
        """Counts this opening as an attempt. Raises OSError or BadInput where the work folder does not take it."""
        folder = paths.as_path(workdir)
        self.folder, self.start_step, self.run_name = folder, start_step, str(folder.name) or "run"
        file = folder / FOLDER / f"{name}.json"
        before = paths.read_json(file) if file.exists() else {}  # also of one killed before its first checkpoint
        self.id = str(before.get("id") or new_id())
        self.attempt = int(before.get("attempt", 0)) + 1
        if not paths.is_remote(folder):
            paths.make_private(folder / FOLDER)
        paths.write_json(file, {"id": self.id, "attempt": self.attempt})
        config = folder / "config.json"
        self.config = redacted(paths.read_json(config)) if config.exists() else {}


class Sink:
    """A service behind a queue and a thread."""

    def __init__(
        self,
        name: str,
        workdir: Any,
        start_step: int,
        open_service: Callable[[Begin], Service],
        *,
        most_waiting: int = MOST_WAITING,
        close_seconds: float = CLOSE_SECONDS,
    ):
        self.name, self.workdir, self.start_step, self.open_service = name, workdir, start_step, open_service
        self.close_seconds = close_seconds
        self.records: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(most_waiting)
        self.lost, self.cause = 0, ""
        self.news = ""  # where a person finds the run, until that is told
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.work, name=f"sink-{name}", daemon=True)
        self.thread.start()

    @property
    def problem(self) -> str | None:
        """Why the service lacks records, in words that stay the same, so that they are told once."""
        if not (self.lost or self.cause):
            return None
        return f"{self.name} lacks metrics that metrics.jsonl has: {self.cause or 'it is too slow'}"

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Puts a record into the queue; one that has no room there is lost to this service."""
        if self.cause:
            return
        try:
            self.records.put_nowait((step, dict(metrics)))
        except queue.Full:
            self.lost += 1

    def work(self) -> None:
        """Opens the service and hands it the records until the end."""
        with turn(self.name):
            try:
                service = self.open_service(Begin(self.workdir, self.name, self.start_step))
                self.news = f"{self.name}: {service.place}"
                while (record := self.records.get()) is not None:
                    service.log(*record)
                service.finish()
            except BaseException as error:  # some services leave by SystemExit where they would ask a person
                first_line = (shown(str(error)).strip().splitlines() or [""])[0][:300]
                self.cause = f"{type(error).__name__}: {first_line}"
        self.over.set()

    def close(self) -> None:
        """Sends what is waiting, as long as that takes no more than close_seconds."""
        deadline = time.monotonic() + self.close_seconds
        with contextlib.suppress(queue.Full):
            self.records.put(None, timeout=self.close_seconds)
        if not self.over.wait(max(0.0, deadline - time.monotonic())):
            self.cause = self.cause or f"it did not take the last of them within {self.close_seconds:g} s"


TURNS = {
    name: threading.Lock() for name in ("wandb", "trackio")
}  # each library holds one run in a process: the next one waits


def turn(name: str) -> contextlib.AbstractContextManager:
    """A block that one thread of the process is in at a time, for each service."""
    return TURNS.get(name) or contextlib.nullcontext()


def new_id() -> str:
    """A random name of 12 letters and digits."""
    return secrets.token_hex(6)
