"""The watchdog, which ends the run and writes the stacks of all threads if a phase exceeds its time budget.

Otherwise a run that is blocked by storage, network, device or code would occupy its machines until someone notices.
Budgets are settings per phase, since a compilation may take longer than a step. Every process has a watchdog. The first
one that expires reports to the other processes, so that all write their stacks and end with exit code 15.

Not covered are threads that the kernel cannot interrupt (state D, such as in a broken disk driver) and, outside Linux,
threads that hold the GIL forever.
"""

import contextlib
import ctypes
import dataclasses
import faulthandler
import math
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Literal, Protocol

from jaxscale.runtime.hosts.cluster import Team
from jaxscale.runtime.hosts.config import HangConfig
from jaxscale.system import faults, fence, paths
from jaxscale.system.exits import Exit, print_stderr, silence_closed_streams

TICK_SECONDS = 0.25
LAST_SECONDS = 4.5  # from expiry to the exit, even if reporting blocks
FOLDER = "stacks"
# Delays after the deadline, for a blocked watchdog thread: first the stacks, then a line, then the exit.
STACKS_SECONDS, LINE_SECONDS, EXIT_SECONDS = 2.0, 2.3, 3.0
STACKS_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 2  # an unused real-time signal
BY_SIGNAL, BY_THREAD, ABSOLUTE = 0, 2, 1  # SIGEV_SIGNAL, SIGEV_THREAD and TIMER_ABSTIME of Linux

PhaseName = Literal["compile", "restore", "data", "step", "save", "eval", "statistics"]


class Observer(Protocol):
    """Receives the phases of all threads, in the thread of the phase."""

    def entered(self, name: str, step: int | None = None) -> None:
        """Called when a phase begins."""

    def left(self) -> None:
        """Called when the innermost phase of this thread ends."""


