"""A run whose batches grow: which rows each step reads, its programs, its end, and what it says of itself."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import tiny

from jaxscale import schema
from jaxscale.api.tracing import trace
from jaxscale.build import make_program
from jaxscale.config import RunConfig
from jaxscale.program.budget import batch_sizes, resolve_budget
from jaxscale.runtime.data.order import Batches, RowOrder, batch_index, rows_trained
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.rows import SyntheticRows
from jaxscale.runtime.data.stacking import tokens_hash
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.run.options import RunOptions
from jaxscale.runtime.training import loop
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.units import BatchSizes

pytestmark = pytest.mark.slow

ROW = tiny.SEQ_LEN
QUIET = {"monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0}
# 3 batches of 8 rows, 2 of 16, then 32: 40 rows in the warmup and 13 steps in all.
RAMP = QUIET | {
    "batch_tokens": 32 * ROW,
    "batch_ramp": (("8 rows", 24 * ROW), ("16 rows", "17%")),
    "train_tokens": 312 * ROW,
    "optim.warmup_tokens": 40 * ROW,
    "train.num_microbatches": 4,
    "optim.name": "sgd",
}
ROWS = [8] * 3 + [16] * 2 + [32] * 8
SHARDED = RAMP | {"mesh.data": 2, "mesh.fsdp": 1}


@pytest.fixture(scope="module")
def programs():
    """make_program, each config on its devices compiled once for all tests."""
    made = {}

    def make(cfg, budget, devices=None):
        name = (tuple(cfg.mesh.__dict__.items()), budget.total_steps)
        made.setdefault(name, make_program(cfg, budget, devices))
        return dataclasses.replace(made[name], cfg=cfg)

    return make


def open_ramp(folder, make, overrides=None, number=2, replay=None):
    cfg = tiny.config(SHARDED | (overrides or {}))
    make_program = lambda cfg, budget: make(cfg, budget, jax.devices()[:number])
    options = RunOptions(replay=replay)
    return open_run(cfg, str(folder), log=lambda text: None, options=options, make_program=make_program)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_budget_of_a_ramp_is_that_of_its_batches():
    budget = resolve_budget(tiny.config(RAMP), None)
    stages = [tiny.config(RAMP).with_batch(rows * ROW) for rows in (8, 16, 32)]
    assert batch_sizes(stages) == (
        "3 programs, each compiled when the run reaches it: 8 sequences of 16 tokens in 1 microbatch, "
        "16 sequences of 16 tokens in 2 microbatches, 32 sequences of 16 tokens in 4 microbatches"
    )
    assert batch_sizes(stages[:1]) == ""
    assert budget.ramp == ((0, 8 * ROW), (3, 16 * ROW), (5, 32 * ROW))
    assert (budget.total_steps, budget.warmup_steps) == (len(ROWS), 4)
    assert resolve_budget(tiny.config(RAMP | {"optim.warmup_tokens": "6 steps"}), None).warmup_steps == 6
    assert budget.tokens_of(13) == sum(ROWS) * ROW == 312 * ROW
    assert "128 tokens from batch 0, 256 tokens from batch 3, 512 tokens from batch 5, 4.99K tokens in total" in str(
        budget
    )


def test_the_rows_of_each_batch_follow_those_of_the_one_before_it():
    order = RowOrder(SyntheticRows(seq_len=ROW, vocab_size=64, seed=1), 3)
    grown = Batches(order, BatchSizes.growing([(8, 24), (16, 54)], 32))
    stream = order.row_numbers(np.arange(sum(ROWS)))
    tokens_NT = order.rows.read(order.rows.locate(stream), range(len(stream))).tokens
    for n in (*range(13), 4, 0):  # also back again: nothing is remembered
        begin = sum(ROWS[:n])
        assert grown.row_numbers(n).tolist() == stream[begin : begin + ROWS[n]].tolist()
        whole = grown.batch(n).tokens
        np.testing.assert_array_equal(whole, tokens_NT[begin : begin + ROWS[n]])
        assert (grown.rows(n, [3]).tokens[0] == whole[3]).all()
    with pytest.raises(BadInput, match="rows .8. are out of range: there are 8 rows in batch 2"):
        grown.rows(2, [8])


def test_tokens_seen_are_those_of_the_batches_that_were_trained_on():
    sizes, skipped = BatchSizes.growing([(8, 24), (16, 54)], 32), ((1, 2), (4, 7))
    for step in range(12):
        assert rows_trained(step, sizes, skipped) == sum(sizes.size(batch_index(s, skipped)) for s in range(step))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            {"batch_ramp": (("64 rows", "10%"),)},
            "followed by batch_tokens=512; each must be larger than the previous one",
        ),
        ({"batch_ramp": (("16 rows", "10%"), ("8 rows", "20%"))}, "each must be larger than the previous one"),
        ({"batch_ramp": ((8 * ROW + 1, "10%"),)}, "129 tokens must be a multiple of seq_len=16, such as 144"),
        (
            {"batch_ramp": (("8 rows", "3 steps"),)},
            "batch_ramp='3 steps' is in steps, but steps differ in size",
        ),
        (
            {"train_tokens": "30 steps"},
            "train_tokens='30 steps' is in steps, but steps differ in size with batch_ramp",
        ),
        ({"data.mixture": {"0": {"a": 1.0}, "4 steps": {"b": 1.0}}}, "data.mixture's start='4 steps' is in steps, but"),
    ],
)
def test_a_ramp_that_cannot_be_is_refused_in_one_line(overrides, line):
    with pytest.raises(BadInput, match=line) as error:
        tiny.config(RAMP | overrides)
    assert "\n" not in str(error.value)


def test_a_size_that_no_batch_would_have_is_refused():
    cfg = tiny.config(RAMP | {"batch_ramp": (("8 rows", 24 * ROW), ("16 rows", 20 * ROW))})
    with pytest.raises(BadInput, match="batch_ramp.* in tokens.*: no batch has size 256, because earlier"):
        resolve_budget(cfg, None)


def test_microbatches_stay_as_large_and_smaller_batches_have_fewer():
    cfg = tiny.config(RAMP | {"batch_ramp": (("4 rows", "5%"), ("8 rows", "10%"), ("16 rows", "17%"))})
    smaller = [cfg.with_batch(tokens) for tokens in cfg.ramp_tokens]
    assert [(c.rows_per_step, c.train.num_microbatches) for c in smaller] == [(4, 1), (8, 1), (16, 2)]
    assert cfg.with_batch(12 * ROW).train.num_microbatches == 2  # of 6 rows: no microbatch has more than 8
    assert cfg.with_batch(12 * ROW, batch_shards=4).train.num_microbatches == 3  # of 4 rows, which 4 devices share
    assert cfg.with_batch(11 * ROW, batch_shards=8).train.num_microbatches == 11  # of 1 row: 8 devices do not fit
    assert schema.from_dict(RunConfig, json.loads(json.dumps(schema.to_dict(cfg)))) == cfg


def test_a_size_that_the_devices_do_not_divide_is_named():
    cfg = tiny.config(RAMP | {"mesh.data": 4, "mesh.fsdp": 2, "batch_ramp": (("4 rows", "17%"),)})
    with pytest.raises(
        BadInput, match="^batch_ramp needs batches of 4 rows: train.num_microbatches=1 leaves 4 sequences for 8"
    ):
        make_program(cfg, resolve_budget(cfg, None))


@pytest.fixture(scope="module")
def straight(tmp_path_factory, programs):
    """(folder, state) of the run from its first step to its last."""
    folder = tmp_path_factory.mktemp("ramp") / "run"
    return folder, tiny.host(loop.train(open_ramp(folder, programs)).params)


def test_each_step_trains_on_its_batch_and_tells_so(straight):
    found = records(straight[0])
    assert [record["tokens_seen"] for record in found] == [sum(ROWS[: n + 1]) * ROW for n in range(13)]
    assert [record["batch_index"] for record in found] == list(range(13))
    rows = open_data(tiny.config().data, seq_len=16, vocab_size=tiny.VOCAB, seed=1, say=lambda text: None)
    batches = rows.batches(BatchSizes.growing([(8, 24), (16, 54)], 32))
    assert [record["tokens_hash"] for record in found] == [tokens_hash(batches.batch(n)) for n in range(13)]
    speeds = [record["tokens_per_second"] is None for record in found]
    assert [n for n, left_out in enumerate(speeds) if left_out] == [0, 3, 5]  # what was compiled is no speed


@pytest.mark.soak
def test_the_losses_are_those_of_one_device(straight, tmp_path, programs):
    loop.train(open_ramp(tmp_path / "one", programs, {"mesh.data": 1, "mesh.fsdp": 1}, number=1))
    for one, many in zip(records(tmp_path / "one"), records(straight[0]), strict=True):
        assert one["loss"] == pytest.approx(many["loss"], rel=1e-5)
        assert one["tokens_hash"] == many["tokens_hash"]


# Within a size (2, 4), where the second size begins (3) and where the last begins (5).
@pytest.mark.parametrize("stops", [(4,), pytest.param((2, 3, 5), marks=pytest.mark.soak)], ids=str)
def test_a_run_that_goes_on_in_its_ramp_ends_bit_for_bit_as_if_it_never_stopped(straight, tmp_path, programs, stops):
    for stop in (*stops, None):
        run = open_ramp(tmp_path / "run", programs)
        state = loop.train(dataclasses.replace(run, stop_after=stop))
    tiny.assert_same_bits(tiny.host(state.params), straight[1])
    same = ("loss", "tokens_seen", "tokens_hash", "grad_norm", "learning_rate")
    wanted = [[record[name] for name in same] for record in records(straight[0])]
    assert [[record[name] for name in same] for record in records(tmp_path / "run")] == wanted


@pytest.mark.soak
def test_a_replay_leaves_out_the_batches_that_its_ramp_left_out(tmp_path, programs):
    """One of 8 rows and one of 16: the batches behind them are as large as without, and so are all steps."""
    loop.train(open_ramp(tmp_path / "run", programs, {"data.skip_batches": ((1, 2), (4, 5))}))
    loop.train(open_ramp(tmp_path / "again", programs, replay=str(tmp_path / "run")))
    first, again = records(tmp_path / "run"), records(tmp_path / "again")
    for name in ("loss", "tokens_seen", "tokens_hash", "batch_index"):
        assert [record[name] for record in again] == [record[name] for record in first]
    assert [record["batch_index"] for record in first][:4] == [0, 2, 3, 5]


@pytest.mark.soak
def test_another_ramp_is_refused_like_another_batch(tmp_path, programs):
    loop.train(dataclasses.replace(open_ramp(tmp_path / "run", programs), stop_after=5))
    with pytest.raises(Stop, match="settings differ from the run in .*: batch_ramp: .*restore them$") as stop:
        open_ramp(tmp_path / "run", programs, {"batch_ramp": (("8 rows", 24 * ROW), ("16 rows", "30%"))})
    assert stop.value.code is Exit.CONFIG_MISMATCH
    with pytest.raises(Stop, match=r"completed batches up to 4: .* were \[\(0, 8\), \(3, 16\)\] and would be") as stop:
        open_ramp(tmp_path / "run", programs, {"train_tokens": 170 * ROW})  # of which '17%' were reached at batch 4
    assert stop.value.code is Exit.DATA_MISMATCH
    longer = open_ramp(tmp_path / "run", programs, {"train_tokens": 400 * ROW})  # '17%' is later, and still ahead
    assert longer.total_steps == resolve_budget(tiny.config(RAMP | {"train_tokens": 400 * ROW}), None).total_steps


@pytest.mark.soak
def test_a_document_of_a_mixture_is_traced_to_the_steps_whose_rows_have_it(tmp_path):
    for name in "ab":
        text = "".join(f"{name} line {n} of some words here\n" * 3 for n in range(150))
        (tmp_path / f"{name}.txt").write_text(text)
    files = {name: str(tmp_path / f"{name}.txt") for name in "ab"}
    data = {"data.name": "files", "data.files": files, "data.cache_dir": str(tmp_path / "cache")}
    data |= {"data.mixture": {"0": {"a": 0.7, "b": 0.3}, "60%": {"b": 1.0}}, "data.skip_batches": ((1, 3),)}
    own = {"model.vocab_size": 264, "data.val_fraction": 0.0, "batch_ramp": RAMP["batch_ramp"][:1]}
    cfg = tiny.config(RAMP | data | own | {"train_tokens": 200 * ROW})
    make = functools.partial(make_program, devices=jax.devices()[:1])
    run = open_run(cfg, str(tmp_path / "run"), log=lambda text: None, make_program=make)
    loop.train(dataclasses.replace(run, stop_after=5))
    found = [piece for step in range(5) for piece in trace(str(tmp_path / "run"), step=step, characters=0).pieces]
    rows = {step: 1 + max(piece.entry.row for piece in found if piece.step == step) for step in range(5)}
    assert rows == {0: 8, 1: 32, 2: 32, 3: 32, 4: 32}
    hashes = [trace(str(tmp_path / "run"), step=step).hash_now for step in range(5)]
    assert not any(hashes)  # what is traced is what the devices had
    for name in {piece.entry.name for piece in found}:
        back = [p for p in trace(str(tmp_path / "run"), document=name).pieces if p.step < 5]
        key = lambda p: (p.step, p.batch, p.entry.row, p.entry.begin, p.entry.tokens)
        assert sorted(map(key, back)) == sorted(key(p) for p in found if p.entry.name == name)
    with pytest.raises(BadInput, match="row=8 does not exist: there are 8 rows in batch 0; use 0 to 7"):
        trace(str(tmp_path / "run"), step=0, row=8)
