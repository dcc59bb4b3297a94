"""Restarts a training run after failures that a restart can fix.

  jaxscale supervise [FLAGS] -- python -m jaxscale.main --config=FILE --workdir=FOLDER
  jaxscale supervise [FLAGS] -- --config=FILE --workdir=FOLDER      equivalent

Restarts after exit codes 10, 13, 14, 15 and death by a signal, except Ctrl-C. For any other exit code, the supervisor
exits with the same code. If it gives up, it exits with 1, so that an outer supervisor does not restart it. SIGTERM,
SIGINT and SIGHUP are forwarded to the command (SIGHUP as SIGTERM), which saves and exits with 10; then the supervisor
exits as well. It deletes no files.
"""

import collections
import dataclasses
import datetime
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxscale import units
from jaxscale.runtime.checkpoint.folders import all_steps
from jaxscale.runtime.checkpoint.lineage import read_start_step
from jaxscale.runtime.hosts.config import host_budgets
from jaxscale.runtime.hosts.discovery import FLAGS, ProcessInfo, discover_process
from jaxscale.runtime.monitor.records import Record, append, tail_records
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.config_file import config_name
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.attempt import Attempt
from jaxscale.system.exits import BadInput, Exit, codes_help, first_line, may_start_again, meaning, print_stderr

POLL_SECONDS = 0.05  # interval of checking for signals during a pause
FORWARDED_SIGNALS = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT, signal.SIGHUP: signal.SIGTERM}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuperviseFlags:
    """Flags of `jaxscale supervise`, such as the limit of restarts and the pauses between them."""

    no_config = "it is a flag of the training command, after --: jaxscale supervise -- --config=FILE"

    workdir: str | None = flag(
        None, "work folder of the run; default: the command's --workdir, or runs/<config>", "FOLDER"
    )
    ledger: str | None = flag(None, "log of the supervisor (JSON Lines); default WORKDIR/supervise.jsonl", "FILE")
    max_fruitless: int | None = flag(
        None,
        "gives up after N consecutive starts without progress (a new checkpoint, or a local copy of a later step that "
        "the next start restores); the number of restarts with progress is unlimited; default: depends on the "
        "number of processes: 5 up to 64, 10 for 1,536",
        least=1,
    )
    min_seconds: int = flag(60, "the pause doubles after a start that runs for less than this", least=0)
    backoff_seconds: int = flag(
        5,
        "first pause; each pause is shortened by a random fraction of up to half, so that hosts do not restart at the "
        "same time",
        least=0,
    )
    max_backoff_seconds: int = flag(300, "longest pause", least=0)

    def pause(self, quick_ends: int, draw: float) -> float:
        """Returns the seconds to pause after `quick_ends` consecutive short attempts. draw: random number in [0, 1)."""
        doubled = self.backoff_seconds * 2.0 ** min(max(quick_ends - 1, 0), 30)
        return min(doubled, self.max_backoff_seconds) * (1 - draw / 2)


class RunProgress(NamedTuple):
    """Progress of a run, as read from its work folder."""

    saved: dict[int, float]  # {committed step: modification time in the storage}
    logged: int = 0  # last step in metrics.jsonl
    last_record: Record | None = None  # last record of metrics.jsonl, to detect new records
    step_seconds: float = 0.0  # median over the last steps; 0 if unknown
    read_error: str = ""  # error message if the folder could not be read
    begun: int = 0  # highest step from which a start resumed, possibly from a local copy

    @property
    def newest(self) -> int:
        """Newest committed step, or 0."""
        return max(self.saved, default=0)

    def advanced(self, before: "RunProgress") -> bool:
        """Returns True if there is a checkpoint that `before` lacks, or a start has resumed from a later step."""
        return bool(set(self.saved.items()) - set(before.saved.items())) or self.begun > before.begun


