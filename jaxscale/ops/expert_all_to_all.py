"""Rows sent to the devices that have their experts, and results back: in rounds of a fixed size until none is left.

A round holds so many rows of each device for each other that balanced routing needs one. However uneven it is, nothing
is dropped, and memory is that of a round; only time grows. Going back, the rounds run once more.

R rows of a device, sorted by expert  P devices  e experts of a device  C rows of a round from one device to another
D embed
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.ops.gradient import custom_vjp
from jaxscale.ops.routing import sort_rows
from jaxscale.sharding.expert_axis import ExpertAxis

# Of a round, over an equal share: at random some devices have more rows for one than for another, and a second round
# for a few rows would cost as much as the first.
SPARE = 1.25
TILE = 8  # rows: rounds are a multiple

# (weights of the own experts, x_RD, weight_R, counts_e) -> y_RD of rows sorted by expert
RunExperts = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]


class Route(NamedTuple):
    """Which rows go where, in integers."""

    begin_P: jax.Array  # the first row for each device
    count_P: jax.Array  # rows for it
    ends_Pe: jax.Array  # of each device's rows for this one: where those of each of its experts end
    rounds: jax.Array


def plan_route(axis: ExpertAxis, counts_E: jax.Array, capacity: int) -> Route:
    """The way of rows that are sorted by expert, so many of each."""
    counts_Pe = counts_E.reshape(axis.size, -1)
    count_P = jnp.sum(counts_Pe, axis=1)
    begin_P = jnp.cumsum(count_P) - count_P
    ends_Pe = jnp.cumsum(axis.all_to_all(counts_Pe), axis=1)
    return Route(begin_P, count_P, ends_Pe, axis.max(jnp.max(-(-count_P // capacity))))


def round_size(rows: int, devices: int) -> int:
    """C"""
    return min(rows, math.ceil(SPARE * rows / devices / TILE) * TILE)


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def exchanged(axis: ExpertAxis, run: RunExperts, weights: Any, x_RD: jax.Array, weight_R: jax.Array, counts_E):
    """(y_RD: run() of each row, where its expert is; int32[]: rounds). counts_E: of the device's rows, for all."""
    work = Rounds(axis, run, round_size(len(x_RD), axis.size))
    route = plan_route(axis, counts_E, work.capacity)

    def one(number, y_RD):
        sent = work.send(number, route, (x_RD, weight_R))
        with jax.named_scope(work.scope(len(x_RD))):
            x_SD, weight_S = sent.rows
            y = run(weights, x_SD, weight_S, sent.counts_e)
        return work.receive(number, route, y_RD, y[sent.place])

    return lax.fori_loop(0, route.rounds, one, jnp.zeros_like(x_RD)), route.rounds


def _forward(axis, run, weights, x_RD, weight_R, counts_E):
    return exchanged(axis, run, weights, x_RD, weight_R, counts_E), (weights, x_RD, weight_R, counts_E)


def _backward(axis, run, saved, cotangents):
    weights, x_RD, weight_R, counts_E = saved
    dy_RD, _ = cotangents
    work = Rounds(axis, run, round_size(len(x_RD), axis.size))
    route = plan_route(axis, counts_E, work.capacity)

    def one(number, so_far):
        dweights, dx_RD, dweight_R = so_far
        sent = work.send(number, route, (x_RD, weight_R, dy_RD))
        *rows, dy = sent.rows
        with jax.named_scope(work.scope(len(x_RD))):
            _, pull = jax.vjp(lambda weights, x, weight: run(weights, x, weight, sent.counts_e), weights, *rows)
            found, dx, dweight = pull(dy)
        dx_RD = work.receive(number, route, dx_RD, dx[sent.place])
        dweight_R = work.receive(number, route, dweight_R, dweight[sent.place])
        return jax.tree.map(jnp.add, dweights, found), dx_RD, dweight_R

    zeros = jax.tree.map(jnp.zeros_like, (weights, x_RD, weight_R))
    return *lax.fori_loop(0, route.rounds, one, zeros), None


exchanged.defvjp(_forward, _backward)


class Sent(NamedTuple):
    """What has arrived of a round."""

    rows: tuple[jax.Array, ...]  # sorted by own expert; those behind the last one are of no meaning
    counts_e: jax.Array
    place: jax.Array  # where each row, in the order in which it came, has gone


class Rounds(NamedTuple):
    """The work of one round."""

    axis: ExpertAxis
    run: RunExperts
    capacity: int

    def scope(self, rows: int) -> str:
        """Tells who reads a compiled program how many of a round's rows there are, of balanced routing: kernels
        declare products of them all (ahead/hlo_costs.py)."""
        return f"rows_{rows}_of_{self.axis.size * self.capacity}"

    def send(self, number: jax.Array, route: Route, arrays: tuple[jax.Array, ...]) -> Sent:
        """The rows that this device gets in a round, sorted by its experts."""
        offset_C = number * self.capacity + jnp.arange(self.capacity, dtype=jnp.int32)
        row_PC = jnp.clip(route.begin_P[:, None] + offset_C[None], 0, len(arrays[0]) - 1)
        come = [self.axis.all_to_all(array[row_PC]).reshape(-1, *array.shape[1:]) for array in arrays]
        # A row's expert is the first whose rows end behind it; past the last there is nothing.
        expert_PC = jax.vmap(lambda ends_e: jnp.searchsorted(ends_e, offset_C, side="right"))(route.ends_Pe)
        own = route.ends_Pe.shape[1]
        sorting = sort_rows(expert_PC.reshape(-1, 1), own + 1)
        return Sent(tuple(array[sorting.order_R] for array in come), sorting.counts_E[:own], sorting.place_R)

    def receive(self, number: jax.Array, route: Route, so_far: jax.Array, back: jax.Array) -> jax.Array:
        """so_far [R, ...] with the results of a round in their places. back: in the order in which rows had come."""
        parts = self.axis.all_to_all(back.reshape(self.axis.size, self.capacity, *back.shape[1:]))
        row_R = jnp.arange(len(so_far), dtype=jnp.int32)
        device_R = jnp.searchsorted(jnp.cumsum(route.count_P), row_R, side="right").astype(jnp.int32)
        offset_R = row_R - route.begin_P[device_R]
        now_R = offset_R // self.capacity == number
        found = parts.reshape(-1, *back.shape[1:])[device_R * self.capacity + offset_R % self.capacity]
        return jnp.where(now_R.reshape(-1, *[1] * (so_far.ndim - 1)), found.astype(so_far.dtype), so_far)
