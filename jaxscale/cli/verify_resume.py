"""Proof that killing a run twice and starting it again equals never stopping, bit for bit.

Both runs are the real command in processes of their own. One is left alone. The other is killed with SIGKILL after
steps that no checkpoint holds, started again, killed while a checkpoint is being written, and started again.
"""

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxscale import paths
from jaxscale.checkpoint.manager import CheckpointConfig, Checkpoints, named_leaves, nest
from jaxscale.cli.shrink import as_flags, changes, table
from jaxscale.command_line import Arguments
from jaxscale.config import RunConfig
from jaxscale.exits import Exit, Stop
from jaxscale.sharding.mesh import MeshConfig, mesh_shape

SAVE_EVERY = 3
LEAST_STEPS = 4 * SAVE_EVERY  # room for a kill between the first two checkpoints and one in a later save
SHOWN_DIFFERENCES = 6
CLOCKED = ("seconds", "per_second", "mfu", "bytes")  # parts of names of metrics that tell of time or of the machine


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs, compared."""

    rows: list[tuple[str, str, str]]  # what, how much of it, how many differ
    differences: list[str]  # one line each
    told: list[str] = dataclasses.field(default_factory=list)  # how the run was killed
    kept: str = ""  # folder of the runs, if it stays

    @property
    def exact(self) -> bool:
        """True if everything was there and equal."""
        return not self.differences

    def lines(self) -> list[str]:
        """The table and the verdict."""
        shown = [f"  {line}" for line in self.differences[:SHOWN_DIFFERENCES]]
        more = len(self.differences) - len(shown)
        shown += [f"  and {more} more"] if more else []
        kept = [f"both runs are kept in {self.kept}"] if self.kept else []
        verdict = "resume: exact" if self.exact else f"resume: NOT exact, {len(self.differences)} differences"
        return [*table([("compared", "how much", "differing"), *self.rows]), verdict, *shown, *kept]


def settings(cfg: RunConfig, steps: int, devices: int) -> RunConfig:
    """The config of both runs: so many steps, a checkpoint every 3, every step logged, no validation and no sample."""
    mesh = cfg.mesh
    try:
        shape = mesh_shape(mesh, devices)
    except ValueError:
        mesh = MeshConfig()
        shape = mesh_shape(mesh, devices)
    shards = shape["data"] * shape["fsdp"] * cfg.train.num_microbatches
    rows = -(-cfg.rows_per_step // shards) * shards
    return dataclasses.replace(
        cfg,
        mesh=mesh,
        batch_tokens=cfg.batch_tokens if rows == cfg.rows_per_step else rows * cfg.seq_len,
        train_tokens=f"{steps} steps",
        optim=dataclasses.replace(cfg.optim, warmup_tokens=f"{SAVE_EVERY} steps"),
        checkpoint=dataclasses.replace(cfg.checkpoint, save_every_steps=SAVE_EVERY, keep_last=steps),
        monitor=dataclasses.replace(cfg.monitor, log_every_steps=1, tensorboard=False, progress="lines"),
        eval=dataclasses.replace(cfg.eval, num_rows=0),
        sample=dataclasses.replace(cfg.sample, num_tokens=0),
    )


def verify(
    arguments: Arguments,
    cfg: RunConfig,
    wanted: RunConfig,
    steps: int,
    devices: int,
    workdir: str | None = None,
    say: Callable[[str], None] = lambda text: print(text, flush=True),
) -> Comparison:
    """Both runs, compared. Their folder is removed if they are equal.

    Args: arguments: of the command line, which say where the config is. wanted: the config to run, from `settings`.
    Raises: Stop if a run ends by itself before its time.
    """
    folder = new_folder(workdir)
    command = [sys.executable, "-m", "jaxscale.main", f"--config={arguments.config}"]
    command += [f"--config.{name}={value}" for name, value in arguments.overrides.items()]
    command += as_flags(changes(cfg, wanted))  # later flags win
    try:
        say(f"a run of {steps} steps that is left alone")
        Child(command, folder / "straight", devices).finish()
        told, seen = killed_run(command, folder / "killed", steps, devices, say)
    except Stop:
        say(f"the runs are kept in {folder}")
        raise
    except KeyboardInterrupt:
        if workdir is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    found = compare(folder / "straight", folder / "killed", steps, seen)
    if found.exact:
        shutil.rmtree(folder)
    return dataclasses.replace(found, told=told, kept="" if found.exact else str(folder))


def new_folder(workdir: str | None) -> pathlib.Path:
    """An empty folder for both runs. Raises ValueError if `workdir` holds something."""
    if workdir is None:
        return pathlib.Path(tempfile.mkdtemp(prefix="jaxscale-verify-"))
    folder = paths.make_run_dir(workdir)
    if any(folder.iterdir()):
        raise ValueError(f"workdir={workdir} is not empty, and a proof begins anew; name another folder")
    return folder


def killed_run(
    command: list[str], workdir: pathlib.Path, steps: int, devices: int, say: Callable[[str], None]
) -> tuple[list[str], list[dict[int, dict]]]:
    """(how the run was killed, the metrics that it had written at each kill), after two kills and a third start."""
    told, seen = [], []
    for moment in (past_a_checkpoint, while_saving):
        begin = newest(workdir)
        reached = functools.partial(moment, workdir, unfinished(workdir), begin, steps)
        where = Child(command, workdir, devices).kill_when(reached)
        told.append(f"from step {begin}: killed {where}")
        say(f"the same, {told[-1]}")
        seen.append(read_metrics(workdir))
    told.append(f"from step {newest(workdir)}: to the end")
    say(f"the same, {told[-1]}")
    Child(command, workdir, devices).finish()
    return told, seen


def past_a_checkpoint(workdir: pathlib.Path, known: set, begin: int, steps: int) -> str:
    """Says where the run is if it holds a checkpoint and steps beyond it, else ''."""
    saved, logged = newest(workdir), last_logged(workdir)
    lost = saved > begin and logged >= saved + 2
    return f"after step {logged}, checkpoint {saved} being the newest" if lost else ""


def while_saving(workdir: pathlib.Path, known: set, begin: int, steps: int) -> str:
    """Says where the run is if it has added a checkpoint and is writing the next, or has but one to write, else ''."""
    fresh, saved = unfinished(workdir) - known, newest(workdir)
    if saved == begin:
        return ""
    if fresh:
        name = min(name for name, _ in fresh)
        return f"while it wrote checkpoint {name.split('.')[0]}, {saved} being the newest"
    return f"after checkpoint {saved}" if saved >= steps - SAVE_EVERY else ""


class Child:
    """The training command in a process of its own, on simulated devices, its output in a file beside the workdir."""

    def __init__(self, command: list[str], workdir: pathlib.Path, devices: int):
        workdir.parent.mkdir(parents=True, exist_ok=True)
        self.workdir, self.log = workdir, workdir.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, f"--workdir={workdir}"], stdout=log, stderr=log, env=environment(devices)
            )

    def finish(self) -> None:
        """Waits for the end. Raises Stop with the child's exit code if it is not 0."""
        try:
            code = self.process.wait()
        except BaseException:
            self.process.kill()
            self.process.wait()  # so that nothing writes any more
            raise
        if code:
            known = Exit(code) if code in list(Exit) else Exit.ERROR
            raise Stop(known, f"the run ended with exit {code}: {self.tail()}")

    def kill_when(self, reached: Callable[[], str]) -> str:
        """Kills the process as soon as reached() says where it is, and returns that. Raises Stop if it ends before."""
        try:
            while self.process.poll() is None:
                if where := reached():
                    return where
                time.sleep(0.001)
        finally:
            self.process.kill()
            self.process.wait()
        self.finish()
        raise Stop(Exit.ERROR, "the run ended before it could be killed; give it more --steps")

    def tail(self) -> str:
        """The last line of its output."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it printed nothing to {self.log}"


def environment(devices: int) -> dict[str, str]:
    """This process's environment with so many simulated devices for jax."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}


