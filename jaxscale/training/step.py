"""The training step: pure, compiled once, short enough to read at one sight. B batch  T position"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.data.batch import HASH_SALTS, Batch, hashed_parts, joined_rows, mixed_tokens
from jaxscale.ops.recorder import SOWN
from jaxscale.optim.schedules import Schedule
from jaxscale.sharding.offload import is_on_host
from jaxscale.training import guard
from jaxscale.training.balance import bias_ends
from jaxscale.training.config import TrainConfig
from jaxscale.training.ema import update_ema
from jaxscale.training.state import TrainState, adjust_loss_scale

Means = dict[str, Any]  # of each named loss, and the scores of attention under SOWN
Gradients = Callable[[TrainState, Batch], tuple[Means, Any]]  # those of the mean loss
Rebalance = Callable[[Any, Means], Any]
QkClip = Callable[[Any, Any], tuple[Any, Means]]  # (parameters, scores) -> (parameters, what is told)
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Means]]


def make_train_step(
    gradients: Gradients,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    cfg: TrainConfig,
    *,
    dynamic_scale: bool = False,
    clip_norm: float = 0.0,
    count_gated: bool = False,
    rebalance: Rebalance | None = None,
    data_row: int | None = None,
    qk_clip: QkClip | None = None,
) -> TrainStep:
    """Builds the pure step (state, batch) -> (state, metrics); build.py jits it and donates the state.

    clip_norm: of the optimizer, for the guard. count_gated: also count the rows that the data's row filter left without
    weight, as gated_rows does. rebalance: what is done to parameters after their update, by the step's counts.
    data_row: tokens in a row of the data, where those of the batch are cut from these. qk_clip: what is done to
    parameters after all that, by the largest scores of attention.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Means]:
        means, grads = gradients(state, batch)
        scores = means.pop(SOWN, None)
        grad_norm = optax.tree.norm(grads)  # before clipping, which would hide a spike
        finite = jnp.isfinite(grad_norm)
        excused = ~finite & (state.loss_scale.value > cfg.loss_scale.min) if dynamic_scale else False
        ok, verdict, guard_state = guard.inspect(
            cfg.guard, state.guard, means["objective"], grad_norm, excused, clip_norm, means["real_tokens"] == 0
        )

        lr_factor = guard.lr_factor(state.guard, state.step)  # below 1 for a while after recovery has cut it
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(
                grads, state.opt_state, state.params, step=state.step, ok=ok, lr_factor=lr_factor
            )
            params = jax.tree.map(add_update, state.params, updates)
            params = params if rebalance is None else rebalance(params, means)
            params, clipped = (params, {}) if qk_clip is None else qk_clip(params, scores)
        # A bad step changes nothing. What is on the host was kept, or not, where it was renewed.
        keep_one = lambda new, old: new if new is old or is_on_host(new) else jnp.where(ok, new, old)
        keep = lambda new, old: jax.tree.map(keep_one, new, old)
        new_state = state._replace(
            step=state.step + 1,
            params=keep(params, state.params),
            opt_state=keep(opt_state, state.opt_state),
            loss_scale=adjust_loss_scale(cfg.loss_scale, state.loss_scale, finite)
            if dynamic_scale
            else state.loss_scale,
            guard=guard_state,
            ema=keep(update_ema(cfg.ema, state.ema, params, state.step), state.ema),
        )
        rows = batch if data_row is None else joined_rows(batch, data_row)  # whose hash and filter are of whole rows
        metrics = means | {
            "grad_norm": grad_norm,
            "lr": schedule(state.step) * lr_factor,
            "loss_scale": state.loss_scale.value,
            "tokens_seen": tokens_seen(rows),
            **guard.told(state.guard, guard_state, ok, verdict),
            **clipped,
        }
        if count_gated:
            metrics["gated_rows"] = gated_rows(rows)
        if rebalance is not None:
            metrics |= bias_ends(new_state.params)
        return new_state, metrics

    return train_step


def at_state(gradients: Callable[[Any, Batch, jax.Array, jax.Array], tuple[Means, Any]]) -> Gradients:
    """gradients(params, batch, key, scale) with the parameters, random key and loss scale of a state."""

    def gradients_at(state: TrainState, batch: Batch) -> tuple[Means, Any]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        return gradients(state.params, batch, key, state.loss_scale.value)

    return gradients_at


def make_gradient_norms(gradients: Gradients) -> Callable[[TrainState, Batch], dict[str, jax.Array]]:
    """(state, batch) -> the norm of each gradient by its parameter's name."""

    def gradient_norms(state: TrainState, batch: Batch) -> dict[str, jax.Array]:
        _, grads = gradients(state, batch)
        return {leaf_name(path): optax.tree.norm(grad) for path, grad in jax.tree_util.tree_leaves_with_path(grads)}

    return gradient_norms


def gated_rows(batch: Batch) -> jax.Array:
    """int32[]: rows of the whole batch that hold text and weigh nothing, on any mesh.

    They are those of the row filter, and the few without a target of their own: only documents of one token, or none to
    mask.
    """
    return jnp.sum(jnp.any(batch.segment_ids > 0, axis=1) & ~jnp.any(batch.weights > 0, axis=1), dtype=jnp.int32)


def add_update(param: jax.Array, update: Any) -> Any:
    """param + update; itself where it is frozen and has none. For one on the host the update is the new parameter."""
    if isinstance(update, optax.MaskedNode):
        return param
    if is_on_host(param):
        return update if is_on_host(update) else param
    return optax.apply_updates(param, update)


def leaf_name(path: Any) -> str:
    """'blocks/mlp/up', as checkpoints name it behind 'params/'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def tokens_seen(batch: Batch) -> jax.Array:
    """uint32[2]: what data.batch.tokens_hash gives for the whole batch, on any mesh and for any number of processes.

    Its words are added modulo 2**32, so that neither the sharding nor the order of the sum matters. One process alone
    could hash only the rows that it has read.
    """
    sums = [summed_words(words_BT, first_column) for words_BT, first_column in hashed_parts(batch)]
    return sum(sums[1:], sums[0])


def summed_words(tokens_BT: jax.Array, first_column: int) -> jax.Array:
    """uint32[2]: the sums for ids whose columns are numbered from first_column on."""
    row_BT = jax.lax.broadcasted_iota(jnp.uint32, tokens_BT.shape, 0)
    column_BT = jax.lax.broadcasted_iota(jnp.uint32, tokens_BT.shape, 1) + jnp.uint32(first_column)
    words_BT = tokens_BT.astype(jnp.uint32)
    sums = [jnp.sum(mixed_tokens(words_BT, row_BT, column_BT, salt), dtype=jnp.uint32) for salt in HASH_SALTS]
    return jnp.stack(sums)
