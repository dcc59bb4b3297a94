"""Router of mixtures of experts, and the permutation of tokens to rows sorted by expert and back.

n tokens  E experts  k experts per token  R = n * k rows, one per (token, expert) pair  D embed
B batch  T position  G groups of experts  e experts of a group
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.kernels.config import RouterConfig
from jaxscale.kernels.matmul.slots import bitcast_from_uint, bitcast_to_uint

F32 = jnp.float32
PARTS = 8  # number of parts into which gradient_in_parts() splits the tokens


class RouterOutput(NamedTuple):
    """Router output of each token."""

    expert_nk: jax.Array  # int32, in descending order of score; for equal scores the lower index is first
    weight_nk: jax.Array  # float32
    logit_nE: jax.Array  # float32
    prob_nE: jax.Array  # float32: scores normalised to a sum of 1 per token


@jax.custom_vjp
def router_logits(x_nD: jax.Array, w_DE: jax.Array) -> jax.Array:
    """Returns logit_nE, from a float32 matmul."""
    return jnp.matmul(x_nD.astype(F32), w_DE, precision=lax.Precision.HIGHEST)


def _logits_backward(saved, dlogit_nE):
    x_nD, w_DE = saved
    dx_nD = jnp.matmul(dlogit_nE, w_DE.T, precision=lax.Precision.HIGHEST).astype(x_nD.dtype)
    matmul = lambda x_nD, dlogit_nE: jnp.matmul(x_nD.astype(F32).T, dlogit_nE, precision=lax.Precision.HIGHEST)
    cpu = matmul if len(x_nD) % PARTS else gradient_in_parts
    return dx_nD, lax.platform_dependent(x_nD, dlogit_nE, cpu=cpu, default=matmul)


router_logits.defvjp(lambda x_nD, w_DE: (router_logits(x_nD, w_DE), (x_nD, w_DE)), _logits_backward)


def gradient_in_parts(x_nD: jax.Array, dlogit_nE: jax.Array) -> jax.Array:
    """Returns dw_DE of a router. On XLA:CPU, a single matmul would transpose x and take ten times as long (jax 0.10.2,
    2026-11-26)."""
    split = lambda array: array.reshape(PARTS, -1, array.shape[1])
    dlogit_pEn = lax.optimization_barrier(split(dlogit_nE).swapaxes(1, 2))
    return jnp.sum(jnp.matmul(dlogit_pEn, split(x_nD.astype(F32)), precision=lax.Precision.HIGHEST), axis=0).T


def route(cfg: RouterConfig, logit_nE: jax.Array, bias_E: jax.Array | None = None) -> RouterOutput:
    """Selects the experts of each token. bias_E: added to the scores for selection, but not for weights."""
    score_nE = jax.nn.sigmoid(logit_nE) if cfg.score == "sigmoid" else jax.nn.softmax(logit_nE)
    choice_nE = lax.stop_gradient(score_nE)
    choice_nE = mask_other_groups(cfg, choice_nE if bias_E is None else choice_nE + bias_E[None])
    expert_nk = lax.top_k(choice_nE, cfg.chosen)[1].astype(jnp.int32)
    weight_nk = gather_scores(score_nE, expert_nk)
    if cfg.normalised:
        # The sigmoids of all selected experts may underflow. DeepSeek-V3's code adds the same epsilon.
        weight_nk = weight_nk / (jnp.sum(weight_nk, axis=1, keepdims=True) + 1e-20)
    prob_nE = score_nE
    if cfg.score == "sigmoid":
        prob_nE = score_nE / (jnp.sum(score_nE, axis=1, keepdims=True) + 1e-20)
    return RouterOutput(expert_nk, weight_nk * cfg.scale, logit_nE, prob_nE)


@jax.custom_vjp
def gather_scores(score_nE: jax.Array, expert_nk: jax.Array) -> jax.Array:
    """Returns score_nk of the selected experts."""
    return jnp.take_along_axis(score_nE, expert_nk, axis=1)


def _scores_backward(saved, dscore_nk):
    expert_nk, num_experts = saved
    # JAX's gradient is a scatter, into which XLA:GPU fuses the sums over the width of experts. It takes 38 of 819 ms of
    # OLMoE's step (H200, jax 0.11.2, 2026-11-26).
    one_hot_nkE = jax.nn.one_hot(expert_nk, num_experts, dtype=bool)
    return jnp.sum(jnp.where(one_hot_nkE, dscore_nk[..., None], 0), axis=1), None


gather_scores.defvjp(
    lambda score_nE, expert_nk: (gather_scores(score_nE, expert_nk), (expert_nk, score_nE.shape[1])), _scores_backward
)


def score_range(cfg: RouterConfig, routes: RouterOutput) -> jax.Array:
    """Returns range_n, the maximum minus the minimum of each token's scores, without gradient."""
    score_nE = jax.nn.sigmoid(routes.logit_nE) if cfg.score == "sigmoid" else routes.prob_nE
    return lax.stop_gradient(jnp.max(score_nE, axis=1) - jnp.min(score_nE, axis=1))


def mask_other_groups(cfg: RouterConfig, choice_nE: jax.Array) -> jax.Array:
    """Sets the scores of experts outside of the best groups to -inf (arXiv:2405.04434)."""
    if cfg.groups == 1:
        return choice_nE
    choice_nGe = choice_nE.reshape(len(choice_nE), cfg.groups, -1)
    group_score_nG = jnp.sum(lax.top_k(choice_nGe, cfg.group_best)[0], axis=-1)
    group_ng = lax.top_k(group_score_nG, cfg.groups_chosen)[1]
    selected_nG = jnp.any(jax.nn.one_hot(group_ng, cfg.groups, dtype=bool), axis=1)
    return jnp.where(selected_nG[:, :, None], choice_nGe, -jnp.inf).reshape(choice_nE.shape)


