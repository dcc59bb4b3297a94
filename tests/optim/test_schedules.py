"""The learning rate at named points, for all shapes."""

import numpy as np
import pytest
import tiny

from jaxscale.core.optim.config import OptimConfig
from jaxscale.core.optim.optimizer import optim_schedule
from jaxscale.program.budget import resolve_budget
from jaxscale.system.exits import BadInput

PEAK, MIN = 3e-4, 3e-5
DECAYS = ["cosine", "linear", "wsd", "constant", "inverse_sqrt", "piecewise"]


def rates(
    decay, warmup_steps=10, total_steps=100, decay_fraction=0.2, beyond=50, *, min_lr=MIN, shape="linear", **more
):
    """Rates of steps 0 to total_steps + beyond - 1."""
    cfg = OptimConfig(decay=decay, peak_lr=PEAK, min_lr=min_lr, decay_fraction=decay_fraction, decay_shape=shape)
    schedule = optim_schedule(cfg, warmup_steps=warmup_steps, total_steps=total_steps, **more)
    return np.asarray([schedule(step) for step in range(total_steps + beyond)])


@pytest.mark.parametrize("decay", DECAYS)
def test_the_first_step_learns_and_the_warmup_ends_at_the_peak(decay):
    found = rates(decay, beyond=0)
    np.testing.assert_allclose(found[:10], PEAK * np.arange(1, 11) / 10, rtol=1e-6)
    assert found.max() == np.float32(PEAK) and found.min() > 0


@pytest.mark.parametrize(
    ("warmup_steps", "total_steps"), [(10, 100), (0, 100), (0, 2), (1, 2), (9, 10), (8, 10), (0, 1)]
)
@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_the_last_step_and_all_beyond_the_horizon_have_the_smallest_rate_exactly(decay, warmup_steps, total_steps):
    found = rates(decay, warmup_steps, total_steps)
    np.testing.assert_array_equal(found[total_steps - 1 :], np.float32(MIN))


@pytest.mark.parametrize("decay_fraction", [0.001, 0.2, 1.0])
def test_wsd_reaches_the_smallest_rate_however_short_its_decay_is(decay_fraction):
    assert rates("wsd", decay_fraction=decay_fraction)[99] == np.float32(MIN)


@pytest.mark.parametrize("decay", DECAYS)
def test_a_run_that_is_all_warmup_ends_at_the_peak(decay):
    found = rates(decay, warmup_steps=20, total_steps=20, beyond=1)
    assert found[19] == np.float32(PEAK)
    after = {"constant": PEAK, "piecewise": PEAK, "inverse_sqrt": PEAK * np.sqrt(20 / 21)}
    np.testing.assert_allclose(found[20], after.get(decay, MIN), rtol=1e-6)


@pytest.mark.parametrize("decay", DECAYS)
def test_after_the_warmup_the_rate_never_rises(decay):
    found = rates(decay)
    assert (np.diff(found[9:]) <= 0).all() and (np.diff(found[:10]) > 0).all()


def test_the_middle_is_what_each_shape_says():
    # 10 warmup steps, then 90 steps from 10 to 99: the middle of the fall is step 54.5.
    middle = (PEAK + MIN) / 2
    for decay in ("cosine", "linear"):
        np.testing.assert_allclose(rates(decay)[54:56].mean(), middle, rtol=1e-6)
    quarter = 10 + 89 / 4
    steps = np.array([int(quarter), int(quarter) + 1])
    np.testing.assert_allclose(np.interp(quarter, steps, rates("linear")[steps]), MIN + 0.75 * (PEAK - MIN), rtol=1e-5)
    np.testing.assert_allclose(
        np.interp(quarter, steps, rates("cosine")[steps]),
        MIN + (PEAK - MIN) * (0.5 + 0.5 * np.cos(np.pi / 4)),
        rtol=1e-4,
    )


def test_wsd_stays_at_the_peak_until_its_decay():
    found = rates("wsd")
    np.testing.assert_array_equal(found[9:81], np.float32(PEAK))
    np.testing.assert_allclose(found[80:100], np.linspace(PEAK, MIN, 20), rtol=1e-5)


