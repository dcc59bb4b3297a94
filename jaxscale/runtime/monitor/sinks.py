"""Metrics writers: TensorBoard, and services such as Weights & Biases, each with a bounded queue and a thread.

`monitor.writers` selects services from OPENERS and from entry points of other packages. A service never ends a run or
blocks a step. Records that it does not accept in time are dropped, which is reported once; metrics.jsonl has them. Each
record has `attempt`, the number of times the run was opened: group charts by it to separate repeated steps.

Sources: https://docs.wandb.ai/guides/track/log/customize-logging-axes (define_metric),
https://docs.wandb.ai/guides/runs/resuming (an id with resume="allow"), https://huggingface.co/docs/trackio/index.
"""

import contextlib
import dataclasses
import difflib
import html
import importlib.metadata
import os
import pathlib
import queue
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.system import fence, packages, paths
from jaxscale.system.exits import BadInput, Stop
from jaxscale.system.redact import block_in_markdown, redacted, shown

MAX_PENDING = 10_000  # records, about 10 MB
CLOSE_SECONDS = 10.0  # timeout for pending records when a run ends
FOLDER = "writers"  # in the work folder: NAME.json is {"id": ..., "attempt": ...}
OFFLINE = ("offline", "disabled", "dryrun")  # values of WANDB_MODE
LOCKS: dict[str, threading.Lock] = {}  # by writer, since W&B and Trackio allow one run per process
GROUP = "jaxscale.writers"  # entry points; each opens a Service when called with a ServiceRun
FLUSH_SECONDS = 10.0  # a flush also syncs the disk, which is too slow for every write


class Service(NamedTuple):
    """An open run of a service; an opener may return any object with these attributes. Functions may raise or block."""

    address: str  # URL, or a command that shows it
    write: Callable[[int, dict[str, Any]], None]  # write(step, metrics); values are numbers, which may be NaN, and text
    write_text: Callable[[int, str, str], None]  # write_text(step, name, text); generated text
    close: Callable[[], None]  # sends remaining records


class ServiceRun:
    """Identity and settings of a run for a service."""

    def __init__(self, workdir: Any, name: str):
        """Increments the attempt number of the run. Raises OSError or BadInput if the work folder is not writable."""
        folder = paths.as_path(workdir)
        self.folder, self.run_name = folder, str(folder.name) or "run"
        file = folder / FOLDER / f"{name}.json"
        before = paths.read_json(file) if file.exists() else {}
        self.id = str(before.get("id") or secrets.token_hex(6))
        self.attempt = int(before.get("attempt", 0)) + 1
        if not paths.is_remote(folder):
            paths.make_private(folder / FOLDER)
        paths.write_json(file, {"id": self.id, "attempt": self.attempt})
        config = redacted(paths.read_json(folder / "config.json")) if (folder / "config.json").exists() else {}
        self.settings: dict[str, Any] = config.get("config", config) | {"attempts": self.attempt}


@dataclasses.dataclass(eq=False)
class Sink:
    """Sends records to a metrics service in a thread, from a bounded queue."""

    name: str
    workdir: Any
    open_service: Callable[[ServiceRun], Service]
    max_pending: int = MAX_PENDING
    close_seconds: float = CLOSE_SECONDS

    def __post_init__(self):
        self.records: queue.Queue[tuple[int, Any] | None] = queue.Queue(self.max_pending)
        self.lost, self.cause = 0, ""
        self.announcement = ""  # address of the run, until it is logged
        self.finished = threading.Event()
        self.thread = threading.Thread(target=self.work, name=f"sink-{self.name}", daemon=True)
        self.thread.start()

    @property
    def problem(self) -> str | None:
        """Reason for missing records, or None. The text does not change, so that it is logged once."""
        if not (self.lost or self.cause):
            return None
        return f"{self.name} lacks metrics that metrics.jsonl has: {self.cause or 'it is too slow'}"

    def write(self, step: int, record: Mapping[str, Any] | tuple[str, str]) -> None:
        """Queues metrics, or a name and text; drops them if the queue is full."""
        if self.cause:
            return
        try:
            self.records.put_nowait((step, record))
        except queue.Full:
            self.lost += 1

    def write_text(self, step: int, name: str, text: str) -> None:
        """Queues generated text."""
        self.write(step, (name, text))

    def work(self) -> None:
        """Opens the service and logs records until `close`."""
        with LOCKS.setdefault(self.name, threading.Lock()):
            try:
                service_run = ServiceRun(self.workdir, self.name)
                service = self.open_service(service_run)
                self.announcement = f"{self.name}: {service.address}"
                while (pending := self.records.get()) is not None:
                    step, record = pending
                    if isinstance(record, tuple):
                        service.write_text(step, *record)
                    else:
                        metrics = {name: value for name, value in record.items() if value is not None}
                        service.write(step, metrics | {"attempt": service_run.attempt})
                service.close()
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
            self.cause = self.cause or f"the service did not accept the last records within {self.close_seconds:g} s"


