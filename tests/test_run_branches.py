"""A branch goes on where another run stood, with all of its state and its data, bit for bit, and decays its rate."""

import functools
import json
import shutil

import numpy as np
import pytest
import tiny

from jaxscale import main
from jaxscale.build import make_program
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.run.branching import branch_settings, check_stable
from jaxscale.runtime.run.opening import open_run, train_to_completion
from jaxscale.runtime.run.options import RunOptions
from jaxscale.system.exits import BadInput, Exit, Stop

pytestmark = pytest.mark.slow

TRUNK = {
    "monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0,
    "train_tokens": "10 steps", "checkpoint.save_every_steps": 2, "checkpoint.keep_last": 9, "seed": 2,
    "optim.decay": "constant", "data.skip_batches": [(1, 2), (5, 6)],
}  # fmt: skip
SEED = {"seed": TRUNK["seed"]}
programs = functools.lru_cache(4)(
    lambda optim, budget: make_program(tiny.config(SEED | {"optim": dict(optim)}), budget)
)


def program_of(cfg, budget):
    """The program of the config, compiled once for each schedule."""
    names = ("peak_lr", "min_lr", "decay", "decay_tokens", "decay_shape")
    return programs(tuple((name, getattr(cfg.optim, name)) for name in names), budget)


def train(folder, overrides, stop_after=None, said=None):
    """Trains in the folder, and returns its newest state."""
    cfg = tiny.config(TRUNK | overrides)
    log = (said if said is not None else []).append
    options = RunOptions(stop_after=stop_after)
    train_to_completion(open_run(cfg, str(folder), log, options=options, make_program=program_of))
    return state_of(folder)


def state_of(folder, step=None):
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    return tiny.host(checkpoints.restore(step or checkpoints.latest_step(), tiny.program().abstract_state))


def records(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in rows if "loss" in row}


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "trunk"
    train(folder, {})
    return folder


LONGER = {"train_tokens": "10 steps"}  # than the 4 steps of a decay, so that the rate is the peak's up to step 7


@pytest.fixture(scope="module")
def branch(trunk, tmp_path_factory):
    """(the folder of a branch that was never stopped, its end, what was said)"""
    folder, said = tmp_path_factory.mktemp("branches") / "branch", []
    told = branch_settings(f"{trunk}/checkpoints/4", "4 steps", {})
    return folder, train(folder, told | LONGER, said=said), said


def test_a_branch_steps_as_its_trunk_does_until_its_decay_and_ends_at_the_smallest_rate(trunk, branch):
    folder, end, said = branch
    assert f"init: a branch of {trunk}/checkpoints/4: continues from step 4, with its state and its data" in said
    tiny.assert_same_bits(state_of(folder, 6), state_of(trunk, 6))
    ours, theirs = records(folder), records(trunk)
    assert sorted(ours) == [5, 6, 7, 8, 9, 10]
    for name in ("batch_index", "tokens_hash", "tokens_seen"):
        assert [row[name] for row in ours.values()] == [theirs[step][name] for step in ours]
    assert [ours[step]["loss"] for step in (5, 6, 7)] == [theirs[step]["loss"] for step in (5, 6, 7)]
    rates = [ours[step]["learning_rate"] for step in (7, 8, 9, 10)]
    np.testing.assert_allclose(rates, np.linspace(1e-2, 1e-3, 4), rtol=1e-6)
    assert rates[-1] == np.float32(1e-3) and end.step == 10
    (ancestor,) = json.loads((folder / "config.json").read_text())["ancestry"]
    assert (ancestor["step"], ancestor["what"], ancestor["path"]) == (4, "run", str(trunk / "checkpoints"))