def read_progress(workdir: Any, begun: int = 0) -> RunProgress:
    """Returns the run's progress, with `read_error` if reading fails. begun: highest step that was resumed before."""
    folder = paths.as_path(workdir)
    try:
        checkpoints = folder / "checkpoints"
        saved = {step: written_at(checkpoints / str(step)) for step in all_steps(checkpoints)}
        records = tail_records(folder / "metrics.jsonl")
        begun = max(begun, read_start_step(folder))
    except Exception as error:  # errors of any storage client, which must not end the supervisor
        return RunProgress({}, begun=begun, read_error=first_line(error))
    steps = [record for record in records if "tokens_hash" in record]
    seconds = [record["step_seconds"] for record in steps if record.get("step_seconds")]
    return RunProgress(
        saved,
        logged=max((record["step"] for record in steps), default=0),
        last_record=records[-1] if records else None,
        step_seconds=statistics.median(seconds) if seconds else 0.0,
        begun=begun,
    )


def written_at(folder: Any) -> float:
    """Returns the modification time of a checkpoint record, or 0.0 if it is missing, as in a damaged checkpoint."""
    try:
        return (folder / "run" / "metadata").stat().st_mtime
    except OSError:
        return 0.0


class Ended(NamedTuple):
    """A finished attempt."""

    code: int
    seconds: float
    before: RunProgress
    after: RunProgress

    @property
    def fruitless(self) -> bool:
        """True if the attempt made no progress."""
        return not self.after.advanced(self.before)

    @property
    def steps_won(self) -> int:
        """Increase of the newest checkpoint's step; negative after a rewind."""
        return 0 if self.after.read_error or self.before.read_error else self.after.newest - self.before.newest

    @property
    def steps_lost(self) -> int:
        """Number of steps logged by this attempt after the last checkpoint. At least these steps must be repeated."""
        if self.code == 0 or self.after.last_record == self.before.last_record:  # nothing was logged
            return 0
        return max(0, self.after.logged - self.after.newest)

    def record(self) -> dict[str, Any]:
        """Returns the entry of the supervisor's log."""
        found = {"code": self.code, "meaning": meaning(self.code), "seconds": round(self.seconds, 3)}
        found |= {"step": self.after.newest, "steps_won": self.steps_won, "steps_lost": self.steps_lost}
        found |= {"lost_seconds": round(self.lost_seconds, 3)}
        return found | ({"unknown": self.after.read_error} if self.after.read_error else {})

    @property
    def lost_seconds(self) -> float:
        """Time of the lost steps, in seconds."""
        return min(self.seconds, self.steps_lost * self.after.step_seconds)


def crash_loop_text(ends: Sequence[Ended]) -> str:
    """Returns the reason for giving up after these attempts without progress."""
    last = ends[-1].after
    newest = f"the newest is step {last.newest}" if last.newest else "no checkpoint exists"
    seen = f" ({last.read_error})" if last.read_error else ""
    codes = ", ".join(meaning(end.code) for end in ends)
    return (
        f"crash loop: {len(ends)} consecutive starts without a new checkpoint{seen}; {newest}; they ended with: {codes}"
    )


def trailing(ends: Sequence[Ended], holds: Callable[[Ended], bool]) -> int:
    """Returns the number of most recent consecutive attempts for which `holds` is True."""
    return len(list(itertools.takewhile(holds, reversed(ends))))


