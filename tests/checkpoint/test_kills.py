"""Death at any moment of a save costs the steps since the last commit, and nothing else."""

import ast
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from xla_flags import xla_flags

from jaxscale.runtime import checkpoint
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import read_last_good


def start(code, *arguments):
    """A process of its own, with one device and our package."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": xla_flags(1)}
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def points():
    """The names of all places where training can be killed on purpose in a save; those of buckets are left out.

    Those of `jaxscale ckpt`, which have a dot, and those of local copies have tests of their own.
    """
    names = set()
    for path in pathlib.Path(checkpoint.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "crash_point":
                names.add(node.args[0].value)
    return sorted(name for name in names if "/" in name and not name.startswith(("gs/", "local/")))


# A run that saves every step, keeps two, and after three steps moves the newest aside and goes on from the one before.
# For each point a child goes on where the last one was killed, and is killed at that point; the last one ends well.
# They are forked, not started, because importing jax costs two seconds; no thread runs and no device is open by then.
FORKED = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import read_last_good
from jaxscale.runtime.checkpoint.write import import_orbax
import_orbax()
folder = sys.argv[1]

def expected(step_of, step):
    state = np.ones((3, 700), np.float32)
    for number in range(1, step + 1):
        state = np.asarray(step_of(state, np.float32(number)))
    return state

def train(crash_at):
    os.environ["JAXSCALE_CRASH_AT"] = crash_at
    checkpoints = Checkpoints(folder, CheckpointConfig(keep_last=2))
    step_of = jax.jit(lambda w, n: w * 0.5 + n)
    shape = {"w": jax.ShapeDtypeStruct((3, 700), jnp.float32)}
    saved = checkpoints.newest_readable(lambda line: os._exit(3))  # no damage is ever seen
    began, state = (0, None) if saved is None else (saved, checkpoints.restore(saved, shape))
    state = state or {"w": jnp.ones((3, 700))}
    assert np.asarray(state["w"]).tobytes() == expected(step_of, began).tobytes()
    for step in range(began + 1, began + 4):
        state = {"w": step_of(state["w"], np.float32(step))}
        checkpoints.save(step, state, {"step": step}, wait=True)
    checkpoints.set_aside(step, "rewound")
    if crash_at:
        return train(crash_at)  # not reached a second time unless the point comes later
    checkpoints.save(step, state, {"step": step}, wait=True)
    assert checkpoints.all_steps() == [step - 1, step], checkpoints.all_steps()
    names = [name for name in sorted(os.listdir(folder)) if not name.startswith("rewound")]
    assert names == sorted([str(step - 1), str(step), "last_good.json"]), names
    assert read_last_good(checkpoints.directory)["step"] == step and checkpoints.read_run(step) == {"step": step}
    assert np.asarray(checkpoints.restore(step, shape)["w"]).tobytes() == expected(step_of, step).tobytes()
    print("whole", began > 0)

for point in [*sys.argv[2:], ""]:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(point)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    print(point or "end", -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
"""


@pytest.mark.slow
@pytest.mark.fault("F1")
def test_killed_at_every_point_of_a_save_it_ends_as_if_it_never_was(tmp_path):
    names = points()
    assert len(names) > 15
    with start(FORKED, tmp_path, *names) as process:
        told = process.communicate(timeout=300)[0].splitlines()
    assert told == [*(f"{name} {-signal.SIGKILL}" for name in names), "whole True", "end 0"]


SAVER = """
import sys
import jax.numpy as jnp, numpy as np
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
checkpoints = Checkpoints(sys.argv[1], CheckpointConfig(keep_last=2))
values = np.random.default_rng(0).normal(size=2_000_000).astype(np.float32)
first = (checkpoints.latest_step() or 0) + 1
for step in range(first, first + 1000):
    checkpoints.save(step, {"w": jnp.asarray(values) + step}, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.fault("F1")
@pytest.mark.parametrize("kills", [1, pytest.param(30, marks=pytest.mark.soak)])
def test_kill_9_during_a_save_leaves_the_step_before_it_readable(tmp_path, kills):
    values = np.random.default_rng(0).normal(size=2_000_000).astype(np.float32)
    delays = np.random.default_rng(kills).uniform(0, 0.15, max(6, 2 * kills)).round(3)
    print(f"delays {delays}")
    reached, in_a_save = 0, 0
    for attempt, delay in enumerate(delays):
        if attempt >= kills and in_a_save:  # the first ones nearly always hit a save; a busy machine may need more
            break
        with start(SAVER, tmp_path) as process:
            for line in process.stdout:
                if int(line) >= reached + 3:
                    break
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        reached = int(line)
        in_a_save += any("tmp" in path.name for path in tmp_path.iterdir())
        checkpoints = Checkpoints(tmp_path, CheckpointConfig())
        latest = checkpoints.latest_step()
        assert latest >= reached - 1  # `reached` was begun after the one before it was committed
        restored = checkpoints.restore(latest, {"w": jax.ShapeDtypeStruct((2_000_000,), np.float32)})
        np.testing.assert_array_equal(restored["w"], values + np.float32(latest))
        assert checkpoints.read_run(latest) == {"step": latest}
        assert read_last_good(checkpoints.directory)["step"] in (latest, latest - 1)
        reached = latest
    assert in_a_save
