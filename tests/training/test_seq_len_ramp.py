"""A run whose rows grow: what is cut where, its programs, its end, and what it says of itself."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import tiny

from jaxscale.api.tracing import trace
from jaxscale.build import make_program
from jaxscale.cli.trace import piece_line
from jaxscale.program.budget import resolve_budget, train_flops
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.stacking import tokens_hash
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.training import loop
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.units import BatchSizes

ROW = tiny.SEQ_LEN
QUIET = {"monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0}
# Batches 0 to 2 in rows of 4 tokens, 3 and 4 in rows of 8, then whole; batches of 8 rows up to number 3, then of 16.
RAMP = QUIET | {
    "seq_len_ramp": ((4, 24 * ROW), (8, "37%")),
    "batch_ramp": (("8 rows", 32 * ROW),),
    "train_tokens": 128 * ROW,
    "optim.warmup_tokens": 0,
    "train.num_microbatches": 2,
}
SHAPES = [(32, 4)] * 3 + [(16, 8), (32, 8)] + [(16, 16)] * 5


def test_the_budget_says_the_rows_of_each_batch_and_counts_their_operations():
    cfg = tiny.config(RAMP)
    budget = resolve_budget(cfg, None)
    assert budget.seq_len_ramp == ((0, 4), (3, 8), (5, 16)) and budget.total_steps == len(SHAPES)
    assert "(sequence length: 4 from batch 0, 8 from batch 3, 16 from batch 5)" in str(budget)
    of = lambda length: cfg.with_batch(8 * ROW, length).flops_per_token
    assert of(4) < of(8) < of(16) == cfg.flops_per_token
    tokens = {4: 24 * ROW, 8: 24 * ROW, 16: 80 * ROW}
    assert train_flops(cfg, budget) == pytest.approx(sum(of(length) * number for length, number in tokens.items()))
    assert train_flops(tiny.config(), resolve_budget(tiny.config(), None)) == pytest.approx(20 * 256 * of(16))
    program = make_program(cfg, budget, jax.devices()[:1])
    shapes = [one.abstract_batch.tokens.shape for one in (*program.smaller, program)]
    assert shapes == list(dict.fromkeys(SHAPES))  # a length and a size have a program only where they meet
    assert [one.cfg.train.num_microbatches for one in program.smaller] == [1, 1, 2]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"seq_len_ramp": ((8, "10%"), (8, "20%"))}, "rows of 8, 8 tokens, followed by seq_len=16; each must be"),
        ({"seq_len_ramp": ((1, "10%"),)}, "rows of 1 tokens, followed by seq_len=16; each must be at least 2"),
        ({"seq_len_ramp": ((6, "10%"),)}, "seq_len=16 is not a multiple of 6; .* 2, 4 or 8"),
        (
            {"train_tokens": 1600, "seq_len_ramp": ((4, "3 steps"),)},
            "seq_len_ramp='3 steps' is in steps, but steps differ in size",
        ),
        ({"data.objective": {"name": "prefix_lm"}}, "data.objective.name='prefix_lm' needs them whole"),
        ({"data.name": "chat"}, "seq_len_ramp would split the conversations of data.name='chat'"),
    ],
)
def test_a_ramp_that_cannot_be_is_refused_in_one_line(overrides, line):
    with pytest.raises(BadInput, match=line) as error:
        tiny.config(RAMP | overrides)
    assert "\n" not in str(error.value)


def test_what_the_amounts_or_the_mesh_do_not_allow_is_named():
    cfg = tiny.config(RAMP | {"seq_len_ramp": ((4, 24 * ROW), (8, 20 * ROW))})
    with pytest.raises(
        BadInput, match="length 8 is never used, because it ends at 320, which is batch 3, and the previous"
    ):
        resolve_budget(cfg, None)
    shared = tiny.config(RAMP | {"mesh.context": 4, "mesh.data": 2})
    with pytest.raises(BadInput, match="^seq_len_ramp with rows of 4 tokens needs batches of 32 rows: seq_len=4 is"):
        make_program(shared, resolve_budget(shared, None))


@functools.cache
def program_of(mesh):
    cfg = tiny.config(RAMP | dict(mesh))
    number = int(np.prod([size for _, size in mesh]))
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:number])


def open_ramp(folder, mesh=(), overrides=None):
    cfg = tiny.config(RAMP | dict(mesh) | (overrides or {}))
    make = lambda cfg, budget: dataclasses.replace(program_of(mesh), cfg=cfg)
    return open_run(cfg, str(folder), log=lambda text: None, make_program=make)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.soak
def test_a_run_over_its_lengths_is_the_same_on_every_mesh_and_however_often_it_is_killed(tmp_path):
    meshes = [(), (("mesh.data", 4), ("mesh.fsdp", 2)), (("mesh.data", 2), ("mesh.fsdp", 2), ("mesh.context", 2))]
    for number, mesh in enumerate(meshes):
        state = tiny.host(loop.train(open_ramp(tmp_path / str(number), mesh)).params)
    one, *others = (records(tmp_path / str(number)) for number in range(len(meshes)))
    for other in others:
        np.testing.assert_allclose([r["loss"] for r in other], [r["loss"] for r in one], rtol=1e-5)
    for stop in (2, 3, 4, None):  # within a length, where the second begins, before the last
        again = loop.train(dataclasses.replace(open_ramp(tmp_path / "killed", meshes[-1]), stop_after=stop))
    tiny.assert_same_bits(tiny.host(again.params), state)
    same = ("loss", "tokens_seen", "tokens_hash", "grad_norm")
    assert [[r[name] for name in same] for r in records(tmp_path / "killed")] == [
        [r[name] for name in same] for r in others[-1]
    ]
    # The hashes are those of whole rows, of an order that knows of no lengths.
    rows = open_data(tiny.config().data, seq_len=ROW, vocab_size=tiny.VOCAB, seed=1, say=lambda text: None)
    batches = rows.batches(BatchSizes.growing([(8, 32)], 16))
    assert [r["tokens_hash"] for r in one] == [tokens_hash(batches.batch(n)) for n in range(len(SHAPES))]
    compiled = [n for n, r in enumerate(one) if r["tokens_per_second"] is None]
    assert compiled == [SHAPES.index(shape) for shape in dict.fromkeys(SHAPES)]  # one program for each shape
    longer = open_ramp(tmp_path / "killed", meshes[-1], {"train_tokens": 256 * ROW})
    assert longer.parts.budget.seq_len_ramp == ((0, 4), (3, 8), (5, 16))  # '37%' would be later, and is over
    longer.writer.close()
    loop.train(dataclasses.replace(open_ramp(tmp_path / "begun", meshes[-1]), stop_after=5))
    with pytest.raises(
        Stop, match=r"row lengths of the completed batches up to 4: .* were \[\(0, 4\), \(3, 8\)"
    ) as stop:
        open_ramp(tmp_path / "begun", meshes[-1], {"train_tokens": 80 * ROW})
    assert stop.value.code is Exit.DATA_MISMATCH
    with pytest.raises(Stop, match="settings differ from the run in .*: seq_len_ramp"):
        open_ramp(tmp_path / "killed", meshes[-1], {"seq_len_ramp": ((4, 24 * ROW),)})


@pytest.mark.soak
def test_trace_says_in_rows_of_which_length_a_text_was_seen(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {n} of some words here\n" * 3 for n in range(150)))
    data = {"data.name": "files", "data.files": {"a": str(tmp_path / "a.txt")}, "model.vocab_size": 264}
    data |= {"data.cache_dir": str(tmp_path / "cache"), "data.val_fraction": 0.0}
    make = functools.partial(make_program, devices=jax.devices()[:1])
    run = open_run(tiny.config(RAMP | data), str(tmp_path / "run"), log=lambda text: None, make_program=make)
    loop.train(dataclasses.replace(run, stop_after=4))
    for step, length in ((0, 4), (3, 8), (5, 16)):
        found = trace(str(tmp_path / "run"), step=step)
        pieces = list(found.pieces)
        assert not found.hash_now and {piece.row_tokens for piece in pieces} == {length}
        assert pieces[0].record["row_tokens"] == length
        assert (f"in rows of {length})" in piece_line(pieces[0], ROW, with_step=True)) == (length < ROW)
