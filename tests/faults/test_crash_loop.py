"""A real training that dies before each new checkpoint is given up with the reason, and its last good step stays."""

import os
import pathlib
import subprocess
import sys

import pytest
import tiny

import jaxscale
from jaxscale.cli.supervise import read_progress
from jaxscale.system.exits import Exit

pytestmark = [pytest.mark.soak, pytest.mark.fault("F28")]


def test_a_training_that_dies_at_its_third_step_each_time_is_given_up(tmp_path):
    values = tiny.VALUES | dict(eval=dict(num_rows=0), checkpoint=dict(save_every_steps=5))
    (tmp_path / "tiny.py").write_text(f"def get_config():\n    return {values!r}\n")
    flags = [f"--config={tmp_path / 'tiny.py'}", f"--workdir={tmp_path / 'run'}"]
    env = os.environ | {"PYTHONPATH": str(pathlib.Path(jaxscale.__file__).parent.parent)}
    first = subprocess.run([sys.executable, "-m", "jaxscale.main", *flags, "--stop_after=5"], env=env, timeout=400)
    assert first.returncode == 0 and read_progress(tmp_path / "run").newest == 5
    supervise = [
        sys.executable,
        "-m",
        "jaxscale.cli",
        "supervise",
        "--max_fruitless=2",
        "--backoff_seconds=0",
        "--",
        *flags,
    ]
    crashing = env | {"JAXSCALE_CRASH_AT": "step:3"}
    given_up = subprocess.run(supervise, env=crashing, timeout=800, capture_output=True, text=True)
    assert given_up.returncode == Exit.ERROR, given_up.stdout + given_up.stderr
    assert "crash loop: 2 consecutive starts without a new checkpoint; the newest is step 5" in given_up.stderr
    mended = subprocess.run(supervise, env=env, timeout=400, capture_output=True, text=True)
    assert mended.returncode == 0 and "resuming from step 5" in mended.stdout
