"""Checks a config on this machine's CPU.

  jaxscale verify resume --config=FILE    compares a run that is killed and restarted twice with an uninterrupted run,
                                          bitwise
  jaxscale verify parity --config=FILE    compares losses and gradients on one device, each mesh axis (pipeline, data,
                                          fsdp, context, tensor; expert, with both exchanges, for a mixture of experts),
                                          pairs of axes, four axes, ZeRO 1 to 3 and accumulation, on up to 16 simulated
                                          devices

Exit code 0 if the check passes, 1 otherwise. Changes to the config are printed.
"""

import dataclasses
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Literal

from jaxscale.cli import verify_parity
from jaxscale.cli.shrink import changes_text, is_large, shrink, use_available_data
from jaxscale.cli.two_runs import KILL_AFTER, SAVE_EVERY, RunComparison, TwoRuns, comparable, compare
from jaxscale.config import RunConfig
from jaxscale.core.config import MeshConfig
from jaxscale.core.mesh import mesh_shape
from jaxscale.settings import config_file
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.attempt import simulated_devices_env
from jaxscale.system.exits import BadInput, Exit, Stop, put

LEAST_STEPS = 4 * SAVE_EVERY  # enough for a kill after the second checkpoint, and one during the second save after it
KILLS = {f"step:{KILL_AFTER}": "", "save/start:2": ", while starting to write the next one"}


def resume_settings(cfg: RunConfig, steps: int, devices: int) -> RunConfig:
    """Returns the config of both runs: `steps` logged steps, a checkpoint every 3 steps, no evaluations or samples."""
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


def verify_resume(
    cfg: RunConfig, steps: int, devices: int, workdir: str | None = None, say: Callable[[str], None] = put
) -> RunComparison:
    """Trains and compares both runs of a config from `resume_settings`. Deletes their folder if they are equal.

    The second run is killed with SIGKILL some steps after a checkpoint, resumed, killed while it writes a checkpoint,
    and resumed again. Raises Stop if a run fails.
    """
    folder = new_folder(workdir)
    runs = TwoRuns(
        trained=cfg,
        command=[sys.executable, "-m", "jaxscale.cli", "train"],
        folder=folder,
        logs=folder,
        steps=steps,
        env=simulated_devices_env(devices),
        say=lambda line: None,
    )
    metrics = []  # metrics logged before each kill
    try:
        say(f"an uninterrupted run of {steps} steps")
        runs.run("straight")
        for point, where in KILLS.items():
            newest, logged, seen = runs.kill(point)
            metrics.append(logged)
            end = f"killed after step {max(logged, default=0)}, newest checkpoint {newest}{where}"
            say(f"the second run, from step {seen.begin}: {end}")
        say(f"the second run, from step {runs.newest()}: to the end")
        runs.run("killed")
    except Stop:
        say(f"both runs are kept in {folder}")
        raise
    except KeyboardInterrupt:
        if workdir is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    found = compare(folder / "straight", folder / "killed", steps, metrics)
    if found.passes:
        shutil.rmtree(folder)
    else:
        say(f"both runs are kept in {folder}")
    return found


def new_folder(workdir: str | None) -> pathlib.Path:
    """Returns an empty folder for both runs. Raises BadInput if `workdir` is not empty."""
    if workdir is None:
        return pathlib.Path(tempfile.mkdtemp(prefix="jaxscale-verify-"))
    folder = paths.make_run_dir(workdir)
    if any(folder.iterdir()):
        raise BadInput(f"workdir={workdir} is not empty, but verify needs an empty folder; use a different one")
    return folder


SHARED = ("config", "settings", "layers", "small")
SUBVERBS = {"resume": (*SHARED, "steps", "devices", "workdir"), "parity": SHARED}


@dataclasses.dataclass(frozen=True)
class VerifyFlags:
    config: str = flag("", None, "FILE")
    settings: dict[str, str] = flag(dict, "sets any setting, as in training", "VALUE", name="config.NAME")
    layers: int | None = flag(None, "at most N layers", "N", least=1)
    small: Literal["on", "off", "auto"] = flag(
        "auto", "on: a narrow model and short sequences; off: the config's sizes; auto: on for a large config"
    )
    steps: int = flag(12, "resume: steps of each run", least=LEAST_STEPS)
    devices: int = flag(1, "resume: simulated devices", least=1)
    workdir: str | None = flag(
        None, "resume: folder of the two runs, which is kept if they differ; default: a temporary folder", "FOLDER"
    )


@command(VerifyFlags, subverbs=SUBVERBS, alone="--help")
def main(arguments: Arguments) -> int:
    """Runs the named check. Returns the exit code. For parity, re-executes the command with simulated devices."""
    flags, is_parity = arguments.flags, arguments.subverb == "parity"
    if is_parity:
        verify_parity.on_simulated_devices([sys.executable, "-m", "jaxscale.cli", "verify", "parity", *arguments.words])
    cfg, checked = prepared(arguments, copies=verify_parity.NUM_DEVICES if is_parity else flags.devices)
    checked = verify_parity.settings(checked) if is_parity else resume_settings(checked, flags.steps, flags.devices)
    put(*changes_text(cfg, checked))
    if is_parity:
        done = verify_parity.verify(checked, verify_parity.layouts(checked), put)
    else:
        done = verify_resume(checked, flags.steps, flags.devices, flags.workdir)
    put(*done.lines())
    return Exit.DONE if done.passes else Exit.ERROR


def prepared(arguments: Arguments, copies: int) -> tuple[RunConfig, RunConfig]:
    """Returns (user's config, config reduced as requested and with readable data)."""
    cfg = config_file.load_config(arguments.config, arguments.overrides)
    flags = arguments.flags
    small = is_large(cfg, copies) if flags.small == "auto" else flags.small == "on"
    smaller = shrink(cfg, layers=flags.layers, small=small)
    smaller, problems = use_available_data(smaller)
    for problem in problems:
        put(f"using synthetic tokens instead of the config's data: {problem}")
    return cfg, smaller
