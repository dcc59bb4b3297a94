"""A run whose step takes its batch in parts, on eight devices, is killed anywhere and ends as if it never was."""

import json
import os
import signal
import subprocess
import sys

import jax
import pytest
import tiny
from xla_flags import xla_flags

from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.run.opening import open_run, train_to_completion

VALUES = {
    "train_tokens": "40 steps", "train.num_microbatches": 4, "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2,
    "eval.num_rows": 0, "checkpoint.save_every_steps": 3, "checkpoint.keep_last": 2, "monitor.log_every_steps": 1,
    "monitor.progress": "off", "monitor.tensorboard": False,
}  # fmt: skip
CHILD = """
import json, sys
import tiny
from jaxscale.runtime.run.opening import open_run, train_to_completion
train_to_completion(open_run(tiny.config(json.loads(sys.argv[2])), sys.argv[1], lambda line: None))
"""
ANYWHERE = ("step:5", "save/folder:2", "save/arrays:2", "save/finalized:1", "save/renamed:2", "verify/before:1",
            "last_good/before:1", "delete/half:1", "step:1")  # fmt: skip


def killed(folder, point):
    """Returns when a process that trains in the folder has been killed there."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": xla_flags(8), "JAXSCALE_CRASH_AT": point}
    env["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(folder), json.dumps(VALUES)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


@pytest.mark.fault("F1")
@pytest.mark.parametrize("points", [("save/arrays:2",), ANYWHERE], ids=len)
@pytest.mark.soak
def test_killed_and_gone_on_with_it_is_the_run_that_never_stopped(tmp_path, points):
    train_to_completion(open_run(tiny.config(VALUES), str(tmp_path / "whole"), lambda line: None))
    for point in points:
        killed(tmp_path / "killed", point)
    train_to_completion(open_run(tiny.config(VALUES), str(tmp_path / "killed"), lambda line: None))
    saved, told = [], []
    for name in ("whole", "killed"):
        saved.append(Checkpoints(tmp_path / name / "checkpoints", CheckpointConfig()).read_record(40)["leaves"])
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        told.append([[line[key] for key in ("step", "loss", "grad_norm", "tokens_hash")] for line in lines])
    assert saved[0] == saved[1] and told[0] == told[1] and len(told[0]) == 40
