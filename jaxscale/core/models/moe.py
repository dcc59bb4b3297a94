"""Mixture-of-experts MLP: each token is routed to a few of many experts (arXiv:1701.06538).

No token is dropped unless experts have a capacity in training. The result for a token does not depend on the routing of
other tokens, except with a capacity on earlier tokens of its sequence. Balance losses are sums over tokens, so they do
not depend on the mesh or microbatches.

B batch  T position  D embed  E experts  k experts per token  F width of an expert  n = B * T tokens  R = n * k rows
"""

import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.core.axes.tensor_axis import TensorAxis
from jaxscale.core.config import EXPERT_LOSSES
from jaxscale.core.models.config import MLP_GATE, MLP_UP, ExpertsConfig
from jaxscale.core.models.layers import constant, param
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.moe_balance import MoEMetrics
from jaxscale.core.plan import ParallelPlan
from jaxscale.kernels.activation import geglu_tanh, swiglu
from jaxscale.kernels.matmul.expert_all_to_all import all_to_all_experts
from jaxscale.kernels.matmul.routing import (
    RouterOutput,
    capacity_mask,
    combine,
    dispatch,
    mask_unrouted,
    route,
    router_logits,
    score_range,
    sort_rows,
    sort_weights,
)
from jaxscale.kernels.matmul.slots import GroupedProject

F32 = jnp.float32


