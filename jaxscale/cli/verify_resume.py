"""Proof that killing a run twice and starting it again equals never stopping, bit for bit.

Both runs are the real command in processes of their own. One is left alone. The other is killed with SIGKILL after
steps that no checkpoint holds, started again, killed while a checkpoint is being written, and started again.
"""

import dataclasses
import functools
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable

from jaxscale.checkpoint.folders import UNFINISHED
from jaxscale.cli.attempt import Child, environment
from jaxscale.cli.compare_runs import Comparison, checkpoints_of, compare, read_metrics
from jaxscale.cli.shrink import as_flags, changes
from jaxscale.command_line import Arguments
from jaxscale.config import RunConfig
from jaxscale.sharding.config import MeshConfig
from jaxscale.sharding.mesh import mesh_shape
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Stop, put

SAVE_EVERY = 3
LEAST_STEPS = 4 * SAVE_EVERY  # room for a kill between the first two checkpoints and one in a later save


def settings(cfg: RunConfig, steps: int, devices: int) -> RunConfig:
    """The config of both runs: so many steps, a checkpoint every 3, every step logged, no measurement and no sample."""
    mesh = cfg.mesh
    try:
        shape = mesh_shape(mesh, devices)
    except BadInput:
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
        evals={},
        sample=dataclasses.replace(cfg.sample, num_tokens=0),
    )


def verify(
    arguments: Arguments,
    cfg: RunConfig,
    wanted: RunConfig,
    steps: int,
    devices: int,
    workdir: str | None = None,
    say: Callable[[str], None] = put,
) -> Comparison:
    """Both runs, compared. Their folder is removed if they are equal.

    Args: arguments: of the command line, which say where the config is. wanted: the config to run, from `settings`.
    Raises: Stop if a run ends by itself before its time.
    """
    folder = new_folder(workdir)
    command = [sys.executable, "-m", "jaxscale.cli", "train", f"--config={arguments.config}"]
    command += [f"--config.{name}={value}" for name, value in arguments.overrides.items()]
    command += as_flags(changes(cfg, wanted))  # later flags win
    try:
        say(f"a run of {steps} steps that is left alone")
        start(command, folder / "straight", devices).finish()
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
    """An empty folder for both runs. Raises BadInput if `workdir` holds something."""
    if workdir is None:
        return pathlib.Path(tempfile.mkdtemp(prefix="jaxscale-verify-"))
    folder = paths.make_run_dir(workdir)
    if any(folder.iterdir()):
        raise BadInput(f"workdir={workdir} is not empty, and a proof begins anew; name another folder")
    return folder


def killed_run(
    command: list[str], workdir: pathlib.Path, steps: int, devices: int, say: Callable[[str], None]
) -> tuple[list[str], list[dict[int, dict]]]:
    """(how the run was killed, the metrics that it had written at each kill), after two kills and a third start."""
    told, seen = [], []
    for moment in (past_a_checkpoint, while_saving):
        begin = newest(workdir)
        reached = functools.partial(moment, workdir, unfinished(workdir), begin, steps)
        where = start(command, workdir, devices).kill_when(reached)
        told.append(f"from step {begin}: killed {where}")
        say(f"the same, {told[-1]}")
        seen.append(read_metrics(workdir))
    told.append(f"from step {newest(workdir)}: to the end")
    say(f"the same, {told[-1]}")
    start(command, workdir, devices).finish()
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


def start(command: list[str], workdir: pathlib.Path, devices: int) -> Child:
    """The command in `workdir`, on simulated devices, its output beside it."""
    return Child([*command, f"--workdir={workdir}"], workdir.with_suffix(".log"), environment(devices))


def newest(workdir: pathlib.Path) -> int:
    """The newest committed step, or 0."""
    return checkpoints_of(workdir).latest_step() or 0


def unfinished(workdir: pathlib.Path) -> set[tuple[str, int]]:
    """(name, inode) of the folders of saves that are under way or were killed."""
    try:
        entries = os.scandir(workdir / "checkpoints")
        return {(entry.name, entry.inode()) for entry in entries if entry.name.endswith(UNFINISHED)}
    except FileNotFoundError:
        return set()


def last_logged(workdir: pathlib.Path) -> int:
    """The last step in metrics.jsonl, or 0."""
    return max(read_metrics(workdir), default=0)
