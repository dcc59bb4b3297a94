"""Weights & Biases and Trackio, each behind a queue of limited length and a thread of its own.

This is the one file that imports them; which of them a run has is `monitor.writers`. A service can end no run and keeps
no step waiting: what it does not take in time is left out there, reported once, and is in metrics.jsonl all the same.
Each record carries `attempt`, how often the run was opened: a chart grouped or filtered by it shows the steps that were
run again apart from those that were given up.

Sources: https://docs.wandb.ai/guides/track/log/customize-logging-axes (define_metric),
https://docs.wandb.ai/guides/runs/resuming (an id with resume="allow"), https://huggingface.co/docs/trackio/index.
"""

import contextlib
import os
import queue
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.system import packages, paths
from jaxscale.system.exits import BadInput
from jaxscale.system.redact import redacted, shown

MOST_WAITING = 10_000  # records, some 10 MB
CLOSE_SECONDS = 10.0  # for what is still on its way when a run ends
FOLDER = "writers"  # in the work folder: NAME.json is {"id": ..., "attempt": ...}
OFFLINE = ("offline", "disabled", "dryrun")  # values of WANDB_MODE
# each library holds one run in a process: the next one waits
TURNS = {name: threading.Lock() for name in ("wandb", "trackio")}


class Service(NamedTuple):
    """An open run of a service. Its functions may raise, or take their time."""

    place: str  # where a person finds it
    log: Callable[[int, Mapping[str, Any]], None]  # takes the step and the metrics of a record
    finish: Callable[[], None]  # sends what is left


class Begin:
    """What a service is told of the run that it shows."""

    def __init__(self, workdir: Any, name: str):
        """Counts this opening as an attempt. Raises OSError or BadInput where the work folder does not take it."""
        folder = paths.as_path(workdir)
        self.folder, self.run_name = folder, str(folder.name) or "run"
        file = folder / FOLDER / f"{name}.json"
        before = paths.read_json(file) if file.exists() else {}  # also of one killed before its first checkpoint
        self.id = str(before.get("id") or secrets.token_hex(6))
        self.attempt = int(before.get("attempt", 0)) + 1
        if not paths.is_remote(folder):
            paths.make_private(folder / FOLDER)
        paths.write_json(file, {"id": self.id, "attempt": self.attempt})
        config = folder / "config.json"
        self.config = redacted(paths.read_json(config)) if config.exists() else {}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run, as the service shows them."""
        return self.config.get("config", self.config) | {"attempts": self.attempt}

    def numbers(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """What a service gets of a record: its attempt, and the values that are known; W&B would draw no others."""
        return {name: value for name, value in metrics.items() if value is not None} | {"attempt": self.attempt}


class Sink:
    """A service behind a queue and a thread."""

    def __init__(
        self,
        name: str,
        workdir: Any,
        open_service: Callable[[Begin], Service],
        *,
        most_waiting: int = MOST_WAITING,
        close_seconds: float = CLOSE_SECONDS,
    ):
        self.name, self.workdir, self.open_service = name, workdir, open_service
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
        with TURNS.get(self.name, contextlib.nullcontext()):
            try:
                service = self.open_service(Begin(self.workdir, self.name))
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


def open_wandb(begin: Begin) -> Service:
    """The run of this work folder, resumed. WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and WANDB_API_KEY hold.

    Its own step can only grow, and a run that goes back to an older step must show both lines: metrics are drawn over
    `step`, which is ours. Raises BadInput where nobody is logged in, for wandb would ask at the terminal of the run.
    """
    import wandb

    offline = os.environ.get("WANDB_MODE") in OFFLINE
    if not offline and not wandb.api.api_key:
        raise BadInput("nobody is logged in; set WANDB_API_KEY, or WANDB_MODE=offline to keep all on this machine")
    settings = wandb.Settings(
        console="off",  # the run's own output stays where it is
        silent=True,
        disable_git=True,  # the commit is in the config; a diff of the sources is nobody else's
        disable_code=True,
        finish_timeout=CLOSE_SECONDS,
        finish_timeout_raises=True,
        x_disable_machine_info=True,  # the name of this machine is nobody else's either
    )
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "jaxscale",
        id=begin.id,
        name=os.environ.get("WANDB_NAME") or begin.run_name,
        resume=None if offline else "allow",  # offline, `wandb sync --append` joins them
        dir=tempfile.mkdtemp(prefix="jaxscale-wandb-") if paths.is_remote(begin.folder) else str(begin.folder),
        config=begin.settings,
        settings=settings,
    )
    run.config.update({"attempts": begin.attempt}, allow_val_change=True)
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    kept = f"kept in {run.dir.removesuffix('/files')}; wandb sync --append brings it there"
    log = lambda step, metrics: run.log(begin.numbers(metrics) | {"step": step})
    link = run.url or "not sent: W&B gives no address"  # as with WANDB_MODE=disabled
    return Service(kept if run.offline else link, log, run.finish)


def open_trackio(begin: Begin) -> Service:
    """The run of this work folder, resumed, in a local database or a Hugging Face Space, over the records' own steps.

    TRACKIO_PROJECT, TRACKIO_DIR and TRACKIO_SPACE_ID hold as they do elsewhere.
    """
    import trackio

    with contextlib.redirect_stdout(sys.stderr):  # it prints what it does; the bar is on stdout
        run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or "jaxscale",
            name=f"{begin.run_name}-{begin.id}",
            resume="allow",
            config=begin.settings,
            embed=False,
            auto_log_gpu=False,  # the run's own records have what the devices say
            auto_log_cpu=False,
        )

    def finish() -> None:
        with contextlib.redirect_stdout(sys.stderr):
            run.finish()

    log = lambda step, metrics: run.log(begin.numbers(metrics), step=step)
    return Service(f"run {run.name}; trackio show --project {run.project}", log, finish)


OPEN = {"wandb": open_wandb, "trackio": open_trackio}


def open_sinks(names: Sequence[str], workdir: Any) -> list[Sink]:
    """A sink for each name. Raises BadInput where a package is missing."""
    if missing := missing_packages(names):
        raise BadInput("; ".join(missing))
    return [Sink(name, workdir, OPEN[name]) for name in names]


def missing_packages(names: Sequence[str]) -> list[str]:
    """One line for each writer whose package is not installed."""
    return [
        f"monitor.writers={name!r} needs its package: pip install 'jaxscale[{name}]', or leave it out"
        for name in names
        if not packages.is_installed(name)
    ]
