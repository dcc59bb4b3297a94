"""The wheel contains the configs and works in an empty folder, without a clone."""

import os
import subprocess
import sys

import pytest
from scripts import ROOT

import jaxscale


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the wheel of this checkout installed, without its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    for command in (
        ["wheel", "--no-deps", f"--wheel-dir={folder / 'dist'}", ROOT],
        [
            "install",
            "--no-deps",
            "--no-index",
            f"--find-links={folder / 'dist'}",
            f"--target={folder / 'site'}",
            "jaxscale",
        ],
    ):
        done = subprocess.run([*pip, *command], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    return folder / "site"


def run(installed, folder, *command):
    env = {**os.environ, "PYTHONPATH": str(installed), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_config_trains_by_name_from_the_wheel(installed, tmp_path):
    small = ["--config.train_tokens=2 steps", "--config.optim.warmup_tokens=0", "--config.model.num_layers=1"]
    done = run(installed, tmp_path, sys.executable, "-m", "jaxscale.main", "--config=quickstart", *small)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/quickstart/checkpoints/2").is_dir()
    where = run(installed, tmp_path, sys.executable, "-c", "import jaxscale; print(jaxscale.__file__)").stdout
    assert where.startswith(str(installed))


@pytest.mark.slow
def test_a_config_in_a_subfolder_and_one_with_an_argument_are_in_the_wheel(installed, tmp_path):
    plan = [sys.executable, "-m", "jaxscale.cli", "plan", "--config=auto:depth=2", "--topology=v5e:2x4"]
    done = run(installed, tmp_path, *plan)
    assert done.returncode == 0 and "auto-depth2 on v5e:2x4" in done.stdout, done.stderr
    assert (installed / "jaxscale/configs/data/web.py").is_file()


@pytest.mark.slow
def test_the_command_of_the_wheel_prints_its_version(installed, tmp_path):
    done = run(installed, tmp_path, sys.executable, installed / "bin" / "jaxscale", "--version")
    assert done.stdout == f"jaxscale {jaxscale.__version__}\n"
