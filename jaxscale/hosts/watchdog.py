"""The watchdog: a phase of the run that takes longer than its budget ends the run, with the stacks of all threads.

Without it a run whose storage, network, device or code stands still would hold its machines until a person looks. What
a phase may take is a setting; so a long compilation is no hang, and a step as long is one. Every process has a
watchdog, and the first that barks tells the others, so that all leave their stacks and end with exit code 15.

Not covered: a thread that the kernel itself cannot interrupt (state D, as in a broken disk driver) keeps the process in
the process table after its end, and on systems other than Linux a thread that holds Python's lock for ever.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from jaxscale.hosts.backstop import Backstop
from jaxscale.hosts.cluster import Team
from jaxscale.hosts.config import HangConfig
from jaxscale.system import faults, fence, paths
from jaxscale.system.exits import Exit, silence_closed_streams, tell

TICK_SECONDS = 0.25
LAST_SECONDS = 4.5  # from the bark to the end, whatever the telling and writing of it wait for
FOLDER = "stacks"

PhaseName = Literal["compile", "restore", "data", "step", "save", "eval", "statistics"]


class Observer(Protocol):
    """What takes the phases of all threads, in the thread that each belongs to."""

    def entered(self, name: str, step: int | None = None) -> None:
        """A phase begins."""

    def left(self) -> None:
        """The innermost phase of this thread is over."""


def ignore(kind: str, step: int | None = None, **facts: Any) -> None:
    """A note that nobody takes."""


class Watchdog:
    """Watches the phases of a run while it is entered; before and after, phases may take as long as they like."""

    def __init__(
        self,
        workdir: Any,
        cfg: Any,
        *,
        setting: str = "hang.{}_seconds",
        note: Callable[..., None] = ignore,
        others: Team | None = None,
        end: Callable[[int], None] = os._exit,
        observers: Sequence[Observer] = (),
    ):
        """cfg: NAME_seconds for each phase NAME: HangConfig, or another dataclass. setting: what a person calls these.

        note: takes the event "hang". end: called with the exit code. No file is made before a phase begins."""
        self.observers = observers
        self.workdir, self.note, self.others, self.end, self.setting = workdir, note, others, end, setting
        self.budgets = {
            field.name.removesuffix("_seconds"): getattr(cfg, field.name) for field in dataclasses.fields(cfg)
        }
        self.process = others.process if others else 0
        self.phases: dict[int, Phase] = {}  # the innermost one of each thread
        self.stacks: Any = None  # the open file; private and empty until something hangs
        self.backstop: Backstop | None = None
        self.over = threading.Event()
        self.barked = threading.Lock()
        self.ready = threading.Lock()
        self.entered = False

    def __enter__(self) -> "Watchdog":
        self.entered = any(self.budgets.values()) and self.workdir is not None
        if self.entered:
            threading.Thread(target=self.work, name="watchdog", daemon=True).start()
            if self.others:
                self.others.on_hang(lambda line: self.bark(line, elsewhere=True))
        return self

    def __exit__(self, *exc: object) -> None:
        self.entered = False
        self.over.set()
        with self.ready:
            if self.backstop:
                self.backstop.close()
            self.backstop = None
            if self.stacks:
                self.stacks.close()
                remove_if_empty(pathlib.Path(self.stacks.name))
            self.stacks = None

    def phase(self, name: PhaseName | str, step: int | None = None) -> "Phase":
        """A block of this thread that must end within the budget of its name.

        A phase within another stops that one's time. step: which one it belongs to, for who reads the stacks.
        """
        return Phase(self, name, self.budgets[name] or math.inf, step)

    def work(self) -> None:
        """Looks again and again whether a phase is overdue, and puts off the end that the kernel would bring."""
        while not self.over.wait(TICK_SECONDS):
            phase = min(list(self.phases.values()), key=lambda phase: phase.deadline, default=None)
            if phase is not None and time.monotonic() > phase.deadline:
                self.bark(self.accusation(phase), phase)
            with self.ready:
                if self.backstop is not None and not self.barked.locked():
                    self.put_off(self.backstop, phase)

    def put_off(self, backstop: Backstop, phase: "Phase | None") -> None:
        """Sets the kernel's timers for what is now the first to end."""
        if phase is None or phase.deadline == math.inf:
            backstop.disarm()
        else:
            line = f"stopped (hang, exit {int(Exit.HANG)}): {self.accusation(phase)}, and Python stands still"
            backstop.arm(phase.deadline, f"{line}; stacks of all threads: {self.stacks.name}")

    def accusation(self, phase: "Phase") -> str:
        """'process 1: step 7 has made no progress for 600 s (hang.step_seconds)'."""
        what = f"{phase.name}" + (f" of step {phase.step}" if phase.step is not None and phase.name != "step" else "")
        setting = self.setting.format(phase.name)
        what = f"step {phase.step}" if phase.name == "step" and phase.step is not None else what
        return f"process {self.process}: {what} has made no progress for {phase.budget:g} s ({setting})"

    def prepare(self, phase: "Phase") -> None:
        """Opens the file for the stacks and makes the kernel's timers: at the first phase there is a work folder."""
        with self.ready:
            if self.stacks is not None or not self.entered:
                return
            self.stacks = open_stacks(self.workdir, self.process)
            with contextlib.suppress(OSError, AttributeError):  # without it, what Python itself can see is seen
                self.backstop = Backstop(self.stacks)
                self.put_off(self.backstop, phase)

    def bark(self, line: str, phase: "Phase | None" = None, *, elsewhere: bool = False) -> None:
        """Ends the process: the line, word to the others, the stacks, the event. elsewhere: it is another's hang."""
        if not self.barked.acquire(blocking=False):
            return
        if backstop := self.backstop:
            backstop.end_at(time.monotonic() + LAST_SECONDS)
        where = self.stacks.name if self.stacks else "none, for no phase had begun"
        tell(f"stopped (hang, exit {int(Exit.HANG)}): {line}; stacks of all threads: {where}")
        if self.others and not elsewhere:
            self.others.tell_hang(line)
        with contextlib.suppress(Exception):  # another process has the folder, or its disk fails
            if self.stacks:
                fence.ask(self.stacks.name)
                self.stacks.write(f"{line}\n{all_stacks(self.phases)}".encode(errors="replace"))
                self.stacks.flush()
        with contextlib.suppress(Exception):  # nothing of this is worth staying for
            facts = {} if phase is None else {"phase": phase.name, "seconds": phase.budget}
            self.note("hang", phase.step if phase else None, cause=line, stacks=str(where), **facts)
        with contextlib.suppress(Exception):
            if self.stacks and paths.is_remote(self.workdir):
                target = paths.as_path(self.workdir) / FOLDER / os.path.basename(self.stacks.name)
                paths.write_bytes_atomic(target, pathlib.Path(self.stacks.name).read_bytes())
        silence_closed_streams()
        self.end(int(Exit.HANG))


