"""Recorders of a model's intermediates, for the statistics program. The training step uses a recorder only for QK-clip
(arXiv:2507.20534, 2.1), which scales down the query and key weights of heads with large attention logits.

A model passes each array to sow(), which returns it unchanged. A layer may be scanned or rematerialised, so its records
are outputs of the layer in addition to the residual stream. run_stack() of core.models.layers passes the results of
end_layer() for all layers to end_stack(). Similarly, layer_inputs() returns inputs of each layer, such as a KV cache
(runtime/sampling/kv_cache.py).

B batch  T position  D embed  L layers of a stack  N query heads  K kv heads  H head dim  C latent  U H without RoPE
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.core.axes.context_axis import NO_CONTEXT_AXIS, ContextAxis
from jaxscale.core.axes.tensor_axis import TensorAxis
from jaxscale.kernels.attention import windowed_or_full
from jaxscale.kernels.attention.xla import (
    EXACT,
    MaskSpec,
    as_mask_spec,
    attention_logit_bound,
    attention_logit_max,
    head_logit_max,
)
from jaxscale.kernels.config import AttentionNeeds

ATTENTION, CROSS_ATTENTION, MLP, ACTIVATION = "attention", "across", "mlp", "activation"  # records of a layer
POSITIONS = "positions"  # number of non-padding positions, by which sums are divided
MAX_LOGITS = "scores"  # largest logit of each head
LOGIT_MAX, NUM_CLIPPED = "attention_logit_max", "qk_clipped"  # metrics: largest score, number of clipped heads
SOWN = "sown"  # key of the intermediates in the sums that a loss returns


class Intermediates(NamedTuple):
    """Local statistics of a layer, float32[], or of a stack of layers, float32[L]."""

    sums: dict[str, jax.Array]  # sums of an array's mean square over non-padding positions
    maxima: dict[str, jax.Array]  # largest attention logits; float32[L, N] if per head


class Recorder:
    """Base class of recorders, which records nothing."""

    def wrap_attention(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Returns `attend` extended to record a statistic of queries and keys."""
        return attend

    def wrap_latent(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Wraps latent attention before the expansion of keys and values (core/models/latent_attention.py)."""
        return attend

    def sow(self, name: str, x_BTD: jax.Array) -> jax.Array:
        """Records an array of local positions and returns it unchanged."""
        return x_BTD

    def layer_inputs(self) -> Any:
        """Returns additional inputs for the layers of the next stack, as a tree with a leading layer axis, or None."""
        return None

    def begin_layer(self, layer_input: Any) -> None:
        """Receives the entry of layer_inputs() for the next layer."""

    def end_layer(self, x_BTD: jax.Array) -> Any:
        """Returns the records of the layer. x_BTD: the residual stream after the layer."""
        return None

    def end_stack(self, stacked: Any) -> None:
        """Receives the records of all layers of a stack."""

    def sown(self) -> dict[str, tuple[Intermediates, ...]]:
        """Returns {SOWN: records of all stacks in order}, or {} if nothing is recorded."""
        return {}


NO_RECORDER = Recorder()


class LogitRecorder(Recorder):
    """Records a statistic of the attention logits of each layer in one trace of a model, without gradients.

    logit_stat: (q, k, segments, causal=, bias_NTS=, scale=) -> float32[N] for local sequences and heads.
    """

    def __init__(self, logit_stat: Callable[..., jax.Array], tensor: TensorAxis):
        self.logit_stat, self.tensor = logit_stat, tensor
        self.logits: jax.Array | None = None  # result of logit_stat for the current layer
        self.stacks: list[Intermediates] = []

    def wrap_attention(self, attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Returns `attend` extended to record logit_stat of queries and keys."""

        def recorded_attend(q_BTNH, k_BSKH, v_BSKH, segments: jax.Array | MaskSpec, **kwargs):
            self.record(
                self.logit_stat(lax.stop_gradient(q_BTNH), lax.stop_gradient(k_BSKH), segments, **kwargs), segments
            )
            return attend(q_BTNH, k_BSKH, v_BSKH, segments, **kwargs)

        return recorded_attend

    def record(self, logits: jax.Array, segments: jax.Array | MaskSpec) -> None:
        """Records the statistic of an attention layer."""
        self.logits = logits

    def end_layer(self, x_BTD: jax.Array) -> Intermediates:
        """Returns the largest logit of each head. The values for heads on other devices are -inf."""
        logit_max_N, self.logits = self.logits, None
        assert logit_max_N is not None, "the layer has no attention"
        return Intermediates({}, {MAX_LOGITS: self.tensor.pad_remote(logit_max_N, -jnp.inf)})

    def end_stack(self, stacked: Intermediates) -> None:
        """Receives the records of all layers of a stack."""
        self.stacks.append(stacked)

    def sown(self) -> dict[str, tuple[Intermediates, ...]]:
        """Returns {SOWN: records of all stacks in order}."""
        return {SOWN: tuple(self.stacks)}


class StatisticsRecorder(LogitRecorder):
    """Records mean squares of activations and a statistic of attention logits over non-padding positions.

    logit_stat: as in LogitRecorder, but returns float32[]. name: name of the metric for this statistic.
    """

    def __init__(self, name: str, logit_stat: Callable[..., jax.Array], tensor: TensorAxis):
        super().__init__(logit_stat, tensor)
        self.name, self.layer = name, Intermediates({}, {})
        self.mask_BT: jax.Array | None = None

    def record(self, logits: jax.Array, segments: jax.Array | MaskSpec) -> None:
        """Records the statistic of an attention layer, and which positions are padding."""
        self.mask_BT = self.tensor.local(as_mask_spec(segments).segment_ids_BT > 0)
        self.layer.maxima[self.name] = jnp.maximum(self.layer.maxima.get(self.name, -jnp.inf), logits)

    def sow(self, name: str, x_BTD: jax.Array) -> jax.Array:
        """Records x_BTD, of local positions, and returns it."""
        assert self.mask_BT is not None, "attention must be recorded before the other arrays of a layer"
        mean_BT = jnp.mean(jnp.square(lax.stop_gradient(x_BTD).astype(jnp.float32)), axis=-1)
        self.layer.sums[name] = jnp.sum(mean_BT, where=self.mask_BT)
        return x_BTD

    def end_layer(self, x_BTD: jax.Array) -> Intermediates:
        """Returns the records of the layer. x_BTD: the residual stream after it."""
        self.sow(ACTIVATION, x_BTD)
        assert self.mask_BT is not None  # checked by sow()
        self.layer.sums[POSITIONS] = jnp.sum(self.mask_BT, dtype=jnp.float32)
        layer, self.layer, self.mask_BT = self.layer, Intermediates({}, {}), None
        return layer


def make_recorder(
    attention: str, needs: AttentionNeeds, tensor: TensorAxis, context: ContextAxis = NO_CONTEXT_AXIS
) -> StatisticsRecorder:
    """Returns a recorder of activations and the largest attention logit, or an upper bound on it, for one trace.

    attention: name of the attention kernel.
    """
    from jaxscale.kernels.attention.context_parallel import over_all_keys

    if attention in EXACT:
        logit_max = functools.partial(attention_logit_max, window=needs.window)
        if needs.window_layers is not None:
            logit_max = windowed_or_full(logit_max, attention_logit_max, needs.window_layers)
        return StatisticsRecorder("attention_logit_max", over_all_keys(logit_max, context), tensor)
    return StatisticsRecorder("attention_logit_bound", over_all_keys(attention_logit_bound, context), tensor)


def make_max_logit_recorder(
    attention: str, needs: AttentionNeeds, tensor: TensorAxis, context: ContextAxis = NO_CONTEXT_AXIS
) -> LogitRecorder:
    """Returns a recorder of the largest attention logit of each head, computed outside of the attention kernel."""
    from jaxscale.kernels.attention.context_parallel import over_all_keys

    logit_max = functools.partial(head_logit_max, window=needs.window)
    if needs.window_layers is not None:
        logit_max = windowed_or_full(logit_max, head_logit_max, needs.window_layers)
    return LogitRecorder(over_all_keys(logit_max, context), tensor)


def clip_heads(
    params: dict, intermediates: Sequence[Intermediates], *, limit: float, stacks: Sequence[str]
) -> tuple[dict, dict[str, jax.Array]]:
    """Scales down heads whose logits exceed the limit. Returns (parameters, metrics). intermediates are per stack."""
    maxima = [stack.maxima[MAX_LOGITS] for stack in intermediates]
    for name, max_LN in zip(stacks, maxima, strict=True):
        factor_LN = jnp.where(max_LN > limit, limit / max_LN, 1.0)  # 1 for -inf, if a head has no text
        params = params | {name: clip_stack(params[name], factor_LN)}
    metrics = {
        LOGIT_MAX: jnp.max(jnp.stack([jnp.max(max_LN) for max_LN in maxima])),
        NUM_CLIPPED: sum(jnp.sum(max_LN > limit, dtype=jnp.int32) for max_LN in maxima),
    }
    return params, metrics


def clip_stack(blocks: dict, factor_LN: jax.Array) -> dict:
    """Returns a stack of layers, with weights scaled such that each head's scores are multiplied by its factor."""
    if "attention" not in blocks:  # not stacked
        return {layer: clip_stack(block, factor_LN[int(layer)]) for layer, block in blocks.items()}
    return blocks | {"attention": clip_attention(blocks["attention"], factor_LN)}


def clip_attention(weights: dict, factor_N: jax.Array) -> dict:
    """Returns attention weights scaled such that each head's scores are multiplied by its factor."""
    root_N = jnp.sqrt(factor_N)
    if "wkv_up" in weights:
        return weights | clip_latent(weights, factor_N, root_N)
    multi_head = weights["wk"].shape[-2] == factor_N.shape[-1]
    factors = {"q": root_N, "k": root_N} if multi_head else {"q": factor_N}
    clipped = {}
    for name, scale_N in factors.items():
        clipped[f"w{name}"] = scale_weight(weights[f"w{name}"], scale_N[..., None, :, None])
        if f"bias_{name}" in weights:
            clipped[f"bias_{name}"] = scale_weight(weights[f"bias_{name}"], scale_N[..., None])
    return weights | clipped


def clip_latent(weights: dict, factor_N: jax.Array, root_N: jax.Array) -> dict:
    """Returns the scaled per-head weights of latent attention (MLA).

    Dimensions without RoPE are scaled by the square root of the factor in queries and keys. All heads share the RoPE
    key, so the RoPE dimensions of queries are scaled by the full factor.
    """
    name = "wq_up" if "wq_up" in weights else "wq"
    expand = lambda scale_N: scale_N[..., None, :, None]
    rope_dim = weights["wkv_down"].shape[-1] - weights["wkv_up"].shape[-3]  # R
    nope_dim = weights[name].shape[-1] - rope_dim  # U
    is_nope = lambda width: jnp.arange(width) < nope_dim
    return {
        name: scale_weight(
            weights[name], jnp.where(is_nope(weights[name].shape[-1]), expand(root_N), expand(factor_N))
        ),
        "wkv_up": scale_weight(weights["wkv_up"], jnp.where(is_nope(weights["wkv_up"].shape[-1]), expand(root_N), 1.0)),
    }


def scale_weight(weight: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns weight * factor in the dtype of the weight."""
    return (weight * factor).astype(weight.dtype)
