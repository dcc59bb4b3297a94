"""A run past its ramps resumes on devices that its first batches would not fit; going back to them is refused."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
import tiny

from jaxscale.api import planning
from jaxscale.api.tracing import trace
from jaxscale.build import make_program
from jaxscale.program.budget import Budget, Position, remaining_stages, resolve_budget
from jaxscale.program.fitting_mesh import fitting_program
from jaxscale.program.machine_check import check_machine
from jaxscale.runtime.run.branching import branch_settings
from jaxscale.runtime.run.opening import open_run, train_to_completion
from jaxscale.runtime.run.options import RunOptions
from jaxscale.runtime.run.resume_checks import recorded_position
from jaxscale.runtime.training import loop
from jaxscale.system.exits import BadInput, Exit, Stop

pytestmark = pytest.mark.slow

ROW = tiny.SEQ_LEN
QUIET = {"monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0}
# Batches 0 to 4 of 4 rows, then 9 of 16 rows.
RAMP = QUIET | {
    "batch_tokens": 16 * ROW, "batch_ramp": (("4 rows", 20 * ROW),), "train_tokens": 164 * ROW,
    "optim.name": "sgd", "optim.decay": "constant", "optim.warmup_tokens": 0, "mesh.data": 4, "mesh.fsdp": 1,
    "checkpoint.save_every_steps": 3, "checkpoint.keep_last": 9,
    "train.guard.window_steps": 10, "train.guard.max_skipped_in_row": 2, "train.recovery.rewind_margin_steps": 2,
}  # fmt: skip
LARGER = {"mesh.data": 4, "mesh.fsdp": 2}
NUM_SMALL, NUM_STEPS = 5, 14
SMALL_FIRST = ((0, 4 * ROW), (NUM_SMALL, 16 * ROW))
REFUSED = r"batch_ramp needs batches of 4 rows: .* leaves 4 sequences for 8 batch shards .* resumes at batch 5 or later"
GOING_BACK = f"^batch 3, after step 3: {REFUSED}"


@functools.cache
def program_on(number, ramp):
    """The rate is constant, so that one program serves every horizon."""
    cfg = tiny.config(RAMP | (LARGER if number == 8 else {}))
    budget = dataclasses.replace(resolve_budget(cfg, None), ramp=ramp)
    return make_program(cfg, budget, jax.devices()[:number])


def opened(folder, overrides=None, *, number=4, large_only=False, **options):
    """The opened run. large_only: otherwise the program for the small batches is there already on 4 devices."""
    cfg = tiny.config(RAMP | (LARGER if number == 8 else {}) | (overrides or {}))

    def make(cfg, budget):
        there = number == 4 and not large_only
        return dataclasses.replace(program_on(number, SMALL_FIRST if there else budget.ramp), cfg=cfg)

    return open_run(cfg, str(folder), lambda line: None, options=RunOptions(**options), make_program=make)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run on 4 devices from its first step to its last."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    loop.train(opened(folder))
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """(folder of the same run after step 6, its state)."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    return folder, tiny.host(loop.train(opened(folder, stop_after=6)))


@pytest.fixture
def resumed(stopped, tmp_path):
    """A copy of that folder."""
    shutil.copytree(stopped[0], tmp_path / "run")
    return tmp_path / "run"


def test_devices_are_added_once_the_ramp_is_over(stopped, straight, resumed):
    run = opened(resumed, number=8)
    assert run.start_step == 6 and not run.parts.program.smaller
    assert len(jax.tree.leaves(run.state.params)[0].sharding.device_set) == 8
    tiny.assert_same_bits(tiny.host(run.state), stopped[1])
    loop.train(run)
    found, expected = records(resumed), records(straight)
    assert len(found) == NUM_STEPS
    for name in ("tokens_seen", "tokens_hash", "batch_index", "learning_rate"):
        assert [record[name] for record in found] == [record[name] for record in expected]
    losses = np.array([[record["loss"] for record in lines] for lines in (found, expected)])
    assert np.abs(losses[0] - losses[1]).max() < 1e-4  # float32 sums taken in another order


def test_a_first_batch_that_does_not_fit_is_refused_from_the_beginning_and_within_the_ramp(tmp_path):
    with pytest.raises(BadInput, match=f"^{REFUSED}"):
        opened(tmp_path / "new", number=8)
    loop.train(opened(tmp_path / "run", stop_after=4))
    with pytest.raises(BadInput, match=f"^batch 4, after step 4: {REFUSED}"):
        opened(tmp_path / "run", number=8)


