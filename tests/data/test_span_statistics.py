"""Where spans of noise fall: as T5's published code draws them."""

import numpy as np
import pytest

from jaxscale.runtime.data.objective_config import NoiseAmount, noise_amount
from jaxscale.runtime.data.objectives.corrupt import make_noise, random_compositions, split_noise
from jaxscale.runtime.data.stacking import random_words


def noise_of(length, seed, density=0.15, mean_span=3.0):
    cut = noise_amount(length, density, mean_span)
    return noise_in(np.array([length]), cut, 10**6, seed), cut


def noise_in(lengths, cut, most_marks, seed):
    words = random_words(seed, 0, 0, int(lengths.sum()) + 2)
    rows = np.zeros(len(lengths), np.int64)
    noise, spans = split_noise(lengths, rows, np.array([[*cut, most_marks]]).T, words[None, :2])
    return make_noise(lengths, noise, spans, words[2 : 2 + noise.sum()], words[2 + noise.sum() :])


def test_spans_and_gaps_have_the_published_statistics():
    """T5's code draws both as uniform compositions: of 85 tokens in 28 parts for a row of 568."""
    lengths, shares, first_gaps = [], np.zeros(568), []
    for seed in range(400):
        noise, cut = noise_of(568, seed)
        assert (noise.is_noise.sum(), noise.begins.sum()) == cut == (85, 28)
        assert not noise.is_noise[0] and noise.is_noise[-1]
        starts = np.flatnonzero(noise.begins)
        ends = np.flatnonzero(noise.is_noise & ~np.append(noise.is_noise[1:], False)) + 1
        lengths += (ends - starts).tolist()
        first_gaps.append(starts[0])
        shares += noise.is_noise
    assert np.mean(lengths) == 85 / 28
    # A part of a uniform composition of n in k is l with probability C(n-l-1, k-2) / C(n-1, k-1): 1 is (k-1)/(n-1).
    counts = np.bincount(lengths) / len(lengths)
    np.testing.assert_allclose(counts[1], 27 / 84, atol=0.015)  # 11,200 parts: 4 standard deviations are 0.018
    np.testing.assert_allclose(counts[2], 27 * 57 / 84 / 83, atol=0.015)
    np.testing.assert_allclose(np.mean(first_gaps), 483 / 28, atol=4 * 17 / 20)
    middle = shares[100:-100].mean() / 400
    np.testing.assert_allclose(middle, 85 / 568, atol=0.01)  # no place is more likely than another, but near the ends


def test_every_division_of_a_length_is_equally_likely():
    seen = {}
    for seed in range(3000):
        parts = tuple(random_compositions(np.array([5]), np.array([3]), random_words(seed, 0, 0, 5)).tolist())
        seen[parts] = seen.get(parts, 0) + 1
    assert len(seen) == 6 and all(sum(parts) == 5 and min(parts) > 0 for parts in seen)
    assert max(abs(count - 500) for count in seen.values()) < 4 * (500 * 5 / 6) ** 0.5


def test_each_document_has_its_share_of_the_noise():
    lengths = np.array([300, 7, 2, 100, 1, 158])
    cut, total = noise_amount(568, 0.15, 3.0), np.zeros(6)
    for seed in range(300):
        noise = noise_in(lengths, cut, 29, seed)
        owner = np.repeat(np.arange(6), lengths)
        total += np.bincount(owner[noise.is_noise], minlength=6)
        assert noise.is_noise.sum() == 85 and noise.begins.sum() == 28 - 5
        assert not noise.is_noise[np.cumsum(lengths) - lengths].any()  # every document begins with a gap
    # A token alone has none; 4 standard deviations of a rounding, at random, of 300 shares.
    np.testing.assert_allclose(total[[1, 2, 3, 5]] / 300, 85 * lengths[[1, 2, 3, 5]] / 568, atol=4 * 0.5 / 300**0.5)
    assert total[4] == 0


@pytest.mark.parametrize("length", [2, 3, 5])
def test_the_shortest_rows_keep_a_token_and_lose_one(length):
    noise, cut = noise_of(length, 0)
    assert cut.noise >= 1 and noise.is_noise.sum() == cut.noise < length
    assert noise_amount(1, 0.15, 3.0) == NoiseAmount(0, 0)
