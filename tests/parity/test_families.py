"""A config.json and tensors of each Hugging Face family give a model with transformers' logits and gradients."""

import dataclasses
import json
import os
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.core.models.layers import merge_model, split_model
from jaxscale.core.models.model import logits, make_model
from jaxscale.core.plan import single_device_plan
from jaxscale.tools.interop import families
from jaxscale.tools.interop.source_model import initial_router_load

HERE = pathlib.Path(__file__).parent
PYTHON = os.environ.get("JAXSCALE_TORCH_PYTHON", "")  # one with torch and transformers
NAMES = (
    "gpt2", "llama2", "llama31", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_vision", "olmo2",
    "llama_yarn", "llama_dynamic", "llama_longrope", "qwen2_windows", "phi3", "mixtral", "mixtral_tied", "qwen3_moe",
    "qwen3_moe_windows", "olmoe", "olmoe_biases", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3",
    "deepseek_v3_one_group",
)  # fmt: skip
LIKE = (  # others whose text model has the same parts
    "llama2", "gemma3_vision", "mixtral_tied", "deepseek_v2_lite", "deepseek_v3_one_group",
)  # fmt: skip
CASES = [pytest.param(name, marks=pytest.mark.soak) if name in LIKE else name for name in NAMES]
# Of these the gradients are compared in a test of their own: they compile for as long as all else, and another family
# that is compared whole has the same operations, or tests/ops and tests/models compare the gradients of these.
WITHOUT_GRADIENTS = (
    "mixtral", "qwen3_moe_windows", "olmoe", "olmoe_biases", "deepseek_v2", "deepseek_v3", "llama31", "mistral",
    "qwen2_windows", "qwen3", "gemma", "llama_yarn", "llama_dynamic", "llama_longrope", "phi3",
)  # fmt: skip
# float32 sums taken in another order, and transformers' angles of RoPE in float32.
TOLERANCE, GRADIENT_TOLERANCE = 5e-5, 1e-5
READ_CONFIGS = """
import json, sys
from transformers import AutoConfig
pairs = json.load(sys.stdin)
print(json.dumps([[AutoConfig.for_model(**config).to_dict() for config in pair] for pair in pairs]))
"""
# Read by other releases alone, or what follows from other keys, or said of a text model that came from a larger one.
WITHOUT_EFFECT = {
    "hidden_activation", "sliding_window_pattern", "max_window_layers", "head_dim", "dtype", "architectures"
}  # fmt: skip
FORMS = (
    pytest.param("gemma3", "xla", dict(scan_layers=False), marks=pytest.mark.soak),
    ("gemma3", "blockwise", dict(remat="full")),
    ("gpt2", "blockwise", dict(scan_layers=False)),
    pytest.param("gemma2", "xla", dict(scan_layers=False, remat="full"), marks=pytest.mark.soak),
    pytest.param("gemma2", "blockwise", dict(remat="attention"), marks=pytest.mark.soak),
)


def load(parity, name, folder=HERE, **changes):
    """(reference, our config, (tensor pairs, unused names)) of one family."""
    reference = parity.load(f"family_{name}", folder)
    cfg = parity.config(reference.config, **changes)
    if cfg.max_seq_len and cfg.name == "llama":  # transformers chose by the length of the rows, which we are told
        scaling = dataclasses.replace(cfg.rope_scaling, row_len=reference["tokens"].shape[1])
        cfg = dataclasses.replace(cfg, rope_scaling=scaling)
    found = families.match(families.family_of(reference.config), cfg, json.loads(str(reference["names"])))
    return reference, cfg, found


