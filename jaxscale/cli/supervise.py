"""Restarts a training after failures that a restart can fix.

  jaxscale supervise [FLAGS] -- python -m jaxscale.main --config=FILE --workdir=FOLDER
  jaxscale supervise [FLAGS] -- --config=FILE --workdir=FOLDER      the same

Restarts after exit codes 10, 13, 14, 15 and death by a signal, except Ctrl-C. Any other exit code becomes that of the
supervisor. It exits with 1 when it gives up, so that an outer supervisor does not restart it. SIGTERM, SIGINT and
SIGHUP are forwarded to the command (SIGHUP as SIGTERM), which saves and exits with 10; then the supervisor exits, too.
Deletes nothing.
"""

import collections
import dataclasses
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxscale import units
from jaxscale.cli import run_verb
from jaxscale.cli.attempt import Attempt
from jaxscale.cli.supervisor_log import SuperviseLedger, Totals
from jaxscale.runtime.checkpoint.folders import all_steps
from jaxscale.runtime.checkpoint.lineage import read_start_step
from jaxscale.runtime.hosts.config import host_budgets
from jaxscale.runtime.hosts.discovery import FLAGS as HOST_FLAGS
from jaxscale.runtime.hosts.discovery import ProcessInfo, discover_process
from jaxscale.runtime.monitor.records import Record, tail_records
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.config_file import config_name
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, codes_help, may_start_again, meaning, print_stderr

POLL_SECONDS = 0.05  # of signals during a pause
FORWARDED_SIGNALS = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT, signal.SIGHUP: signal.SIGTERM}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits of restarts and the pauses before them."""

    max_fruitless: int | None = flag(
        None,
        "gives up after N consecutive starts without progress (a new checkpoint, or a local copy of a later step that "
        "the next start restores); a run that progresses is restarted without limit; default: by the number of "
        "processes, 5 up to 64 and 10 for 1,536",
        least=1,
    )
    min_seconds: int = flag(60, "after a start that lasted less, the pause doubles", least=0)
    backoff_seconds: int = flag(
        5, "the first pause; each is shortened randomly by up to half, so that hosts do not restart together", least=0
    )
    max_backoff_seconds: int = flag(300, "the longest pause", least=0)

    def pause(self, quick_ends: int, draw: float) -> float:
        """Returns seconds before the next start, after `quick_ends` consecutive quick ends. draw: from [0, 1)."""
        doubled = self.backoff_seconds * 2.0 ** min(max(quick_ends - 1, 0), 30)
        return min(doubled, self.max_backoff_seconds) * (1 - draw / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuperviseFlags(Policy):
    """The flags of `jaxscale supervise`."""

    no_config = "it is a flag of the training: jaxscale supervise -- --config=FILE"

    workdir: str | None = flag(None, "of the run; default: the --workdir, or runs/<config>, of the command", "FOLDER")
    ledger: str | None = flag(None, "log of the supervisor, JSON lines; default WORKDIR/supervise.jsonl", "FILE")


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a run as seen in its work folder."""

    saved: dict[int, float]  # {committed step: modification time in the storage}
    logged: int = 0  # the last step in metrics.jsonl
    last_record: Record | None = None  # of metrics.jsonl, to detect additions
    step_seconds: float = 0.0  # median over the last steps; 0: unknown
    read_error: str = ""  # the error if the folder could not be read
    begun: int = 0  # the furthest step from which a start resumed, possibly from a local copy

    @property
    def newest(self) -> int:
        """The newest committed step, or 0."""
        return max(self.saved, default=0)

    def advanced(self, before: "Progress") -> bool:
        """Returns True for a checkpoint that `before` lacks, even of an earlier step after a rewind.

        Also if a start resumed from a later step than any before, which proves good local copies.
        """
        return bool(set(self.saved.items()) - set(before.saved.items())) or self.begun > before.begun


def read_progress(workdir: Any, begun: int = 0) -> Progress:
    """Reads the progress of the run in `workdir`; empty, with `read_error`, if it cannot be read.

    begun: the furthest step from which an earlier start resumed.
    """
    folder = paths.as_path(workdir)
    try:
        checkpoints = folder / "checkpoints"
        saved = {step: written_at(checkpoints / str(step)) for step in all_steps(checkpoints)}
        records = tail_records(folder / "metrics.jsonl")
        begun = max(begun, read_start_step(folder))
    except Exception as error:  # any storage client's errors: a failed read must not end the supervisor
        reason = str(error).splitlines()[0] if str(error) else ""
        return Progress({}, begun=begun, read_error=f"{type(error).__name__}: {reason}")
    steps = [record for record in records if "tokens_hash" in record]
    seconds = [record["step_seconds"] for record in steps if record.get("step_seconds")]
    return Progress(
        saved,
        logged=max((record["step"] for record in steps), default=0),
        last_record=records[-1] if records else None,
        step_seconds=statistics.median(seconds) if seconds else 0.0,
        begun=begun,
    )


