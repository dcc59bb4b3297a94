"""Periodic exports during training: each in a process of its own, so that no step waits and no failure stops the run.

It reads the committed checkpoint from its files, on the CPU. The step is pinned meanwhile, so that the run keeps it;
the pin says that it is an export's, so that a resumed run finishes the export, or removes the pin.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxscale.checkpoint.folders import is_step_name, remove_tree
from jaxscale.checkpoint.retention import PINNED
from jaxscale.checkpoint.storage_errors import short_reason
from jaxscale.interop import hub
from jaxscale.interop.config import ExportConfig
from jaxscale.interop.exporting import is_finished
from jaxscale.monitor.events import Note
from jaxscale.system import fence, paths
from jaxscale.system.redact import shown

FOLDER = "export"  # of a work folder
OURS = "export\n"  # what a pin of ours holds
LOOK_SECONDS = 0.2
TAIL = 400  # characters of what a failed export said


class Exporter:
    """Exports the steps of one run, one after the other; where they come too fast, only the newest waits."""

    def __init__(self, cfg: ExportConfig, workdir: Any, note: Note, say: Callable[[str], None]):
        self.cfg, self.workdir = cfg, paths.absolute(workdir)
        self.tell, self.say = note, say
        self.last_saved = self.last_asked = 0
        self.lock = threading.Lock()
        self.waiting: int | None = None
        self.thread: threading.Thread | None = None
        self.child: subprocess.Popen | None = None
        self.ended = False

    def note(self, kind: str, step: int | None = None, **facts: Any) -> None:
        """The run's Note, which also hears of each checkpoint that is committed. Never waits, never raises for it."""
        self.tell(kind, step, **facts)
        if kind == "saved" and step:
            self.last_saved = step
            if step % self.cfg.every_steps == 0:
                self.ask(step)

    def ask(self, step: int) -> None:
        """Exports the step once the export before it is done, unless a newer one is asked for by then."""
        self.last_asked = step
        try:
            self.pin(step)
        except Exception as error:  # of whatever client a bucket has
            self.failed(step, short_reason(error))
            return
        with self.lock:
            passed, self.waiting = self.waiting, step
            if self.thread is None:
                self.thread = threading.Thread(target=self.work, name="export", daemon=True)
                self.thread.start()
        if passed is not None:
            self.unpin(passed)
            self.failed(passed, f"the export before it was still under way when step {step} was saved")

    def work(self) -> None:
        """Exports what is waiting, until nothing is."""
        while True:
            with self.lock:
                step, self.waiting = self.waiting, None
                if step is None or self.ended:
                    self.thread = None
                    return
            try:
                self.export(step)
            except Exception as error:  # nothing of it may reach the run
                self.failed(step, short_reason(error))
            if not self.ended:
                self.unpin(step)

    def export(self, step: int) -> None:
        """Returns when the export is there, or is told to have failed."""
        folder = self.workdir / FOLDER / str(step)
        if not is_finished(folder):  # a start that was killed before it could say so may have finished it
            code, text = self.run(self.command(step))
            if self.ended:
                return
            if code:
                return self.failed(step, " ".join(text.split())[-TAIL:] or f"its process ended with {code}")
        self.tell("exported", step, folder=str(folder), pushed_to=self.cfg.push_to)
        try:
            self.remove_old(step)
        except Exception as error:  # they take room, and nothing else
            self.tell("alarm", step, cause=f"an old export could not be removed: {short_reason(error)}")

    def command(self, step: int) -> list[str]:
        """The command of the process: at the lowest priority, where the system has a command for that."""
        polite = [nice, "-n", "19"] if (nice := shutil.which("nice")) else []
        flags = [f"--workdir={self.workdir}", f"--step={step}", f"--to={self.workdir / FOLDER / str(step)}"]
        flags += [f"--dtype={self.cfg.dtype}", *(["--ema"] if self.cfg.ema else [])]
        flags += [f"--push={self.cfg.push_to}"] if self.cfg.push_to else []
        return [*polite, sys.executable, "-m", "jaxscale.cli.convert", *flags]

    def run(self, command: list[str]) -> tuple[int, str]:
        """(exit code, what it said on stderr)."""
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
        """Tells of an export that there is not, in an event and a line."""
        with contextlib.suppress(Exception):  # a log that cannot be written has its own alarms
            self.tell("alarm", step, cause=f"no export of step {step}: {cause}")
        self.say(f"WARNING: no export of step {step}: {cause}")

    def pin(self, step: int) -> None:
        """Keeps the step where it is."""
        mark = self.mark(step)
        if not mark.exists():
            paths.make_run_dir(mark.parent)
            paths.write_text_atomic(mark, OURS)

    def unpin(self, step: int) -> None:
        """Unpins the step, unless another process has pinned it."""
        with contextlib.suppress(Exception):  # it stays pinned, and the next start sees to it
            if self.mark(step).read_text("utf-8") == OURS:
                fence.ask(self.mark(step))
                self.mark(step).unlink()

    def mark(self, step: int) -> Any:
        """The file that pins a step."""
        return self.workdir / "checkpoints" / PINNED / str(step)

    def take_up(self) -> None:
        """Goes on with what a run that was killed was exporting. To be called before the first save."""
        with contextlib.suppress(Exception):  # nothing of an export keeps a run from starting
            folder = self.workdir / "checkpoints" / PINNED
            pins = [path for path in folder.iterdir() if is_step_name(path.name)] if folder.exists() else []
            for step in sorted(int(path.name) for path in pins if path.read_text("utf-8") == OURS):
                if (self.workdir / "checkpoints" / str(step)).exists():
                    self.ask(step)
                else:
                    self.unpin(step)

    def remove_old(self, newest: int) -> None:
        """Removes the exports that need not stay, and what was left of those that failed."""
        if not self.cfg.keep:
            return
        folder = self.workdir / FOLDER
        steps = sorted(int(path.name) for path in folder.iterdir() if is_step_name(path.name))
        for step in [step for step in steps if step <= newest][: -self.cfg.keep]:
            remove_tree(folder / str(step))

    def finish(self) -> None:
        """Exports the last step too, and returns when nothing is under way."""
        if self.last_saved and self.last_saved != self.last_asked:
            self.ask(self.last_saved)
        if self.thread is not None:
            self.say("waiting for the export that is under way")
        while (thread := self.thread) is not None:
            thread.join(LOOK_SECONDS)  # not for ever: a signal that the kernel gives another thread would not end it

    def give_up(self) -> None:
        """Ends what is under way: the run leaves. The pin stays, and the next start goes on with it."""
        with self.lock:
            self.ended = True
            child = self.child
        if child is not None and child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def exporting(
    cfg: ExportConfig,
    workdir: Any,
    note: Note,
    say: Callable[[str], None],
    primary: bool,
    make_exporter: Callable[..., Exporter] = Exporter,
) -> Iterator[Note]:
    """Gives the run's note, which has steps exported as they are saved; waits for the last one at a good end.

    Raises: BadInput, before anything is trained, if what is exported could not be pushed.
    """
    if not cfg.every_steps or not primary:
        yield note
        return
    if cfg.push_to:
        hub.check_push(cfg.push_to, paths.absolute(workdir))
    exporter = make_exporter(cfg, workdir, note, say)
    exporter.take_up()
    try:
        yield exporter.note
        exporter.finish()
    except BaseException:
        exporter.give_up()
        raise
