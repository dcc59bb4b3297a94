"""Products of experts where no kernel visits the rows of each: the same number of rows of every one, its slots.

Each expert has a product of its own, of fixed size: XLA:CPU then runs it as fast as one of a dense model, and copies no
weight. An expert's rows past its slots follow in visits of a few rows, as many as there are left: what is computed is
exactly what is asked for, whatever a router says. Where a slot has no row lie zeros, forward and backward, so that no
expert's rows touch another's.

E experts  R rows, sorted by expert  S slots of an expert, or rows of a visit  D embed  F width of an expert
C contracted size  O output size
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.ops.gradient import custom_vjp
from jaxscale.ops.project import cpu_project

F32 = jnp.float32
TILE = 16  # slots are a multiple
FEWEST = 16  # rows of an equal share: with fewer, most slots would be empty, and visits do all
APART = 16  # experts: so many have products of their own; of more it is one batched product, which is slower


class Sizes(NamedTuple):
    """Empty slots cost every step, rows past slots only the steps that have some; visits cost what they have room for,
    and each a little for itself."""

    spare: Callable[[int], int]  # slots over an equal share of so many rows
    visit: int  # rows of a visit, at most


# The fastest by `jaxscale bench experts` on 2 cores of an EPYC, jax 0.10.2, 2026-11-26: 8 experts of 512 x 768 in
# bfloat16 with shares of 128 to 1,024 rows, the busiest at 1.1 and 1.4 times. Visits of 32 and 128 were no faster.
ON_CPU = Sizes(lambda share: 0 if share >= 1024 else TILE, 64)
ON_GPU = Sizes(lambda share: share // 16, 128)  # random routing of 4,096 tokens stays about within; nothing else timed

# (weights of an expert, x_SD, weight_S, None) -> y_SD
RunExpert = Callable[[Any, jax.Array, jax.Array, Any], jax.Array]
Weigh = Callable[[Callable, jax.Array, jax.Array, jax.Array], jax.Array]  # (activate, gate, up, weight) -> h
# (RunExpert, weights of all, x_RD, weight_R, counts_E) -> y_RD
LayRows = Callable[[RunExpert, Any, jax.Array, jax.Array, jax.Array], jax.Array]


def project_rows(x_SC: jax.Array, w_CO: jax.Array, counts: Any = None, *, turned: bool = False) -> jax.Array:
    """A GroupedProject of one expert: y_SO."""
    return cpu_project("SC,CO->SO", x_SC, w_CO)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def weigh(activate: Callable, gate_SF: jax.Array, up_SF: jax.Array, weight_S: jax.Array) -> jax.Array:
    """activate(gate, up) times the rows' weights, computed in float32. The backward keeps only what is given."""
    return (activate(gate_SF.astype(F32), up_SF.astype(F32)) * weight_S[..., None]).astype(gate_SF.dtype)


def _weigh_backward(activate, saved, dh_SF):
    gate_SF, up_SF, weight_S = saved
    h_SF, pull = jax.vjp(activate, gate_SF.astype(F32), up_SF.astype(F32))
    dh_SF = dh_SF.astype(F32)
    dgate_SF, dup_SF = pull(dh_SF * weight_S[..., None])
    dweight_S = jnp.sum(dh_SF * h_SF, axis=-1).astype(weight_S.dtype)
    return dgate_SF.astype(gate_SF.dtype), dup_SF.astype(up_SF.dtype), dweight_S


weigh.defvjp(lambda activate, *given: (weigh(activate, *given), given), _weigh_backward)