def written_at(folder: Any) -> float:
    """Returns the modification time of a step's record; 0.0 if it is missing, as in a damaged step."""
    try:
        return (folder / "run" / "metadata").stat().st_mtime
    except OSError:
        return 0.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """A finished attempt."""

    code: int
    seconds: float
    before: Progress
    after: Progress

    @property
    def fruitless(self) -> bool:
        """True if it made no progress."""
        return not self.after.advanced(self.before)

    @property
    def steps_won(self) -> int:
        """Increase of the newest checkpoint's step; negative after a rewind."""
        return 0 if self.after.read_error or self.before.read_error else self.after.newest - self.before.newest

    @property
    def steps_lost(self) -> int:
        """Logged steps of this attempt after the last checkpoint, a lower bound of the steps to repeat."""
        if self.code == 0 or self.after.last_record == self.before.last_record:  # it logged nothing
            return 0
        return max(0, self.after.logged - self.after.newest)

    def record(self) -> dict[str, Any]:
        """Returns the entry of the log."""
        found = {"code": self.code, "meaning": meaning(self.code), "seconds": round(self.seconds, 3)}
        found |= {"step": self.after.newest, "steps_won": self.steps_won, "steps_lost": self.steps_lost}
        found |= {"lost_seconds": round(self.lost_seconds, 3)}
        return found | ({"unknown": self.after.read_error} if self.after.read_error else {})

    @property
    def lost_seconds(self) -> float:
        """Seconds of the lost steps."""
        return min(self.seconds, self.steps_lost * self.after.step_seconds)


def give_up_reason(policy: Policy, ends: Sequence[Ended]) -> str:
    """Returns the reason to stop restarting, or ''."""
    fruitless = trailing(ends, lambda end: end.fruitless)
    assert policy.max_fruitless is not None, "main() sets the default"
    if fruitless >= policy.max_fruitless:
        last = ends[-1]
        codes = ", ".join(meaning(end.code) for end in ends[-fruitless:])
        newest = f"step {last.after.newest} is the newest and is kept" if last.after.newest else "there is none"
        seen = f" ({last.after.read_error})" if last.after.read_error else ""
        return f"crash loop: {fruitless} starts in a row brought no new checkpoint{seen}; {newest}; they ended: {codes}"
    return ""


def trailing(ends: Sequence[Ended], holds: Callable[[Ended], bool]) -> int:
    """Returns the number of consecutive last ends for which `holds` is True."""
    count = 0
    for end in reversed(ends):
        if not holds(end):
            break
        count += 1
    return count


