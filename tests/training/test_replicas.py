"""A wrong bit in one copy of the state is found and its device named; what has no copy is said to have none."""

import functools
import types

import jax
import numpy as np
import pytest
import tiny

from jaxscale.core.config import GuardConfig
from jaxscale.core.shardings import RULES
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import named_leaves
from jaxscale.runtime.run.opening import open_run, train_to_completion
from jaxscale.runtime.training.autopilot import Autopilot, AutopilotSpec
from jaxscale.runtime.training.config import RecoveryConfig, ReplicaConfig
from jaxscale.runtime.training.replicas import (
    ReplicaMonitor,
    find_difference,
    flip_bit,
    flip_bits,
    make_replica_check,
    replica_coverage,
    replica_devices,
)
from jaxscale.system import faults
from jaxscale.system.exits import Exit, Stop

pytestmark = pytest.mark.fault("F25")

# Copies of a weight on 8 devices: 8, 4, 4 of products that are split, 2, and none. Without moments the check compiles
# in a third of the time.
FEW = {"optim.name": "sgd", "optim.b1": 0.0}
DATA = FEW | {"mesh.data": 8, "mesh.fsdp": 1}
BOTH = {"mesh.data": 4, "mesh.fsdp": 2}
TENSOR = FEW | {"mesh.data": 4, "mesh.fsdp": 1, "mesh.tensor": 2}
PAIRS = FEW | {"mesh.data": 2, "mesh.fsdp": 4}
RUN = FEW | {"mesh.data": 4, "mesh.fsdp": 1}  # of 4 devices, which compiles and runs faster
SHARDED = FEW | {"mesh.fsdp": 8}


@functools.cache
def made_of(overrides):
    program, rng = tiny.program(dict(overrides), 8), np.random.default_rng(0)
    fill = lambda leaf: jax.device_put(rng.integers(0, 2, leaf.shape).astype(leaf.dtype), leaf.sharding)
    state = jax.tree.map(fill, program.abstract_state)
    return program, state, make_replica_check(program.mesh, program.abstract_state)


def made(overrides):
    """(program, some state of it, its check)."""
    return made_of(tuple(overrides.items()))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [DATA, BOTH, TENSOR], ids=["data", "data and fsdp", "tensor"])
def test_each_of_many_flipped_bits_is_found_in_its_leaf_and_on_its_device(mesh):
    _, state, check = made(mesh)
    assert check(state).same and str(check(state)) == "all copies are equal"
    leaves, rng, found = named_leaves(state), np.random.default_rng(0), 0
    sizes = {name: leaf.addressable_shards[0].data.nbytes * 8 for name, leaf in leaves.items()}
    for _ in range(100):
        device = int(rng.integers(8))
        name = str(rng.choice([name for name in leaves if len(replica_devices(leaves[name], device)) > 2]))
        report = check(flip_bit(state, device, leaf=name, bit=int(rng.integers(sizes[name]))))
        found += (report.devices, report.leaves, report.certain) == ((device,), (name,), True)
    assert found == 100
    assert check(state).same  # the flips were made in copies


def test_the_line_names_the_device_and_the_leaf():
    _, state, check = made(DATA)
    report = check(flip_bit(state, 5, leaf="params/head"))
    assert str(report) == "device 5 (cpu, process 0) has different bits in params/head than the other copies"


def test_several_wrong_devices_are_all_named():
    _, state, check = made(DATA)
    wrong = flip_bit(flip_bit(state, 5, leaf="params/head"), 2, leaf="params/embedding", bit=3)
    report = check(wrong)
    assert report.devices == (2, 5) and set(report.leaves) == {"params/head", "params/embedding"}


def test_of_two_copies_that_differ_both_devices_are_named_unless_a_majority_elsewhere_tells():
    program, state, check = made(PAIRS)
    pair = replica_devices(state.params["head"], 3)
    assert len(pair) == 2
    report = check(flip_bit(state, 3, leaf="params/head"))
    assert report.devices == tuple(sorted(pair)) and not report.certain
    assert "too few copies to identify the wrong one" in str(report)
    report = check(flip_bit(flip_bit(state, 3, leaf="params/head"), 3, leaf="params/final_norm"))
    assert report.devices == (3,) and report.certain
    assert "if two copies differ, both are named" in str(
        replica_coverage(program.abstract_state, RULES[program.cfg.rules])
    )


@pytest.mark.parametrize(
    ("seen", "wrong", "certain"),
    [
        ({0: 7, 1: 7}, None, None),
        ({0: 7, 1: 8}, (0, 1), False),
        ({0: 7, 1: 8, 2: 7}, (1,), True),
        ({0: 7, 1: 8, 2: 9}, (0, 1, 2), False),
        ({0: 7, 1: 7, 2: 9, 3: 9}, (0, 1, 2, 3), False),
        ({0: 7, 1: 7, 2: 7, 3: 9, 4: 8}, (3, 4), True),
    ],
    ids=str,
)
def test_more_than_half_of_the_copies_are_believed(seen, wrong, certain):
    found = find_difference("w", seen)
    assert (found and (found.devices, found.certain)) == (wrong and (wrong, certain))


