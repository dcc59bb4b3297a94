"""What the guard lets through, and what the window that it judges by is made of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.core.config import GuardConfig
from jaxscale.core.guard import APPLY, GOOD, NEW_LEVEL, SKIP, VERDICTS, check, init_guard, loss_median, lr_factor

NAN, INF = float("nan"), float("inf")


@functools.cache
def compiled(cfg, excused, clip_norm):
    return jax.jit(lambda state, loss, norm: check(cfg, state, loss, norm, excused, clip_norm=clip_norm))


def judged(losses, norms=None, state=None, clip_norm=0.0, excused=False, **settings):
    """(verdict of each step, the last state)."""
    cfg = GuardConfig(window_steps=10, **settings)
    state = init_guard(cfg.window_steps) if state is None else state
    step = compiled(cfg, excused, clip_norm)
    verdicts = []
    for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
        ok, verdict, state = step(state, jnp.float32(loss), jnp.float32(norm))
        assert bool(ok) == (verdict in (GOOD, NEW_LEVEL))
        verdicts.append(VERDICTS[int(verdict)])
    return verdicts, state


def test_a_loss_is_judged_by_the_median_of_the_good_steps_before_it():
    losses = [4.0, 4.1, 3.9] * 4
    verdicts, state = judged([*losses, 7.9, 8.1, 4.0])
    assert verdicts == ["good"] * 13 + ["loss by median", "good"] and float(loss_median(state)) == pytest.approx(4.0)
    assert judged([*losses, 1e3], spike_ratio=0.0)[0][-1] == "good"


def test_the_first_steps_are_not_judged_by_a_median():
    assert judged([8.0] + [1.0] * 8 + [5.0])[0] == ["good"] * 10
    assert judged([1.0] * 10 + [5.0])[0][-1] == "loss by median"


@pytest.mark.fault("F10")
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
def test_bad_steps_never_enter_the_window_and_the_next_good_one_trains(bad):
    verdicts, state = judged([3.0] * 12 + [bad] * 30 + [3.0])
    assert set(verdicts[12:42]) <= {"not finite", "loss by median"} and verdicts[42] == "good"
    assert int(state.seen) == 13 and int(state.skipped) == 30 and int(state.skipped_in_row) == 0
    _, state = judged([3.0] * 12 + [bad] * 3)
    assert set(np.asarray(state.losses).tolist()) == {3.0} and int(state.skipped_in_row) == 3


def test_a_loss_that_stays_high_is_believed_after_a_few_steps_and_judged_by_its_own_like():
    verdicts, state = judged([3.0] * 12 + [8.0] * 20 + [30.0], max_spikes_in_row=4)
    spikes = ["loss by median"] * 4
    assert verdicts == ["good"] * 12 + spikes + ["new level"] + ["good"] * 15 + ["loss by median"]
    assert float(loss_median(state)) == 8.0 and (int(state.skipped), int(state.spikes_in_row)) == (5, 1)
    levels = [3.0] * 12 + [8.0] * 3 + [3.0] + [8.0] * 3
    assert "new level" not in judged(levels, max_spikes_in_row=4)[0]  # in a row
    norms = judged([3.0] * 20, [1.0] * 12 + [9.0] * 8, max_spikes_in_row=2, spike_sigma=6.0)[0]
    assert norms[12:] == ["norm by sigmas"] * 2 + ["new level"] + ["good"] * 5


@pytest.mark.fault("F10")
def test_what_is_not_finite_or_absurd_is_never_believed():
    assert set(judged([3.0] * 12 + [NAN] * 9, max_spikes_in_row=1)[0]) == {"good", "not finite"}
    assert set(judged([3.0] * 21, [1.0] * 12 + [1e6] * 9, max_spikes_in_row=1)[0]) == {"good", "absurd norm"}
    both = judged([3.0] * 12 + [9.0] * 9, [1.0] * 12 + [1e6] * 9, max_spikes_in_row=1)[0]
    assert "new level" not in both
    clipped = judged([3.0] * 12 + [9.0] * 9, [1.0] * 12 + [9.0] * 9, None, 1.0, max_spikes_in_row=1, grad_ratio=3.0)
    assert "new level" not in clipped[0]


def test_a_new_level_is_believed_at_the_same_step_where_it_is_replayed():
    losses = [3.0] * 12 + [8.0] * 6
    verdicts, old = judged(losses, max_spikes_in_row=4)
    state = init_guard(10)
    for loss, verdict in zip(losses, verdicts, strict=True):
        order = APPLY if verdict in ("good", "new level") else SKIP
        _, state = judged([loss], state=state._replace(order=jnp.int32(order)), max_spikes_in_row=4)
    assert (int(state.seen), np.asarray(state.losses).tolist()) == (int(old.seen), np.asarray(old.losses).tolist())


def test_an_excused_overflow_has_a_verdict_of_its_own_and_is_none_in_a_row():
    state = judged([3.0] * 2 + [NAN])[1]
    verdicts, state = judged([NAN] * 3, state=state, excused=True)
    assert verdicts == ["loss scale"] * 3 and (int(state.skipped), int(state.skipped_in_row)) == (4, 1)


def test_a_loss_near_nothing_may_double():
    assert judged([0.01] * 12 + [0.05, 0.6])[0][-2:] == ["good", "loss by median"]


def test_the_window_forgets_what_is_older_than_it():
    _, state = judged([float(n) for n in range(20, 0, -1)])
    assert sorted(np.asarray(state.losses).tolist()) == [float(n) for n in range(1, 11)]


def test_sigmas_are_robust_and_apply_to_losses_and_norms():
    losses = [3.0 + 0.01 * (n % 5) for n in range(20)]
    assert judged([*losses, 3.06], spike_sigma=6.0)[0][-1] == "good"
    assert judged([*losses, 3.5], spike_sigma=6.0)[0][-1] == "loss by sigmas"
    norms = [1.0 + 0.01 * (n % 5) for n in range(20)]
    assert judged([3.0] * 21, [*norms, 1.5], spike_sigma=6.0)[0][-1] == "norm by sigmas"
    assert judged([3.0] * 20 + [np.nextafter(np.float32(3), np.float32(4))], spike_sigma=6.0)[0][-1] == "good"


def test_norms_are_judged_by_the_clip_and_by_the_absurd():
    clipped = judged([3.0] * 13, [9.0] * 10 + [2.9, 3.1, 3.1], clip_norm=1.0, grad_ratio=3.0)[0]
    assert clipped == ["good"] * 11 + ["norm by clip"] * 2  # the first steps have large gradients
    assert judged([3.0] * 2, [50.0, 3e4], clip_norm=1.0)[0] == ["good", "absurd norm"]


def test_orders_overrule_the_judgement_but_never_apply_what_is_not_finite():
    def ordered(order, loss):
        state = judged([3.0] * 12)[1]._replace(order=jnp.int32(order))
        return judged([loss], state=state)[0][0]

    assert [ordered(SKIP, 3.0), ordered(APPLY, 30.0), ordered(APPLY, NAN)] == ["ordered", "good", "not finite"]


def test_a_cut_holds_for_its_steps_alone():
    state = init_guard()._replace(lr_factor=jnp.float32(0.1), cut_until=jnp.int32(7))
    assert [float(lr_factor(state, jnp.int32(step))) for step in (5, 6, 7)] == pytest.approx([0.1, 0.1, 1.0])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"window_steps": 5}, "window_steps=5"),
        ({"spike_ratio": 0.5}, "spike_ratio=0.5"),
        ({"grad_ratio": -1.0}, "grad_ratio"),
    ],
)
def test_settings_that_could_only_harm_are_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        GuardConfig(**settings)
