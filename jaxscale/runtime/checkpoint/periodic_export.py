"""Exports checkpoints to Hugging Face folders during training, in subprocesses that neither delay nor stop the run.

The subprocess reads a committed checkpoint on the CPU. During the export the step is pinned, so that the retention
policy does not delete it. The content of the pin file marks the pin as made by an export, so a resumed run can finish
the export or remove the pin.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from jaxscale.runtime.checkpoint.config import ExportConfig, check_hub_name
from jaxscale.runtime.checkpoint.folders import is_step_name, remove_tree
from jaxscale.runtime.checkpoint.retention import PINNED, pin, pinned_steps
from jaxscale.runtime.checkpoint.storage_errors import short_reason
from jaxscale.runtime.monitor.events import Note
from jaxscale.system import fence, packages, paths
from jaxscale.system.exits import BadInput
from jaxscale.system.redact import shown
from jaxscale.system.storage import is_loopback

FOLDER = "export"  # subfolder of the work folder
OURS = "export\n"  # content of the pin file of an export
LOOK_SECONDS = 0.2
TAIL = 400  # number of last characters of a failed export's stderr to log
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"  # the last files that an export writes
JOURNAL = ".converting.json"
TOKEN, ENDPOINT = "HF_TOKEN", "HF_ENDPOINT"


class Exporter:
    """Exports the steps of a run one at a time. A newer request replaces a pending one."""

    def __init__(self, cfg: ExportConfig, workdir: Any, note: Note, say: Callable[[str], None]):
        self.cfg, self.workdir = cfg, paths.absolute(workdir)
        self.write_event, self.log = note, say
        self.last_saved = self.last_requested = 0
        self.lock = threading.Lock()
        self.pending: int | None = None
        self.thread: threading.Thread | None = None
        self.child: subprocess.Popen | None = None
        self.ended = False

    def note(self, kind: str, step: int | None = None, **facts: Any) -> None:
        """Writes an event and, for committed checkpoints, requests an export. Exports never block or raise."""
        self.write_event(kind, step, **facts)
        if kind == "saved" and step:
            self.last_saved = step
            if step % self.cfg.every_steps == 0:
                self.request(step)

    def request(self, step: int) -> None:
        """Requests an export of a step. It starts after the current export, unless a newer step is requested first."""
        self.last_requested = step
        try:
            pin(self.workdir / "checkpoints", step, OURS)
        except Exception as error:  # storage clients raise various types
            self.failed(step, short_reason(error))
            return
        with self.lock:
            skipped, self.pending = self.pending, step
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name="export", daemon=True)
                self.thread.start()
        if skipped is not None:
            self.unpin(skipped)
            self.failed(skipped, f"the previous export was still running when step {step} was saved")

    def work(self) -> None:
        """Exports pending steps until none is left."""
        while True:
            with self.lock:
                step, self.pending = self.pending, None
                if step is None or self.ended:
                    self.thread = None
                    return
            try:
                self.export(step)
            except Exception as error:  # an export must not stop the run
                self.failed(step, short_reason(error))
            if not self.ended:
                self.unpin(step)

    def export(self, step: int) -> None:
        """Exports a step, or logs why the export failed."""
        folder = self.workdir / FOLDER / str(step)
        if not is_finished(folder):  # an earlier start that was killed may have finished the export
            code, text = self.run(self.command(step))
            if self.ended:
                return
            if code:
                return self.failed(step, " ".join(text.split())[-TAIL:] or f"its process exited with code {code}")
        self.write_event("exported", step, folder=str(folder), pushed_to=self.cfg.push_to)
        try:
            steps = sorted(int(path.name) for path in folder.parent.iterdir() if is_step_name(path.name))
            for old in [old for old in steps if old <= step][: -self.cfg.keep] if self.cfg.keep else ():
                remove_tree(folder.parent / str(old))
        except Exception as error:  # a remaining old export only uses space
            self.write_event("alarm", step, cause=f"an old export could not be removed: {short_reason(error)}")

    def command(self, step: int) -> list[str]:
        """Returns the command of the subprocess, with the lowest CPU priority if `nice` is installed."""
        polite = [nice, "-n", "19"] if (nice := shutil.which("nice")) else []
        flags = [f"--workdir={self.workdir}", f"--step={step}", f"--to={self.workdir / FOLDER / str(step)}"]
        flags += [f"--dtype={self.cfg.dtype}", *(["--ema"] if self.cfg.ema else [])]
        flags += [f"--push={self.cfg.push_to}"] if self.cfg.push_to else []
        return [*polite, sys.executable, "-m", "jaxscale.cli", "convert", *flags]

    def run(self, command: list[str]) -> tuple[int, str]:
        """Runs a command and returns (exit code, stderr)."""
        env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
        with self.lock:
            if self.ended:
                return 0, ""
            nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
            self.child = child = subprocess.Popen(
                command, env=env, stdin=nothing, stdout=nothing, stderr=pipe, encoding="utf-8", errors="replace"
            )
        _, text = child.communicate()
        return child.returncode, shown(text)

    def failed(self, step: int, cause: str) -> None:
        """Logs a failed export as an event and a warning."""
        with contextlib.suppress(Exception):  # an unwritable event log is reported elsewhere
            self.write_event("alarm", step, cause=f"no export of step {step}: {cause}")
        self.log(f"WARNING: no export of step {step}: {cause}")

    def unpin(self, step: int) -> None:
        """Removes the pin of a step if an export made it."""
        with contextlib.suppress(Exception):  # the next start removes the pin
            if self.pin_path(step).read_text("utf-8") == OURS:
                fence.ask(self.pin_path(step))
                self.pin_path(step).unlink()

    def pin_path(self, step: int) -> Any:
        """Returns the path of a step's pin file."""
        return self.workdir / "checkpoints" / PINNED / str(step)

    def resume_pending(self) -> None:
        """Resumes the exports of a killed run. Call before the first save."""
        with contextlib.suppress(Exception):  # an export must not prevent the start of a run
            pins = sorted(pinned_steps(self.workdir / "checkpoints"))
            for step in [step for step in pins if self.pin_path(step).read_text("utf-8") == OURS]:
                if (self.workdir / "checkpoints" / str(step)).exists():
                    self.request(step)
                else:
                    self.unpin(step)

    def finish(self) -> None:
        """Exports the last saved step, and waits until all exports are done."""
        if self.last_saved and self.last_saved != self.last_requested:
            self.request(self.last_saved)
        if self.thread is not None:
            self.log("waiting for the current export")
        while (thread := self.thread) is not None:
            thread.join(LOOK_SECONDS)  # with a timeout, so that signals are handled

    def abort(self) -> None:
        """Kills the current export. Its step stays pinned, so the next start resumes the export."""
        with self.lock:
            self.ended = True
            child = self.child
        if child is not None and child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def periodic_exports(
    cfg: ExportConfig,
    workdir: Any,
    note: Note,
    say: Callable[[str], None],
    primary: bool,
    make_exporter: Callable[..., Exporter] = Exporter,
) -> Iterator[Note]:
    """Yields a function that writes events and exports saved steps. Raises BadInput if a push cannot succeed."""
    if not cfg.every_steps or not primary:
        yield note
        return
    if cfg.push_to:
        check_push(cfg.push_to, paths.absolute(workdir))
    exporter = make_exporter(cfg, workdir, note, say)
    exporter.resume_pending()
    try:
        yield exporter.note
        exporter.finish()
    except BaseException:
        exporter.abort()
        raise


