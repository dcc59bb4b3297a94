"""A scaling of RoPE that a config.json says turns heads as transformers turns them, and goes out as it came in."""

import dataclasses
import json
import os
import pathlib
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
import rope_computed

from jaxscale.kernels.rope import attention_factor, frequencies, make_rotation
from jaxscale.tools.interop import families
from jaxscale.tools.interop.families.settings import with_static_rope

PYTHON = os.environ.get("JAXSCALE_TORCH_PYTHON", "")  # one with torch and transformers
HERE = pathlib.Path(__file__).parent
THEIRS = json.loads((HERE / "rope_computed.json").read_text())  # transformers 5.23
CASES = rope_computed.cases()


def read(name):
    """Our settings for rows of the case's length."""
    hf, length = CASES[name]
    cfg = families.read(hf)[1]
    if cfg.max_seq_len is None:
        return cfg
    return dataclasses.replace(cfg, rope_scaling=dataclasses.replace(cfg.rope_scaling, row_len=length))


def turned(cfg, length):
    """(frequencies, factor)"""
    return frequencies(cfg.head_dim, cfg.rope_base, cfg.rope_scaling), attention_factor(cfg.rope_scaling)


@pytest.mark.parametrize("name", CASES)
def test_heads_are_turned_and_stretched_as_in_transformers(name):
    freq_h, factor = turned(read(name), CASES[name][1])
    their_freq_h, their_factor = THEIRS[name]
    np.testing.assert_allclose(freq_h, their_freq_h, rtol=2e-6)  # theirs are float32
    assert factor == pytest.approx(their_factor, rel=1e-12)


@pytest.mark.parametrize("name", rope_computed.SCALINGS)
def test_it_goes_out_as_it_came_in(name):
    hf = dict(model_type="llama", rope_scaling=rope_computed.SCALINGS[name], **rope_computed.PUBLISHED)
    family, cfg, kept = families.read(hf)
    written = families.write(family, cfg, kept)
    assert families.read(json.loads(json.dumps(written)))[1] == cfg
    alone = families.write(families.family_for(cfg), cfg)  # where nothing is known but our settings
    assert families.read(alone)[1] == cfg


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("dynamic", "longrope"))])
def test_what_a_length_chose_goes_out_as_it_was_chosen_for_rows_of_every_length(name):
    chosen = read(name)
    told = with_static_rope(chosen)
    back = families.read(families.write(families.family_for(told), told))[1]
    assert back == told != chosen
    for row_len in (None, 100, 100_000):
        scaling = back.rope_scaling and dataclasses.replace(back.rope_scaling, row_len=row_len)
        anew = dataclasses.replace(back, rope_scaling=scaling)
        np.testing.assert_allclose(turned(anew, 1)[0], turned(chosen, 1)[0], rtol=1e-12)
        assert turned(anew, 1)[1] == turned(chosen, 1)[1]
    with pytest.raises(ValueError, match="no Hugging Face model type supports model.rope_scaling"):
        families.family_for(chosen)


def test_the_factor_makes_vectors_longer_and_nothing_else():
    cfg, plain = read("yarn with its own attention factor, 4096"), read("yarn, 4096")
    places_BT = jnp.arange(5)[None]
    longer, usual = (make_rotation(places_BT, 64, one.rope_base, one.rope_scaling) for one in (cfg, plain))
    usual_factor = attention_factor(plain.rope_scaling)
    assert usual_factor == pytest.approx(0.1 * np.log(4) + 1)
    for ours, theirs in zip(longer, usual, strict=True):
        np.testing.assert_allclose(ours / 1.3, theirs / usual_factor, rtol=1e-6, atol=1e-7)


@pytest.mark.peer
def test_transformers_still_computes_it_so():
    if not PYTHON:
        pytest.skip("set JAXSCALE_TORCH_PYTHON to a Python that has torch and transformers")
    command = [PYTHON, HERE / "rope_computed.py"]
    assert json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) == THEIRS
