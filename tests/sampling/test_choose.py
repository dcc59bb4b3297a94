"""Tokens are drawn from the distribution that a plain reference in float64 gives. B batch  V vocab"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.runtime.sampling.config import Sampling
from jaxscale.runtime.sampling.generator import choose, filtered

V = 12


def reference(logits_V, seen_V, sampling):
    """float64[V]: the probabilities, written as one reads them."""
    logits = [float(x) for x in logits_V]
    if sampling.repetition_penalty != 1:
        for i in np.flatnonzero(seen_V):
            logits[i] = (
                logits[i] / sampling.repetition_penalty if logits[i] > 0 else logits[i] * sampling.repetition_penalty
            )
    chances = np.exp(np.array(logits) / sampling.temperature)
    order = sorted(range(V), key=lambda i: -chances[i])
    kept = set(order[: sampling.top_k] if sampling.top_k else order)
    if sampling.top_p < 1:
        total, nucleus, so_far = sum(chances[i] for i in kept), set(), 0.0
        for i in order:
            if i in kept and so_far < sampling.top_p:
                nucleus.add(i)
                so_far += chances[i] / total
        kept = nucleus
    if sampling.min_p:
        kept = {i for i in kept if chances[i] >= sampling.min_p * max(chances)}
    found = np.array([chances[i] if i in kept else 0.0 for i in range(V)])
    return found / found.sum()


EACH = itertools.product((0.7, 1.3), (0, 5), (1.0, 0.8), (0.0, 0.1), (1.0, 1.5))
SETTINGS = [
    Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    for temperature, top_k, top_p, min_p, penalty in itertools.product(
        (0.7, 1.3), (0, 5), (1.0, 0.8), (0.0, 0.1), (1.0, 1.5)
    )
]


def example(n):
    rng = np.random.default_rng(n)
    return rng.normal(size=(4, V)).astype(np.float32) * 2, rng.random((4, V)) < 0.4


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_distribution_is_the_reference(sampling):
    logits_BV, seen_BV = example(1)
    found_BV = jax.nn.softmax(filtered(jnp.asarray(logits_BV), jnp.asarray(seen_BV), sampling), axis=-1)
    wanted_BV = [reference(logits_V, seen_V, sampling) for logits_V, seen_V in zip(logits_BV, seen_BV)]
    np.testing.assert_allclose(found_BV, wanted_BV, atol=1e-6)  # float32


@pytest.mark.parametrize(
    "sampling",
    [SETTINGS[0], Sampling(temperature=1.0, top_k=6, top_p=0.9, min_p=0.05, repetition_penalty=1.3)],
    ids=str,
)
def test_tokens_come_as_often_as_the_distribution_says(sampling):
    logits_BV, seen_BV = (np.repeat(x[:1], 20_000, axis=0) for x in example(2))
    keys_B = jax.random.split(jax.random.key(0), 20_000)
    drawn_B = jax.jit(choose, static_argnums=3)(logits_BV, seen_BV, keys_B, sampling)
    wanted_V = reference(logits_BV[0], seen_BV[0], sampling)
    found_V = np.bincount(drawn_B, minlength=V) / 20_000
    np.testing.assert_allclose(found_V, wanted_V, atol=0.015)  # 4 standard deviations of a half
    assert not found_V[wanted_V == 0].any()


def test_temperature_0_takes_the_likeliest_after_the_penalty():
    logits_BV, seen_BV = jnp.asarray([[1.0, 3.0, 2.9]]), jnp.asarray([[False, True, False]])
    keys_B = jax.random.split(jax.random.key(0), 1)
    assert choose(logits_BV, None, keys_B, Sampling(temperature=0)) == 1
    assert choose(logits_BV, seen_BV, keys_B, Sampling(temperature=0, repetition_penalty=1.2)) == 2


def test_a_likelihood_that_is_shared_stays_or_goes_together():
    logits_BV = jnp.asarray([[2.0, 1.0, 1.0, 0.0]])
    kept = lambda **settings: np.isfinite(filtered(logits_BV, None, Sampling(**settings)))[0].tolist()
    assert kept(top_k=2) == [True, True, True, False]
    assert kept(temperature=1.0, top_p=0.7) == [True, True, True, False]


@pytest.mark.parametrize(
    "settings, told",
    [
        (dict(temperature=-0.1), "temperature=-0.1 must be 0 or more"),
        (dict(temperature=float("nan")), "temperature=nan must be"),
        (dict(top_k=-1), "top_k=-1 must be 0"),
        (dict(top_p=0.0), "top_p=0.0 must be above 0"),
        (dict(top_p=1.5), "top_p=1.5 must be"),
        (dict(min_p=1.0), "min_p=1.0 must be"),
        (dict(repetition_penalty=0.0), "repetition_penalty=0.0 must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        Sampling(**settings)
