"""Weights & Biases and Trackio, each behind a bounded queue and a thread.

This is the only file that imports them; `monitor.writers` selects them. A service never ends a run or blocks a step:
records that it does not accept in time are dropped there and reported once; metrics.jsonl has them all. Each record has
`attempt`, the number of times the run was opened: group charts by it to separate repeated from abandoned steps.

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

MAX_PENDING = 10_000  # records, some 10 MB
CLOSE_SECONDS = 10.0  # timeout for pending records when a run ends
FOLDER = "writers"  # in the work folder: NAME.json is {"id": ..., "attempt": ...}
OFFLINE = ("offline", "disabled", "dryrun")  # values of WANDB_MODE
LOCKS = {name: threading.Lock() for name in ("wandb", "trackio")}  # each library allows one run per process


class Service(NamedTuple):
    """An open run of a service. Its functions may raise or block."""

    address: str  # URL, or a command that shows it
    log: Callable[[int, Mapping[str, Any]], None]  # log(step, metrics)
    finish: Callable[[], None]  # sends remaining records


class ServiceRun:
    """Identity and settings of a run for a service."""

    def __init__(self, workdir: Any, name: str):
        """Records a new attempt. Raises OSError or BadInput if the work folder cannot be written."""
        folder = paths.as_path(workdir)
        self.folder, self.run_name = folder, str(folder.name) or "run"
        file = folder / FOLDER / f"{name}.json"
        before = paths.read_json(file) if file.exists() else {}
        self.id = str(before.get("id") or secrets.token_hex(6))
        self.attempt = int(before.get("attempt", 0)) + 1
        if not paths.is_remote(folder):
            paths.make_private(folder / FOLDER)
        paths.write_json(file, {"id": self.id, "attempt": self.attempt})
        config = folder / "config.json"
        self.config = redacted(paths.read_json(config)) if config.exists() else {}

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run to show in the service."""
        return self.config.get("config", self.config) | {"attempts": self.attempt}

    def with_attempt(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the record with its attempt and without None, which W&B does not draw."""
        return {name: value for name, value in metrics.items() if value is not None} | {"attempt": self.attempt}


class Sink:
    """A service behind a queue and a thread."""

    def __init__(
        self,
        name: str,
        workdir: Any,
        open_service: Callable[[ServiceRun], Service],
        *,
        max_pending: int = MAX_PENDING,
        close_seconds: float = CLOSE_SECONDS,
    ):
        self.name, self.workdir, self.open_service = name, workdir, open_service
        self.close_seconds = close_seconds
        self.records: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(max_pending)
        self.lost, self.cause = 0, ""
        self.announcement = ""  # address of the run, until it is logged
        self.finished = threading.Event()
        self.thread = threading.Thread(target=self.work, name=f"sink-{name}", daemon=True)
        self.thread.start()

    @property
    def problem(self) -> str | None:
        """Reason for missing records, or None; constant text, so that it is logged once."""
        if not (self.lost or self.cause):
            return None
        return f"{self.name} lacks metrics that metrics.jsonl has: {self.cause or 'it is too slow'}"

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queues a record; drops it if the queue is full."""
        if self.cause:
            return
        try:
            self.records.put_nowait((step, dict(metrics)))
        except queue.Full:
            self.lost += 1

    def work(self) -> None:
        """Opens the service and logs records until `close`."""
        with LOCKS.get(self.name, contextlib.nullcontext()):
            try:
                service = self.open_service(ServiceRun(self.workdir, self.name))
                self.announcement = f"{self.name}: {service.address}"
                while (record := self.records.get()) is not None:
                    service.log(*record)
                service.finish()
            except BaseException as error:  # some services raise SystemExit instead of prompting
                first_line = (shown(str(error)).strip().splitlines() or [""])[0][:300]
                self.cause = f"{type(error).__name__}: {first_line}"
        self.finished.set()

    def close(self) -> None:
        """Sends pending records, for at most close_seconds."""
        deadline = time.monotonic() + self.close_seconds
        with contextlib.suppress(queue.Full):
            self.records.put(None, timeout=self.close_seconds)
        if not self.finished.wait(max(0.0, deadline - time.monotonic())):
            self.cause = self.cause or f"it did not take the last of them within {self.close_seconds:g} s"


def open_wandb(service_run: ServiceRun) -> Service:
    """Opens or resumes the run of this work folder. Honors WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, WANDB_API_KEY.

    Metrics use our `step` as x-axis: wandb's step cannot decrease, as after a rewind. Raises BadInput without a login,
    since wandb would prompt on the terminal.
    """
    import wandb

    offline = os.environ.get("WANDB_MODE") in OFFLINE
    if not offline and not wandb.api.api_key:
        raise BadInput("nobody is logged in; set WANDB_API_KEY, or WANDB_MODE=offline to keep all on this machine")
    settings = wandb.Settings(
        console="off",  # do not redirect the run's output
        silent=True,
        disable_git=True,  # the commit is in the config; do not upload a diff of the sources
        disable_code=True,
        finish_timeout=CLOSE_SECONDS,
        finish_timeout_raises=True,
        x_disable_machine_info=True,  # do not upload the host name
    )
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "jaxscale",
        id=service_run.id,
        name=os.environ.get("WANDB_NAME") or service_run.run_name,
        resume=None if offline else "allow",  # offline, `wandb sync --append` joins the attempts
        dir=tempfile.mkdtemp(prefix="jaxscale-wandb-")
        if paths.is_remote(service_run.folder)
        else str(service_run.folder),
        config=service_run.settings,
        settings=settings,
    )
    run.config.update({"attempts": service_run.attempt}, allow_val_change=True)
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")

    log = lambda step, metrics: run.log(service_run.with_attempt(metrics) | {"step": step})
    offline_path = f"kept in {run.dir.removesuffix('/files')}; wandb sync --append brings it there"
    link = run.url or "not sent: W&B gives no address"  # as with WANDB_MODE=disabled
    return Service(offline_path if run.offline else link, log, run.finish)


def open_trackio(service_run: ServiceRun) -> Service:
    """Opens or resumes the run of this work folder in a local database or a Hugging Face Space.

    Honors TRACKIO_PROJECT, TRACKIO_DIR and TRACKIO_SPACE_ID.
    """
    import trackio

    with contextlib.redirect_stdout(sys.stderr):  # its messages would break the bar on stdout
        run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or "jaxscale",
            name=f"{service_run.run_name}-{service_run.id}",
            resume="allow",
            config=service_run.settings,
            embed=False,
            auto_log_gpu=False,  # records have device telemetry
            auto_log_cpu=False,
        )

    def finish() -> None:
        with contextlib.redirect_stdout(sys.stderr):
            run.finish()

    log = lambda step, metrics: run.log(service_run.with_attempt(metrics), step=step)
    return Service(f"run {run.name}; trackio show --project {run.project}", log, finish)


OPENERS = {"wandb": open_wandb, "trackio": open_trackio}


def open_sinks(names: Sequence[str], workdir: Any) -> list[Sink]:
    """Returns a sink for each name. Raises BadInput if a package is missing."""
    if missing := missing_packages(names):
        raise BadInput("; ".join(missing))
    return [Sink(name, workdir, OPENERS[name]) for name in names]


def missing_packages(names: Sequence[str]) -> list[str]:
    """Returns one line for each writer whose package is not installed."""
    return [
        f"monitor.writers={name!r} needs its package: pip install 'jaxscale[{name}]', or leave it out"
        for name in names
        if not packages.is_installed(name)
    ]