class Supervisor:
    """Runs the command until it ends for good. `supervise()` may be called once, in the main thread."""

    def __init__(
        self,
        command: Sequence[str],
        workdir: Any,
        policy: Policy,
        ledger: SuperviseLedger,
        say: Callable[[str], None],
        draw: Callable[[], float] = random.random,
    ):
        self.command, self.workdir, self.policy, self.ledger = list(command), workdir, policy, ledger
        self.say, self.draw = say, draw
        self.totals, self.began = Totals(), time.monotonic()
        self.attempt: Attempt | None = None
        self.received: list[int] = []  # signals
        self.unsent: collections.deque[int] = collections.deque()  # of these, not yet forwarded

    def supervise(self) -> int:
        """Supervises the command. Returns its last exit code, or 1 after giving up."""
        previous = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
        for number, handler in previous.items():
            if handler != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.forward)
        try:
            return self.run()
        finally:
            if self.attempt is not None:  # an error in the supervisor must not leave it running
                self.attempt.kill_group()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def run(self) -> int:
        """Implements supervise() without signal handlers."""
        ends: list[Ended] = []
        progress = self.read_progress()
        while True:
            end = self.start(progress)
            ends.append(end)
            progress = end.after
            if self.received:
                names = ", ".join(signal.Signals(number).name for number in self.received)
                return self.leave(end.code, f"told to end ({names}); {meaning(end.code)}")
            if not may_start_again(end.code):
                return self.leave(end.code, meaning(end.code))
            if end.code == Exit.STORAGE and not (paths.is_remote(self.workdir) or os.path.isdir(self.workdir)):
                return self.leave(int(Exit.ERROR), f"gave up: {self.workdir} was moved or deleted", event="gave_up")
            if reason := give_up_reason(self.policy, ends):
                return self.leave(int(Exit.ERROR), f"gave up: {reason}", event="gave_up")
            quick = trailing(ends, lambda end: end.seconds < self.policy.min_seconds or end.fruitless)
            seconds = self.policy.pause(quick, self.draw())
            self.note("pause", seconds=round(seconds, 3), restart=len(ends))
            count = trailing(ends, lambda end: end.fruitless)
            left = f" (start {count} of at most {self.policy.max_fruitless} without a new checkpoint)" if count else ""
            self.say(
                f"supervise: {meaning(end.code)}, after {units.duration(end.seconds)} at step {progress.newest}"
                f" ({end.steps_won:+d}, {end.steps_lost} to be repeated); restarting in {seconds:.1f} s{left}"
            )
            self.pause(seconds)
            if self.received:
                return self.leave(end.code, f"told to end during a pause; the last: {meaning(end.code)}")

    def start(self, before: Progress) -> Ended:
        """Runs the command once."""
        self.totals.starts += 1
        began, keeping = time.monotonic(), self.totals.keeping
        self.attempt = Attempt(self.command)
        self.forward_unsent()  # signals from before the start
        self.note("start", number=self.totals.starts, step=before.newest, pid=self.attempt.process.pid)
        self.totals.keeping = keeping  # this time counts as `up`
        code = self.attempt.wait()
        self.attempt = None
        seconds = time.monotonic() - began
        end = Ended(code, seconds, before, self.read_progress(before.begun))
        self.totals.up += seconds
        self.totals.steps_won += end.steps_won
        self.totals.steps_lost += end.steps_lost
        self.totals.lost += end.lost_seconds
        self.note("end", number=self.totals.starts, **end.record())
        return end

    def read_progress(self, begun: int = 0) -> Progress:
        """Reads and times the progress of the run."""
        began = time.monotonic()
        found = read_progress(self.workdir, begun)
        self.totals.keeping += time.monotonic() - began
        return found

    def note(self, event: str, **facts: Any) -> None:
        """Appends a line to the log."""
        began = time.monotonic()
        self.ledger.note(event, **facts)
        self.totals.keeping += time.monotonic() - began

    def pause(self, seconds: float) -> None:
        """Waits until the time is over or a signal comes."""
        began = time.monotonic()
        while not self.received and (left := seconds - (time.monotonic() - began)) > 0:
            time.sleep(min(left, POLL_SECONDS))
        self.totals.waiting += time.monotonic() - began

    def leave(self, code: int, reason: str, event: str = "leave") -> int:
        """Writes the last line and returns the exit code, 128 + N for signal N."""
        totals = self.totals.record(time.monotonic() - self.began)
        self.ledger.note(event, code=code, why=reason, **totals)
        times = ", ".join(f"{name} {units.duration(getattr(self.totals, name))}" for name in ("up", "waiting"))
        self.say(
            f"supervise: {reason}\nsupervise: {self.totals.starts} starts, {times}, "
            f"{self.totals.steps_won} steps gained, {self.totals.steps_lost} lost, goodput {totals['goodput']:.1%}"
        )
        return 128 - code if code < 0 else code

    def forward(self, number: int, frame: Any) -> None:
        """Handles a signal: forwards it to the command, which exits immediately at a second one."""
        self.received.append(number)
        self.unsent.append(number)
        self.forward_unsent()

    def forward_unsent(self) -> None:
        """Forwards each signal once, as a second one would prevent the command from saving."""
        while self.attempt is not None and self.unsent:
            self.attempt.signal(FORWARDED_SIGNALS[signal.Signals(self.unsent.popleft())])


@command(SuperviseFlags, f"\nExit codes:\n{codes_help()}", passes_on=True)
def main(arguments: Arguments) -> int:
    """Supervises the command after '--' and returns the exit code."""
    flags, training = arguments.flags, arguments.behind
    if not training:
        raise BadInput("nothing to supervise; give the training's command: jaxscale supervise -- --config=FILE")
    if training[0].startswith("--"):
        training = [sys.executable, "-m", "jaxscale.cli", "train", *training]
    workdir = flags.workdir or workdir_of(training)
    process_info = process_info_of(training)
    ledger = SuperviseLedger(flags.ledger or default_ledger(workdir, process_info), say=print_stderr)
    default = host_budgets(process_info.num_processes if process_info else 1).max_fruitless
    policy = dataclasses.replace(flags, max_fruitless=flags.max_fruitless or default)
    return Supervisor(training, workdir, policy, ledger, say=print_stderr).supervise()


def flags_of(command: Sequence[str]) -> dict[str, str]:
    """Returns {name: value} of the command's flags, --name=value or --name value; the last one wins."""
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
    raise BadInput("the command names neither --workdir nor --config; write jaxscale supervise --workdir=FOLDER -- ...")


def process_info_of(command: Sequence[str]) -> ProcessInfo | None:
    """Returns the command's process among several; None for a single one, or for flags that it will reject."""
    flags = flags_of(command)
    try:
        return discover_process({name: flags[name] for name in HOST_FLAGS if name in flags})
    except BadInput:
        return None


def default_ledger(workdir: str, process_info: ProcessInfo | None) -> str:
    """Returns WORKDIR/supervise.jsonl, or supervise-3.jsonl for a process other than the first."""
    number = f"-{process_info.process_id}" if process_info is not None and not process_info.is_first else ""
    return f"{workdir.rstrip('/')}/supervise{number}.jsonl"


if __name__ == "__main__":
    run_verb("supervise")
