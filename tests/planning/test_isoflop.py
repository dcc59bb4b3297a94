"""Approaches 1 and 2 give the exponents of laws with known answers back, and say where runs tell nothing."""

import csv
import functools
import math
import os

import numpy as np
import pytest

from jaxscale.tools.planning import best_size, scaling
from jaxscale.tools.planning.loss_law import SAME, Point
from jaxscale.tools.planning.scaling import BESIROGLU, lowest_params, predicted_loss, train_flops

OTHER = scaling.Terms(1.5, 20.0, 40.0, 0.25, 0.21)
LAWS = {"besiroglu": BESIROGLU, "other": OTHER}
BUDGETS = (1e18, 1e19, 1e20, 1e21)


def exponent(law):
    """a of N = k C^a where a law is lowest: arXiv:2203.15556, equation 4."""
    return law.beta / (law.alpha + law.beta)


def point(params, tokens, law=BESIROGLU, off=0.0):
    """A run's end."""
    return Point(params, tokens, predicted_loss(params, tokens, law) * math.exp(off))


def of_equal_flops(law=BESIROGLU, budgets=BUDGETS, factors=(0.3, 0.5, 1, 2, 3), noise=0.0, seed=0):
    """Runs of each budget at so many times the best size."""
    rng, found = np.random.default_rng(seed), []
    for flops in budgets:
        sizes = [factor * lowest_params(flops, law) for factor in factors]
        found += [point(size, flops / 6 / size, law, rng.normal(0, noise)) for size in sizes]
    return found


def curves_of_ends(points):
    """Curves through the ends of runs, one of each size that has two."""
    found = []
    for group in best_size.group_by(points, lambda point: point.params, SAME):
        ends = sorted(group, key=lambda point: point.compute)
        if len(ends) > 1:
            per_token = math.exp(np.mean([math.log(end.compute / end.tokens) for end in ends]))
            tokens, losses = ([getattr(end, name) for end in ends] for name in ("tokens", "loss"))
            found.append(best_size.Curve(group[0].params, per_token, tokens, losses))
    return found


def of_sizes(law=BESIROGLU, sizes=6, noise=0.0, seed=0, steps=400):
    """Curves of sizes that are best from 1e18 to 1e21 FLOPs, five lengths of each: 6% above the law, falling onto it as
    a decaying schedule ends."""
    rng, found = np.random.default_rng(seed), []
    ends = np.log([lowest_params(1e18, law), lowest_params(1e21, law)])
    for size in np.exp(np.linspace(*ends, sizes)):
        for flops in np.geomspace(1e18, 1e21, 5):
            parts = np.arange(1, steps + 1) / steps
            tokens = parts * flops / 6 / size
            off = rng.normal(0, noise, steps)
            losses = predicted_loss(size, tokens, law) * (1 + 0.06 * (1 - parts)) * np.exp(off)
            found.append(best_size.curve_of_run(size, 6 * size, tokens, losses))
    return found


@pytest.mark.parametrize("name", LAWS)
def test_parabolas_give_a_known_law_back(name):
    law = LAWS[name]
    found = best_size.parabolas(of_equal_flops(law, factors=(0.6, 0.8, 1.25, 1.8, 2.5)), draws=50)
    assert found.params_exponent.middle == pytest.approx(exponent(law), abs=1e-3)
    assert found.tokens_exponent.middle == pytest.approx(1 - exponent(law), abs=1e-3)
    for optimum in found.optima:
        assert optimum.params == pytest.approx(lowest_params(optimum.flops, law), rel=0.02)
        assert train_flops(optimum.params, optimum.tokens) == pytest.approx(optimum.flops, rel=1e-6)
        assert optimum.loss == pytest.approx(predicted_loss(optimum.params, optimum.tokens, law), rel=2e-3)
    low, middle, high = found.params(1e22)
    assert low <= middle <= high and middle == pytest.approx(lowest_params(1e22, law), rel=0.02)
    assert found.tokens(1e22).middle == pytest.approx(1e22 / 6 / middle, rel=1e-6)


