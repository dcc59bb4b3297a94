"""Which experts a token is sent to, and the way of its numbers there and back.

n tokens  E experts  k experts of a token  R = n * k rows, one for each expert of each token  D embed
B batch  T position
G groups of experts  e experts of a group
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.ops.config import RouterForm
from jaxscale.ops.slots import bits, from_bits

F32 = jnp.float32
PARTS = 8  # of tokens, whose parts of a router's gradient XLA:CPU sums apart


class Routes(NamedTuple):
    """What a router says of each token."""

    expert_nk: jax.Array  # int32, the most wanted first; among equals the lower one
    weight_nk: jax.Array  # float32
    logit_nE: jax.Array  # float32
    share_nE: jax.Array  # float32: how much it wants each expert; of a token they add up to 1


@jax.custom_vjp
def router_logits(x_nD: jax.Array, w_DE: jax.Array) -> jax.Array:
    """logit_nE, by float32 products."""
    return jnp.matmul(x_nD.astype(F32), w_DE, precision=lax.Precision.HIGHEST)


def _logits_backward(saved, dlogit_nE):
    x_nD, w_DE = saved
    dx_nD = jnp.matmul(dlogit_nE, w_DE.T, precision=lax.Precision.HIGHEST).astype(x_nD.dtype)
    plain = lambda x_nD, dlogit_nE: jnp.matmul(x_nD.astype(F32).T, dlogit_nE, precision=lax.Precision.HIGHEST)
    cpu = plain if len(x_nD) % PARTS else gradient_in_parts
    return dx_nD, lax.platform_dependent(x_nD, dlogit_nE, cpu=cpu, default=plain)


router_logits.defvjp(lambda x_nD, w_DE: (router_logits(x_nD, w_DE), (x_nD, w_DE)), _logits_backward)


def gradient_in_parts(x_nD: jax.Array, dlogit_nE: jax.Array) -> jax.Array:
    """dw_DE of a router. XLA:CPU would turn all of x for it, and take ten times as long (jax 0.10.2, 2026-11-26)."""
    part = lambda array: array.reshape(PARTS, -1, array.shape[1])
    turned_pEn = lax.optimization_barrier(part(dlogit_nE).swapaxes(1, 2))
    return jnp.sum(jnp.matmul(turned_pEn, part(x_nD.astype(F32)), precision=lax.Precision.HIGHEST), axis=0).T


def route(form: RouterForm, logit_nE: jax.Array, bias_E: jax.Array | None = None) -> Routes:
    """The experts of each token. bias_E: is added to scores when experts are chosen, and not to their weights."""
    score_nE = jax.nn.sigmoid(logit_nE) if form.score == "sigmoid" else jax.nn.softmax(logit_nE)
    wanted_nE = lax.stop_gradient(score_nE)
    wanted_nE = within_groups(form, wanted_nE if bias_E is None else wanted_nE + bias_E[None])
    expert_nk = lax.top_k(wanted_nE, form.chosen)[1].astype(jnp.int32)
    weight_nk = scores_of(score_nE, expert_nk)
    if form.normalised:
        # Sigmoids of all chosen may be as good as 0; DeepSeek-V3's code adds as much.
        weight_nk = weight_nk / (jnp.sum(weight_nk, axis=1, keepdims=True) + 1e-20)
    share_nE = score_nE
    if form.score == "sigmoid":
        share_nE = score_nE / (jnp.sum(score_nE, axis=1, keepdims=True) + 1e-20)
    return Routes(expert_nk, weight_nk * form.scale, logit_nE, share_nE)


@jax.custom_vjp
def scores_of(score_nE: jax.Array, expert_nk: jax.Array) -> jax.Array:
    """score_nk of these experts."""
    return jnp.take_along_axis(score_nE, expert_nk, axis=1)


def _scores_backward(saved, dscore_nk):
    expert_nk, num_experts = saved
    # JAX's own gradient is a scatter, into which XLA:GPU fuses the sums over an expert's width: 38 of 819 ms of OLMoE's
    # step (H200, jax 0.11.2, 2026-11-26).
    chosen_nkE = jax.nn.one_hot(expert_nk, num_experts, dtype=bool)
    return jnp.sum(jnp.where(chosen_nkE, dscore_nk[..., None], 0), axis=1), None


scores_of.defvjp(
    lambda score_nE, expert_nk: (scores_of(score_nE, expert_nk), (expert_nk, score_nE.shape[1])), _scores_backward
)


def score_ranges(form: RouterForm, routes: Routes) -> jax.Array:
    """range_n: how far the highest score of each token is above the lowest. Nothing is differentiated through it."""
    score_nE = jax.nn.sigmoid(routes.logit_nE) if form.score == "sigmoid" else routes.share_nE
    return lax.stop_gradient(jnp.max(score_nE, axis=1) - jnp.min(score_nE, axis=1))


def within_groups(form: RouterForm, wanted_nE: jax.Array) -> jax.Array:
    """The scores by which experts are chosen, those outside of the best groups as low as can be (arXiv:2405.04434)."""
    if form.groups == 1:
        return wanted_nE
    wanted_nGe = wanted_nE.reshape(len(wanted_nE), form.groups, -1)
    best_nG = jnp.sum(lax.top_k(wanted_nGe, form.group_best)[0], axis=-1)
    group_ng = lax.top_k(best_nG, form.groups_chosen)[1]
    open_nG = jnp.any(jax.nn.one_hot(group_ng, form.groups, dtype=bool), axis=1)
    return jnp.where(open_nG[:, :, None], wanted_nGe, -jnp.inf).reshape(wanted_nE.shape)


def within_capacity(expert_BTk: jax.Array, text_BT: jax.Array, num_experts: int, capacity: int) -> jax.Array:
    """bool_BTk: whether an expert has room for a token, having taken fewer than `capacity` before it in the row.

    What comes later in a row changes nothing of it, nor does another row. text_BT: where there is text; what is not
    takes no room.
    """
    chosen_BTE = jnp.sum(jax.nn.one_hot(expert_BTk, num_experts, dtype=jnp.int32), axis=2)
    chosen_BTE = chosen_BTE * text_BT[:, :, None]
    before_BTE = jnp.cumsum(chosen_BTE, axis=1) - chosen_BTE
    return jnp.take_along_axis(before_BTE, expert_BTk, axis=2) < capacity


class Sorted(NamedTuple):
    """Rows in the order of their experts. The two orders are each other's inverse."""

    order_R: jax.Array  # which row of [n * k] comes here
    place_R: jax.Array  # where a row of [n * k] has gone
    counts_E: jax.Array  # rows of each expert


