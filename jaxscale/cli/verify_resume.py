"""Proof that killing a run twice and starting it again equals never stopping, bit for bit.

One run is killed with SIGKILL after steps that no checkpoint holds, started again, killed while a checkpoint is being
written, and started again. It is held against one that is left alone.
"""

import dataclasses
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable

from jaxscale.cli.attempt import simulated_devices_env
from jaxscale.cli.compare_runs import Comparison, compare
from jaxscale.cli.two_runs import KILL_AFTER, SAVE_EVERY, TwoRuns, comparable
from jaxscale.config import RunConfig
from jaxscale.sharding.config import MeshConfig
from jaxscale.sharding.mesh import mesh_shape
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Stop, put

LEAST_STEPS = 4 * SAVE_EVERY  # room for a kill behind the second checkpoint and one in the second save after that
KILLS = {f"step:{KILL_AFTER}": "", "save/start:2": ", while it began to write the next"}


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
        comparable(cfg, keep_last=steps),
        mesh=mesh,
        batch_tokens=cfg.batch_tokens if rows == cfg.rows_per_step else rows * cfg.seq_len,
        train_tokens=f"{steps} steps",
        optim=dataclasses.replace(cfg.optim, warmup_tokens=f"{SAVE_EVERY} steps"),
        eval=dataclasses.replace(cfg.eval, num_rows=0),
        evals={},
    )


def verify(
    wanted: RunConfig, steps: int, devices: int, workdir: str | None = None, say: Callable[[str], None] = put
) -> Comparison:
    """Both runs, compared. Their folder is removed if they are equal.

    Args: wanted: the config to run, from `settings`.
    Raises: Stop if a run ends by itself before its time.
    """
    folder = new_folder(workdir)
    runs = TwoRuns(
        trained=wanted,
        command=[sys.executable, "-m", "jaxscale.cli", "train"],
        folder=folder,
        logs=folder,
        steps=steps,
        env=simulated_devices_env(devices),
        kills=KILLS,
        say=lambda line: None,
    )
    try:
        say(f"a run of {steps} steps that is left alone")
        runs.run("straight")
        told, seen = killed_run(runs, say)
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


def killed_run(runs: TwoRuns, say: Callable[[str], None]) -> tuple[list[str], list[dict[int, dict]]]:
    """(how the run was killed, the metrics that it had written at each kill), after two kills and a third start."""
    told, seen = [], []

    def tell(line: str) -> None:
        told.append(line)
        say(f"the same, {line}")

    for kill in runs.kill():
        seen.append(kill.metrics)
        last = max(kill.metrics, default=0)
        tell(f"from step {kill.begin}: killed after step {last}, checkpoint {kill.newest} being the newest{kill.where}")
    tell(f"from step {runs.newest()}: to the end")
    runs.run("killed")
    return told, seen


def new_folder(workdir: str | None) -> pathlib.Path:
    """An empty folder for both runs. Raises BadInput if `workdir` holds something."""
    if workdir is None:
        return pathlib.Path(tempfile.mkdtemp(prefix="jaxscale-verify-"))
    folder = paths.make_run_dir(workdir)
    if any(folder.iterdir()):
        raise BadInput(f"workdir={workdir} is not empty, and a proof needs an empty folder; name another one")
    return folder
