"""Starts a training again as long as that can help, and says why when it cannot.

  jaxscale supervise [FLAGS] -- python -m jaxscale.main --config=FILE --workdir=FOLDER
  jaxscale supervise [FLAGS] -- --config=FILE --workdir=FOLDER      the same

Started again: exit 10, 13, 14, 15 and death by a signal, except Ctrl-C. Anything else ends the supervisor with that
code, and giving up with 1, so that whatever supervises it does not start it all again. SIGTERM, SIGINT and SIGHUP go on
to the command (SIGHUP as SIGTERM), which saves and leaves with 10, and the supervisor with it. Nothing is deleted.
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
from jaxscale.checkpoint.folders import all_steps
from jaxscale.checkpoint.lineage import read_start_step
from jaxscale.cli import run_verb
from jaxscale.cli.attempt import Attempt
from jaxscale.cli.ledger import SuperviseLedger, Totals
from jaxscale.command_line import Arguments, flag
from jaxscale.config_file import config_name
from jaxscale.help_text import command
from jaxscale.hosts.config import host_budgets
from jaxscale.hosts.discovery import FLAGS as HOST_FLAGS
from jaxscale.hosts.discovery import ProcessInfo, discover_process
from jaxscale.monitor.records import Record, tail_records
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, codes_help, may_start_again, meaning, print_stderr

SLICE_SECONDS = 0.05  # how soon a signal ends a pause
PASSED_ON = {signal.SIGTERM: signal.SIGTERM, signal.SIGINT: signal.SIGINT, signal.SIGHUP: signal.SIGTERM}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """When to start again, and how long to wait."""

    max_fruitless: int | None = flag(
        None,
        "so many starts in a row without a new checkpoint, or a local copy of a later step that the next start takes, "
        "are a crash loop, and it gives up; a run that advances never runs out of starts; default: by the number of "
        "processes, 5 up to 64 and 10 for 1,536",
        least=1,
    )
    min_seconds: int = flag(
        60, "a start that lasted less counts as a quick end: the pause before the next one doubles", least=0
    )
    backoff_seconds: int = flag(
        5, "the first pause; up to half of each is left out at random, so that hosts do not march in step", least=0
    )
    max_backoff_seconds: int = flag(300, "the longest", least=0)

    def pause(self, quick_ends: int, draw: float) -> float:
        """Seconds before the next start, after `quick_ends` quick ends in a row. draw: from [0, 1)."""
        doubled = self.backoff_seconds * 2.0 ** min(max(quick_ends - 1, 0), 30)
        return min(doubled, self.max_backoff_seconds) * (1 - draw / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuperviseFlags(Policy):
    """The flags of `jaxscale supervise`."""

    no_config = "it belongs to the training: jaxscale supervise -- --config=FILE"

    workdir: str | None = flag(None, "of the run; default: the --workdir, or runs/<config>, of the command", "FOLDER")
    ledger: str | None = flag(None, "what it did, a JSON object a line; default WORKDIR/supervise.jsonl", "FILE")


@dataclasses.dataclass(frozen=True)
class Progress:
    """One look at a work folder."""

    saved: dict[int, float]  # committed steps, and when each was written by the clock of the storage
    logged: int = 0  # the last step in metrics.jsonl
    last_record: Record | None = None  # of metrics.jsonl, to tell whether anything was added
    step_seconds: float = 0.0  # median over the last steps; 0: unknown
    unknown: str = ""  # why the folder could not be read
    begun: int = 0  # the furthest step from which a start went on, which a local copy may have held

    @property
    def newest(self) -> int:
        """The newest committed step, 0 if there is none."""
        return max(self.saved, default=0)

    def won(self, before: "Progress") -> bool:
        """True if a checkpoint is here that was not there before, be it of an earlier step after a rewind.

        Or if a start went on from further than any before: the one before it has left local copies that were good.
        """
        return bool(set(self.saved.items()) - set(before.saved.items())) or self.begun > before.begun


def look(workdir: Any, begun: int = 0) -> Progress:
    """The progress of the run in `workdir`; empty where there is none yet, with the cause where it cannot be read.

    begun: the furthest step from which a start was seen to go on before.
    """
    folder = paths.as_path(workdir)
    try:
        checkpoints = folder / "checkpoints"
        saved = {step: written_at(checkpoints / str(step)) for step in all_steps(checkpoints)}
        records = tail_records(folder / "metrics.jsonl")
        begun = max(begun, read_start_step(folder))
    except Exception as error:  # whatever the storage's client raises: to look is never worth an end
        why = str(error).splitlines()[0] if str(error) else ""
        return Progress({}, begun=begun, unknown=f"{type(error).__name__}: {why}")
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
    """When the record of a step was written; 0.0 where it is missing, as in a damaged step."""
    try:
        return (folder / "run" / "metadata").stat().st_mtime
    except OSError:
        return 0.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """An attempt that is over."""

    code: int
    seconds: float
    before: Progress
    after: Progress

    @property
    def fruitless(self) -> bool:
        """True if it left no new checkpoint that can be seen, nor went on from further than those before."""
        return not self.after.won(self.before)

    @property
    def steps_won(self) -> int:
        """By how much the newest checkpoint moved on; less than 0 after a rewind."""
        return 0 if self.after.unknown or self.before.unknown else self.after.newest - self.before.newest

    @property
    def steps_lost(self) -> int:
        """Logged steps of this attempt that no checkpoint holds: at least these have to be run again."""
        if self.code == 0 or self.after.last_record == self.before.last_record:  # it logged nothing
            return 0
        return max(0, self.after.logged - self.after.newest)

    def record(self) -> dict[str, Any]:
        """What the ledger keeps."""
        found = {"code": self.code, "meaning": meaning(self.code), "seconds": round(self.seconds, 3)}
        found |= {"step": self.after.newest, "steps_won": self.steps_won, "steps_lost": self.steps_lost}
        found |= {"lost_seconds": round(self.lost_seconds, 3)}
        return found | ({"unknown": self.after.unknown} if self.after.unknown else {})

    @property
    def lost_seconds(self) -> float:
        """What the lost steps took."""
        return min(self.seconds, self.steps_lost * self.after.step_seconds)


def why_give_up(policy: Policy, ends: Sequence[Ended]) -> str:
    """Why another start is not worth it, or ''."""
    fruitless = trailing(ends, lambda end: end.fruitless)
    assert policy.max_fruitless is not None, "the verb has put in the usual number"
    if fruitless >= policy.max_fruitless:
        last = ends[-1]
        codes = ", ".join(meaning(end.code) for end in ends[-fruitless:])
        kept = f"step {last.after.newest} is the newest and is kept" if last.after.newest else "there is none"
        seen = f" ({last.after.unknown})" if last.after.unknown else ""
        return f"crash loop: {fruitless} starts in a row brought no new checkpoint{seen}; {kept}; they ended: {codes}"
    return ""


def trailing(ends: Sequence[Ended], holds: Callable[[Ended], bool]) -> int:
    """For how many of the last ends in a row it holds."""
    count = 0
    for end in reversed(ends):
        if not holds(end):
            break
        count += 1
    return count


class Supervisor:
    """Runs the command again and again. `supervise()` may be called once, in the main thread."""

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
        self.asked: list[int] = []  # signals that came to us
        self.unsent: collections.deque[int] = collections.deque()  # of these, not yet sent to the command

    def supervise(self) -> int:
        """The exit code to leave with: the command's last one, or 1 if this gave up."""
        previous = {number: signal.getsignal(number) for number in PASSED_ON}
        for number, handler in previous.items():
            if handler != signal.SIG_IGN:  # as nohup leaves SIGHUP
                signal.signal(number, self.pass_on)
        try:
            return self.run()
        finally:
            if self.attempt is not None:  # an error of ours must leave nothing running
                self.attempt.kill_group()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def run(self) -> int:
        """As supervise()."""
        ends: list[Ended] = []
        progress = self.look()
        while True:
            end = self.start(progress)
            ends.append(end)
            progress = end.after
            if self.asked:
                names = ", ".join(signal.Signals(number).name for number in self.asked)
                return self.leave(end.code, f"told to end ({names}); {meaning(end.code)}")
            if not may_start_again(end.code):
                return self.leave(end.code, meaning(end.code))
            if end.code == Exit.STORAGE and not (paths.is_remote(self.workdir) or os.path.isdir(self.workdir)):
                return self.leave(int(Exit.ERROR), f"gave up: {self.workdir} was moved or deleted", event="gave_up")
            if why := why_give_up(self.policy, ends):
                return self.leave(int(Exit.ERROR), f"gave up: {why}", event="gave_up")
            quick = trailing(ends, lambda end: end.seconds < self.policy.min_seconds or end.fruitless)
            seconds = self.policy.pause(quick, self.draw())
            self.note("pause", seconds=round(seconds, 3), restart=len(ends))
            vain = trailing(ends, lambda end: end.fruitless)
            left = f" (start {vain} of at most {self.policy.max_fruitless} without a new checkpoint)" if vain else ""
            self.say(
                f"supervise: {meaning(end.code)}, after {units.duration(end.seconds)} at step {progress.newest}"
                f" ({end.steps_won:+d}, {end.steps_lost} to be run again); started again in {seconds:.1f} s{left}"
            )
            self.pause(seconds)
            if self.asked:
                return self.leave(end.code, f"told to end during a pause; the last: {meaning(end.code)}")

    def start(self, before: Progress) -> Ended:
        """Runs the command once, to its end."""
        self.totals.starts += 1
        began, kept = time.monotonic(), self.totals.keeping
        self.attempt = Attempt(self.command)
        self.pass_on_unsent()  # came before there was anybody to tell
        self.note("start", number=self.totals.starts, step=before.newest, pid=self.attempt.process.pid)
        self.totals.keeping = kept  # the command is up meanwhile
        code = self.attempt.wait()
        self.attempt = None
        seconds = time.monotonic() - began
        end = Ended(code, seconds, before, self.look(before.begun))
        self.totals.up += seconds
        self.totals.steps_won += end.steps_won
        self.totals.steps_lost += end.steps_lost
        self.totals.lost += end.lost_seconds
        self.note("end", number=self.totals.starts, **end.record())
        return end

    def look(self, begun: int = 0) -> Progress:
        """Reads the run's folder."""
        began = time.monotonic()
        found = look(self.workdir, begun)
        self.totals.keeping += time.monotonic() - began
        return found

    def note(self, event: str, **facts: Any) -> None:
        """Adds a line to the ledger."""
        began = time.monotonic()
        self.ledger.note(event, **facts)
        self.totals.keeping += time.monotonic() - began

    def pause(self, seconds: float) -> None:
        """Waits, or until a signal comes."""
        began = time.monotonic()
        while not self.asked and (left := seconds - (time.monotonic() - began)) > 0:
            time.sleep(min(left, SLICE_SECONDS))
        self.totals.waiting += time.monotonic() - began

    def leave(self, code: int, why: str, event: str = "leave") -> int:
        """Writes the last line and returns the code as a shell has it."""
        totals = self.totals.record(time.monotonic() - self.began)
        self.ledger.note(event, code=code, why=why, **totals)
        times = ", ".join(f"{name} {units.duration(getattr(self.totals, name))}" for name in ("up", "waiting"))
        self.say(
            f"supervise: {why}\nsupervise: {self.totals.starts} starts, {times}, {self.totals.steps_won} steps won, "
            f"{self.totals.steps_lost} run in vain, goodput {totals['goodput']:.1%}"
        )
        return 128 - code if code < 0 else code

    def pass_on(self, number: int, frame: Any) -> None:
        """The handler: the command gets the signal, and a second one too, at which it leaves at once."""
        self.asked.append(number)
        self.unsent.append(number)
        self.pass_on_unsent()

    def pass_on_unsent(self) -> None:
        """Sends each signal once, whoever comes first: a second one would keep the command from saving."""
        while self.attempt is not None and self.unsent:
            self.attempt.signal(PASSED_ON[signal.Signals(self.unsent.popleft())])