def sort_rows(expert_nk: jax.Array, num_experts: int) -> Sorted:
    """All rows by their experts; those of one expert in the order of their tokens. Behind them are rows with the number
    past the last expert, which have none."""
    expert_R = expert_nk.reshape(-1)
    order_R = stable_order(expert_R, num_experts + 1)
    counts_E = jnp.sum(expert_R[:, None] == jnp.arange(num_experts)[None], axis=0, dtype=jnp.int32)
    return Sorted(order_R, inverse(order_R), counts_E)


def stable_order(number_R: jax.Array, end: int) -> jax.Array:
    """order_R that sorts numbers from 0 up to but not including `end`; equals stay in their order."""
    R = len(number_R)
    if R * end > jnp.iinfo(jnp.int32).max:
        return jnp.argsort(number_R, stable=True).astype(jnp.int32)
    # Sorted with its place in one number, XLA:CPU takes a quarter of the time.
    return jnp.sort(number_R * R + jnp.arange(R, dtype=jnp.int32)) % R


def inverse(order_R: jax.Array) -> jax.Array:
    """place_R: where each of them is. Written in a fortieth of the time of sorting on a CPU; others were not timed."""
    written = lambda order_R: jnp.zeros_like(order_R).at[order_R].set(jnp.arange(len(order_R), dtype=order_R.dtype))
    return lax.platform_dependent(order_R, cpu=written, default=lambda order_R: jnp.argsort(order_R).astype(jnp.int32))


# A gradient of a gather is a scatter-add, which is slow: here it is a gather by the other order.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def to_rows(k: int, x_nD: jax.Array, rows: Sorted, as_bits: bool = False) -> jax.Array:
    """x_RD: each row's token. as_bits: moved as integers."""
    token_R = rows.order_R // k
    return moved(x_nD, token_R) if as_bits else x_nD[token_R]


def _to_rows_backward(k, as_bits, rows, dx_RD):
    return to_tokens(k, dx_RD, rows, as_bits), None


to_rows.defvjp(lambda k, x_nD, rows, as_bits: (to_rows(k, x_nD, rows, as_bits), rows), _to_rows_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def to_tokens(k: int, y_RD: jax.Array, rows: Sorted, as_bits: bool = False) -> jax.Array:
    """y_nD: the sum of each token's rows, taken in float32, in their dtype. as_bits: moved as integers, one of a token
    after the other, which XLA:CPU does in one loop."""
    if as_bits:
        place_kn = rows.place_R.reshape(-1, k).T
        return sum((moved(y_RD, place_n).astype(F32) for place_n in place_kn), jnp.zeros((), F32)).astype(y_RD.dtype)
    y_nkD = y_RD[rows.place_R].reshape(-1, k, y_RD.shape[1])
    return jnp.sum(y_nkD.astype(F32), axis=1).astype(y_RD.dtype)


def _to_tokens_backward(k, as_bits, rows, dy_nD):
    return to_rows(k, dy_nD, rows, as_bits), None


to_tokens.defvjp(lambda k, y_RD, rows, as_bits: (to_tokens(k, y_RD, rows, as_bits), rows), _to_tokens_backward)


def moved(array_RD: jax.Array, place_R: jax.Array) -> jax.Array:
    """The rows in these places. As integers: of bfloat16, XLA:CPU would first turn all rows into float32."""
    return from_bits(bits(array_RD)[place_R], array_RD.dtype)


@jax.custom_vjp
def in_order(weight_nk: jax.Array, rows: Sorted) -> jax.Array:
    """weight_R: the numbers of the rows."""
    return weight_nk.reshape(-1)[rows.order_R]


def _in_order_forward(weight_nk, rows):
    return in_order(weight_nk, rows), (rows, weight_nk.shape[1])


def _in_order_backward(saved, dweight_R):
    rows, k = saved
    return dweight_R[rows.place_R].reshape(-1, k), None


in_order.defvjp(_in_order_forward, _in_order_backward)


def taken_alone(array_R: jax.Array, rows: Sorted) -> jax.Array:
    """The rows of [R, ...] that have an expert, zeros for the others: also in its gradient."""
    taken_R = jnp.arange(len(array_R), dtype=jnp.int32) < jnp.sum(rows.counts_E)
    return jnp.where(taken_R.reshape(-1, *[1] * (array_R.ndim - 1)), array_R, jnp.zeros_like(array_R))