def test_a_stage_whose_batches_are_all_skipped_is_not_needed(tmp_path):
    run = opened(tmp_path / "run", {"data.skip_batches": ((0, NUM_SMALL),)}, number=8, stop_after=1)
    loop.train(run)
    assert records(tmp_path / "run")[0]["batch_index"] == NUM_SMALL


def test_stages_are_needed_from_the_next_batch_on_except_for_skipped_ones():
    budget = Budget(8, 10**6, 10**6, 0, ramp=((0, 2), (10, 4), (20, 8)), seq_len_ramp=((0, 1), (15, 2)))
    firsts = lambda *where: [stage.first for stage in remaining_stages(budget, 2, *where)]
    assert firsts() == firsts(9) == [0, 10, 15, 20]
    assert firsts(10) == [10, 15, 20] and firsts(15) == [15, 20] and firsts(20) == firsts(10**9) == [20]
    assert firsts(0, [(0, 10)]) == [10, 15, 20] and firsts(3, [(12, 17), (3, 12)]) == [15, 20]
    assert firsts(3, [(3, 9)]) == [0, 10, 15, 20] and firsts(3, [(15, 20)]) == [0, 10, 20]


def test_a_rewind_into_a_stage_that_does_not_fit_is_refused_by_name(resumed, monkeypatch):
    monkeypatch.setenv("JAXSCALE_SPOIL_BATCHES", "6:9:nan")  # steps 7 to 9: back to step 3, and batch 3 comes next
    with pytest.raises(BadInput, match=GOING_BACK):
        train_to_completion(opened(resumed, number=8))
    monkeypatch.delenv("JAXSCALE_SPOIL_BATCHES")
    with pytest.raises(BadInput, match=GOING_BACK):  # the rewind binds
        opened(resumed, number=8)
    loop.train(opened(resumed, stop_after=5))  # on the devices of before it runs through that stage
    loop.train(opened(resumed, number=8))
    assert [record["batch_index"] for record in records(resumed)] == [*range(4), *range(9, 19)]


def test_a_rewind_that_skips_the_rest_of_a_stage_needs_no_program_of_it(tmp_path, monkeypatch):
    loop.train(opened(tmp_path / "run", {"checkpoint.save_every_steps": 4}, stop_after=6))
    monkeypatch.setenv("JAXSCALE_SPOIL_BATCHES", "6:9:nan")  # back to step 4, and batches 4 to 8 are skipped
    train_to_completion(opened(tmp_path / "run", {"checkpoint.save_every_steps": 4}, number=8))
    assert [record["batch_index"] for record in records(tmp_path / "run")] == [*range(4), *range(9, 19)]


def test_a_rewind_into_a_stage_that_fits_makes_its_program(resumed, straight, monkeypatch):
    run = opened(resumed, large_only=True)
    assert not run.parts.program.smaller
    monkeypatch.setenv("JAXSCALE_SPOIL_BATCHES", "6:9:nan")
    train_to_completion(run)
    found = records(resumed)
    assert [record["batch_index"] for record in found][:5] == [0, 1, 2, 3, 9]
    same = ("loss", "tokens_hash")
    assert [[record[name] for name in same] for record in found[:4]] == [
        [record[name] for name in same] for record in records(straight)[:4]
    ]