def test_a_branch_that_is_stopped_goes_on_bit_for_bit_without_its_trunk_and_with_the_same_command(
    trunk, branch, tmp_path
):
    shutil.copytree(trunk, tmp_path / "trunk")
    command = functools.partial(branch_settings, str(tmp_path / "trunk"), "4 steps")
    told = command({})
    assert told["init.from_path"] == f"{tmp_path}/trunk/checkpoints/10" and told["optim.warmup_tokens"] == "2 steps"
    for step in (6, 8, 10):
        shutil.rmtree(tmp_path / "trunk" / "checkpoints" / str(step))
    told = command({})
    train(tmp_path / "branch", told | LONGER, stop_after=9)
    assert sorted(records(tmp_path / "branch")) == [5, 6, 7, 8, 9]
    shutil.copytree(trunk / "checkpoints" / "10", tmp_path / "trunk" / "checkpoints" / "10")  # the trunk has gone on
    begun = json.loads((tmp_path / "branch" / "config.json").read_text())["config"]
    assert command(begun) == told
    shutil.rmtree(tmp_path / "trunk")
    tiny.assert_same_bits(train(tmp_path / "branch", told | LONGER), branch[1])
    assert records(tmp_path / "branch")[10]["learning_rate"] == np.float32(1e-3)
    written = json.loads((tmp_path / "branch" / "config.json").read_text())
    assert [one["step"] for one in written["ancestry"]] == [4], "the descent is told after a restart too"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"seed": 3}, r"which depend on seed, .*: seed: 2 in the source, 3 in this run; use the same values"),
        ({"train_tokens": "4 steps"}, "train_tokens=4 steps gives 4 steps, but the branch starts after step 4 of"),
        ({"init.skip": ("head",)}, "what='run' restores arrays unchanged and does not support skip"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_a_branch_is_refused_and_nothing_is_written(trunk, tmp_path, overrides, message):
    path = {"init.from_path": f"{trunk}/checkpoints/4", "init.what": "run"}
    with pytest.raises(BadInput, match=message):
        train(tmp_path / "branch", path | overrides)
    assert not (tmp_path / "branch" / "config.json").exists()


def test_other_data_are_refused(trunk, tmp_path):
    path = {"init.from_path": f"{trunk}/checkpoints/4", "init.what": "run"}
    with pytest.raises(Stop, match="the data have changed") as stop:
        train(tmp_path / "branch", path | {"data.name": "stdlib", "model.vocab_size": 300})
    assert stop.value.code is Exit.DATA_MISMATCH


@pytest.mark.soak
def test_a_branch_that_decays_begins_where_the_rate_is_at_its_peak(tmp_path):
    train(tmp_path / "cosine", {"optim.decay": "cosine"}, stop_after=4)
    with pytest.raises(BadInput, match="follows decay=cosine; branch from a run with optim.decay=wsd or constant"):
        branch_settings(f"{tmp_path}/cosine", "4 steps", {})
    assert branch_settings(f"{tmp_path}/cosine", None, {}) == {
        "init.from_path": f"{tmp_path}/cosine/checkpoints/4", "init.what": "run",
    }  # fmt: skip
    with pytest.raises(BadInput, match="--branch_from=.*: .* has no checkpoint of step 3"):
        branch_settings(f"{tmp_path}/cosine/checkpoints/3", "4 steps", {})


def test_a_decay_begins_neither_in_the_warmup_nor_in_another_decay():
    optim = dict(decay="wsd", decay_fraction=0.2)
    run = {"config": {"optim": optim}, "budget": dict(total_steps=100, warmup_steps=10)}
    assert [check_stable("run", step, run) for step in (10, 50, 80)] == [None] * 3
    for step, message in (
        (9, "is in its warmup of 10 steps.* a later step"),
        (81, "decays from step 80 on.*step 80 or"),
    ):
        with pytest.raises(BadInput, match=message):
            check_stable("run", step, run)
    early = {**run, "budget": run["budget"] | dict(decay_start=40)}
    with pytest.raises(BadInput, match="decays from step 40 on"):
        check_stable("run", 50, early)


def test_a_decay_without_a_branch_is_refused():
    with pytest.raises(BadInput, match="--decay_tokens=5 requires --branch_from; add --branch_from=RUN"):
        main.main(["--config=configs/quickstart.py", "--decay_tokens=5"])