class SignalEvent(ctypes.Structure):
    """struct sigevent of 64-bit Linux."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_byte * 32),
    ]


class Backstop:
    """Kernel timers that write the stacks and end the process with exit code 15 after a deadline.

    The timers also work while C code holds the GIL, which blocks all Python threads. They call functions of the C
    library, which need no interpreter. The last timer calls `_exit(15)`, in a separate thread.
    """

    def __init__(self, stacks: BinaryIO):
        """Raises OSError on systems without these timers; Linux has them."""
        self.text = ctypes.create_string_buffer(500)
        self.timers: list[ctypes.c_void_p] = []
        if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
            raise OSError("no kernel timers")
        self.libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(self.libc, "timer_create"):  # before glibc 2.34 the timers were in librt
            self.libc = ctypes.CDLL("librt.so.1", use_errno=True)
        self.libc.timer_settime.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self.libc.timer_delete.argtypes = [ctypes.c_void_p]
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
        warn, leave = (ctypes.cast(function, ctypes.c_void_p) for function in (self.libc.warnx, self.libc._exit))
        for event in (
            SignalEvent(notify=BY_SIGNAL, signal=STACKS_SIGNAL),
            SignalEvent(notify=BY_THREAD, function=warn, value=ctypes.addressof(self.text)),
            SignalEvent(notify=BY_THREAD, function=leave, value=int(Exit.HANG)),
        ):
            timer = ctypes.c_void_p()
            if self.libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
                self.close()
                raise OSError(ctypes.get_errno(), "timer_create failed")
            self.timers.append(timer)

    def arm(self, deadline: float, line: str) -> None:
        """Schedules the exit EXIT_SECONDS after `deadline` (time.monotonic()). Prints `line` to stderr before it."""
        self.text.value = line.encode(errors="replace").replace(b"%", b" percent")[:499]  # a format string of warnx
        self.set_timers(deadline + STACKS_SECONDS, deadline + LINE_SECONDS, deadline + EXIT_SECONDS)

    def disarm(self) -> None:
        """Cancels the exit."""
        self.set_timers(0.0, 0.0, 0.0)

    def set_timers(self, *moments: float) -> None:
        """Sets the times to write the stacks, print the line, and exit. 0.0 disables a timer."""
        for timer, moment in zip(self.timers, moments):
            once = (ctypes.c_long * 4)(0, 0, int(moment), int(moment % 1 * 1e9))
            self.libc.timer_settime(timer, ABSOLUTE, ctypes.byref(once), None)

    def close(self) -> None:
        """Deletes the timers."""
        for timer in self.timers:
            self.libc.timer_delete(timer)
        self.timers = []
        faulthandler.unregister(STACKS_SIGNAL)


@dataclasses.dataclass(eq=False)
class Watchdog:
    """Context manager that limits the duration of each phase of a run. Outside the context, phases are unlimited.

    Creates no file before the first phase begins.
    """

    workdir: Any
    cfg: Any  # a dataclass with NAME_seconds for each phase NAME
    _: dataclasses.KW_ONLY
    setting: str = "hang.{}_seconds"  # format of setting names in messages
    note: Callable[..., None] = lambda kind, step=None, **facts: None  # receives the event "hang"
    others: Team | None = None
    end: Callable[[int], None] = os._exit  # called with the exit code
    observers: Sequence[Observer] = ()

    def __post_init__(self) -> None:
        self.budgets = {name.removesuffix("_seconds"): seconds for name, seconds in vars(self.cfg).items()}
        self.process = self.others.process if self.others else 0
        self.phases: dict[int, WatchedPhase] = {}  # innermost phase of each thread
        self.stacks: Any = None  # the open file, private; empty until a hang
        self.backstop: Backstop | None = None
        self.stopped = threading.Event()
        self.expired = threading.Lock()
        self.ready = threading.Lock()
        self.entered = False

    def __enter__(self) -> "Watchdog":
        self.entered = any(self.budgets.values()) and self.workdir is not None
        if self.entered:
            threading.Thread(target=self.work, name="watchdog", daemon=True).start()
            if self.others:
                self.others.on_hang(lambda line: self.expire(line, is_remote=True))
        return self

    def __exit__(self, *exc: object) -> None:
        self.entered = False
        self.stopped.set()
        with self.ready:
            if self.backstop:
                self.backstop.close()
            self.backstop = None
            if self.stacks:
                self.stacks.close()
                remove_if_empty(pathlib.Path(self.stacks.name))
            self.stacks = None

    def phase(self, name: PhaseName | str, step: int | None = None) -> "WatchedPhase":
        """Returns a context manager that limits a block to the budget of `name`. Nested phases pause the budget."""
        return WatchedPhase(self, name, self.budgets[name] or math.inf, step)

    def work(self) -> None:
        """Polls for overdue phases, and moves the deadline of the kernel timers."""
        while not self.stopped.wait(TICK_SECONDS):
            phase = min(list(self.phases.values()), key=lambda phase: phase.deadline, default=None)
            if phase is not None and time.monotonic() > phase.deadline:
                self.expire(self.overdue_message(phase), phase)
            with self.ready:
                if self.backstop is not None and not self.expired.locked():
                    self.arm_backstop(self.backstop, phase)

    def arm_backstop(self, backstop: Backstop, phase: "WatchedPhase | None") -> None:
        """Sets the kernel timers to the earliest deadline."""
        if phase is None or phase.deadline == math.inf:
            backstop.disarm()
        else:
            line = f"stopped (hang, exit {int(Exit.HANG)}): {self.overdue_message(phase)}, and Python is blocked"
            backstop.arm(phase.deadline, f"{line}; stacks of all threads: {self.stacks.name}")

    def overdue_message(self, phase: "WatchedPhase") -> str:
        """Returns a message such as 'process 1: step 7 has made no progress for 600 s (hang.step_seconds)'."""
        what, setting = phase.name, self.setting.format(phase.name)
        if phase.step is not None:
            what = f"step {phase.step}" if what == "step" else f"{what} of step {phase.step}"
        return f"process {self.process}: {what} has made no progress for {phase.budget:g} s ({setting})"

    def prepare(self, phase: "WatchedPhase") -> None:
        """Opens the stacks file and creates the kernel timers. Called in the first phase, once the folder exists."""
        with self.ready:
            if self.stacks is not None or not self.entered:
                return
            self.stacks = open_stacks(self.workdir, self.process)
            with contextlib.suppress(OSError, AttributeError):  # without it, only the Python thread watches
                self.backstop = Backstop(self.stacks)
                self.arm_backstop(self.backstop, phase)

    def expire(self, line: str, phase: "WatchedPhase | None" = None, *, is_remote: bool = False) -> None:
        """Logs `line`, writes the stacks and an event, and ends the process. Reports local hangs to other processes."""
        if not self.expired.acquire(blocking=False):
            return
        if backstop := self.backstop:
            backstop.set_timers(0.0, 0.0, time.monotonic() + LAST_SECONDS)  # only the exit, without stacks or line
        where = self.stacks.name if self.stacks else "none, because no phase had started"
        print_stderr(f"stopped (hang, exit {int(Exit.HANG)}): {line}; stacks of all threads: {where}")
        if self.others and not is_remote:
            self.others.report_hang(line)
        with contextlib.suppress(Exception):  # another process owns the folder, or its disk fails
            if self.stacks:
                fence.ask(self.stacks.name)
                self.stacks.write(f"{line}\n{all_stacks(self.phases)}".encode(errors="replace"))
                self.stacks.flush()
        with contextlib.suppress(Exception):  # an error must not prevent the exit
            facts = {} if phase is None else {"phase": phase.name, "seconds": phase.budget}
            self.note("hang", phase.step if phase else None, cause=line, stacks=str(where), **facts)
        with contextlib.suppress(Exception):
            if self.stacks and paths.is_remote(self.workdir):
                target = paths.as_path(self.workdir) / FOLDER / os.path.basename(self.stacks.name)
                paths.write_bytes_atomic(target, pathlib.Path(self.stacks.name).read_bytes())
        silence_closed_streams()
        self.end(int(Exit.HANG))


class WatchedPhase:
    """One phase of one thread, from Watchdog.phase."""

    __slots__ = ("budget", "began", "deadline", "name", "outer", "step", "thread", "watchdog")

    def __init__(self, watchdog: Watchdog, name: str, budget: float, step: int | None):
        self.watchdog, self.name, self.budget, self.step = watchdog, name, budget, step

    def __enter__(self) -> "WatchedPhase":
        for observer in self.watchdog.observers:
            observer.entered(self.name, self.step)
        watchdog, self.thread, self.began = self.watchdog, threading.get_ident(), time.monotonic()
        self.deadline = self.began + self.budget
        self.outer = watchdog.phases.get(self.thread)
        watchdog.phases[self.thread] = self
        if watchdog.entered and watchdog.stacks is None:
            watchdog.prepare(self)
        faults.hang_point(self.name)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.outer is None:
            del self.watchdog.phases[self.thread]
        else:
            self.outer.deadline += time.monotonic() - self.began
            self.watchdog.phases[self.thread] = self.outer
        for observer in self.watchdog.observers:
            observer.left()


UNWATCHED = Watchdog(None, HangConfig())  # phases without a watchdog


def open_stacks(workdir: Any, process: int) -> Any:
    """Opens WORKDIR/stacks/PROCESS-TIME.txt, or a temporary file; removes empty files of earlier starts."""
    name = f"{process}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}.txt"
    if not paths.is_remote(workdir):
        with contextlib.suppress(OSError):
            folder = paths.as_path(workdir).absolute() / FOLDER
            paths.make_private(folder)
            for old in folder.glob(f"{process}-*.txt"):
                remove_if_empty(old, keep_folder=True)
            return open(folder / name, "xb", opener=paths.open_private)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxscale-stacks-"))
    return open(folder / name, "xb", opener=paths.open_private)


def remove_if_empty(file: pathlib.Path, *, keep_folder: bool = False) -> None:
    """Removes an empty file, and its folder if that is then empty."""
    with contextlib.suppress(OSError):
        if file.stat().st_size == 0:
            file.unlink()
            if not keep_folder:
                file.parent.rmdir()  # fails if it has other files


def all_stacks(phases: dict[int, WatchedPhase]) -> str:
    """Returns the stacks of all threads as text, with the threads in a phase first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] not in phases):
        where = f", in phase {phases[ident].name}" if ident in phases else ""
        title = f"Thread {names.get(ident, 'without a name')}{where} (most recent call last):"
        texts.append("\n".join([title, *traceback.format_stack(frame)]))
    return "\n".join(texts)
