"""Profiles of a range of steps, or of the next steps when a trigger file exists, for XProf and TensorBoard.

`--config.monitor.profile_steps=100:105` captures steps 100 to 104 as counted in the log. While a run trains,
`touch WORKDIR/PROFILE` captures the next 5 steps and removes the file. Open a profile with
`xprof WORKDIR/profiles/STEP`, or with TensorBoard and its profile plugin.

The first step is never captured, since it compiles; captured steps do not count in the throughput. The watchdog's
phases show where a step begins: with its data wait.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxscale.runtime.monitor.config import Steps
from jaxscale.runtime.monitor.events import Note
from jaxscale.system import fence, paths
from jaxscale.system.exits import Stop, first_line

TRIGGER_FILE = "PROFILE"
FOLDER = "profiles"
TRIGGER_STEPS = 5
POLL_SECONDS = 15.0  # between polls of a bucket
UPLOAD_SECONDS = 60.0  # timeout of pending uploads when the run ends


@dataclasses.dataclass(eq=False)
class Profiler:
    """Starts and stops captures between steps, in the training thread. A failure is logged once; the run continues."""

    workdir: Any
    _: dataclasses.KW_ONLY
    steps: Steps | None
    note: Note
    say: Callable[[str], None]
    start: Callable[[str], None]  # jax.profiler.start_trace
    stop: Callable[[], None]
    process: int = 0  # only process 0 polls for the file
    poll_seconds: float = POLL_SECONDS

    def __post_init__(self):
        self.owner, self.remote = threading.get_ident(), paths.is_remote(self.workdir)
        self.workdir = paths.as_path(self.workdir)
        self.trigger = self.workdir / TRIGGER_FILE
        self.compiled = False
        self.phases: list[str] = []
        self.last = 0  # the last step of the current capture
        self.first: int | None = None  # its first step
        self.destination: Any = None
        self.excluded_steps = 0  # number of next steps that do not count in the throughput
        self.failed = False
        self.requested, self.stopped = threading.Event(), threading.Event()
        self.uploads: list[threading.Thread] = []

    def __enter__(self) -> "Profiler":
        if self.remote and self.process == 0:
            threading.Thread(target=self.poll_bucket, name="profile", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopped.set()
        if self.first is not None:
            self.end()
        deadline = time.monotonic() + UPLOAD_SECONDS
        for upload in self.uploads:
            upload.join(max(0.0, deadline - time.monotonic()))

    def busy(self) -> bool:
        """Returns True if a capture slowed the step that was just measured."""
        return self.excluded_steps > 0

    def entered(self, name: str, step: int | None = None) -> None:
        """Enters a phase; a step begins with its data wait."""
        if threading.get_ident() != self.owner:
            return
        self.phases.append(name)
        if name == "data" and step is not None and self.compiled:
            self.before_step(step)

    def left(self) -> None:
        """Leaves a phase."""
        if threading.get_ident() == self.owner and self.phases.pop() == "compile":
            self.compiled = True

    def before_step(self, step: int) -> None:
        """Ends a capture whose steps the devices have finished, or begins one."""
        if self.first is not None:
            if step <= self.last + 1 and step > self.first:  # the host is one step ahead of the devices
                return
            self.end()  # also after a rewind
            self.excluded_steps = 2  # the next metrics are of a step that ran during the end of the capture
        self.excluded_steps = max(0, self.excluded_steps - 1)
        if self.failed:
            return
        if self.steps and self.steps.first <= step < self.steps.stop:
            self.begin(step, self.steps.stop - 1)
        elif self.is_requested():
            self.begin(step, step + TRIGGER_STEPS - 1)

    def begin(self, step: int, last: int) -> None:
        """Begins a capture of steps [step, last]."""
        self.first, self.last, self.excluded_steps = step, last, 1
        self.destination = self.workdir / FOLDER / str(step)
        try:
            if self.remote:
                self.folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxscale-profile-"))
            else:
                self.folder = self.destination
                paths.make_private(self.folder)
            self.start(str(self.folder))
        except Exception as error:  # OSError, or an error of the platform's profiler, such as being in use
            self.first = None
            self.fail(step, "could not start", error)
            return
        self.note("profile", step, what="begun", last=last, place=str(self.destination))
        self.say(f"profile: capturing steps {step} to {last} into {self.destination}")

    def end(self) -> None:
        """Ends the current capture and writes it."""
        step, began = self.first, time.monotonic()
        assert step is not None  # both callers check it
        self.first = None
        try:
            if not self.remote:  # the upload thread checks for a bucket
                fence.ask(self.destination)
            self.stop()
        except Stop:  # another process owns the folder
            raise
        except Exception as error:
            self.fail(step, "could not be written", error)
            return
        if self.remote:
            args = (step, self.folder, self.destination)
            self.uploads.append(threading.Thread(target=self.upload, args=args, daemon=True))
            self.uploads[-1].start()
        else:
            self.report_written(step, self.destination, began)

    def upload(self, step: int, folder: pathlib.Path, destination: Any) -> None:
        """Copies a capture into the bucket, in a thread."""
        began = time.monotonic()
        try:
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                paths.write_bytes_atomic(destination / file.relative_to(folder).as_posix(), file.read_bytes())
            shutil.rmtree(folder, ignore_errors=True)
        except Stop:  # the lock reports a lost folder to the training thread
            pass
        except Exception as error:  # any exception of the storage client
            with contextlib.suppress(Stop):
                self.fail(step, f"could not be uploaded to the bucket and is still in {folder}", error)
        else:
            self.report_written(step, destination, began)

    def report_written(self, step: int, destination: Any, began: float) -> None:
        """Logs that the capture is complete."""
        seconds = round(time.monotonic() - began, 3)
        self.note("profile", step, what="written", place=str(destination), seconds=seconds)
        self.say(f"profile: written in {seconds:g} s; view it with: xprof {destination}")

    def fail(self, step: int, what: str, error: Exception) -> None:
        """Logs the failure of the capture that began at `step` and disables the profiler until restart."""
        cause = f"the profile that begins at step {step} {what}: {first_line(error)}"
        self.failed = True
        self.note("alarm", None, cause=cause)
        self.say(f"{cause}; training continues without it")

    def is_requested(self) -> bool:
        """Returns True once after each creation of the trigger file. In a bucket, a thread polls for the file."""
        if self.process != 0 or not self.remote:
            return self.process == 0 and remove_if_exists(self.trigger)
        requested = self.requested.is_set()
        self.requested.clear()
        return requested

    def poll_bucket(self) -> None:
        """Polls the bucket for the trigger file, in a thread."""
        while not self.stopped.wait(self.poll_seconds):
            with contextlib.suppress(Exception):  # checkpoint saves report storage errors
                if remove_if_exists(self.trigger):
                    self.requested.set()


def remove_if_exists(file: Any) -> bool:
    """Removes the file. Returns False if it is missing, or if removal fails: it would trigger again."""
    with contextlib.suppress(OSError):
        if file.exists():
            fence.ask(file)
            file.unlink()
            return True
    return False
