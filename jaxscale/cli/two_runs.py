"""One config trained twice: `straight` is uninterrupted, `killed` is killed by SIGKILL and restarted.

Shared by `verify resume` and `rehearse`. Each run is the real command in its own process, and all read one config file.
The kill is deterministic: with `checkpoint.save_every_steps=3` the second save, at step 6, waits until the first one
is committed, and the process kills itself at a named point (system/faults.py).
"""

import dataclasses
import pathlib
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxscale import units
from jaxscale.cli.attempt import Child
from jaxscale.cli.compare_runs import checkpoints_of, read_metrics
from jaxscale.cli.shrink import without_extras
from jaxscale.config import RunConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.settings.config_file import file_text
from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop, may_start_again, meaning

SAVE_EVERY = 3
KILL_AFTER = 2 * SAVE_EVERY + 1
RUNS = ("straight", "killed")
POLL_SECONDS = 0.2
REMOTE_POLL_SECONDS = 2.0  # each poll of a bucket is a request
STEP_LINE = re.compile(r"^step (\d+)/\d+  loss", re.MULTILINE)


def comparable(cfg: RunConfig, keep_last: int) -> RunConfig:
    """Returns cfg with a save every SAVE_EVERY steps, none postponed, every step logged, and ramps at their end."""
    cfg = without_extras(cfg)
    return dataclasses.replace(
        cfg,
        batch_ramp=(),
        seq_len_ramp=(),
        checkpoint=dataclasses.replace(
            cfg.checkpoint, save_every_steps=SAVE_EVERY, keep_last=keep_last, keep_every_steps=0, wait_seconds=3600
        ),
        monitor=dataclasses.replace(cfg.monitor, log_every_steps=1, tensorboard=False, progress="lines"),
    )


@dataclasses.dataclass
class Watched:
    """Exit code and step times of a child process, in seconds since its start."""

    code: int = 0
    seconds: float = 0.0
    steps: dict[int, float] = dataclasses.field(default_factory=dict)  # time of each step's log line

    @property
    def first(self) -> float | None:
        """Time of the first step."""
        return min(self.steps.values(), default=None)


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill of a run."""

    begin: int  # the checkpoint from which it had resumed, or 0
    newest: int  # the newest checkpoint after the kill
    where: str  # a description, beyond the step
    metrics: dict[int, dict]  # logged before the kill, by step
    seen: Watched


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoRuns:
    """The config, command and folder of the two runs."""

    trained: RunConfig
    command: Sequence[str]  # of the training, without --config and --workdir
    folder: Any  # of both runs
    logs: pathlib.Path  # on a local disk
    steps: int
    env: Mapping[str, str]
    kills: Mapping[str, str]  # {point of system/faults.py: a description, beyond the step}
    say: Callable[[str], None]  # gets a line for each step and checkpoint
    is_first: bool = True  # of several processes
    name: str = ""  # of this process among several, for its files

    def start(self, run: str, kill_at: str = "") -> Child:
        """Starts the training in FOLDER/run."""
        config = self.log(f"config{self.name}").with_suffix(".py")
        self.logs.mkdir(parents=True, exist_ok=True)
        paths.write_text_atomic(config, file_text(self.trained))
        crash = {"JAXSCALE_CRASH_AT": kill_at} if kill_at and self.is_first else {}
        flags = [f"--config={config}", f"--workdir={self.folder / run}"]
        return Child([*self.command, *flags], self.log(run), {**self.env, **crash})

    def log(self, run: str) -> pathlib.Path:
        """Returns the log file of a run."""
        return self.logs / f"{run}{self.name}.log"

    def newest(self) -> int:
        """Returns the newest committed step of the killed run, or 0."""
        return checkpoints_of(self.folder / "killed").latest_step() or 0

    def run(self, run: str, kill_at: str = "") -> Watched:
        """Starts or resumes a run and watches it until it ends.

        Raises Stop for an unexpected end, with the run's exit code if it is an Exit, and if the run did not resume from
        its newest checkpoint.
        """
        begin = self.newest() if run == "killed" else 0
        child = self.start(run, kill_at)
        seen = watch(child, checkpoints_of(self.folder / run), self.steps, self.say)
        expected = seen.code == (-signal.SIGKILL if kill_at else 0)
        if not (expected or kill_at and not self.is_first and may_start_again(seen.code)):
            code = Exit(seen.code) if seen.code and seen.code in list(Exit) else Exit.ERROR
            instead = "it should have been killed, but: " if kill_at else ""
            raise Stop(code, f"{instead}{meaning(seen.code)}: {child.tail()}")
        if begin and self.is_first and f"going on from step {begin}" not in child.log.read_text("utf-8", "replace"):
            raise Stop(Exit.ERROR, f"it did not resume from step {begin}; see {child.log}")
        return seen

    def kill(self) -> Iterator[Kill]:
        """Starts the run and kills it once at each point; yields each kill. Raises Stop as `run` does."""
        for point, where in self.kills.items():
            begin = self.newest()
            seen = self.run("killed", point)
            if not (newest := self.newest()):
                raise Stop(Exit.ERROR, f"{meaning(seen.code)} at {point}, it left no checkpoint to resume from")
            yield Kill(begin, newest, where, read_metrics(self.folder / "killed"), seen)


def watch(child: Child, checkpoints: Checkpoints, steps: int, say: Callable[[str], None]) -> Watched:
    """Follows the child until it ends, reporting each step and checkpoint."""
    began, seen = time.monotonic(), Watched()
    known = set(checkpoints.all_steps())
    already = len(child.log.read_text("utf-8", "replace"))
    pause = REMOTE_POLL_SECONDS if paths.is_remote(checkpoints.directory) else POLL_SECONDS
    try:
        running = True
        while running:
            running = child.attempt.running()  # before reading, so that its last output is seen
            now = time.monotonic() - began
            for step in map(int, STEP_LINE.findall(child.log.read_text("utf-8", "replace")[already:])):
                if step not in seen.steps:
                    seen.steps[step] = now
                    say(f"  step {step} of {steps}, {units.duration(now)} after its start")
            for step in checkpoints.all_steps():
                if step not in known:
                    known.add(step)
                    say(f"  checkpoint {step} is committed")
            if running:
                time.sleep(pause)
    finally:
        child.attempt.kill_group()
        seen.code = child.attempt.wait()
    seen.seconds = time.monotonic() - began
    return seen