def test_what_has_no_copy_is_told_and_a_flip_there_is_not_seen():
    program, state, check = made(SHARDED)
    told = replica_coverage(program.abstract_state, RULES[program.cfg.rules])
    assert 0 < told.copied_bytes < 0.1 * told.total_bytes and told.fewest_copies == 8
    assert "the rest has no copy, and a wrong bit there is not detected" in str(told)
    assert check(flip_bit(state, 3, leaf="params/head")).same
    assert check(flip_bit(state, 3, leaf="params/final_norm")).devices == (3,)
    everywhere = replica_coverage(made(DATA)[0].abstract_state, RULES["zero3"])
    assert everywhere.copied_bytes == everywhere.total_bytes and "(100%)" in str(everywhere)
    renewed = tiny.program(FEW | {"rules": "zero1"}, 4).abstract_state
    assert "between the last step and the comparison" in str(replica_coverage(renewed, RULES["zero1"]))
    alone = tiny.program()
    assert str(replica_coverage(alone.abstract_state, RULES["zero3"])).startswith(
        "each part of the state is on one device only"
    )
    assert make_replica_check(alone.mesh, alone.abstract_state)(alone.init()).same


def test_what_lives_on_the_host_is_compared_too():
    _, state, check = made(DATA | {"optim.offload_params": True})
    assert state.params["head"].sharding.memory_kind == "pinned_host"
    assert check(state).same
    assert check(flip_bit(state, 6, leaf="params/head")).devices == (6,)


STAGES = {"model.remat": "full", "train.num_microbatches": 2, "mesh.pipeline": 2, "mesh.context": 2, "mesh.fsdp": 2}
SLOW = [DATA | {"optim.name": "adamw"}, BOTH, TENSOR, STAGES]
MESHES = [(RUN, 4), *[pytest.param(overrides, 8, marks=pytest.mark.soak) for overrides in SLOW]]


@pytest.mark.parametrize(("overrides", "num_devices"), MESHES, ids=str)
def test_copies_stay_the_same_through_training_and_a_flip_stays_found(overrides, num_devices):
    program = tiny.program(overrides, num_devices)
    check, state = make_replica_check(program.mesh, program.abstract_state), program.init()
    step = lambda state, n: program.train_step(state, tiny.on_mesh(program, tiny.packed_batch(n)))[0]
    for n in range(3):
        state = step(state, n)
    assert check(state).same
    before = program.train_step._cache_size()
    state = step(flip_bit(state, 2, bit=20), 3)  # its gradients go to all alike, its own bit stays
    report = check(state)
    assert report.devices == (2,) and any(name.startswith("params/") for name in report.leaves)
    assert program.train_step._cache_size() == before  # a flipped state is placed like any other


@pytest.mark.soak
@pytest.mark.parametrize("rules", ["zero1", "zero2"])
def test_where_each_step_renews_the_copies_a_flip_is_seen_before_it_alone_and_this_is_told(rules):
    program = tiny.program(FEW | {"rules": rules}, 4)
    check, state = make_replica_check(program.mesh, program.abstract_state), program.init()
    flipped = flip_bit(state, 2, bit=20)
    assert check(flipped).devices == (2,)
    assert check(program.train_step(flipped, tiny.on_mesh(program, tiny.packed_batch(0)))[0]).same
    assert "between the last step and the comparison" in str(replica_coverage(program.abstract_state, RULES[rules]))


# What a run does about it.


class Heard:
    """A watch over a state that never leaves the test, and what it reports."""

    def __init__(self, **settings):
        self.events, self.said = [], []
        self.state, check = made(DATA)[1:]
        cfg = ReplicaConfig(**{"every_steps": 5} | settings)
        note = lambda kind, step=None, **facts: self.events.append((kind, step, facts["verdict"], facts.get("devices")))
        self.watch = ReplicaMonitor(cfg, check, note=note, say=self.said.append)

    def check_agreement(self, step, wrong=None):
        return self.watch.check_agreement(step, self.state if wrong is None else flip_bit(self.state, wrong))


def test_copies_are_compared_every_so_many_steps_and_before_each_save():
    watch = Heard().watch
    assert [step for step in range(1, 12) if watch.due(step, saving=step == 7)] == [5, 7, 10]
    assert not Heard(every_steps=0).watch.due(5, saving=True)


def test_a_fault_that_is_gone_when_the_steps_are_run_again_is_reported_and_the_run_goes_on():
    heard = Heard()
    assert heard.check_agreement(5) and heard.events == []
    assert not heard.check_agreement(13, wrong=2)
    assert heard.watch.due(13, saving=False)  # the same step again, though it was a save that showed it
    assert heard.check_agreement(10) and heard.watch.suspected == 13  # not yet there again
    assert heard.check_agreement(13)
    assert heard.events == [("replicas_differ", 13, "unknown", [2]), ("replicas_differ", 13, "passing", None)]
    assert heard.check_agreement(15) and len(heard.events) == 2
    assert "running the same steps again from the last checkpoint" in heard.said[0] and "was transient" in heard.said[1]


