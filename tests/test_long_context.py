"""A model comes in, is trained on longer rows, and goes out with RoPE as it was trained; what was far back is found."""

import dataclasses
import json
import pathlib

import needle
import numpy as np
import pytest
from hf_folders import LLAMA, make_folder

from jaxscale import schema
from jaxscale.cli import convert
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.run.opening import open_run, train_to_completion
from jaxscale.settings.config_file import load_config
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop import families
from jaxscale.tools.interop.families.settings import with_static_rope

FILE = pathlib.Path(__file__).parent.parent / "configs" / "long_context.py"
DYNAMIC = dict(rope_scaling=dict(rope_type="dynamic", factor=2.0))
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8)  # fmt: skip
SMALL = {
    "train_tokens": "1 steps", "optim.warmup_tokens": 0, "batch_tokens": "8 rows", "eval.num_rows": 8,
    "data": {"name": "synthetic"}, "monitor": {"progress": "off", "tensorboard": False},
    "model.compute_dtype": "float32", "checkpoint.save_every_steps": 1,
}  # fmt: skip


def bring_in(folder, **config):
    """A work folder that was made of a small Llama with these keys."""
    make_folder(folder / "hf", LLAMA | config)
    assert convert.main([f"--from={folder / 'hf'}", f"--workdir={folder / 'base'}"]) == 0
    return folder / "base"


def longer(base, times=4, **overrides):
    """The settings of a run that goes on from there."""
    return load_config(f"{FILE}:{times},{base}", SMALL | overrides)


@pytest.mark.soak
def test_a_model_goes_on_with_rows_four_times_as_long_and_goes_out_as_it_was_trained(tmp_path):
    cfg = longer(bring_in(tmp_path))
    scaling = cfg.model.rope_scaling
    assert (scaling.name, scaling.factor, scaling.original_max_len, cfg.seq_len) == ("yarn", 4.0, 64, 256)
    train_to_completion(open_run(cfg, str(tmp_path / "run"), lambda line: None))
    assert convert.main([f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["max_position_embeddings"] == 256 and written["rope_scaling"]["rope_type"] == "yarn"
    assert families.read(written)[1].rope_scaling == scaling
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    told = [line for line in lines if "validation/loss" in line][-1]
    assert {f"validation_by_position/{part}/loss" for part in ("1-1", "33-64", "129-256")} <= told.keys()


@pytest.mark.slow
def test_rows_of_a_model_whose_rope_goes_by_their_length_are_said_once_and_go_out_as_they_were(tmp_path):
    base = bring_in(tmp_path, **DYNAMIC)
    with pytest.raises(BadInput, match="rope_scaling.name='dynamic', which depends on row_len and has no factor"):
        longer(base)
    plain = longer(bring_in(tmp_path / "plain"))
    read = families.read(LLAMA | DYNAMIC)[1]
    model = dataclasses.replace(plain.model, rope_scaling=dataclasses.replace(read.rope_scaling, row_len=96))
    with pytest.raises(BadInput, match="set model.rope_scaling.row_len=256"):
        dataclasses.replace(plain, model=model)
    cfg = dataclasses.replace(plain, model=model, seq_len=96, init=dataclasses.replace(plain.init, from_path=str(base)))
    cfg = dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, num_rows=0))
    run = open_run(cfg, str(tmp_path / "run"), lambda line: None)
    run.writer.close()
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", cfg.checkpoint)
    checkpoints.save(0, run.state, {"config": schema.to_dict(cfg)}, wait=True)  # as trained by no step
    assert convert.main([f"--workdir={tmp_path / 'run'}", f"--to={tmp_path / 'out'}"]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    back = families.read(written)[1]
    assert back.rope_scaling is None and back.rope_base == with_static_rope(model).rope_base > 2 * model.rope_base
    assert written["max_position_embeddings"] == 96


def test_a_scaling_that_is_there_is_stretched_further_and_what_cannot_be_is_named(tmp_path):
    cfg = longer(bring_in(tmp_path, rope_scaling=LLAMA3), times=2)
    assert cfg.model.rope_scaling.name == "llama3" and cfg.model.rope_scaling.factor == 16.0 and cfg.seq_len == 128
    for argument, told in (
        ("1", "the argument is '1'; write FACTOR"),
        (f"4,{tmp_path}/no", "is missing or not from a run"),
    ):
        with pytest.raises(ValueError, match=told) as error:
            load_config(f"{FILE}:{argument}")
        assert "\n" not in str(error.value)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_needle_far_back_is_found_after_the_context_was_extended_and_not_before(seed, capsys):
    with capsys.disabled():
        told = needle.measure(seed)
    far = needle.SHORT * needle.FACTOR
    chance = 1 / needle.VALUES
    assert told["short rows"][needle.SHORT] > 0.99
    assert told["long rows, as it was"][far] < 2 * chance
    assert told["long rows, as it was, trained on"][far] < 0.5  # the steps alone are not what does it
    assert min(told["long rows, YaRN, trained on"].values()) > 0.97


def test_needles_lie_where_they_are_said_to_lie():
    batch, distance_BT = needle.rows(np.random.default_rng(0), 8, 256)
    rows, places = np.nonzero(distance_BT)
    assert len(rows) == 8 * needle.PLANTED and distance_BT.max() > needle.SHORT
    asked, planted = batch.tokens[rows, places], batch.tokens[rows, places - distance_BT[rows, places]]
    key, value = np.divmod(planted - needle.PLANT, needle.VALUES)
    np.testing.assert_array_equal(asked - needle.ASK, key)
    np.testing.assert_array_equal(batch.targets[rows, places] - needle.ANSWER, value)
    np.testing.assert_array_equal(batch.weights > 0, distance_BT > 0)
