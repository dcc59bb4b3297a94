"""The optimizer is optax's where optax has it, and follows the step that it is told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxscale.core.optim.config import OptimConfig
from jaxscale.core.optim.groups import assign_groups
from jaxscale.core.optim.optimizer import make_optimizer, optim_schedule

AXES = {"wq": ("embed", "heads"), "up": ("embed", "mlp")}
SCHEDULE = optim_schedule(OptimConfig(peak_lr=1e-2, min_lr=1e-3), warmup_steps=3, total_steps=12)


def params_and_grads(steps):
    rng = np.random.default_rng(0)
    draw = lambda scale: {name: jnp.asarray(scale * rng.normal(size=(4, 6)), jnp.float32) for name in AXES}
    return draw(1.0), [draw(10.0 ** (n % 4 - 2)) for n in range(steps)]  # some below the clip norm, some above


def train(optimizer, params, grads, **extra):
    """Parameters after each step."""
    state, seen = optimizer.init(params), []
    for number, grad in enumerate(grads):
        updates, state = optimizer.update(grad, state, params, **{name: number for name in extra})
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen


def ours(**settings):
    cfg = OptimConfig(**settings)
    return make_optimizer(cfg, SCHEDULE, assign_groups(AXES, (), cfg.weight_decay, cfg.weight_decay_all))


REFERENCES = {
    "adamw": optax.adamw(SCHEDULE, 0.9, 0.95, 1e-8, weight_decay=0.1),
    "lion": optax.lion(SCHEDULE, 0.9, 0.95, weight_decay=0.1),
    "sgd": optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(SCHEDULE)),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_an_update_is_optax_s(name):
    params, grads = params_and_grads(12)
    reference = optax.chain(optax.clip_by_global_norm(1.0), REFERENCES[name])
    for mine, theirs in zip(train(ours(name=name), params, grads, step=0), train(reference, params, grads)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), mine, theirs)


def test_the_rate_is_that_of_the_step_which_is_told():
    params, grads = params_and_grads(1)
    optimizer = ours(weight_decay=0.0)
    state = optimizer.init(params)
    update = lambda step: optimizer.update(grads[0], state, params, step=step)[0]["wq"]
    for step in (1, 5, 11, 100):  # the optimizer's own count is 0 all the time
        np.testing.assert_allclose(update(step) / update(0), SCHEDULE(step) / SCHEDULE(0), rtol=1e-5)


def test_a_large_gradient_is_clipped_to_the_norm_and_a_small_one_is_left():
    params, _ = params_and_grads(0)
    optimizer = ours(name="sgd", b1=0.0, weight_decay=0.0, clip_norm=0.5)
    norm = lambda grads: float(optax.tree.norm(optimizer.update(grads, optimizer.init(params), params, step=2)[0]))
    grads = jax.tree.map(jnp.ones_like, params)
    np.testing.assert_allclose(norm(grads), 0.5 * 1e-2, rtol=1e-5)
    small = jax.tree.map(lambda grad: 1e-3 * grad, grads)
    np.testing.assert_allclose(norm(small), float(optax.tree.norm(small)) * 1e-2, rtol=1e-5)


def test_a_clip_norm_of_zero_clips_nothing():
    params, _ = params_and_grads(0)
    optimizer = ours(name="sgd", b1=0.0, weight_decay=0.0, clip_norm=0.0)
    grads = jax.tree.map(lambda p: 100 * jnp.ones_like(p), params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params, step=2)
    np.testing.assert_allclose(updates["wq"], -1.0, rtol=1e-5)


OUT_OF_RANGE = dict(b1=1.0, b2=-0.1, decay_fraction=0.0, clip_norm=-1.0, weight_decay=-0.1, eps=-1.0, min_lr=-1e-5)


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_settings_out_of_range_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}="):
        OptimConfig(**{name: OUT_OF_RANGE[name]})


def test_a_smallest_rate_above_the_peak_is_refused():
    with pytest.raises(ValueError, match="min_lr=3e-05 must be between 0 and peak_lr=1e-06"):
        OptimConfig(peak_lr=1e-6)