class Place(NamedTuple):
    """Rows of one expert among all: S in a row, of which some are its own."""

    first: jax.Array
    own_S: jax.Array

    def take(self, bits_R: jax.Array, dtype: Any) -> jax.Array:
        """[S, ...] in their dtype: its own rows, zeros for others."""
        found = lax.dynamic_slice_in_dim(bits_R, self.first, len(self.own_S))
        return from_bits(jnp.where(self.like(found), found, jnp.zeros_like(found)), dtype)

    def put(self, bits_R: jax.Array, new_S: jax.Array) -> jax.Array:
        """bits_R with its own rows in it."""
        old = lax.dynamic_slice_in_dim(bits_R, self.first, len(self.own_S))
        new = jnp.where(self.like(old), bits(new_S), old)
        return lax.dynamic_update_slice_in_dim(bits_R, new, self.first, 0)

    def like(self, array_S: jax.Array) -> jax.Array:
        """own_S with as many axes as the array."""
        return self.own_S.reshape(-1, *[1] * (array_S.ndim - 1))


def bits(array: jax.Array) -> jax.Array:
    """The array as integers: to move a few rows of bfloat16, XLA:CPU would turn all of them into float32 and back."""
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


def from_bits(array: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of bits()."""
    return lax.bitcast_convert_type(array, dtype)


def place_rows(begin: jax.Array, end: jax.Array, rows: int, size: int) -> Place:
    """The place of the rows from begin up to end, of which there may be more than `size`."""
    first = jnp.minimum(begin, rows - size)
    row_S = first + jnp.arange(size, dtype=jnp.int32)
    return Place(first, (row_S >= begin) & (row_S < end))


class Layout(NamedTuple):
    """How rows are taken, by their number, that of experts, and what a platform likes."""

    rows: int
    experts: int
    sizes: Sizes

    @property
    def slots(self) -> int:
        """Of an expert; 0 where there are too few rows."""
        if self.rows < FEWEST * self.experts:
            return 0
        share = -(-self.rows // self.experts)
        return min(self.rows, -(-(share + self.sizes.spare(share)) // TILE) * TILE)

    @property
    def visit(self) -> int:
        """Rows of a visit: about half an equal share, a power of 2."""
        share = max(self.rows // (2 * self.experts), 8)
        return min(self.sizes.visit, 1 << (share.bit_length() - 1), self.rows)

    def places(self, counts_E: jax.Array) -> list[Place]:
        """Those of slots, as split() gives weights."""
        ends_E = jnp.cumsum(counts_E).astype(jnp.int32)
        of_one = lambda begin, end: place_rows(begin, end, self.rows, self.slots)
        return self.split(jax.vmap(of_one)(ends_E - counts_E, ends_E)) if self.slots else []

    def split(self, tree: Any) -> list[Any]:
        """What all experts have, expert by expert; of many together, for each() to run."""
        if self.experts > APART:
            return [tree]
        return [jax.tree.map(operator.itemgetter(expert), tree) for expert in range(self.experts)]

    def join(self, parts: Sequence[Any]) -> Any:
        """The inverse of split()."""
        return parts[0] if self.experts > APART else jax.tree.map(lambda *arrays: jnp.stack(arrays), *parts)

    def each(self, f: Callable) -> Callable:
        """A function of one expert, as one of a part."""
        return jax.vmap(f) if self.experts > APART else f

    def put(self, places: list[Place], bits_R: jax.Array, parts: Sequence[jax.Array]) -> jax.Array:
        """bits_R with what lies in slots in its rows."""
        for place, part in zip(places, parts, strict=True):
            if self.experts > APART:
                bits_R = lax.scan(lambda so_far, new: (new[0].put(so_far, new[1]), None), bits_R, (place, part))[0]
            else:
                bits_R = place.put(bits_R, part)
        return bits_R

    def past_slots(self, f: Callable, counts_E: jax.Array, so_far: Any) -> Any:
        """f(expert, visits, so_far) for each expert that has rows past its slots. visits(g, so_far) is then g(Place,
        so_far) for run after run of them."""
        ends_E = jnp.cumsum(counts_E).astype(jnp.int32)
        left_E = jnp.maximum(counts_E - self.slots, 0).astype(jnp.int32)
        full_E = jnp.nonzero(left_E, size=self.experts)[0]

        def of_one(place_in_E, so_far):
            expert = full_E[place_in_E]
            end, left = ends_E[expert], left_E[expert]
            place = lambda visit: place_rows(end - left + visit * self.visit, end, self.rows, self.visit)
            number = -(-left // self.visit)
            visits = lambda g, so_far: lax.fori_loop(0, number, lambda n, so_far: g(place(n), so_far), so_far)
            return f(expert, visits, so_far)

        return lax.fori_loop(0, jnp.sum(left_E > 0), of_one, so_far)


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def in_slots(
    sizes: Sizes, run: RunExpert, weights: Any, x_RD: jax.Array, weight_R: jax.Array, counts_E: jax.Array
) -> jax.Array:
    """A LayRows: y_RD, 0 behind the last expert's rows. Going back, what run() names or keeps is that of slots; rows
    past them are computed again."""
    return _forward(sizes, run, weights, x_RD, weight_R, counts_E)[0]


def _forward(sizes, run, weights, x_RD, weight_R, counts_E):
    layout = Layout(len(x_RD), len(counts_E), sizes)
    places, parts, pulls = layout.places(counts_E), [], []
    given = bits(x_RD), bits(weight_R)
    take = lambda place: (place.take(given[0], x_RD.dtype), place.take(given[1], weight_R.dtype))
    of_rows = lambda own, x_SD, weight_S: run(own, x_SD, weight_S, None)
    for own, place in zip(layout.split(weights), places):
        part, pull = jax.vjp(layout.each(of_rows), own, *layout.each(take)(place))
        parts, pulls = [*parts, part], [*pulls, pull]

    def past(expert, visits, y_R):
        own = of_expert(weights, expert)
        return visits(lambda place, y_R: place.put(y_R, of_rows(own, *take(place))), y_R)

    y_R = layout.put(places, jnp.zeros_like(given[0]), parts)
    y_RD = from_bits(layout.past_slots(past, counts_E, y_R), x_RD.dtype)
    return y_RD, (weights, x_RD, weight_R, counts_E, pulls)


def _backward(sizes, run, saved, dy_RD):
    weights, x_RD, weight_R, counts_E, pulls = saved
    layout = Layout(len(x_RD), len(counts_E), sizes)
    places = layout.places(counts_E)
    given, dy_R = (bits(x_RD), bits(weight_R)), bits(dy_RD)
    take_dy = lambda place: place.take(dy_R, dy_RD.dtype)
    dx_R, dweight_R = jax.tree.map(jnp.zeros_like, given)
    if places:
        parts = [pull(layout.each(take_dy)(place)) for pull, place in zip(pulls, places)]
        dweights, dx, dweight = zip(*parts)
        found = layout.join(dweights), layout.put(places, dx_R, dx), layout.put(places, dweight_R, dweight)
    else:
        found = jax.tree.map(jnp.zeros_like, weights), dx_R, dweight_R

    def past(expert, visits, found):
        own = of_expert(weights, expert)
        run_own = lambda own, x_SD, weight_S: run(own, x_SD, weight_S, None)

        def back(place, found):
            dw, dx_R, dweight_R = found
            of_rows = place.take(given[0], x_RD.dtype), place.take(given[1], weight_R.dtype)
            more, dx, dweight = jax.vjp(run_own, own, *of_rows)[1](take_dy(place))
            return jax.tree.map(jnp.add, dw, more), place.put(dx_R, dx), place.put(dweight_R, dweight)

        dweights, *of_rows = found
        dw, *of_rows = visits(back, (of_expert(dweights, expert), *of_rows))
        put = lambda all, new: lax.dynamic_update_index_in_dim(all, new, expert, 0)
        return jax.tree.map(put, dweights, dw), *of_rows

    dweights, dx_R, dweight_R = layout.past_slots(past, counts_E, found)
    return dweights, from_bits(dx_R, x_RD.dtype), from_bits(dweight_R, weight_R.dtype), None


in_slots.defvjp(_forward, _backward)


def of_expert(weights: Any, expert: jax.Array) -> Any:
    """Those of one."""
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, expert, keepdims=False), weights)
