"""One config run twice in a folder: `straight` is left alone, `killed` dies by SIGKILL and is started again.

What `verify resume` and `rehearse` share. Each run is the real command in a process of its own, and all read one config
file that is made for them. A kill is exact, not a race: `checkpoint.save_every_steps=3` starts a second save at step 6,
which waits until the first one is committed, and the process dies at a point of its own (system/faults.py).
"""

import dataclasses
import pathlib
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxscale import units
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.cli.attempt import Child
from jaxscale.cli.compare_runs import checkpoints_of, read_metrics
from jaxscale.cli.shrink import without_extras
from jaxscale.config import RunConfig
from jaxscale.config_file import file_text
from jaxscale.system import paths
from jaxscale.system.exits import Exit, Stop, may_start_again, meaning

SAVE_EVERY = 3
KILL_AFTER = 2 * SAVE_EVERY + 1
RUNS = ("straight", "killed")
LOOK_SECONDS = 0.2
LOOK_REMOTE_SECONDS = 2.0  # each look at a bucket is a request
STEP_LINE = re.compile(r"^step (\d+)/\d+  loss", re.MULTILINE)


def comparable(cfg: RunConfig, keep_last: int) -> RunConfig:
    """cfg with saves so close that a few steps hold two, none of them put off, every step logged, and all batches as
    large as a ramp makes them in the end."""
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
    """What was seen of a child from outside. Seconds count from its start."""

    code: int = 0
    seconds: float = 0.0
    steps: dict[int, float] = dataclasses.field(default_factory=dict)  # when each was reported

    @property
    def first(self) -> float | None:
        """When the first step was done."""
        return min(self.steps.values(), default=None)


@dataclasses.dataclass(frozen=True)
class Kill:
    """How a run was killed."""

    begin: int  # the checkpoint that it had gone on from, or 0
    newest: int  # the one that it left
    where: str  # in words, beyond the step
    metrics: dict[int, dict]  # that it had written, by step
    seen: Watched


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoRuns:
    """What is run twice, and where."""

    trained: RunConfig
    command: Sequence[str]  # the training's, without --config and --workdir
    folder: Any  # where both write
    logs: pathlib.Path  # always on a local disk
    steps: int
    env: Mapping[str, str]
    kills: Mapping[str, str]  # {point of system/faults.py: in words, beyond the step}
    say: Callable[[str], None]  # is told each step and checkpoint
    is_first: bool = True  # of several processes
    name: str = ""  # of this process among several, for its files

    def start(self, run: str, kill_at: str = "") -> Child:
        """The training in FOLDER/run."""
        config = self.log(f"config{self.name}").with_suffix(".py")
        self.logs.mkdir(parents=True, exist_ok=True)
        paths.write_text_atomic(config, file_text(self.trained))
        crash = {"JAXSCALE_CRASH_AT": kill_at} if kill_at and self.is_first else {}
        flags = [f"--config={config}", f"--workdir={self.folder / run}"]
        return Child([*self.command, *flags], self.log(run), {**self.env, **crash})

    def log(self, run: str) -> pathlib.Path:
        """Where the output of a run goes."""
        return self.logs / f"{run}{self.name}.log"

    def newest(self) -> int:
        """The newest committed step of the run that is killed, or 0."""
        return checkpoints_of(self.folder / "killed").latest_step() or 0

    def run(self, run: str, kill_at: str = "") -> Watched:
        """Starts a run, from its newest checkpoint if it has one, and watches it to its end.

        Raises Stop, with the code of the run where it is one of ours, for another end than was wanted, and where it did
        not go on from that checkpoint.
        """
        begin = self.newest() if run == "killed" else 0
        child = self.start(run, kill_at)
        seen = watch(child, checkpoints_of(self.folder / run), self.steps, self.say)
        wanted = seen.code == (-signal.SIGKILL if kill_at else 0)
        if not (wanted or kill_at and not self.is_first and may_start_again(seen.code)):
            code = Exit(seen.code) if seen.code and seen.code in list(Exit) else Exit.ERROR
            instead = "it was to be killed, and instead: " if kill_at else ""
            raise Stop(code, f"{instead}{meaning(seen.code)}: {child.tail()}")
        if begin and self.is_first and f"going on from step {begin}" not in child.log.read_text("utf-8", "replace"):
            raise Stop(Exit.ERROR, f"it did not go on from step {begin}; see {child.log}")
        return seen

    def kill(self) -> Iterator[Kill]:
        """Starts the run and kills it, once at each point; yields each kill. Raises Stop as `run` does."""
        for point, where in self.kills.items():
            begin = self.newest()
            seen = self.run("killed", point)
            if not (newest := self.newest()):
                raise Stop(Exit.ERROR, f"{meaning(seen.code)} at {point}, it left no checkpoint to go on from")
            yield Kill(begin, newest, where, read_metrics(self.folder / "killed"), seen)


def watch(child: Child, checkpoints: Checkpoints, steps: int, say: Callable[[str], None]) -> Watched:
    """Follows the child to its end, telling each step and each checkpoint as they come."""
    began, seen = time.monotonic(), Watched()
    known = set(checkpoints.all_steps())
    already = len(child.log.read_text("utf-8", "replace"))
    pause = LOOK_REMOTE_SECONDS if paths.is_remote(checkpoints.directory) else LOOK_SECONDS
    try:
        running = True
        while running:
            running = child.attempt.running()  # asked first: what it did last is seen too
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