def open_wandb(service_run: ServiceRun) -> Service:
    """Opens or resumes the W&B run of this work folder. Reads WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, WANDB_API_KEY.

    Metrics use our `step` as the x-axis, since wandb's step cannot decrease after a rewind. Raises BadInput if the user
    is not logged in; wandb would prompt on the terminal.
    """
    import wandb

    offline = os.environ.get("WANDB_MODE") in OFFLINE
    if not offline and not wandb.api.api_key:
        raise BadInput("not logged in to W&B; set WANDB_API_KEY, or set WANDB_MODE=offline to store metrics locally")
    settings = wandb.Settings(
        console="off",  # do not redirect the run's output
        silent=True,
        disable_git=True,  # the commit is in the config; do not upload a diff of the sources
        disable_code=True,
        finish_timeout=CLOSE_SECONDS,
        finish_timeout_raises=True,
        x_disable_machine_info=True,  # do not upload the host name
    )
    remote = paths.is_remote(service_run.folder)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "jaxscale",
        id=service_run.id,
        name=os.environ.get("WANDB_NAME") or service_run.run_name,
        resume=None if offline else "allow",  # offline, `wandb sync --append` joins the attempts
        dir=tempfile.mkdtemp(prefix="jaxscale-wandb-") if remote else str(service_run.folder),
        config=service_run.settings,
        settings=settings,
    )
    run.config.update({"attempts": service_run.attempt}, allow_val_change=True)
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")

    write = lambda step, metrics: run.log(metrics | {"step": step})
    page = lambda text: wandb.Html(f"<pre>{html.escape(text)}</pre>", data_is_not_path=True)
    write_text = lambda step, name, text: write(step, {name: page(text), "attempt": service_run.attempt})
    address = run.url or "not sent: W&B returned no address"  # such as with WANDB_MODE=disabled
    if run.offline:
        address = f"stored in {run.dir.removesuffix('/files')}; upload it with wandb sync --append"
    return Service(address, write, write_text, run.finish)


def open_trackio(service_run: ServiceRun) -> Service:
    """Opens or resumes the Trackio run. Reads TRACKIO_PROJECT, TRACKIO_DIR, TRACKIO_SPACE_ID (a Hugging Face Space)."""
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

    def close() -> None:
        with contextlib.redirect_stdout(sys.stderr):
            run.finish()

    write = lambda step, metrics: run.log(metrics, step=step)
    write_text = lambda step, name, text: write(step, {name: trackio.Markdown(block_in_markdown(text))})
    return Service(f"run {run.name}; trackio show --project {run.project}", write, write_text, close)


OPENERS = {"wandb": open_wandb, "trackio": open_trackio}


def open_sinks(names: Sequence[str], workdir: Any) -> list[Sink]:
    """Returns a sink for each name. Raises BadInput if a writer or its package is missing."""
    if missing := missing_packages(names):
        raise BadInput("; ".join(missing))
    load = lambda name: lambda run: importlib.metadata.entry_points(group=GROUP)[name].load()(run)  # in the thread
    return [Sink(name, workdir, OPENERS.get(name) or load(name)) for name in names]