@command(SuperviseFlags, f"\nExit codes:\n{codes_help()}", passes_on=True)
def main(arguments: Arguments) -> int:
    """Supervises the command behind '--' and returns the exit code."""
    flags, training = arguments.flags, arguments.behind
    if not training:
        raise BadInput("nothing to supervise; give the training's command: jaxscale supervise -- --config=FILE")
    if training[0].startswith("--"):
        training = [sys.executable, "-m", "jaxscale.cli", "train", *training]
    workdir = flags.workdir or workdir_of(training)
    place = place_of(training)
    ledger = SuperviseLedger(flags.ledger or default_ledger(workdir, place), say=print_stderr)
    usual = host_budgets(place.num_processes if place else 1).max_fruitless
    policy = dataclasses.replace(flags, max_fruitless=flags.max_fruitless or usual)
    return Supervisor(training, workdir, policy, ledger, say=print_stderr).supervise()


def flags_of(command: Sequence[str]) -> dict[str, str]:
    """{name: value} of the command's flags, each as --name=value or --name value; the last one counts."""
    found = {}
    for word, following in zip(command, [*command[1:], ""]):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            found[name] = value if equals else following
    return found


def workdir_of(command: Sequence[str]) -> str:
    """The work folder that the command trains in. Raises BadInput where that is unknown."""
    flags = flags_of(command)
    if flags.get("workdir"):
        return flags["workdir"]
    if flags.get("config"):
        return f"runs/{config_name(flags['config'])}"
    raise BadInput("the command names neither --workdir nor --config; say jaxscale supervise --workdir=FOLDER -- ...")


def place_of(command: Sequence[str]) -> ProcessInfo | None:
    """The place of the command's process among several; None where it is alone, or says itself what is wrong."""
    flags = flags_of(command)
    try:
        return discover_process({name: flags[name] for name in HOST_FLAGS if name in flags})
    except BadInput:
        return None


def default_ledger(workdir: str, place: ProcessInfo | None) -> str:
    """WORKDIR/supervise.jsonl; of several processes each has its own, supervise-3.jsonl."""
    number = f"-{place.process_id}" if place is not None and not place.is_first else ""
    return f"{workdir.rstrip('/')}/supervise{number}.jsonl"


if __name__ == "__main__":
    run_verb("supervise")