def is_finished(folder: Any) -> bool:
    """Returns True if the folder contains a finished export."""
    return any((folder / name).exists() for name in (CONFIG, ADAPTER_CONFIG)) and not (folder / JOURNAL).exists()


def check_endpoint(with_token: bool) -> None:
    """Raises BadInput if the token would be sent unencrypted."""
    address = urllib.parse.urlsplit(os.environ.get(ENDPOINT) or "https://huggingface.co")
    if with_token and address.scheme != "https" and not is_loopback(address.hostname or ""):
        raise BadInput(f"{ENDPOINT}={address.geturl()} would send the token unencrypted; use an https:// address")


def check_push(name: str, folder: Any = None) -> None:
    """Raises BadInput if a push to the Hub cannot succeed. Call before the export. name: OWNER/NAME."""
    check_hub_name("push", name)
    if folder is not None and paths.is_remote(folder):
        raise BadInput(f"--push requires a local folder, but {folder} is remote; export to a local folder")
    if not packages.is_installed("huggingface_hub"):
        raise BadInput("--push requires huggingface_hub; install it with pip install 'jaxscale[hub]'")
    check_endpoint(True)
    if not os.environ.get(TOKEN, "").strip():
        raise BadInput(f"--push requires a token with write access; set the environment variable {TOKEN}")