def newest(workdir: pathlib.Path) -> int:
    """The newest committed step, or 0."""
    return Checkpoints(workdir / "checkpoints", CheckpointConfig()).latest_step() or 0


def unfinished(workdir: pathlib.Path) -> set[tuple[str, int]]:
    """(name, inode) of the folders of saves that are under way or were killed: 'STEP.' and a suffix of Orbax."""
    try:
        return {(entry.name, entry.inode()) for entry in os.scandir(workdir / "checkpoints") if "." in entry.name}
    except FileNotFoundError:
        return set()


def last_logged(workdir: pathlib.Path) -> int:
    """The last step in metrics.jsonl, or 0."""
    return max(read_metrics(workdir), default=0)


def read_metrics(workdir: pathlib.Path) -> dict[int, dict[str, Any]]:
    """{step: its training metrics but for those of the clock}; a torn last line does not count."""
    file, found = workdir / "metrics.jsonl", {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "tokens_hash" in record:
            found[record["step"]] = {k: v for k, v in record.items() if not any(part in k for part in CLOCKED)}
    return found


def compare(
    one: pathlib.Path, other: pathlib.Path, steps: int, seen: list[dict[int, dict]] | None = None
) -> Comparison:
    """The checkpoints of step `steps` and the metrics of two work folders. seen: metrics at each kill of the other."""
    (state, run), (other_state, other_run) = read_checkpoint(one, steps), read_checkpoint(other, steps)
    rows, differences = [], []

    def note(what: str, amount: str, found: list[str]) -> None:
        rows.append((what, amount, str(len(found))))
        differences.extend(f"{what}: {line}" for line in found)

    groups: dict[str, list[str]] = {}
    for name in sorted(state | other_state):
        groups.setdefault(name.split("/")[0], []).append(name)
    for group, names in groups.items():
        found = [line for name in names if (line := leaf_difference(name, state.get(name), other_state.get(name)))]
        numbers = sum(state[name].size for name in names if name in state)
        note(f"state: {group}", f"{len(names)} arrays, {numbers:,} numbers", found)
    note("data position", ", ".join(run["data"]), dict_differences(run["data"], other_run["data"]))
    note("resolved config", "all settings", dict_differences(run["config"], other_run["config"]))

    metrics, other_metrics = read_metrics(one), read_metrics(other)
    for what, names in (("token ids", ("tokens_hash", "batch_index")), ("metrics", None)):
        note(what, f"{steps} steps", metric_differences(metrics, other_metrics, range(1, steps + 1), names))
    again = [(step, record) for early in seen or () for step, record in early.items()]
    found = [line for step, r in again for line in metric_differences(metrics, {step: r}, [step], None)]
    note("metrics before a kill", f"{len(again)} steps", found)
    return Comparison(rows, differences)


def read_checkpoint(workdir: pathlib.Path, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """({name: array on the host}, what else the checkpoint holds)."""
    checkpoints = Checkpoints(workdir / "checkpoints", CheckpointConfig())
    record = checkpoints.read_record(step)
    blank = {name: np.empty(shape, jnp.dtype(dtype)) for name, (shape, dtype, _) in record["leaves"].items()}
    return named_leaves(checkpoints.restore(step, nest(blank))), record["run"]


def leaf_difference(name: str, one: np.ndarray | None, other: np.ndarray | None) -> str:
    """'' if both are the same bit for bit, else what differs."""
    if one is None or other is None:
        return f"{name} is only in {'the killed run' if one is None else 'the run left alone'}"
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{name} is {one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"
    if one.tobytes() == other.tobytes():
        return ""
    unequal = int(np.sum(one != other))
    largest = np.max(np.abs(one.astype(np.float64) - other.astype(np.float64)))
    return f"{name}: {unequal:,} of {one.size:,} numbers differ, by {largest:.3g} at most"


def metric_differences(one: Mapping, other: Mapping, steps: Any, names: tuple[str, ...] | None) -> list[str]:
    """One line for the differing values of each step; `names` None: all that are recorded."""
    found = []
    for step in steps:
        if step not in one or step not in other:
            found.append(f"step {step} is missing in metrics.jsonl")
            continue
        pick = lambda record: record if names is None else {name: record.get(name) for name in names}
        if lines := dict_differences(pick(one[step]), pick(other[step])):
            found.append(f"step {step}: {'; '.join(lines)}")
    return found


def dict_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """'name: value and value' for each name in which they differ."""
    pairs = {name: (one.get(name), other.get(name)) for name in sorted(one | other)}
    return [f"{name} is {left!r} and {right!r}" for name, (left, right) in pairs.items() if left != right]