class Phase:
    """One phase of one thread; made by Watchdog.phase."""

    __slots__ = ("budget", "began", "deadline", "name", "outer", "step", "thread", "watchdog")

    def __init__(self, watchdog: Watchdog, name: str, budget: float, step: int | None):
        self.watchdog, self.name, self.budget, self.step = watchdog, name, budget, step

    def __enter__(self) -> "Phase":
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
    """WORKDIR/stacks/PROCESS-TIME.txt, open and readable by its owner alone.

    In the machine's temporary folder where the work folder is remote or cannot be written. Empty files of earlier
    starts, which a killed process leaves, are removed.
    """
    name = f"{process}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}.txt"
    folder = None
    if not paths.is_remote(workdir):
        with contextlib.suppress(OSError):
            folder = paths.as_path(workdir).absolute() / FOLDER
            paths.make_private(folder)
            for old in folder.glob(f"{process}-*.txt"):
                remove_if_empty(old, keep_folder=True)
            return open_private(folder / name)
    return open_private(pathlib.Path(tempfile.mkdtemp(prefix="jaxscale-stacks-")) / name)


def open_private(path: pathlib.Path) -> Any:
    """A new file with mode 0600, open for writing in binary."""
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def remove_if_empty(file: pathlib.Path, *, keep_folder: bool = False) -> None:
    """Removes an empty file, and its folder if that was all in it."""
    with contextlib.suppress(OSError):
        if file.stat().st_size == 0:
            file.unlink()
            if not keep_folder:
                file.parent.rmdir()  # fails where other files are in it


def all_stacks(phases: dict[int, Phase]) -> str:
    """The stack of each thread by its name, those in a phase first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] not in phases):
        where = f", in phase {phases[ident].name}" if ident in phases else ""
        title = f"Thread {names.get(ident, 'without a name')}{where} (the latest call is the last):"
        texts.append("\n".join([title, *traceback.format_stack(frame)]))
    return "\n".join(texts)
