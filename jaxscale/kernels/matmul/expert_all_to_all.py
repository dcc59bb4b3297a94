"""Expert parallelism by all-to-all rounds of fixed capacity, which send rows to the devices of their experts and back.

Balanced routing needs one round. Uneven routing needs more rounds, with the memory of one round and without dropped
rows. The backward pass reruns the rounds.

R local rows, sorted by expert  P devices  e local experts  C rows per round and pair of devices  D embed
S rows that a device receives in a round
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.core.axes.expert_axis import ExpertAxis
from jaxscale.kernels.gradient import custom_vjp
from jaxscale.kernels.matmul.routing import sort_rows

# Capacity of a round relative to balanced routing. Random routing is slightly uneven, and a second round for a few rows
# would take as long as the first.
CAPACITY_FACTOR = 1.25
TILE = 8  # divisor of capacities

# (weights of the local experts, x_RD, weight_R, counts_e) -> y_RD, for rows sorted by expert
RunExperts = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]


class SendPlan(NamedTuple):
    """Indices and counts of local rows for each destination, and counts of received rows from each source."""

    begin_P: jax.Array  # index of the first local row for each device
    count_P: jax.Array  # number of local rows for each device
    ends_Pe: jax.Array  # cumulative counts, per local expert, of the rows that each device sends to this device
    rounds: jax.Array  # number of rounds


def plan_sends(axis: ExpertAxis, counts_E: jax.Array, capacity: int) -> SendPlan:
    """Returns the plan for rows sorted by expert. counts_E: rows per expert."""
    counts_Pe = counts_E.reshape(axis.size, -1)
    count_P = jnp.sum(counts_Pe, axis=1)
    begin_P = jnp.cumsum(count_P) - count_P
    ends_Pe = jnp.cumsum(axis.all_to_all(counts_Pe), axis=1)
    return SendPlan(begin_P, count_P, ends_Pe, axis.max(jnp.max(-(-count_P // capacity))))


def round_capacity(rows: int, devices: int) -> int:
    """Returns C, the number of rows per round and pair of devices."""
    return min(rows, math.ceil(CAPACITY_FACTOR * rows / devices / TILE) * TILE)


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def all_to_all_experts(axis: ExpertAxis, run: RunExperts, weights: Any, x_RD: jax.Array, weight_R: jax.Array, counts_E):
    """Applies run() to each row on the device of its expert. Returns (y_RD, number of rounds)."""
    rounds = AllToAllRounds(axis, run, round_capacity(len(x_RD), axis.size))
    plan = plan_sends(axis, counts_E, rounds.capacity)

    def one_round(index, y_RD):
        received = rounds.dispatch(index, plan, (x_RD, weight_R))
        with jax.named_scope(rounds.scope(len(x_RD))):
            x_SD, weight_S = received.rows
            y = run(weights, x_SD, weight_S, received.counts_e)
        return rounds.combine(index, plan, y_RD, y[received.inverse_S])

    return lax.fori_loop(0, plan.rounds, one_round, jnp.zeros_like(x_RD)), plan.rounds


def _forward(axis, run, weights, x_RD, weight_R, counts_E):
    return all_to_all_experts(axis, run, weights, x_RD, weight_R, counts_E), (weights, x_RD, weight_R, counts_E)


def _backward(axis, run, saved, cotangents):
    weights, x_RD, weight_R, counts_E = saved
    dy_RD, _ = cotangents
    rounds = AllToAllRounds(axis, run, round_capacity(len(x_RD), axis.size))
    plan = plan_sends(axis, counts_E, rounds.capacity)

    def one_round(index, grads):
        dweights, dx_RD, dweight_R = grads
        received = rounds.dispatch(index, plan, (x_RD, weight_R, dy_RD))
        *rows, dy = received.rows
        with jax.named_scope(rounds.scope(len(x_RD))):
            _, vjp = jax.vjp(lambda weights, x, weight: run(weights, x, weight, received.counts_e), weights, *rows)
            dw, dx, dweight = vjp(dy)
        dx_RD = rounds.combine(index, plan, dx_RD, dx[received.inverse_S])
        dweight_R = rounds.combine(index, plan, dweight_R, dweight[received.inverse_S])
        return jax.tree.map(jnp.add, dweights, dw), dx_RD, dweight_R

    zeros = jax.tree.map(jnp.zeros_like, (weights, x_RD, weight_R))
    return *lax.fori_loop(0, plan.rounds, one_round, zeros), None


all_to_all_experts.defvjp(_forward, _backward)


class ReceivedRows(NamedTuple):
    """Rows that a device receives in a round."""

    rows: tuple[jax.Array, ...]  # arrays of rows sorted by local expert; rows after the last expert are undefined
    counts_e: jax.Array  # rows per local expert
    inverse_S: jax.Array  # sorted position of each row, in order of arrival


class AllToAllRounds(NamedTuple):
    """Dispatch and combine of one round."""

    axis: ExpertAxis
    run: RunExperts
    capacity: int

    def scope(self, rows: int) -> str:
        """Returns a scope name with the fraction of rows that are used if routing is balanced.
        tools/preflight/hlo_costs.py reads the name, because kernels declare the FLOPs of all rows."""
        return f"rows_{rows}_of_{self.axis.size * self.capacity}"

    def dispatch(self, index: jax.Array, plan: SendPlan, arrays: tuple[jax.Array, ...]) -> ReceivedRows:
        """Returns the rows that this device receives in a round, sorted by local expert."""
        offset_C = index * self.capacity + jnp.arange(self.capacity, dtype=jnp.int32)
        row_PC = jnp.clip(plan.begin_P[:, None] + offset_C[None], 0, len(arrays[0]) - 1)
        received = [self.axis.all_to_all(array[row_PC]).reshape(-1, *array.shape[1:]) for array in arrays]
        # The expert of a row is the first expert whose rows end after the row. Rows after the last expert are unused.
        expert_PC = jax.vmap(lambda ends_e: jnp.searchsorted(ends_e, offset_C, side="right"))(plan.ends_Pe)
        num_local = plan.ends_Pe.shape[1]
        sorting = sort_rows(expert_PC.reshape(-1, 1), num_local + 1)
        return ReceivedRows(
            tuple(array[sorting.order_R] for array in received), sorting.counts_E[:num_local], sorting.inverse_R
        )

    def combine(self, index: jax.Array, plan: SendPlan, out: jax.Array, results: jax.Array) -> jax.Array:
        """Returns out [R, ...] with the results of a round written to their rows. results: rows in order of arrival."""
        parts = self.axis.all_to_all(results.reshape(self.axis.size, self.capacity, *results.shape[1:]))
        row_R = jnp.arange(len(out), dtype=jnp.int32)
        device_R = jnp.searchsorted(jnp.cumsum(plan.count_P), row_R, side="right").astype(jnp.int32)
        offset_R = row_R - plan.begin_P[device_R]
        mask_R = offset_R // self.capacity == index
        new = parts.reshape(-1, *results.shape[1:])[device_R * self.capacity + offset_R % self.capacity]
        return jnp.where(mask_R.reshape(-1, *[1] * (out.ndim - 1)), new.astype(out.dtype), out)