def test_constant_stays_at_the_peak_for_ever():
    np.testing.assert_array_equal(rates("constant")[10:], np.float32(PEAK))


def test_a_smallest_rate_of_zero_is_reached_at_the_end_and_not_before():
    found = rates("cosine", min_lr=0.0)
    assert found[98] > 0 and found[99] == 0


def test_inverse_sqrt_is_that_of_the_paper_after_the_warmup():
    steps = np.arange(1, 151)  # arXiv:1706.03762, equation 3, scaled so that its top is the peak
    due = PEAK * np.sqrt(10) * np.minimum(steps**-0.5, steps * 10**-1.5)
    np.testing.assert_allclose(rates("inverse_sqrt"), due, rtol=1e-6)


def test_piecewise_has_each_factor_from_its_step_on():
    found = rates("piecewise", factors=[(80, 0.316), (90, 0.1)])
    np.testing.assert_allclose(found[10:80], PEAK, rtol=1e-6)
    np.testing.assert_allclose(found[80:90], 0.316 * PEAK, rtol=1e-6)
    np.testing.assert_allclose(found[90:], 0.1 * PEAK, rtol=1e-6)


def test_the_decay_of_wsd_may_be_one_minus_sqrt():
    found = rates("wsd", shape="one_minus_sqrt")
    np.testing.assert_array_equal(found[9:81], np.float32(PEAK))
    due = MIN + (PEAK - MIN) * (1 - np.sqrt(np.arange(20) / 19))
    np.testing.assert_allclose(found[80:100], due, rtol=1e-5)


@pytest.mark.parametrize("decay", ["wsd", "constant"])
def test_a_decay_may_begin_at_a_step_of_its_own(decay):
    found = rates(decay, decay_start=60)
    np.testing.assert_array_equal(found[9:61], np.float32(PEAK))
    np.testing.assert_allclose(found[60:100], np.linspace(PEAK, MIN, 40), rtol=1e-5)
    assert found[99] == np.float32(MIN)


def budget_of(**optim):
    """The amounts of a run of 100 steps of 32 tokens."""
    return resolve_budget(tiny.config({"train_tokens": "100 steps", "optim": optim}), None)


def test_the_steps_of_a_schedule_follow_from_tokens_steps_and_percents():
    assert budget_of(decay="piecewise").factors == ((80, 0.316), (90, 0.1)), "as arXiv:2401.02954"
    tokens = tiny.config().tokens_per_step
    rules = (f"{10 * tokens}=>0.5", "20 steps=>0.25", "50%=>0")
    assert budget_of(decay="piecewise", factors=rules).factors == ((10, 0.5), (20, 0.25), (50, 0.0))
    assert budget_of(decay="wsd", decay_tokens="30 steps").decay_start == 70
    assert str(budget_of(decay="wsd", decay_tokens="30 steps")).endswith("warmup 1 steps, decay from step 70")
    told = "learning rate x0.316 from step 80, learning rate x0.1 from step 90"
    assert str(budget_of(decay="piecewise")).endswith(told)
    assert budget_of(decay="wsd").decay_start is None and budget_of(decay="constant").factors == ()


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        (dict(decay="piecewise", factors=("80%",)), r"optim: '80%' in factors .* the form 'WHEN=>FACTOR'"),
        (dict(decay="piecewise", factors=("80%=>-1",)), "factors must be finite and at least 0"),
        (dict(decay="piecewise", factors=("soon=>1",)), "factors='soon' is not an amount of training"),
        (dict(decay="piecewise", factors=("80%=>0.3", "5 steps=>0.1")), "start at steps 80, 5 of this"),
        (dict(decay="wsd", decay_tokens="101 steps"), "optim.decay_tokens=101 steps must be above 0 and not exceed"),
        (dict(decay="wsd", decay_tokens=0), "optim.decay_tokens=0 must be above 0"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_is_refused(optim, message):
    with pytest.raises(BadInput, match=message):
        budget_of(**optim)
