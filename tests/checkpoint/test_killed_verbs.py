"""A verb that is killed at any point leaves nothing that counts as a step, and goes on when it is run again."""

import os
import subprocess
import sys

import kept_run
import pytest

POINTS = ["copy.file:1", "copy.file:6", "copy.read_back:1", "copy.commit:1", "copy.done:1"]
# Each crash in a process of its own, which is forked before TensorStore has threads: one start of Python for all.
SCRIPT = """
import os, pathlib, sys
from jaxscale.runtime.checkpoint.derived_weights import average_steps
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.retention import delete_step, remove_half_deleted
from jaxscale.runtime.checkpoint.transfer import copy_step
run, to = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
there = lambda folder: Checkpoints(folder / "checkpoints", CheckpointConfig())
source = there(run)

def twice(point, action, folder):
    for crash_at in (point, ""):
        child = os.fork()
        if not child:
            os.environ["JAXSCALE_CRASH_AT"] = crash_at
            print(point, "again", action(), flush=True)
            os._exit(0)
        ended = os.waitpid(child, 0)[1]
        print(point, ended, there(folder).all_steps(), flush=True)

for number, point in enumerate(sys.argv[3:]):
    twice(point, lambda: copy_step(source, 20, to / str(number)).kept_bytes, to / str(number))
twice("average.commit", lambda: average_steps(source, [10, 30], to / "mean").step, to / "mean")
twice("delete/half", lambda: (delete_step(source.directory, 10), remove_half_deleted(source.directory)), run)
print(*sorted(path.name for path in source.directory.iterdir()))
"""


@pytest.mark.slow
@pytest.mark.fault("F1")
def test_a_killed_verb_goes_on_and_nothing_half_done_counts_as_a_step(run, tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(run.directory.parent), str(tmp_path / "to"), *POINTS]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    total = sum(path.stat().st_size for path in kept_run.files_of(run, 20))
    kept_bytes = []
    for point, (killed, again, ended) in zip(POINTS, zip(*[iter(lines)] * 3)):
        assert killed == f"{point} 9 {'[20]' if point == 'copy.done:1' else '[]'}", done.stderr
        assert again.startswith(f"{point} again ") and ended == f"{point} 0 [20]"
        kept_bytes.append(int(again.split()[-1]))
    assert 0 < kept_bytes[0] < kept_bytes[1] < kept_bytes[2] == kept_bytes[3] < kept_bytes[4] == total
    assert lines[15:] == [
        "average.commit 9 []", "average.commit again 30", "average.commit 0 [30]",
        "delete/half 9 [20, 30]", "delete/half again (None, None)", "delete/half 0 [20, 30]", "20 30 last_good.json",
    ]  # fmt: skip
    for number in range(len(POINTS)):
        for path in kept_run.files_of(run, 20):
            copied = tmp_path / "to" / str(number) / "checkpoints" / path.relative_to(run.directory)
            assert copied.read_bytes() == path.read_bytes()
