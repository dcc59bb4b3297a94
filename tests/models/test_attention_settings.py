"""A model's window and softcap reach its attention, whatever the form."""

import functools
import itertools

import jax
import numpy as np
import pytest
import tiny

from jaxscale import schema
from jaxscale.core.models.layers import merge_model, split_model
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.model import logits, make_model
from jaxscale.core.plan import single_device_plan


def made(form, **settings):
    """(graphdef, parameters) of a new model, to be traced."""
    cfg = schema.from_dict(LlamaConfig, tiny.LLAMA | {"num_layers": 1} | settings)
    plan = single_device_plan("cpu", form, cfg.attention_needs())
    return split_model(make_model(cfg, key=jax.random.key(0), plan=plan))[:2]


@functools.cache
def parameters():
    return jax.jit(lambda: made("xla")[1])()


@functools.cache
def model_logits(form, **settings):
    batch = tiny.packed_batch(0, rows=2)
    graphdef = jax.eval_shape(lambda: made(form, **settings))[0]
    run = lambda params: logits(merge_model(graphdef, params), batch.tokens, batch.positions, batch.segment_ids)
    return np.asarray(jax.jit(run)(parameters()))


@pytest.mark.slow
def test_settings_of_attention_change_the_model_alike_in_every_form():
    window, both = {"attention_window": 3}, {"attention_window": 3, "attention_softcap": 0.05}
    changed = [model_logits("xla", **settings) for settings in ({}, window, both)]
    for one, other in itertools.pairwise(changed):
        assert np.abs(one - other).max() > 1e-4
    np.testing.assert_allclose(model_logits("blockwise", **both), changed[-1], rtol=1e-4, atol=1e-5)  # sums in float32


@pytest.mark.slow
def test_a_window_as_long_as_the_row_changes_nothing():
    np.testing.assert_array_equal(model_logits("xla", attention_window=tiny.SEQ_LEN), model_logits("xla"))


def test_flops_are_counted_over_the_keys_that_a_window_leaves():
    cfg = lambda **settings: schema.from_dict(LlamaConfig, tiny.LLAMA | settings)
    per_key = 12 * 2 * 4 * 8  # layers, heads, head_dim
    full, half = cfg().flops_per_token(100), cfg(attention_window=50).flops_per_token(100)
    assert full - half == per_key * (50 - 37.5)  # T / 2 against W - W^2 / (2 T)
    assert cfg(attention_window=500).flops_per_token(100) == full


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"attention_window": 0}, "attention_window=0 must be at least 1; use none to disable it"),
        ({"attention_softcap": 0.0}, "attention_softcap=0.0 must be above 0; use none to disable it"),
    ],
)
def test_a_senseless_setting_of_attention_is_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        schema.from_dict(LlamaConfig, tiny.LLAMA | settings)
