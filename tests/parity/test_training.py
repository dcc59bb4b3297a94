"""Fifty steps of our optimizer and train step follow torch's AdamW, and our schedules those of transformers."""

import types

import jax
import numpy as np
import pytest
from twins import twins

from jaxscale.core.batch import Batch
from jaxscale.core.config import LossScaleConfig, StepConfig
from jaxscale.core.gradients import accumulate
from jaxscale.core.models.layers import merge_model, split_model
from jaxscale.core.models.model import logits, make_model, summed_loss
from jaxscale.core.optim.config import OptimConfig
from jaxscale.core.optim.groups import assign_groups
from jaxscale.core.optim.optimizer import make_optimizer, optim_schedule
from jaxscale.core.setup import Updates
from jaxscale.core.state import init_loss_scale, init_state
from jaxscale.core.step import make_train_step


def full_rows(tokens_BU):
    """T + 1 tokens a row as a batch in which each of T positions has a target."""
    inputs_BT = tokens_BU[:, :-1]
    positions_BT = np.broadcast_to(np.arange(inputs_BT.shape[1], dtype=np.int32), inputs_BT.shape)
    ones_BT = np.ones_like(inputs_BT)
    return Batch(inputs_BT, tokens_BU[:, 1:], positions_BT, ones_BT, ones_BT.astype(np.float32))


@pytest.mark.parametrize("num_microbatches", twins([1, 2], 2))
def test_fifty_adamw_steps_follow_torch(num_microbatches, parity):
    start, reference = parity.load("llama"), parity.load("llama_training")
    told, batches = reference.config, reference["batches"]
    cfg = parity.config(told)
    params = parity.params(cfg, start.weights)
    params["head"] = params["head"] * np.float32(told["lm_head_scale"])
    made = jax.eval_shape(lambda key: make_model(cfg, key=key), jax.random.key(0))
    graphdef, _, axes = split_model(made)

    optim = OptimConfig(
        **{name: told[name] for name in ("peak_lr", "min_lr", "b1", "b2", "eps", "weight_decay", "clip_norm")}
    )
    schedule = optim_schedule(optim, warmup_steps=told["warmup_steps"], total_steps=len(batches))
    optimizer = make_optimizer(optim, schedule, assign_groups(axes, (), optim.weight_decay, weight_decay_all=False))
    loss_fn = lambda params, batch, keys_B: summed_loss(merge_model(graphdef, params), batch, keys_B, {})
    compute = lambda state, batch: accumulate(
        loss_fn, state.params, batch, jax.random.key(0), num_microbatches=num_microbatches, scale=state.loss_scale.value
    )
    step = jax.jit(make_train_step(types.SimpleNamespace(compute=compute), Updates(optimizer, schedule), StepConfig()))
    state = init_state(params, optimizer, init_loss_scale(LossScaleConfig(), "float32"), jax.random.key(0))
    rows = []
    for tokens_BU in batches:
        state, metrics = step(state, full_rows(tokens_BU))
        rows.append([metrics["loss"], metrics["grad_norm"], metrics["lr"]])
    losses, norms, rates = np.array(rows).T

    np.testing.assert_allclose(rates, reference["lr"], rtol=1e-6)
    # Rounding differs from the first step and Adam divides by small moments, so the runs part slowly: 1e-5 in the
    # losses, 5e-5 in the norms and 5e-4 in the logits after 50 steps (2026-11-20, x86 CPU).
    np.testing.assert_allclose(losses, reference["losses"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(norms, reference["grad_norms"], rtol=1e-3)
    final = logits(merge_model(graphdef, state.params), start["tokens"])
    np.testing.assert_allclose(final, reference["final_logits"], rtol=0, atol=3e-3)
    assert losses[0] - losses[-1] > 2, "the reference run learns, so that following it means something"


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_schedules_are_those_of_transformers(decay, parity):
    """Theirs give step 0 a rate of 0, so our warmup is theirs one step later; after it both count alike."""
    reference = parity.load("schedules")
    told = reference.config
    warmup, steps = told["warmup"], told["steps"]
    schedule = optim_schedule(
        OptimConfig(decay=decay, peak_lr=told["peak"], min_lr=told["low"] if decay == "cosine" else 0.0),
        warmup_steps=warmup,
        total_steps=steps + 1,
    )
    ours = np.array([schedule(step) for step in range(steps + 1)])
    np.testing.assert_allclose(ours[:warmup], reference[decay][1 : warmup + 1], rtol=1e-6)
    np.testing.assert_allclose(ours[warmup:], reference[decay][warmup:], rtol=1e-5, atol=1e-7)