@pytest.mark.parametrize("sizes", [5, 12])
@pytest.mark.parametrize("name", LAWS)
def test_the_envelope_gives_a_known_law_back(name, sizes):
    """A line through the staircase itself would be 11% too flat of five sizes, of which three are inside."""
    law = LAWS[name]
    found = best_size.envelope(of_sizes(law, sizes), draws=50)
    assert found.params_exponent.middle == pytest.approx(exponent(law), abs=2e-3) and len(found.optima) == sizes - 1
    assert found.tokens_exponent.middle == pytest.approx(1 - exponent(law), abs=2e-3)
    assert found.params(1e22).middle == pytest.approx(lowest_params(1e22, law), rel=0.05)
    for edge in found.optima:
        assert edge.tokens == pytest.approx(edge.flops / 6 / edge.params, rel=1e-6)
    assert sum("the best size may be outside" in reason for reason in found.left_out) == 2


def test_curves_through_ends_of_runs_and_those_that_are_over_fix_no_edge():
    sizes, amounts = lowest_params(1e20) * 2.0 ** np.arange(-2, 3), (1e17, 1e19, 1e20, 1e22)
    ends = [point(size, flops / 6 / size) for size in sizes for flops in amounts]
    curves = curves_of_ends([*ends, point(3e12, 1e9)])
    assert [len(curve.tokens) for curve in curves] == [4] * 5
    for curve in curves:  # far apart, so that the smoothing leaves them where they are
        np.testing.assert_allclose(np.exp(best_size.smooth(curve)), [curve.tokens, curve.losses], rtol=1e-9)
    shorter = lambda curve, by: curve._replace(tokens=curve.tokens[:-by], losses=curve.losses[:-by])
    with pytest.raises(ValueError, match="at a FLOP count that some curves of these sizes do not cover"):
        best_size.envelope([shorter(curves[0], 2), shorter(curves[1], 1), *curves[2:4]])
    with pytest.raises(ValueError, match="that is not finite and above 0"):
        best_size.envelope([curves[0]._replace(losses=[3.0, 2.0, 0.0, 1.0])])