def missing_packages(names: Sequence[str]) -> list[str]:
    """Returns one error message for each writer that is unknown or whose package is not installed."""
    external = set(names) - set(OPENERS) and importlib.metadata.entry_points(group=GROUP).names  # takes 20 ms
    known = sorted({*OPENERS, *external})
    nearest = lambda name: " or ".join(difflib.get_close_matches(name, known, n=2, cutoff=0.3) or known)
    return [
        f"monitor.writers={name!r} needs a missing package; run pip install 'jaxscale[{name}]', or remove the writer"
        if name in OPENERS
        else f"monitor.writers={name!r} is not an installed writer; nearest: {nearest(name)} (docs/watch.md)"
        for name in names
        if not (packages.is_installed(name) if name in OPENERS else name in external)
    ]


class TensorBoard:
    """Writes TensorBoard event files. Starts a new file after an error, since TensorBoard stops at incomplete records.

    Uses the record format and messages of tensorboardX in the calling thread; importing them takes 0.1 s. Does not use
    its SummaryWriter, which starts a thread and a multiprocessing queue, and puts the host name into the file name.
    """

    def __init__(self, folder: pathlib.Path, start_step: int = 0):
        self.folder, self.start_step = folder, start_step
        self.records: Any = None  # the open file
        self.pending: list[bytes] = []  # records; the fence is checked once per flush
        self.flushed_at = 0.0
        self.problem: str | None = None
        self.announcement = ""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds one event with all numbers of a step."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        self.add_summary(step, {"value": [{"tag": name, "simple_value": value} for name, value in numbers.items()]})

    def write_text(self, step: int, name: str, text: str) -> None:
        """Adds text for the text panel. It becomes a code block, since TensorBoard renders Markdown."""
        from tensorboardX import summary

        self.add_summary(step, summary.text(name, block_in_markdown(text)))

    def add_summary(self, step: int, summary: Any) -> None:
        """Adds one event to the open file or to a new one; closes the file after an error."""
        try:
            if self.records is None:
                self.begin_file()
            self.add(step=step, summary=summary)
            if time.time() - self.flushed_at >= FLUSH_SECONDS:
                self.flush()
            self.problem = None
        except Stop:  # another process owns the folder
            self.abandon()
            raise
        except OSError as error:
            self.problem = f"{self.folder} lacks metrics that metrics.jsonl has: {error.strerror or error}"
            if self.records is not None:
                self.start_step = step  # the next file must not hide the events of this file
            self.abandon()

    def begin_file(self) -> None:
        """Creates a file with its first two events."""
        from tensorboardX.record_writer import RecordWriter

        paths.make_folder(self.folder)
        stem = f"events.out.tfevents.{int(time.time())}.jaxscale"
        names = (self.folder / f"{stem}.{number}" for number in range(1_000_000))
        self.path = next(name for name in names if not name.exists())  # a start in the same second uses another number
        self.records = RecordWriter(str(self.path))
        self.add(file_version="brain.Event:2")
        # TensorBoard hides events of earlier processes from this step on, which are repeated; a new run has a step 0
        self.add(step=self.start_step + 1 if self.start_step else 0, session_log={"status": "START"})
        try:
            self.flush()
        except OSError:
            self.abandon()
            self.path.unlink(missing_ok=True)  # do not leave an empty file for each attempt
            raise

    def add(self, **fields: Any) -> None:
        """Buffers one event for the next flush."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue] - generated

        self.pending.append(Event(wall_time=time.time(), **fields).SerializeToString())

    def flush(self) -> None:
        """Writes buffered records. Raises Stop if this process no longer owns the folder, or OSError."""
        fence.ask(self.path)
        for record in self.pending:
            self.records.write(record)
        self.pending.clear()
        self.records.flush()
        self.flushed_at = time.time()

    def abandon(self) -> None:
        """Closes the file, which may not be writable."""
        if self.records is not None:
            with contextlib.suppress(OSError):
                self.records.close()
        self.records = None
        self.pending.clear()

    def close(self) -> None:
        """Flushes and closes the file."""
        if self.records is not None:
            try:
                with contextlib.suppress(Stop):  # the lock reports it
                    self.flush()
                self.records.close()
            except OSError as error:
                self.problem = f"{self.folder} lacks its last metrics: {error.strerror or error}"
        self.abandon()