def test_a_fault_that_comes_again_ends_the_run_with_the_name_of_the_device():
    heard = Heard()
    assert not heard.check_agreement(10, wrong=6)
    with pytest.raises(
        Stop, match=r"after step 10, device 6 \(cpu, process 0\) has different bits .*again also gives"
    ) as stop:
        heard.check_agreement(10, wrong=6)
    assert stop.value.code is Exit.SILENT_CORRUPTION == 16
    assert heard.events[-1] == ("replicas_differ", 10, "lasting", [6])


@pytest.mark.parametrize("passing, told", [(2, "has had 3 such faults"), (0, "has had 1 such fault")])
def test_a_device_with_one_passing_fault_too_many_ends_the_run(passing, told):
    heard = Heard(max_passing=passing)
    for step in (5, 15)[:passing]:
        assert not heard.check_agreement(step, wrong=3) and heard.check_agreement(step)
    assert not passing or not heard.check_agreement(20, wrong=4) and heard.check_agreement(20)
    with pytest.raises(Stop, match=rf", and device 3 {told} \(train.replicas.max_passing={passing}\); run the same"):
        heard.check_agreement(25, wrong=3)


@pytest.mark.parametrize(("text", "flips"), [("7:3", [3, None, None]), ("7:3:2", [3, 3, None]), ("", [None] * 3)])
def test_the_bit_is_flipped_at_the_step_and_device_and_as_often_as_a_test_asks(text, flips, monkeypatch):
    monkeypatch.setenv("JAXSCALE_FLIP_BIT", text)
    faults.passed.clear()
    _, state, check = made(DATA)
    begin = lambda step: flip_bits(lambda state, batch: (state, {}), step)(state, None)[0]
    assert begin(6) is state
    found = [check(begin(7)).devices for _ in range(3)]
    assert found == [() if device is None else (device,) for device in flips]


class TestRun:
    """A run of 8 steps that saves every 4 and compares every 2, on 4 devices."""

    steps = 8

    @pytest.fixture(autouse=True)
    def no_fault_has_passed(self):
        faults.passed.clear()

    def shared(self):
        return tiny.program(RUN, 4)

    def train(self, folder, flip=None, monkeypatch=None):
        """(the last state, what was said)."""
        if flip:
            monkeypatch.setenv("JAXSCALE_FLIP_BIT", flip)
        quiet = {"monitor.progress": "off", "monitor.tensorboard": False, "eval.num_rows": 0}
        often = {"train_tokens": f"{self.steps} steps", "checkpoint.save_every_steps": 4}
        cfg, said = tiny.config(RUN | quiet | often | {"train.replicas.every_steps": 2}), []
        train_to_completion(open_run(cfg, str(folder), said.append, make_program=tiny.reuse(self.shared())))
        checkpoints = Checkpoints(folder / "checkpoints", cfg.checkpoint)
        assert checkpoints.all_steps() == [4, 8]
        return tiny.host(checkpoints.restore(8, self.shared().abstract_state)), said

    @pytest.mark.soak
    def test_a_passing_fault_costs_the_steps_since_the_last_checkpoint_and_not_a_bit(self, tmp_path, monkeypatch):
        straight, said = self.train(tmp_path / "straight")
        assert [line.partition(" of ")[0] for line in said if line.startswith("replicas")] == ["replicas: 33.1 KiB"]
        state, said = self.train(tmp_path / "run", "5:3", monkeypatch)
        tiny.assert_same_bits(state, straight)
        told = [line.partition(":")[0] for line in said if line.startswith("replicas, ")]
        assert told == ["replicas, step 6"] * 2 and "resuming from step 4" in said
        assert next(line for line in said if "step 6: device 3 (cpu, process 0) has different bits in params/" in line)

    @pytest.mark.slow
    def test_a_lasting_fault_ends_the_run_and_names_the_device_and_the_checkpoints_are_good(
        self, tmp_path, monkeypatch
    ):
        with pytest.raises(Stop, match=r"after step 6, device 3 \(cpu, process 0\) has different bits in") as stop:
            self.train(tmp_path / "run", "5:3:99", monkeypatch)
        assert stop.value.code is Exit.SILENT_CORRUPTION
        assert Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig()).all_steps() == [4]

    def test_told_to_leave_it_leaves_without_saving_what_differs(self):
        watch = types.SimpleNamespace(due=lambda step, saving: saving, check_agreement=lambda step, state: False)
        pilot = Autopilot(AutopilotSpec(recovery=RecoveryConfig(), guard=GuardConfig(), replicas=watch), None)
        with pytest.raises(Stop, match="SIGTERM: step 5 was not saved, because the devices' copies") as stop:
            pilot.check_replicas(5, None, True, "SIGTERM")
        assert stop.value.code is Exit.PREEMPTED
