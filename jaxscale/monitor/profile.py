"""Captures of what the devices do, for XProf and TensorBoard's profiler: of a range of steps, or asked for by a file.

`--config.monitor.profile_steps=100:105` captures steps 100 to 104 as the log counts them. While a run trains,
`touch WORKDIR/PROFILE` captures the next 5 steps; the file is removed when they begin. A capture lies in
WORKDIR/profiles/STEP and is opened with `xprof WORKDIR/profiles/STEP`, or with TensorBoard and its profile plugin.

The first step is never captured, for it compiles, and captured steps are no part of the throughput. Watched are the
watchdog's phases: a step begins with its wait for data.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxscale.monitor.config import Steps
from jaxscale.monitor.events import Note
from jaxscale.system import fence, paths
from jaxscale.system.exits import Stop

TOUCHED = "PROFILE"
FOLDER = "profiles"
TOUCHED_STEPS = 5
LOOK_SECONDS = 15.0  # between two looks into a bucket
UPLOAD_SECONDS = 60.0  # for a capture that is on its way to a bucket when the run ends


class Profiler:
    """Begins and ends captures between steps, in the thread of the steps. What fails is told once and ends no run."""

    def __init__(
        self,
        workdir: Any,
        *,
        steps: Steps | None,
        process: int = 0,
        note: Note,
        say: Callable[[str], None],
        start: Callable[[str], None],
        stop: Callable[[], None],
        look_seconds: float = LOOK_SECONDS,
    ):
        """process: only the first looks for the file. start, stop: jax.profiler's start_trace and stop_trace."""
        self.workdir, self.steps, self.process = paths.as_path(workdir), steps, process
        self.touched = self.workdir / TOUCHED
        self.note, self.say, self.start, self.stop, self.look_seconds = note, say, start, stop, look_seconds
        self.owner, self.remote = threading.get_ident(), paths.is_remote(workdir)
        self.compiled = False
        self.names: list[str] = []
        self.last = 0  # the last step of the capture that is under way
        self.begun: int | None = None  # its first step
        self.place: Any = None
        self.leaving_out = 0  # steps whose time is no part of the throughput: while it is above 0
        self.failed = False
        self.asked, self.over = threading.Event(), threading.Event()
        self.uploads: list[threading.Thread] = []

    def __enter__(self) -> "Profiler":
        if self.remote and self.process == 0:
            threading.Thread(target=self.look_again, name="profile", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        if self.begun is not None:
            self.end()
        deadline = time.monotonic() + UPLOAD_SECONDS
        for upload in self.uploads:
            upload.join(max(0.0, deadline - time.monotonic()))

    def busy(self) -> bool:
        """True if the step whose numbers are read now was captured, or waited for a capture to begin or end."""
        return self.leaving_out > 0

    def entered(self, name: str, step: int | None = None) -> None:
        """A phase begins: the wait for data is where a step begins."""
        if threading.get_ident() != self.owner:
            return
        self.names.append(name)
        if name == "data" and step is not None and self.compiled:
            self.between(step)

    def left(self) -> None:
        """A phase is over."""
        if threading.get_ident() == self.owner and self.names.pop() == "compile":
            self.compiled = True

    def between(self, step: int) -> None:
        """Before `step`: ends a capture whose steps the devices are done with, or begins one."""
        if self.begun is not None:
            if step <= self.last + 1 and step > self.begun:  # the host is one step ahead of the devices
                return
            self.end()  # or the run went back
            self.leaving_out = 2  # the next read is of a step that was under way meanwhile
        self.leaving_out = max(0, self.leaving_out - 1)
        if self.failed:
            return
        if self.steps and self.steps.first <= step < self.steps.stop:
            self.begin(step, self.steps.stop - 1)
        elif self.was_touched():
            self.begin(step, step + TOUCHED_STEPS - 1)

    def begin(self, step: int, last: int) -> None:
        """Begins a capture of steps [step, last]."""
        self.begun, self.last, self.leaving_out = step, last, 1
        self.place = self.workdir / FOLDER / str(step)
        try:
            if self.remote:
                folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxscale-profile-"))
            else:
                folder = self.place
                paths.make_private(folder)
            self.folder = folder
            self.start(str(folder))
        except Exception as error:  # OSError, or what the profiler of the platform raises, such as being in use
            self.begun = None
            self.fail(step, "could not begin", error)
            return
        self.note("profile", step, what="begun", last=last, place=str(self.place))
        self.say(f"profile: capturing steps {step} to {last} into {self.place}")

    def end(self) -> None:
        """Ends the capture that is under way and writes it."""
        step, began = self.begun, time.monotonic()
        assert step is not None  # both callers end a capture that has begun
        self.begun = None
        try:
            if not self.remote:  # into a bucket it is brought by a thread, which asks
                fence.ask(self.place)
            self.stop()
        except Stop:  # the folder is another's
            raise
        except Exception as error:
            self.fail(step, "could not be written", error)
            return
        seconds = round(time.monotonic() - began, 3)
        if self.remote:
            self.uploads.append(threading.Thread(target=self.bring, args=(step, self.folder, self.place), daemon=True))
            self.uploads[-1].start()
            return
        self.tell_written(step, self.place, seconds)

    def bring(self, step: int, folder: pathlib.Path, place: Any) -> None:
        """Copies a capture into the bucket, in a thread."""
        began = time.monotonic()
        with contextlib.suppress(Stop):  # of a folder that is another's now, the steps hear from the lock
            try:
                for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                    paths.write_bytes_atomic(place / file.relative_to(folder).as_posix(), file.read_bytes())
                shutil.rmtree(folder, ignore_errors=True)
            except Stop:
                raise
            except Exception as error:  # whatever the storage's client raises
                self.fail(step, f"could not be brought into the bucket, and stays in {folder}", error)
                return
            self.tell_written(step, place, round(time.monotonic() - began, 3))

    def tell_written(self, step: int, place: Any, seconds: float) -> None:
        """The capture can be looked at."""
        self.note("profile", step, what="written", place=str(place), seconds=seconds)
        self.say(f"profile: written in {seconds:g} s; look at it with: xprof {place}")

    def fail(self, step: int, what: str, error: Exception) -> None:
        """Tells what became of the capture that began at `step`. None begins after it in this start."""
        first_line = str(error).splitlines()[0] if str(error) else ""
        cause = f"the profile from step {step} on {what}: {type(error).__name__}: {first_line}"
        self.failed = True
        self.note("alarm", None, cause=cause)
        self.say(f"{cause}; training goes on without")

    def was_touched(self) -> bool:
        """True once for each time that the file was made. A bucket is asked by a thread alone."""
        if self.process != 0:
            return False
        if self.remote:
            asked = self.asked.is_set()
            self.asked.clear()
            return asked
        return os.path.exists(self.touched) and taken_away(self.touched)

    def look_again(self) -> None:
        """Looks into the bucket now and then."""
        while not self.over.wait(self.look_seconds):
            with contextlib.suppress(Exception):  # storage that does not answer is told by what saves there
                if taken_away(self.touched):
                    self.asked.set()


def taken_away(file: Any) -> bool:
    """True if the file was there and is removed now. One that cannot be removed does not count: it would each time."""
    try:
        if not file.exists():
            return False
        fence.ask(file)
        file.unlink()
    except OSError:
        return False
    return True
