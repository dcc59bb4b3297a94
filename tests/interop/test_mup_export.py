"""A model with muP goes out as a plain one: its factors are in the weights."""

import json

import jax
import numpy as np
import pytest
import tiny
from hf_folders import read_folder

from jaxscale import schema
from jaxscale.cli import convert
from jaxscale.config import RunConfig
from jaxscale.core.models.layers import merge_model, split_model
from jaxscale.core.models.model import logits, make_model
from jaxscale.runtime.checkpoint.branch import branch_state
from jaxscale.runtime.checkpoint.config import CheckpointConfig, InitConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.system.exits import BadInput

MUP = dict(base_dim=8, base_head_dim=4, base_layers=1)
OVERRIDES = {"model.mup": MUP, "model.tied_embeddings": True}
TOKENS_BT = tiny.packed_batch(0).tokens[:4]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(the work folder, its parameters) of a run with muP."""
    folder, cfg = tmp_path_factory.mktemp("mup") / "run", tiny.config(OVERRIDES)
    params = jax.jit(lambda key: split_model(make_model(cfg.model, key=key))[1])(jax.random.key(0))
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    checkpoints.save(3, {"params": params}, {"config": schema.to_dict(cfg), "step": 3})
    checkpoints.wait()
    checkpoints.close()
    return folder, params


def computed(cfg, params):
    call = jax.jit(lambda params: logits(merge_model(tiny.graphdef(cfg), params), TOKENS_BT))
    return np.asarray(call(params))


@pytest.mark.slow
def test_it_goes_out_as_a_llama_with_the_same_logits_and_comes_in_without(run, tmp_path):
    folder, params = run
    assert convert.main([f"--workdir={folder}", f"--to={tmp_path / 'out'}", "--dtype=float32"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
    assert convert.main([f"--from={tmp_path / 'out'}", f"--workdir={tmp_path / 'back'}"]) == 0
    plain = schema.from_dict(RunConfig, json.loads((tmp_path / "back" / "config.json").read_text())["config"]).model
    assert plain.mup is None
    wanted = jax.eval_shape(lambda: {"params": params})
    back = Checkpoints(tmp_path / "back" / "checkpoints", CheckpointConfig()).restore(0, wanted, partial=True)
    found = computed(schema.convert(schema.to_dict(plain) | {"compute_dtype": "float32", "attention": "xla"},
                                    type(plain), "model"), back["params"])  # fmt: skip
    np.testing.assert_allclose(found, computed(tiny.config(OVERRIDES).model, params), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_factors_that_are_powers_of_two_are_exact_in_bfloat16(run, tmp_path):
    folder, params = run
    assert convert.main([f"--workdir={folder}", f"--to={tmp_path / 'out'}"]) == 0
    found = read_folder(tmp_path / "out")
    assert np.all(found["model.norm.weight"].astype(np.float32) == 0.5)
    down = np.asarray(params["blocks"]["mlp"]["down"][1].T.astype("bfloat16"), np.float32)
    np.testing.assert_array_equal(found["model.layers.1.mlp.down_proj.weight"].astype(np.float32), down / 2)


def test_a_run_with_other_factors_does_not_begin_with_its_weights(run):
    folder, _ = run
    for other in ({"model.mup": None}, {"model.mup": MUP | {"base_dim": 4}}):
        program = tiny.make_program(cfg := tiny.config(OVERRIDES | other), tiny.resolve_budget(cfg, None))
        with pytest.raises(BadInput, match="were trained with different model.mup factors than"):
            branch_state(program, InitConfig(from_path=str(folder)), print)