class Supervisor:
    """Restarts a command until it completes or a restart cannot help. Call supervise() once, in the main thread."""

    def __init__(self, command: Sequence[str], workdir: Any, policy: SuperviseFlags, ledger: str):
        self.command, self.workdir, self.policy, self.ledger = list(command), workdir, policy, paths.as_path(ledger)
        self.unwritten: list[str] = []  # lines of the supervisor's log, buffered until the run has created its folder
        self.ledger_failed = False
        self.began = time.monotonic()
        self.waiting, self.keeping = 0.0, 0.0  # seconds spent in pauses, and in reading the folder and writing the log
        self.ends: list[Ended] = []
        self.attempt: Attempt | None = None
        self.received: list[int] = []  # received signals
        self.unsent: collections.deque[int] = collections.deque()  # received signals that are not yet forwarded

    def supervise(self) -> int:
        """Supervises the command. Returns its last exit code, or 1 after giving up."""
        previous = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
        for number, handler in previous.items():
            if handler != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.forward)
        try:
            return self.run()
        finally:
            if self.attempt is not None:  # after an error in the supervisor, the command must not continue
                self.attempt.kill_group()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def run(self) -> int:
        """Implements supervise() without signal handlers."""
        ends = self.ends
        progress = self.read_progress()
        while True:
            end = self.start(progress)
            ends.append(end)
            progress = end.after
            if self.received:
                names = ", ".join(signal.Signals(number).name for number in self.received)
                return self.leave(end.code, f"received {names}; {meaning(end.code)}")
            if not may_start_again(end.code):
                return self.leave(end.code, meaning(end.code))
            if end.code == Exit.STORAGE and not (paths.is_remote(self.workdir) or os.path.isdir(self.workdir)):
                return self.leave(int(Exit.ERROR), f"gave up: {self.workdir} was moved or deleted", event="gave_up")
            count, most = trailing(ends, lambda end: end.fruitless), self.policy.max_fruitless
            if most is not None and count >= most:
                return self.leave(int(Exit.ERROR), f"gave up: {crash_loop_text(ends[-count:])}", event="gave_up")
            quick = trailing(ends, lambda end: end.seconds < self.policy.min_seconds or end.fruitless)
            seconds = self.policy.pause(quick, random.random())
            self.note("pause", seconds=round(seconds, 3), restart=len(ends))
            left = f" (start {count} of at most {most} without a new checkpoint)" if count else ""
            print_stderr(
                f"supervise: {meaning(end.code)}, after {units.duration(end.seconds)} at step {progress.newest}"
                f" ({end.steps_won:+d}, {end.steps_lost} to repeat); restarting in {seconds:.1f} s{left}"
            )
            began = time.monotonic()
            while not self.received and (remaining := seconds - (time.monotonic() - began)) > 0:
                time.sleep(min(remaining, POLL_SECONDS))
            self.waiting += time.monotonic() - began
            if self.received:
                names = ", ".join(signal.Signals(number).name for number in self.received)
                return self.leave(end.code, f"received {names} during a pause; last {meaning(end.code)}")

    def start(self, before: RunProgress) -> Ended:
        """Runs the command once."""
        number, began, keeping = len(self.ends) + 1, time.monotonic(), self.keeping
        self.attempt = Attempt(self.command)
        self.forward_unsent()  # signals received before the start
        self.note("start", number=number, step=before.newest, pid=self.attempt.process.pid)
        self.keeping = keeping  # the time for this line is part of `up`
        code = self.attempt.wait()
        self.attempt = None
        seconds = time.monotonic() - began
        end = Ended(code, seconds, before, self.read_progress(before.begun))
        self.note("end", number=number, **end.record())
        return end

    def read_progress(self, begun: int = 0) -> RunProgress:
        """Reads the progress of the run, and records the time for reading."""
        began = time.monotonic()
        found = read_progress(self.workdir, begun)
        self.keeping += time.monotonic() - began
        return found

    def note(self, event: str, **facts: Any) -> None:
        """Appends a line to the log, or buffers it until the folder exists. Prints only the first write error."""
        began, now = time.monotonic(), datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self.unwritten.append(json.dumps({"time": now, "event": event, **facts}, allow_nan=False) + "\n")
        try:
            if paths.is_remote(self.ledger) or self.ledger.parent.is_dir():
                append(self.ledger, "".join(self.unwritten).encode(), mode=0o600, durable=True)
                self.unwritten.clear()
        except Exception as error:  # errors of any storage client
            if not self.ledger_failed:
                print_stderr(
                    f"supervise: cannot write {self.ledger}, continuing without it: {type(error).__name__}: {error}"
                )
            self.ledger_failed = True
        self.keeping += time.monotonic() - began

    def leave(self, code: int, reason: str, event: str = "leave") -> int:
        """Writes the last line of the log. Returns the exit code, or 128 + N for signal N."""
        starts, wall = len(self.ends), time.monotonic() - self.began
        total = lambda name: sum(getattr(end, name) for end in self.ends)
        up, won, lost = total("seconds"), total("steps_won"), total("steps_lost")
        # up, waiting and keeping are measured separately, so that their sum can be compared with the wall time
        seconds = {"up": up, "waiting": self.waiting, "keeping": self.keeping, "lost": total("lost_seconds")}
        goodput = (up - seconds["lost"]) / wall if wall > 0 else 0.0
        times = {f"{name}_seconds": round(value, 3) for name, value in ({"wall": wall} | seconds).items()}
        steps = {"starts": starts, "steps_won": won, "steps_lost": lost}
        self.note(event, code=code, why=reason, **times, **steps, goodput=round(goodput, 4))
        print_stderr(
            f"supervise: {reason}\nsupervise: {starts} starts, up {units.duration(up)}, waiting "
            f"{units.duration(self.waiting)}, {won} steps gained, {lost} lost, goodput {goodput:.1%}"
        )
        return 128 - code if code < 0 else code

    def forward(self, number: int, frame: Any) -> None:
        """Handles a signal by forwarding it to the command. A second signal makes the command exit immediately."""
        self.received.append(number)
        self.unsent.append(number)
        self.forward_unsent()

    def forward_unsent(self) -> None:
        """Forwards each signal only once, because a second signal would prevent the command from saving."""
        while self.attempt is not None and self.unsent:
            self.attempt.signal(FORWARDED_SIGNALS[signal.Signals(self.unsent.popleft())])