class SharedMlp(Protocol):
    """A dense MLP for all tokens."""

    def unreduced(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the output of the local MLP columns at all positions, before the sum over devices."""
        ...


class SparseMlp(nnx.Module):
    """Mixture of gated MLPs, the experts. Each token uses a few experts, and optionally a shared MLP."""

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs, plan: ParallelPlan, shared: SharedMlp | None):
        experts = cfg.experts
        assert experts is not None, "made for a config with experts"
        D, E, F = cfg.embed_dim, experts.number, experts.mlp_dim
        self.experts, self.plan, self.shared = experts, plan, shared
        self.activate = swiglu if cfg.activation == "silu" else geglu_tanh
        self.router = param(rngs, (D, E), ("embed", "router"), std=cfg.scales.router_std * D**-0.5)
        # Not trained. core.models.moe_balance updates router_bias and router_load after each step.
        self.router_bias = constant((E,), ("norm",), 0.0) if experts.bias else None
        self.router_load = constant((E,), ("norm",), 1 / E)  # fraction of the previous step's rows per expert
        self.gate = param(rngs, (E, D, F), ("experts", "expert_embed", "mlp"), fan_in=D)
        self.up = param(rngs, (E, D, F), ("experts", "expert_embed", "mlp"), fan_in=D)
        std = (experts.active_dim * 2 * cfg.init_layers) ** -0.5  # as for a dense MLP of that width
        self.down = param(rngs, (E, F, D), ("experts", "mlp", "expert_embed"), std=std)

    @jax.named_scope("experts")
    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> tuple[jax.Array, MoEMetrics]:
        x_BTD = self.plan.tensor.all_gather(x_BTD)
        x_nD = x_BTD.reshape(-1, x_BTD.shape[-1])
        routes = self.routes(x_nD)
        fits_nk = self.fits_capacity(routes, segment_ids_BT)
        y_nD, rounds_Q = self.apply_experts(x_nD, routes, fits_nk)
        y_BTD = y_nD.reshape(x_BTD.shape)
        if self.shared is not None:
            y_BTD += self.shared.unreduced(x_BTD)
        load_E = self.router_load[...]
        metrics = router_metrics(self.experts, self.plan.tensor, routes, segment_ids_BT, load_E, rounds_Q)
        if fits_nk is not None:
            dropped_nk = ~fits_nk & (segment_ids_BT.reshape(-1, 1) > 0)
            metrics = metrics._replace(dropped=jnp.sum(dropped_nk, dtype=jnp.int32))
        return self.plan.tensor.reduce_scatter(y_BTD), metrics

    @jax.named_scope("router")
    def routes(self, x_nD: jax.Array) -> RouterOutput:
        """Routes each token. Router products are float32."""
        bias_E = None if self.router_bias is None else self.router_bias[...]
        return route(self.experts, router_logits(x_nD, self.router[...]), bias_E)

    def fits_capacity(self, routes: RouterOutput, segment_ids_BT: jax.Array) -> jax.Array | None:
        """Returns True where a (token, expert) pair fits the expert's capacity, or None without a limit."""
        B, T = segment_ids_BT.shape
        capacity = self.experts.capacity(T) if self.plan.use_capacity else None
        if capacity is None:
            return None
        expert_BTk = routes.expert_nk.reshape(B, T, -1)
        fits_BTk = capacity_mask(expert_BTk, segment_ids_BT > 0, self.experts.number, capacity)
        return fits_BTk.reshape(routes.expert_nk.shape)

    def apply_experts(
        self, x_nD: jax.Array, routes: RouterOutput, fits_nk: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (weighted sum of the expert outputs of each token, rounds_Q of MoEMetrics).

        The weights are applied before the last matmul, so the backward pass does not need the result of that matmul.
        fits_nk: True for (token, expert) pairs to compute; None means all pairs.
        """
        k, axis, kernels = self.experts.chosen, self.plan.expert, self.plan.expert_kernels
        activation = functools.partial(kernels.weighted_activation, self.activate)
        run = functools.partial(kernels.map_experts, functools.partial(run_experts, kernels.project, activation))
        expert_nk = routes.expert_nk if fits_nk is None else jnp.where(fits_nk, routes.expert_nk, self.experts.number)
        rows = sort_rows(expert_nk, self.experts.number)
        # Grouped matmuls return arbitrary values for rows after the last expert's.
        valid = (lambda array_R: array_R) if fits_nk is None else (lambda array_R: mask_unrouted(array_R, rows))
        weights = self.gate[...], self.up[...], self.down[...]
        x_RD = valid(dispatch(k, x_nD, rows, kernels.as_bits))
        weight_R = valid(sort_weights(routes.weight_nk, rows))
        if axis.size == 1:
            y_RD, rounds_Q = run(weights, x_RD, weight_R, rows.counts_E), jnp.zeros(0, jnp.int32)
        else:
            y_RD, rounds = all_to_all_experts(axis, run, weights, x_RD, weight_R, rows.counts_E)
            rounds_Q = jax.nn.one_hot(rounds, axis.size + 1, dtype=jnp.int32)  # at most one round per device
        return combine(k, valid(y_RD), rows, kernels.as_bits), rounds_Q


def router_metrics(
    experts: ExpertsConfig,
    tensor: TensorAxis,
    routes: RouterOutput,
    segment_ids_BT: jax.Array,
    router_load_E: jax.Array,
    rounds_Q: jax.Array,
) -> MoEMetrics:
    """Returns router metrics of a layer, replicated over the tensor axis. Gradients are divided by the axis size.

    router_load_E: fraction of (token, expert) pairs per expert in the previous step.
    """
    B, T = segment_ids_BT.shape
    E, k, context = experts.number, experts.chosen, tensor.context
    mask_BT = segment_ids_BT > 0
    chosen_BTE = jnp.sum(jax.nn.one_hot(routes.expert_nk, E, dtype=jnp.int32), axis=1).reshape(B, T, E)
    counts_BE = jnp.sum(chosen_BTE * mask_BT[:, :, None], axis=1)
    partial = tensor.scale_gradient((routes.logit_nE, routes.prob_nE))
    logit_BTE, share_BTE = jax.tree.map(lambda x: x.reshape(B, T, E), partial)
    share_BE = jnp.sum(jnp.where(mask_BT[:, :, None], share_BTE, 0.0), axis=1)
    row_counts_BE = context.sum(counts_BE).astype(F32)
    row_tokens_B1 = jnp.maximum(context.sum(jnp.sum(mask_BT, axis=1, keepdims=True)), 1)
    log_sum_BT = jax.nn.logsumexp(logit_BTE, axis=-1)
    log_share_BTE = jnp.log(jnp.maximum(share_BTE, jnp.finfo(F32).tiny))
    entropy_BT = -jnp.sum(lax.stop_gradient(share_BTE * log_share_BTE), axis=-1)
    losses = (
        jnp.sum(jnp.where(mask_BT, log_sum_BT**2, 0.0)),
        E * jnp.sum(share_BE * router_load_E[None]),
        E / k * jnp.sum(share_BE * row_counts_BE / row_tokens_B1),
    )
    return MoEMetrics(
        jnp.sum(counts_BE, axis=0),
        dict(zip(EXPERT_LOSSES, losses, strict=True)),
        jnp.sum(jnp.where(mask_BT, entropy_BT, 0.0)),
        jnp.sum(jnp.where(mask_BT, score_range(experts, routes).reshape(B, T), 0.0)),
        rounds_Q,
    )


def run_experts(
    grouped: GroupedProject, activation: Callable, weights, x_RD: jax.Array, weight_R: jax.Array, counts_E: jax.Array
) -> jax.Array:
    """Returns y_RD for rows sorted by expert, or for the rows of one expert. weights: (gate_EDF, up_EDF, down_EFD)."""
    gate_EDF, up_EDF, down_EFD = weights
    gate_RF = checkpoint_name(grouped(x_RD, gate_EDF, counts_E), MLP_GATE)
    up_RF = checkpoint_name(grouped(x_RD, up_EDF, counts_E), MLP_UP)
    h_RF = activation(gate_RF, up_RF, weight_R)
    return grouped(h_RF, down_EFD, counts_E, transposed=True)  # the layout of BatchAxes.gather
