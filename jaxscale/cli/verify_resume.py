"""Check that a run that is killed and restarted twice equals an uninterrupted one, bitwise.

One run is killed with SIGKILL after steps that no checkpoint has, restarted, killed while a checkpoint is being
written, and restarted. It is compared with an uninterrupted run.
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
from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import mesh_shape
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Stop, put

LEAST_STEPS = 4 * SAVE_EVERY  # a kill after the second checkpoint, and one in the second save after that
KILLS = {f"step:{KILL_AFTER}": "", "save/start:2": ", while it began to write the next"}


def settings(cfg: RunConfig, steps: int, devices: int) -> RunConfig:
    """Returns the config of both runs: `steps` steps, a checkpoint every 3, every step logged, no evals or samples."""
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
    cfg: RunConfig, steps: int, devices: int, workdir: str | None = None, say: Callable[[str], None] = put
) -> Comparison:
    """Trains and compares both runs. Deletes their folder if they are equal.

    Args: cfg: from `settings`.
    Raises: Stop if a run fails.
    """
    folder = new_folder(workdir)
    runs = TwoRuns(
        trained=cfg,
        command=[sys.executable, "-m", "jaxscale.cli", "train"],
        folder=folder,
        logs=folder,
        steps=steps,
        env=simulated_devices_env(devices),
        kills=KILLS,
        say=lambda line: None,
    )
    try:
        say(f"an uninterrupted run of {steps} steps")
        runs.run("straight")
        kills, metrics = killed_run(runs, say)
    except Stop:
        say(f"the runs are kept in {folder}")
        raise
    except KeyboardInterrupt:
        if workdir is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    found = compare(folder / "straight", folder / "killed", steps, metrics)
    if found.exact:
        shutil.rmtree(folder)
    return dataclasses.replace(found, kills=kills, folder="" if found.exact else str(folder))


def killed_run(runs: TwoRuns, say: Callable[[str], None]) -> tuple[list[str], list[dict[int, dict]]]:
    """Runs with two kills and a third start. Returns (a line for each start, the metrics logged before each kill)."""
    lines, metrics = [], []

    def report(line: str) -> None:
        lines.append(line)
        say(f"the same, {line}")

    for kill in runs.kill():
        metrics.append(kill.metrics)
        last = max(kill.metrics, default=0)
        report(f"from step {kill.begin}: killed after step {last}, newest checkpoint {kill.newest}{kill.where}")
    report(f"from step {runs.newest()}: to the end")
    runs.run("killed")
    return lines, metrics


def new_folder(workdir: str | None) -> pathlib.Path:
    """Returns an empty folder for both runs. Raises BadInput if `workdir` is not empty."""
    if workdir is None:
        return pathlib.Path(tempfile.mkdtemp(prefix="jaxscale-verify-"))
    folder = paths.make_run_dir(workdir)
    if any(folder.iterdir()):
        raise BadInput(f"workdir={workdir} is not empty, but verify needs an empty folder; name another one")
    return folder
