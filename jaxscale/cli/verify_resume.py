"""Proof that killing a run twice and starting it again equals never stopping, bit for bit.

Both runs are the real command in processes of their own. One is left alone. The other is killed with SIGKILL after
steps that no checkpoint holds, started again, killed while a checkpoint is being written, and started again. Each kill
is exact, not a race: a second save waits until the first one is committed, and the process dies at a point of its own
(system/faults.py).
"""

import dataclasses
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable

from jaxscale.cli.attempt import Child, simulated
from jaxscale.cli.compare_runs import Comparison, checkpoints_of, compare, read_metrics
from jaxscale.cli.shrink import changes
from jaxscale.command_line import Arguments
from jaxscale.config import RunConfig
from jaxscale.sharding.config import MeshConfig
from jaxscale.sharding.mesh import mesh_shape
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Stop, put

SAVE_EVERY = 3
LEAST_STEPS = 4 * SAVE_EVERY  # room for a kill behind the second checkpoint and one in the second save after that
KILLS = {f"step:{2 * SAVE_EVERY + 1}": "", "save/start:2": ", while it began to write the next"}  # point: in words


def settings(cfg: RunConfig, steps: int, devices: int) -> RunConfig:
    """The config of both runs: `steps` steps, a checkpoint every 3, every step logged, no measurement and no sample."""
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
        checkpoint=dataclasses.replace(
            cfg.checkpoint, save_every_steps=SAVE_EVERY, keep_last=steps, wait_seconds=3600
        ),  # no save is put off
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
    command += [f"--config.{name}={now}" for name, (_, now) in changes(cfg, wanted).items()]  # later flags win
    try:
        say(f"a run of {steps} steps that is left alone")
        start(command, folder / "straight", devices).finish()
        told, seen = killed_run(command, folder / "killed", devices, say)
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
    command: list[str], workdir: pathlib.Path, devices: int, say: Callable[[str], None]
) -> tuple[list[str], list[dict[int, dict]]]:
    """(how the run was killed, the metrics that it had written at each kill), after two kills and a third start."""
    told, seen = [], []
    for point, where in KILLS.items():
        begin = newest(workdir)
        start(command, workdir, devices, JAXSCALE_CRASH_AT=point).finish(killed=True)
        seen.append(read_metrics(workdir))
        told.append(
            f"from step {begin}: killed after step {max(seen[-1], default=0)}, checkpoint {newest(workdir)} being the "
            f"newest{where}"
        )
        say(f"the same, {told[-1]}")
    told.append(f"from step {newest(workdir)}: to the end")
    say(f"the same, {told[-1]}")
    start(command, workdir, devices).finish()
    return told, seen


def start(command: list[str], workdir: pathlib.Path, devices: int, **env: str) -> Child:
    """The command in `workdir`, on simulated devices, its output beside it."""
    return Child([*command, f"--workdir={workdir}"], workdir.with_suffix(".log"), simulated(devices) | env)


def newest(workdir: pathlib.Path) -> int:
    """The newest committed step, or 0."""
    return checkpoints_of(workdir).latest_step() or 0