@command(SuperviseFlags, f"\nExit codes:\n{codes_help()}", passes_on=True)
def main(arguments: Arguments) -> int:
    """Supervises the command after '--'. Returns the exit code."""
    flags, training = arguments.flags, arguments.behind
    if not training:
        raise BadInput("no training command; put it after --: jaxscale supervise -- --config=FILE")
    if training[0].startswith("--"):
        training = [sys.executable, "-m", "jaxscale.cli", "train", *training]
    workdir = flags.workdir or workdir_of(training)
    process_info = process_info_of(training)
    ledger = flags.ledger or default_ledger(workdir, process_info)
    default = host_budgets(process_info.num_processes if process_info else 1).max_fruitless
    policy = dataclasses.replace(flags, max_fruitless=flags.max_fruitless or default)
    return Supervisor(training, workdir, policy, ledger).supervise()


def flags_of(command: Sequence[str]) -> dict[str, str]:
    """Returns {name: value} of the flags (--name=value or --name value) of a command. Uses the last occurrence."""
    found = {}
    for word, following in zip(command, [*command[1:], ""]):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            found[name] = value if equals else following
    return found


def workdir_of(command: Sequence[str]) -> str:
    """Returns the work folder of the command. Raises BadInput if it is unknown."""
    flags = flags_of(command)
    if flags.get("workdir"):
        return flags["workdir"]
    if flags.get("config"):
        return f"runs/{config_name(flags['config'])}"
    raise BadInput("the command has neither --workdir nor --config; use jaxscale supervise --workdir=FOLDER -- ...")


def process_info_of(command: Sequence[str]) -> ProcessInfo | None:
    """Returns the process info of the command. None for a single process, or if the command rejects its flags."""
    flags = flags_of(command)
    try:
        return discover_process({name: flags[name] for name in FLAGS if name in flags})
    except BadInput:
        return None


def default_ledger(workdir: str, process_info: ProcessInfo | None) -> str:
    """Returns WORKDIR/supervise.jsonl, or e.g. supervise-3.jsonl for a process other than the first."""
    number = f"-{process_info.process_id}" if process_info is not None and not process_info.is_first else ""
    return f"{workdir.rstrip('/')}/supervise{number}.jsonl"