def check(parity, reference, cfg, found, form="xla", gradients=True):
    """Fails unless our model with the tensors of this reference computes what is in it."""
    plan = single_device_plan("cpu", form, cfg.attention_needs())
    make = lambda key: make_model(cfg, key=key, plan=plan)
    graphdef, own, _ = split_model(jax.eval_shape(make, jax.random.key(0)))
    load_pairs, load = initial_router_load(cfg)
    pairs, batch = [*found[0], *load_pairs], parity.make_batch(reference["tokens"])
    params = parity.params(cfg, reference.weights | {name: tensor.read() for name, tensor in load.items()}, pairs)
    assert jax.tree.map(lambda leaf: leaf.shape, own) == jax.tree.map(np.shape, params)

    def loss(params):
        logits_BTV = logits(merge_model(graphdef, params), batch.tokens)
        nats_BT1 = -jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), batch.targets[..., None], -1)
        return jnp.sum(nats_BT1[..., 0] * batch.weights) / batch.weights.sum(), logits_BTV

    run = jax.value_and_grad(loss, has_aux=True) if gradients else lambda params: (loss(params), None)
    (total, logits_BTV), found_gradients = jax.jit(run)(params)
    np.testing.assert_allclose(logits_BTV, reference["logits"], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(total, reference["loss"], rtol=1e-5)
    if not gradients:
        return
    unmoved = {name: np.zeros(tensor.shape) for name, tensor in load.items()}
    theirs = parity.params(cfg, reference.gradients | unmoved, pairs)
    parity.assert_close_trees(found_gradients, theirs, GRADIENT_TOLERANCE)


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", CASES)
def test_tensors_come_back_bit_for_bit_and_compute_what_transformers_computes(name, parity):
    reference, cfg, found = load(parity, name)
    assert {pair.hf_name for pair in found[0]} == set(reference.weights)
    for pair in found[0]:
        tensor = reference.weights[pair.hf_name]
        back = pair.to_hf(pair.to_leaves(tensor))
        assert (back.dtype, back.shape) == (tensor.dtype, pair.hf_shape)
        np.testing.assert_array_equal(back, tensor)
    check(parity, reference, cfg, found, gradients=name not in WITHOUT_GRADIENTS)


@pytest.mark.soak
@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_gradients_of_the_others_are_those_of_transformers(name, parity):
    check(parity, *load(parity, name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form", "changes"), FORMS, ids=str)
def test_a_family_is_the_same_in_every_form(name, form, changes, parity):
    check(parity, *load(parity, name, **changes), form)


def test_the_vision_of_gemma3_is_left_out_and_told(parity):
    _, cfg, (_, left_out) = load(parity, "gemma3_vision")
    assert len(left_out) > 10 and all("vision" in name or "multi_modal" in name for name in left_out)
    assert families.family_for(cfg).model_type == "gemma3_text"  # what an export is


@pytest.mark.peer
@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_it_today(name, parity, made_today):
    check(parity, *load(parity, name, made_today))


@pytest.mark.peer
def test_transformers_reads_the_config_that_we_write_as_its_own(parity):
    if not PYTHON:
        pytest.skip("set JAXSCALE_TORCH_PYTHON to a Python that has torch and transformers")
    pairs = []
    for name in NAMES:
        hf = parity.load(f"family_{name}").config
        _, cfg, kept = families.read(hf)
        family = families.family_for(cfg, hf["model_type"])
        pairs.append((hf.get("text_config", hf), families.write(family, cfg, kept)))
    done = subprocess.run([PYTHON, "-c", READ_CONFIGS], input=json.dumps(pairs), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for theirs, ours in json.loads(done.stdout):
        for told in (theirs, ours):
            (told.get("rope_parameters") or {}).pop("type", None)  # as transformers 4 has it; rope_type says the same
        assert {key for key in theirs | ours if theirs.get(key) != ours.get(key)} <= WITHOUT_EFFECT


@pytest.fixture(scope="module")
def made_today(tmp_path_factory):
    """A folder with references that transformers has just made."""
    if not PYTHON:
        pytest.skip("set JAXSCALE_TORCH_PYTHON to a Python that has torch and transformers")
    folder = tmp_path_factory.mktemp("families")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([PYTHON, HERE / "make_family_references.py", folder], env=environment, check=True)
    return folder