def test_a_damaged_checkpoint_falls_back_to_a_stage_that_fits_and_is_refused_where_it_does_not(resumed):
    file = max((resumed / "checkpoints" / "6" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    file.write_bytes(bytes(byte ^ 255 for byte in file.read_bytes()))
    shutil.copytree(resumed, copy := resumed.with_name("copy"))
    with pytest.raises(BadInput, match=GOING_BACK):
        opened(copy, number=8)
    run = opened(resumed, large_only=True)
    assert run.start_step == 3 and [one.cfg.rows_per_step for one in run.parts.program.smaller] == [4]


def test_the_machine_is_checked_for_the_largest_batch_of_a_run_that_has_begun_or_branches():
    small_first = {"mesh.fsdp": 8, "mesh.data": 1}
    with pytest.raises(Stop, match="batch_ramp needs batches of 4 rows"):
        check_machine(tiny.config(RAMP | small_first))
    check_machine(tiny.config(RAMP | small_first), begun=True)
    check_machine(tiny.config(RAMP | small_first | {"init.from_path": "other", "init.what": "run"}))
    with pytest.raises(Stop, match="needs a multiple of 3 devices"):
        check_machine(tiny.config(RAMP | {"mesh.tensor": 3, "mesh.data": 1, "mesh.fsdp": -1}), begun=True)


PERCENT = {"batch_ramp": (("4 rows", "12%"),)}  # of 164 rows: 20


def test_a_ramp_that_is_over_stays_where_its_end_in_percent_would_move(tmp_path):
    loop.train(opened(tmp_path / "run", PERCENT, stop_after=5))
    longer = PERCENT | {"train_tokens": 328 * ROW}
    assert opened(tmp_path / "run", longer).parts.budget.ramp[1][0] == 10  # of the next batch: it moves
    shorter = PERCENT | {"train_tokens": 100 * ROW}
    with pytest.raises(Stop, match="batch_ramp would change the sizes of the completed batches up to 4"):
        opened(tmp_path / "run", shorter)
    loop.train(opened(tmp_path / "run", PERCENT, stop_after=6))
    run = opened(tmp_path / "run", longer)
    assert run.parts.budget.ramp == SMALL_FIRST
    assert run.total_steps == 5 + -(-(328 - 20) // 16)
    loop.train(dataclasses.replace(run, stop_after=7))
    same_length = PERCENT | {"train_tokens": 280 * ROW}  # 25 steps too, but 9 of 4 rows
    with pytest.raises(Stop, match=r"stages of batch_ramp, .* are \[\[0, 64\], \[5, 256\]\] in that run and") as stop:
        opened(tmp_path / "again", same_length, replay=str(tmp_path / "run"))
    assert stop.value.code is Exit.CONFIG_MISMATCH


def test_the_end_of_a_ramp_counts_as_over_with_the_first_batch_behind_it():
    record = {"budget": {"ramp": [[0, 4], [5, 16]], "seq_len_ramp": [[0, 2], [7, 4]]}, "data": {"skipped": []}}
    ramp, rows = ((0, 4), (5, 16)), ((0, 2), (7, 4))
    assert recorded_position(None, 9) == recorded_position(record, 0) == Position(0, 0, {})
    assert recorded_position(record, 5) == Position(5, 5, {})
    assert recorded_position(record, 6) == Position(6, 6, {"ramp": ramp})
    skipping = record | {"data": {"skipped": [[0, 3]]}}
    assert recorded_position(skipping, 5) == Position(5, 8, {"ramp": ramp, "seq_len_ramp": rows})


def test_a_warmup_that_is_done_refuses_nothing():
    cfg = tiny.config({"train_tokens": "10 steps", "optim.warmup_tokens": "20 steps"})
    with pytest.raises(BadInput, match="optim.warmup_tokens=20 steps must be at most train_tokens=10 steps"):
        resolve_budget(cfg, None, Position(steps_done=19))
    assert resolve_budget(cfg, None, Position(steps_done=20)).total_steps == 10  # the run is complete, and says so


DECAYING = {"optim.decay": "wsd", "optim.min_lr": 0.0}


def test_a_decay_may_begin_early_once_batches_have_stopped_growing(tmp_path):
    limited = DECAYING | {"limit.deadline": "365d", "limit.on_overrun": "decay"}
    with pytest.raises(BadInput, match="batches grow .batch_ramp. until batch 5; use limit.on_overrun='tell'"):
        opened(tmp_path / "run", limited)
    loop.train(opened(tmp_path / "run", DECAYING, stop_after=5))
    assert opened(tmp_path / "run", limited).limits is not None


def test_a_branch_decays_once_batches_have_stopped_growing(tmp_path):
    over = DECAYING | PERCENT
    loop.train(opened(tmp_path / "run", over, stop_after=6))
    steps = lambda step: branch_settings(str(tmp_path / "run" / "checkpoints" / str(step)), "4 steps", {})
    with pytest.raises(
        BadInput, match="at step 3 the batch size still grows .* branch from a step after batch 5, the first"
    ):
        steps(3)
    settings = steps(6)
    assert settings["train_tokens"] == (20 + 16 * 5) * ROW and settings["optim.decay_tokens"] == 4 * 16 * ROW
    run = opened(tmp_path / "branch", over | settings, number=8)
    assert (run.start_step, run.total_steps, run.parts.budget.decay_start) == (6, 10, 6)
    train_to_completion(run)
    assert [record["step"] for record in records(tmp_path / "branch")] == [7, 8, 9, 10]


LONGER_ROWS = QUIET | {
    "seq_len_ramp": ((4, 64 * ROW),), "train_tokens": 160 * ROW, "optim.name": "sgd", "optim.warmup_tokens": 0,
    "mesh.fsdp": 1,
}  # fmt: skip


@pytest.mark.soak
def test_rows_are_shared_by_more_devices_once_short_ones_are_over(tmp_path):
    def run_on(number, overrides, **options):
        cfg = tiny.config(LONGER_ROWS | overrides)
        make = functools.partial(make_program, devices=jax.devices()[:number])
        return open_run(cfg, str(tmp_path / "run"), lambda line: None, options=RunOptions(**options), make_program=make)

    loop.train(run_on(1, {}, stop_after=4))
    run = run_on(8, {"mesh.context": 4, "mesh.data": 2})
    assert run.start_step == 4 and not run.parts.program.smaller
    loop.train(dataclasses.replace(run, stop_after=5))
    shutil.rmtree(tmp_path / "run")
    loop.train(run_on(1, {}, stop_after=3))
    with pytest.raises(
        BadInput,
        match="^batch 3, after step 3: seq_len_ramp with rows of 4 tokens needs batches of 64 rows: seq_len=4 is not",
    ):
        run_on(8, {"mesh.context": 4, "mesh.data": 2})


def test_plan_checks_the_stages_ahead_of_the_newest_checkpoint(stopped):
    cfg = tiny.config(RAMP | LARGER)
    with pytest.raises(BadInput, match="batch_ramp needs batches of 4 rows"):
        planning.plan(cfg, "v5e:2x4")
    work = planning.plan(cfg, "v5e:2x4", workdir=str(stopped[0])).work
    assert (work.total_steps, work.ramp) == (NUM_STEPS, SMALL_FIRST)
    position = Position(6, 6, {"ramp": SMALL_FIRST})  # as preflight takes it too
    assert not fitting_program(cfg, jax.devices(), position=position).smaller


def test_stages_of_a_mixture_that_have_begun_stay_and_later_ones_move(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} line {n} of some words here\n" for n in range(300)))
    text = {
        "data.name": "files", "data.files": {name: str(tmp_path / f"{name}.txt") for name in "ab"},
        "data.cache_dir": str(tmp_path / "cache"), "model.vocab_size": 264, "data.val_fraction": 0.0,
        "data.mixture": {"0": {"a": 1.0}, "30%": {"b": 1.0}, "80%": {"a": 1.0}},
        "optim.name": "sgd", "optim.decay": "constant", "train_tokens": "10 steps", "batch_tokens": 4 * ROW,
    }  # fmt: skip
    cfg = tiny.config(QUIET | text)
    program = make_program(cfg, resolve_budget(cfg, 10**6), jax.devices()[:1])

    def run_to(step, total, folder="run", **options):
        make = lambda cfg, budget: dataclasses.replace(program, cfg=cfg)
        cfg = tiny.config(QUIET | text | {"train_tokens": f"{total} steps"})
        options = RunOptions(stop_after=step, **options)
        run = open_run(cfg, str(tmp_path / folder), lambda line: None, options=options, make_program=make)
        loop.train(run)

    run_to(3, 10)
    with pytest.raises(Stop, match="data.mixture and data.max_epochs would change the rows of the 3 completed steps"):
        run_to(4, 5)  # '30%' would be batch 2
    run_to(4, 10)  # the second stage has begun with batch 3
    run_to(17, 20)
    run_to(20, 20)
    source = {"a": [], "b": []}
    for step in range(20):
        for name in {piece.entry.name for piece in trace(str(tmp_path / "run"), step=step, characters=0).pieces}:
            source[name[0]].append(step)
    assert source == {"a": [0, 1, 2, 16, 17, 18, 19], "b": [*range(3, 16)]}
    with pytest.raises(Stop, match=r"'30%': 3, .* in that run and .*'30%': 6, .*; it cannot be replayed"):
        run_to(20, 20, "again", replay=str(tmp_path / "run"))


def refuse_the_first_batch(batch, n, rows):
    """A transform that cannot do batch 0, which lies behind a run that resumes."""
    if n == 0:
        raise ValueError("batch 0")
    return batch


def test_a_transform_is_tried_on_the_batch_that_comes_next(resumed, tmp_path):
    transform = {"data.transforms": ("test_past_ramps:refuse_the_first_batch",)}
    with pytest.raises(BadInput, match="fails on batch 0: ValueError: batch 0"):
        opened(tmp_path / "new", transform)
    assert opened(resumed, transform, allow_change=("data.transforms",)).start_step == 6


def test_factors_of_the_rate_that_lie_behind_a_run_refuse_nothing():
    factors = ("31%=>0.5", "34%=>0.4", "80%=>0.1")  # of 20 steps: the first two begin with step 7
    cfg = tiny.config({"optim.decay": "piecewise", "optim.factors": factors, "train_tokens": "20 steps"})
    with pytest.raises(BadInput, match="start at steps 7, 7, 16 of this run, which must increase"):
        resolve_budget(cfg, None, Position(steps_done=6))
    assert resolve_budget(cfg, None, Position(steps_done=7)).factors == ((7, 0.5), (7, 0.4), (16, 0.1))
