"""The training step, a pure function that is compiled once. B batch  T position"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.core import guard
from jaxscale.core.batch import HASH_SALTS, Batch, hashed_token_arrays, mix_tokens, reshape_rows
from jaxscale.core.config import StepConfig
from jaxscale.core.gradients import Gradients, Metrics
from jaxscale.core.models.moe_balance import bias_range
from jaxscale.core.recorder import SOWN
from jaxscale.core.setup import Updates
from jaxscale.core.state import TrainState, adjust_loss_scale, update_ema
from jaxscale.kernels.host_memory import is_on_host

UpdateBalance = Callable[[Any, Metrics], Any]  # (parameters, means) -> parameters
QkClip = Callable[[Any, Any], tuple[Any, Metrics]]  # (parameters, intermediates) -> (parameters, metrics)
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_train_step(
    gradients: Gradients,
    updates: Updates,
    cfg: StepConfig,
    *,
    dynamic_scale: bool = False,
    count_gated: bool = False,
    update_balance: UpdateBalance | None = None,
    data_row: int | None = None,
    qk_clip: QkClip | None = None,
) -> TrainStep:
    """Returns the pure step (state, batch) -> (state, metrics). build.py jits it and donates the state.

    count_gated: whether metrics include gated_rows. update_balance: sets router loads and biases of the updated
    parameters. data_row: sequence length in the data, if the batch contains parts of these sequences. qk_clip: scales
    query and key weights of heads with large scores, after all other updates.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        means, grads = gradients.compute(state, batch)
        intermediates = means.pop(SOWN, None)
        grad_norm = optax.tree.norm(grads)  # before clipping, which would hide a spike
        finite = jnp.isfinite(grad_norm)
        excused = ~finite & (state.loss_scale.value > cfg.loss_scale.min) if dynamic_scale else False
        empty, clip_norm = means["real_tokens"] == 0, updates.clip_norm
        ok, verdict, guard_state = guard.check(
            cfg.guard, state.guard, means["objective"], grad_norm, excused, clip_norm, empty
        )

        lr_factor = guard.lr_factor(state.guard, state.step)
        with jax.named_scope("optimizer"):
            changes, opt_state = updates.optimizer.update(
                grads, state.opt_state, state.params, step=state.step, ok=ok, lr_factor=lr_factor
            )
            params = jax.tree.map(apply_update, state.params, changes)
            params = params if update_balance is None else update_balance(params, means)
            params, clip_metrics = (params, {}) if qk_clip is None else qk_clip(params, intermediates)
        new_state = next_state(cfg, state, params, opt_state, guard_state, ok, finite if dynamic_scale else None)
        rows = batch if data_row is None else reshape_rows(batch, data_row)  # hash and row filter need whole rows
        metrics = means | {
            "grad_norm": grad_norm,
            "lr": updates.schedule(state.step) * lr_factor,
            "loss_scale": state.loss_scale.value,
            "tokens_seen": hash_tokens(rows),
            **guard.guard_metrics(state.guard, guard_state, ok, verdict),
            **clip_metrics,
        }
        if count_gated:
            metrics["gated_rows"] = gated_rows(rows)
        if update_balance is not None:
            metrics |= bias_range(new_state.params)
        return new_state, metrics

    return train_step


def next_state(
    cfg: StepConfig,
    state: TrainState,
    params: Any,
    opt_state: Any,
    guard_state: guard.GuardState,
    ok: jax.Array,
    finite: jax.Array | None,
) -> TrainState:
    """Returns the state after a step. A rejected step changes only the step count, the guard and the loss scale.

    finite: bool[], True for finite gradients; None if the loss scale is constant.
    """
    # The optimizer has already applied `ok` to arrays in host memory.
    select_leaf = lambda new, old: new if new is old or is_on_host(new) else jnp.where(ok, new, old)
    select = lambda new, old: jax.tree.map(select_leaf, new, old)
    return state._replace(
        step=state.step + 1,
        params=select(params, state.params),
        opt_state=select(opt_state, state.opt_state),
        loss_scale=state.loss_scale if finite is None else adjust_loss_scale(cfg.loss_scale, state.loss_scale, finite),
        guard=guard_state,
        ema=select(update_ema(cfg.ema, state.ema, params, state.step), state.ema),
    )


def make_gradient_norms(gradients: Gradients) -> Callable[[TrainState, Batch], dict[str, jax.Array]]:
    """Returns a function (state, batch) -> {parameter name: gradient norm}."""

    def gradient_norms(state: TrainState, batch: Batch) -> dict[str, jax.Array]:
        _, grads = gradients.compute(state, batch)
        return {leaf_name(path): optax.tree.norm(grad) for path, grad in jax.tree_util.tree_leaves_with_path(grads)}

    return gradient_norms


def gated_rows(batch: Batch) -> jax.Array:
    """Returns the number of sequences in the global batch that have text but zero weight, int32[].

    The row filter rejected these sequences, or they have no targets, such as documents of a single token.
    """
    return jnp.sum(jnp.any(batch.segment_ids > 0, axis=1) & ~jnp.any(batch.weights > 0, axis=1), dtype=jnp.int32)


def apply_update(param: jax.Array, update: Any) -> Any:
    """Returns param + update, or a frozen param unchanged. The update of a param in host memory is its new value."""
    if isinstance(update, optax.MaskedNode):
        return param
    if is_on_host(param):
        return update if is_on_host(update) else param
    return optax.apply_updates(param, update)


def leaf_name(path: Any) -> str:
    """Formats a key path as 'blocks/mlp/up', which follows 'params/' in checkpoints."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def hash_tokens(batch: Batch) -> jax.Array:
    """Returns tokens_hash() (runtime/data/stacking.py) of the global batch, uint32[2].

    Hashes are added modulo 2**32, so the sum does not depend on sharding or order. It is computed in the step,
    because each process reads only a part of the batch.
    """
    sums = [sum_hash_words(words_BT, first_column) for words_BT, first_column in hashed_token_arrays(batch)]
    return sum(sums[1:], sums[0])


def sum_hash_words(tokens_BT: jax.Array, first_column: int) -> jax.Array:
    """Returns the sums of token hashes, uint32[2]. first_column: column number of the first token."""
    row_BT = jax.lax.broadcasted_iota(jnp.uint32, tokens_BT.shape, 0)
    column_BT = jax.lax.broadcasted_iota(jnp.uint32, tokens_BT.shape, 1) + jnp.uint32(first_column)
    words_BT = tokens_BT.astype(jnp.uint32)
    sums = [jnp.sum(mix_tokens(words_BT, row_BT, column_BT, salt), dtype=jnp.uint32) for salt in HASH_SALTS]
    return jnp.stack(sums)
