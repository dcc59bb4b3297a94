"""Where the launch scripts are, and how a test runs one. The tools they call are stood in for by files on PATH."""

import os
import pathlib
import subprocess

import yaml

ROOT = pathlib.Path(__file__).parent.parent.parent
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), *LAUNCH.rglob("*.sbatch")])


def shell(script, *arguments, env=None, timeout=120):
    """The finished process of `bash launch/SCRIPT ARGUMENT ...`."""
    return subprocess.run(
        ["bash", LAUNCH / script, *arguments],
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )


def printed(script, *arguments):
    """What the script prints, which must end well and say nothing on stderr."""
    done = shell(script, *arguments)
    assert done.returncode == 0 and done.stderr == "", (done.returncode, done.stderr)
    return done.stdout


def manifest(*arguments):
    """The JobSet that launch/gke/jobset.sh renders, as dicts and lists."""
    return yaml.safe_load(printed("gke/jobset.sh", "render", *arguments))