def capacity_mask(expert_BTk: jax.Array, mask_BT: jax.Array, num_experts: int, capacity: int) -> jax.Array:
    """Returns bool_BTk, True where fewer than `capacity` earlier tokens of the sequence selected the expert.

    The result does not depend on later tokens or other sequences. mask_BT: False for padding, which is not counted.
    """
    chosen_BTE = jnp.sum(jax.nn.one_hot(expert_BTk, num_experts, dtype=jnp.int32), axis=2)
    chosen_BTE = chosen_BTE * mask_BT[:, :, None]
    before_BTE = jnp.cumsum(chosen_BTE, axis=1) - chosen_BTE
    return jnp.take_along_axis(before_BTE, expert_BTk, axis=2) < capacity


class SortedRows(NamedTuple):
    """The permutation of rows that sorts them by expert."""

    order_R: jax.Array  # index into [n * k] of each sorted row
    inverse_R: jax.Array  # the inverse permutation
    counts_E: jax.Array  # number of rows per expert


def sort_rows(expert_nk: jax.Array, num_experts: int) -> SortedRows:
    """Returns the stable sort of rows by expert. Rows with expert index `num_experts` are last and not counted."""
    expert_R = expert_nk.reshape(-1)
    order_R = stable_order(expert_R, num_experts + 1)
    counts_E = jnp.sum(expert_R[:, None] == jnp.arange(num_experts)[None], axis=0, dtype=jnp.int32)
    return SortedRows(order_R, inverse(order_R), counts_E)


def stable_order(number_R: jax.Array, end: int) -> jax.Array:
    """Returns the stable argsort of numbers in [0, end)."""
    R = len(number_R)
    if R * end > jnp.iinfo(jnp.int32).max:
        return jnp.argsort(number_R, stable=True).astype(jnp.int32)
    # XLA:CPU sorts (number, index) packed into one integer in a quarter of the time.
    return jnp.sort(number_R * R + jnp.arange(R, dtype=jnp.int32)) % R


def inverse(order_R: jax.Array) -> jax.Array:
    """Returns the inverse permutation. On CPUs a scatter is 40 times as fast as argsort. Only CPUs were timed."""
    scatter = lambda order_R: jnp.zeros_like(order_R).at[order_R].set(jnp.arange(len(order_R), dtype=order_R.dtype))
    return lax.platform_dependent(order_R, cpu=scatter, default=lambda order_R: jnp.argsort(order_R).astype(jnp.int32))


# JAX's gradient of a gather is a slow scatter-add. These custom gradients gather by the inverse permutation.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def dispatch(k: int, x_nD: jax.Array, rows: SortedRows, as_bits: bool = False) -> jax.Array:
    """Returns x_RD, the activations of the token of each row. as_bits: whether to gather values as integers."""
    token_R = rows.order_R // k
    return gather_as_uint(x_nD, token_R) if as_bits else x_nD[token_R]


def _dispatch_backward(k, as_bits, rows, dx_RD):
    return combine(k, dx_RD, rows, as_bits), None


dispatch.defvjp(lambda k, x_nD, rows, as_bits: (dispatch(k, x_nD, rows, as_bits), rows), _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def combine(k: int, y_RD: jax.Array, rows: SortedRows, as_bits: bool = False) -> jax.Array:
    """Returns y_nD, the sum of each token's rows, accumulated in float32 and cast to the dtype of the rows.
    as_bits: whether to gather values as integers, in k gathers that XLA:CPU fuses into one loop."""
    if as_bits:
        index_kn = rows.inverse_R.reshape(-1, k).T
        return sum((gather_as_uint(y_RD, index_n).astype(F32) for index_n in index_kn), jnp.zeros((), F32)).astype(
            y_RD.dtype
        )
    y_nkD = y_RD[rows.inverse_R].reshape(-1, k, y_RD.shape[1])
    return jnp.sum(y_nkD.astype(F32), axis=1).astype(y_RD.dtype)


def _combine_backward(k, as_bits, rows, dy_nD):
    return dispatch(k, dy_nD, rows, as_bits), None


combine.defvjp(lambda k, y_RD, rows, as_bits: (combine(k, y_RD, rows, as_bits), rows), _combine_backward)


def gather_as_uint(array_RD: jax.Array, inverse_R: jax.Array) -> jax.Array:
    """Gathers rows as integers, because XLA:CPU would first convert all bfloat16 rows to float32."""
    return bitcast_from_uint(bitcast_to_uint(array_RD)[inverse_R], array_RD.dtype)


@jax.custom_vjp
def sort_weights(weight_nk: jax.Array, rows: SortedRows) -> jax.Array:
    """Returns weight_R, in the order of the rows."""
    return weight_nk.reshape(-1)[rows.order_R]


def _sort_weights_forward(weight_nk, rows):
    return sort_weights(weight_nk, rows), (rows, weight_nk.shape[1])


def _sort_weights_backward(saved, dweight_R):
    rows, k = saved
    return dweight_R[rows.inverse_R].reshape(-1, k), None


sort_weights.defvjp(_sort_weights_forward, _sort_weights_backward)


def mask_unrouted(array_R: jax.Array, rows: SortedRows) -> jax.Array:
    """Sets rows of [R, ...] without an expert to zero, and also their gradients."""
    mask_R = jnp.arange(len(array_R), dtype=jnp.int32) < jnp.sum(rows.counts_E)
    return jnp.where(mask_R.reshape(-1, *[1] * (array_R.ndim - 1)), array_R, jnp.zeros_like(array_R))
