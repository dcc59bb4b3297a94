"""Sampling follows the model's own next-token probabilities, one token after the other.

B batch  T position  V vocab
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxscale.sample.generate import SampleConfig, make_sampler


@functools.cache
def model():
    """(next_logits, larger parameters than at the start, so that the likeliest token is clear)."""
    program = tiny.program()
    return program.next_logits, jax.tree.map(lambda leaf: 4 * leaf, program.init().params)


def sample(prompt_BT, total, *, window=16, temperature=1e-4, top_k=0, seed=0, filler=0, next_logits=None):
    logits, params = model()
    sampler = make_sampler(next_logits or logits, window=window, temperature=temperature, top_k=top_k)
    tokens_BT = np.full((len(prompt_BT), total), filler, np.int32)
    tokens_BT[:, : prompt_BT.shape[1]] = prompt_BT
    return np.asarray(jax.jit(sampler)(params, tokens_BT, prompt_BT.shape[1], jax.random.key(seed)))


PROMPT_BT = np.array([[5, 9, 2], [7, 7, 1]], np.int32)


def test_at_a_low_temperature_each_token_is_the_likeliest_of_a_full_pass():
    next_logits, params = model()
    tokens_BT = sample(PROMPT_BT, 12)
    np.testing.assert_array_equal(tokens_BT[:, :3], PROMPT_BT)
    call = jax.jit(next_logits)
    for place in range(3, 12):
        padded_BT = np.zeros((2, 12), np.int32)
        padded_BT[:, :place] = tokens_BT[:, :place]
        np.testing.assert_array_equal(tokens_BT[:, place], np.argmax(call(params, padded_BT, place - 1), axis=-1))


def test_what_stands_behind_the_prompt_does_not_matter():
    np.testing.assert_array_equal(sample(PROMPT_BT, 12), sample(PROMPT_BT, 12, filler=33))


def test_next_logits_are_those_after_the_last_token():
    next_logits, params = model()
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(0, tiny.VOCAB, (2, 12), dtype=np.int32)
    changed_BT = tokens_BT.copy()
    changed_BT[:, 6:] = 3
    np.testing.assert_array_equal(next_logits(params, tokens_BT, 5), next_logits(params, changed_BT, 5))
    np.testing.assert_allclose(
        next_logits(params, tokens_BT[:, :6], 5), next_logits(params, tokens_BT, 5), rtol=1e-5, atol=1e-5
    )


def test_text_may_be_longer_than_the_window_and_the_newest_tokens_are_what_is_read():
    next_logits, params = model()
    tokens_BT = sample(PROMPT_BT, 20, window=8)
    np.testing.assert_array_equal(tokens_BT[:, :8], sample(PROMPT_BT, 8))
    for place in range(8, 20):
        best = np.argmax(next_logits(params, tokens_BT[:, place - 8 : place], 7), axis=-1)
        np.testing.assert_array_equal(tokens_BT[:, place], best)


PROBABILITIES = jnp.asarray([0.5, 0.25, 0.125, 0.0625, 0.0625])


def fixed_logits(params, tokens_BT, last):
    return jnp.broadcast_to(jnp.log(PROBABILITIES)[None], (tokens_BT.shape[0], 5))


def draws(**settings):
    tokens_BT = sample(np.zeros((200, 1), np.int32), 21, next_logits=fixed_logits, **settings)
    return np.bincount(tokens_BT[:, 1:].reshape(-1), minlength=5) / 4000


def test_at_temperature_one_tokens_come_as_often_as_the_model_says():
    np.testing.assert_allclose(draws(temperature=1.0), PROBABILITIES, atol=0.03)  # 4 standard deviations


def test_a_temperature_sharpens_or_flattens():
    sharp = np.square(PROBABILITIES) / np.square(PROBABILITIES).sum()
    np.testing.assert_allclose(draws(temperature=0.5), sharp, atol=0.03)
    np.testing.assert_allclose(draws(temperature=1e6), 0.2, atol=0.03)


def test_top_k_leaves_only_the_likeliest():
    np.testing.assert_allclose(draws(temperature=1.0, top_k=2), [2 / 3, 1 / 3, 0, 0, 0], atol=0.03)
    np.testing.assert_allclose(draws(temperature=1.0, top_k=99), PROBABILITIES, atol=0.03)


def test_the_key_decides():
    first, again, other = (sample(PROMPT_BT, 12, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": -1}, {"num_tokens": -1}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match="temperature above 0"):
        SampleConfig(**settings)
