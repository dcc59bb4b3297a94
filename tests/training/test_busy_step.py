"""Devices are kept busy: the state is donated whole, and the loop sends and reads nothing that a step must wait for.

jax.transfer_guard never sees a copy from the device on a CPU, so that reading is watched at the metrics themselves.
"""

import dataclasses
import re

import jax
import numpy as np
import pytest
import tiny

from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.training import loop

pytestmark = pytest.mark.slow

# a program of its own: jax compiles again under a transfer guard, and test_step.py counts compilations
MESH = {"mesh.fsdp": 2, "seed": 2}
QUIET = {"monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0}
STEPS = 4


@pytest.fixture
def run(tmp_path):
    """A run of the tiny program, compiled before the test begins."""
    program = tiny.program(MESH, 2)
    cfg = tiny.config(QUIET | MESH | {"train_tokens": f"{STEPS} steps", "checkpoint.save_every_steps": 0})
    state, _ = program.train_step(program.init(), tiny.on_mesh(program, tiny.packed_batch(0)))
    jax.block_until_ready(state)
    return open_run(cfg, str(tmp_path / "run"), log=lambda text: None, make_program=tiny.reuse(program))


def test_every_array_of_the_state_is_written_in_the_place_of_the_old_one():
    program = tiny.program(MESH, 2)
    compiled = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    leaves = jax.tree.leaves(program.abstract_state)
    header = re.search(r"input_output_alias=\{(.*?)\}, entry_computation_layout", compiled.as_text())[1]
    aliases = {int(out): int(into) for out, into in re.findall(r"\{(\d+)\}: \((\d+), \{\}, \w+-alias\)", header)}
    assert sorted(aliases) == list(range(len(leaves)))  # the state comes first in the results
    assert len(set(aliases.values())) == len(leaves)
    own = [np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves]
    assert compiled.memory_analysis().alias_size_in_bytes == sum(own)


def test_the_old_state_is_gone_after_a_step():
    program = tiny.program(MESH, 2)
    state = program.init()
    program.train_step(state, tiny.on_mesh(program, tiny.packed_batch(0)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_the_loop_itself_sends_nothing_to_the_devices(run):
    """Batches are sent by the feed's thread, which the guard of this one does not concern."""
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        assert int(loop.train(run).step) == STEPS


def test_the_guard_would_see_a_batch_that_the_step_must_wait_for(run):
    def train_step(state, batch):
        return run.train_step(state, jax.tree.map(np.asarray, batch))

    with jax.transfer_guard_host_to_device("disallow_explicit"):
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            loop.train(dataclasses.replace(run, train_step=train_step))


class Watched:
    """A metric that tells when it is read, however that is done: everything goes through __array__."""

    def __init__(self, value, read):
        self.value, self.read = value, read

    def __array__(self, dtype=None, copy=None):
        self.read()
        return np.asarray(self.value, dtype)

    def __float__(self):
        return float(np.asarray(self))

    __int__ = __bool__ = item = __float__


def test_no_metric_of_a_step_is_read_before_the_next_step_is_dispatched(run):
    events = []

    def train_step(state, batch):
        n = sum(what == "step" for what, _ in events)
        events.append(("step", n))
        state, metrics = run.train_step(state, batch)
        return state, {name: Watched(value, lambda: events.append(("read", n))) for name, value in metrics.items()}

    loop.train(dataclasses.replace(run, train_step=train_step))
    first_read = [events.index(("read", n)) for n in range(STEPS)]
    for n in range(STEPS - 1):
        assert first_read[n] > events.index(("step", n + 1))