@pytest.mark.slow
def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Nominal 90%, 0.2% of noise in each run, 2% in each step of a curve."""
    held = {"parabolas": 0, "envelope": 0, "far": 0}
    for seed in range(12):
        found = best_size.parabolas(of_equal_flops(noise=0.002, seed=seed), draws=100, seed=seed)
        held["parabolas"] += found.params_exponent.low < exponent(BESIROGLU) < found.params_exponent.high
        held["far"] += found.params(1e23).low < lowest_params(1e23) < found.params(1e23).high
        found = best_size.envelope(of_sizes(noise=0.02, seed=seed), seed=seed)
        held["envelope"] += found.params_exponent.low < exponent(BESIROGLU) < found.params_exponent.high
    assert all(count >= 9 for count in held.values()), held
    assert found.params_exponent.high - found.params_exponent.low > 0.01


def test_the_same_seed_gives_the_same_interval():
    points = of_equal_flops(noise=0.01)
    first, again, other = (best_size.parabolas(points, draws=20, seed=seed) for seed in (1, 1, 2))
    assert first.draws == again.draws != other.draws and first.optima == other.optima


def test_groups_that_fix_no_size_are_left_out_with_the_reason():
    edge = [point(factor * lowest_params(1e22), 1e22 / 6 / factor / lowest_params(1e22)) for factor in (2, 4, 8)]
    few = [point(size, 1e23 / 6 / size) for size in (1e10, 2e10)]
    bent = [Point(size, 1e24 / 6 / size, loss) for size, loss in ((1e10, 2.0), (2e10, 2.1), (4e10, 2.0))]
    found = best_size.parabolas(of_equal_flops() + edge + few + bent, draws=5)
    assert [optimum.flops for optimum in found.optima] == [pytest.approx(flops) for flops in BUDGETS]
    assert found.left_out == (
        "1.00e+22 FLOPs: the minimum is outside the sizes tried",
        "1.00e+23 FLOPs: fewer than 3 sizes",
        "1.00e+24 FLOPs: the parabola has no minimum",
    )


def test_operations_that_differ_a_little_make_one_group_and_budgets_name_them():
    drift = [
        one._replace(tokens=one.tokens * (1 + 0.02 * number))
        for number, one in enumerate(of_equal_flops(budgets=[1e20]))
    ]
    assert [len(group) for group in best_size.equal_flops_groups(drift, (), 0.1)] == [5]
    assert [len(group) for group in best_size.equal_flops_groups(drift, (), 0.03)] == [2, 2, 1]
    assert [len(group) for group in best_size.equal_flops_groups(drift, (1e20, 2e20), 0.05)] == [3]


def test_too_few_runs_are_refused_with_what_is_missing():
    with pytest.raises(ValueError, match="approach 2 needs 3 FLOP budgets .* but only 2 have one"):
        best_size.parabolas(of_equal_flops(budgets=[1e18, 1e19]))
    with pytest.raises(ValueError, match="approach 1 needs 3 FLOP counts .* at least 4 sizes.*15 curves have 2 such"):
        best_size.envelope(of_sizes(sizes=3))
    for empty in (best_size.envelope, best_size.parabolas):
        with pytest.raises(ValueError, match="needs [34]"):
            empty([])


def test_the_laws_of_2020():
    """arXiv:2001.08361: by its figures' own numbers, and where it differs from the newer law."""
    laws = (scaling.KAPLAN_PARAMS, scaling.KAPLAN_TOKENS, scaling.KAPLAN_FLOPS)
    by_params, by_tokens, by_flops = (functools.partial(scaling.kaplan_power, law) for law in laws)
    assert by_params(8.8e13) == by_tokens(5.4e13) == by_flops(3.1e8 * 86_400e15) == 1.0
    assert by_params(2e9) / by_params(1e9) == pytest.approx(2**-0.076)
    assert by_tokens(2e9) / by_tokens(1e9) == pytest.approx(2**-0.095)
    assert scaling.kaplan_loss(1e9, 1e30) == pytest.approx((6.4e13 / 1e9) ** 0.076)  # data without end
    assert scaling.kaplan_loss(1e30, 1e9) == pytest.approx((1.8e13 / 1e9) ** 0.103, rel=1e-3)
    assert scaling.kaplan_loss(1e9, 2e10) > by_params(1e9) * 0.98
    day = scaling.kaplan_alternative(scaling.PF_DAY)
    assert day.params == 1.3e9 and day.tokens == pytest.approx(1.1e10, rel=0.01)
    ten = scaling.kaplan_alternative(10 * scaling.PF_DAY)
    assert ten.params / day.params == pytest.approx(10**0.73) and ten.loss < day.loss
    far = scaling.kaplan_alternative(5.76e23)  # Gopher's operations: 4 times what the newer law asks for, and more
    assert far.params > 4 * lowest_params(5.76e23) and far.tokens / far.params < 2


@pytest.mark.peer
def test_chinchillas_own_points():
    """The table of docs/loss_law.md: JAXSCALE_CHINCHILLA_CSV is data/svg_extracted_data.csv of the replication."""
    if not (file := os.environ.get("JAXSCALE_CHINCHILLA_CSV")):
        pytest.skip("needs JAXSCALE_CHINCHILLA_CSV, of github.com/epoch-research/analyzing-chinchilla at 9225883")
    with open(file, newline="") as lines:
        rows = [[float(row[name]) for name in ("Model Size", "Training FLOP", "loss")] for row in csv.DictReader(lines)]
    points = [Point(params, flops / 6 / params, loss) for params, flops, loss in rows]
    points = sorted(points, key=lambda point: point.loss)[:-5]  # as arXiv:2404.10102 leaves them out
    assert len(points) == 240
    first = best_size.envelope(curves_of_ends(points))
    assert [round(value, 3) for value in first.params_exponent] == [0.484, 0.542, 0.605]
    budgets = (1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21)
    second = best_size.parabolas(points, budgets=budgets, within=0.12)
    assert [round(value, 3) for value in second.params_exponent] == [0.428, 0.484, 0.528]
    assert [round(value / 1e9) for value in second.params(5.76e23)] == [40, 60, 90] and not second.left_out
    for found in (first, second):
        assert found.params_exponent.low < 0.50 < found.params_exponent.high  # what the paper has for both
