"""Estimates against laws with a known answer."""

import math

import numpy as np
import pytest

from jaxscale.tools.lab import estimate


def test_the_interval_of_a_mean_holds_nine_times_in_ten():
    random = np.random.default_rng(0)
    held = sum(estimate.mean(random.normal(3.0, 1.0, 4)).has(3.0) for _ in range(2000))
    assert 0.88 < held / 2000 < 0.92
    assert estimate.mean([2.0]) == estimate.Estimate(2.0)


def test_the_interval_of_a_difference_in_pairs_holds_nine_times_in_ten():
    random, held = np.random.default_rng(0), 0
    for _ in range(1000):
        of_seed = random.normal(0, 5.0, 3)  # what a seed adds to all settings does not count
        losses = {name: dict(enumerate(name + of_seed + random.normal(0, 0.1, 3))) for name in (2.0, 2.1, 2.3, 2.6)}
        held += estimate.mean_difference(losses, 2.3, 2.0).has(0.3)
    assert 0.87 < held / 1000 < 0.93
    assert estimate.mean_difference({1: {0: 3.0}, 2: {0: 5.0}}, 2, 1) == estimate.Estimate(2.0)


@pytest.mark.parametrize("best", [1.3e-3, 2e-3, 3.1e-3])
def test_the_optimum_of_a_parabola_in_log_x_is_found_exactly(best):
    rates = [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
    curves = [{r: 2.0 + c * math.log(r / best) ** 2 for r in rates} for c in (0.1, 0.2)]
    found = estimate.optimum(curves)
    assert found.x.value == pytest.approx(best, rel=1e-6) and found.y.value == pytest.approx(2.0) and not found.edge


def test_an_optimum_at_the_end_of_what_was_tried_is_a_bound():
    falling = {1e-3: 3.0, 2e-3: 2.5, 4e-3: 2.1}
    found = estimate.optimum([falling, falling])
    assert found.edge == "highest" and str(found) == "at least 0.004"
    assert estimate.optimum([{r: -y for r, y in falling.items()}]).edge == "lowest"
    assert estimate.optimum([falling | {2e-3: 2.0}, falling]).edge == "highest"  # as many inside as at the end


def test_a_power_is_found_with_its_interval():
    xs = [1, 2, 4, 8, 16]
    exact = estimate.power(xs, [3.0 * x**0.5 for x in xs])
    assert exact.exponent.value == pytest.approx(0.5) and exact(9) == pytest.approx(9.0)
    random = np.random.default_rng(1)
    held = 0
    for _ in range(300):
        ys = [3.0 * x**0.5 * math.exp(0.05 * random.normal()) for x in xs]
        held += estimate.power(xs, ys).exponent.has(0.5)
    assert 0.85 < held / 300 < 0.95


def test_a_critical_batch_is_found_from_tokens_to_a_loss():
    batches = [1e3, 2e3, 4e3, 8e3, 16e3]
    found = estimate.critical_batch(batches, [1e6 * (1 + b / 5e3) for b in batches])
    assert found.batch.value == pytest.approx(5e3, rel=1e-3) and found.least == pytest.approx(1e6, rel=1e-3)
    noisy = estimate.critical_batch(batches[:3], [1.2e6, 1.9e6, 1.6e6])  # three points tell no interval
    assert noisy.batch.low is None and noisy.batch.value > 0
    with pytest.raises(estimate.Undetermined, match="far above the critical batch"):
        estimate.critical_batch(batches, [1e3 * b for b in batches])
    with pytest.raises(estimate.Undetermined, match="hardly any more tokens"):
        estimate.critical_batch(batches, [1e6] * 5)


def test_the_noise_scale_of_gradients_with_a_known_covariance_is_found():
    random, size = np.random.default_rng(2), 1000
    gradient = np.full(size, 0.02)  # |G|**2 is 0.4, and the trace 1e3 for one token: the scale is 2,500 tokens
    norms = lambda batch: [np.linalg.norm(gradient + random.normal(0, batch**-0.5, size)) for _ in range(200)]
    found = estimate.noise_scale(1e3, 8e3, norms(1e3), norms(8e3))
    assert found.value == pytest.approx(2500, rel=0.1) and found.low < 2500 < found.high
    with pytest.raises(estimate.Undetermined, match="too small"):
        estimate.noise_scale(1e3, 8e3, [1.0, 1.0], [1.0, 1.0])


def test_tokens_to_a_loss_lie_between_two_points():
    tokens = [10, 20, 30, 40]
    assert estimate.tokens_to(2.5, tokens, [4.0, 3.0, 2.0, 1.0], half=0) == pytest.approx(25)
    assert estimate.tokens_to(0.5, tokens, [4.0, 3.0, 2.0, 1.0], half=0) is None
