"""Matrices that devices hold parts of, each whole on one device: layers are exchanged, not gathered on all.

A stack [L, m, n] whose rows or columns P devices share becomes L / P whole matrices on each, by one all-to-all for each
dimension that is cut; devices with the same part (mesh.data) share the work too. What comes of them goes back the same
way. Where P does not divide the number of matrices, equal ones of other parameters join them (gate and up, the layers
of an unrolled model), and zeros fill the rest up.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxscale.optim.matrices import Dims

OnMatrices = Callable[[jax.Array], jax.Array]  # [b, m, n] -> [b, m, n], each matrix by itself


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a stack of matrices is: the mesh axes that cut each of its dimensions, and those that hold copies."""

    dims: Dims
    cuts: tuple[tuple[str, ...], ...]
    copies: tuple[str, ...]

    @property
    def exchanged(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """(dimension of unstacked(), mesh axes that cut it) of one matrix."""
        return tuple((1 + place, self.cuts[d]) for place, d in enumerate(self.dims.own) if self.cuts[d])

    def unstacked(self, x: jax.Array) -> jax.Array:
        """[matrices, rows..., cols...]"""
        own = [x.shape[d] for d in self.dims.own]
        return x.transpose(self.dims.stack + self.dims.own).reshape(-1, *own)

    def stacked(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The inverse, of an array of this shape."""
        order = self.dims.stack + self.dims.own
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return x.reshape([shape[d] for d in order]).transpose(inverse)


def make_place(dims: Dims, spec: PartitionSpec, mesh: Mesh, slow: Sequence[str] = ()) -> Place:
    """Where the spec puts a stack. slow: mesh axes whose devices all compute what they hold copies of."""
    named = lambda entry: () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    entries = tuple(spec) + (None,) * (len(dims.stack + dims.own) - len(spec))
    cuts = tuple(tuple(name for name in named(entry) if mesh.shape[name] > 1) for entry in entries)
    used = {name for cut in cuts for name in cut} | set(slow)
    return Place(dims, cuts, tuple(name for name, size in mesh.shape.items() if size > 1 and name not in used))


def on_whole_matrices(f: OnMatrices, arrays: Sequence[jax.Array], places: Sequence[Place], mesh: Mesh) -> list:
    """f of every matrix of these stacks, each on one device and whole; the results are where the stacks are."""
    run = lambda arrays: local_matrices(f, arrays, places, dict(mesh.shape))
    if mesh.size == 1:
        return run(list(arrays))
    specs = [PartitionSpec(*[cut or None for cut in place.cuts]) for place in places]
    return jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)(list(arrays))


def local_matrices(f: OnMatrices, arrays: list[jax.Array], places: Sequence[Place], sizes: dict[str, int]) -> list:
    """The same, of the parts of one device."""
    flat = [place.unstacked(x) for x, place in zip(arrays, places)]
    groups: dict[tuple, list[int]] = {}
    for number, (x, place) in enumerate(zip(flat, places)):
        divides = x.shape[0] % sharers(place, sizes) == 0
        alike = (x.shape[1:], len(place.dims.rows), place.exchanged, place.copies)
        groups.setdefault((number,) if divides else alike, []).append(number)
    done = list(arrays)
    for members in groups.values():
        together = jnp.concatenate([flat[number] for number in members]) if len(members) > 1 else flat[members[0]]
        whole = shared_out(f, together, places[members[0]], sizes)
        ends = [sum(flat[n].shape[0] for n in members[: i + 1]) for i in range(len(members) - 1)]
        for number, part in zip(members, jnp.split(whole, ends)):
            done[number] = places[number].stacked(part, arrays[number].shape)
    return done


def sharers(place: Place, sizes: dict[str, int]) -> int:
    """The devices among which the matrices that one of them has parts of are shared out."""
    return math.prod(sizes[name] for _, names in place.exchanged for name in names) * copies(place, sizes)


def copies(place: Place, sizes: dict[str, int]) -> int:
    """The devices that hold the same."""
    return math.prod(sizes[name] for name in place.copies)


def shared_out(f: OnMatrices, x: jax.Array, place: Place, sizes: dict[str, int]) -> jax.Array:
    """f of the matrices [b, rows..., cols...] that the device has its part of; each device computes its share."""
    number = x.shape[0]
    x = jnp.pad(x, [(0, -number % sharers(place, sizes)), *[(0, 0)] * (x.ndim - 1)])
    if place.copies:
        share = x.shape[0] // copies(place, sizes)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(place.copies) * share, share)
    for d, names in place.exchanged:
        x = lax.all_to_all(x, names, split_axis=0, concat_axis=d, tiled=True)
    count = len(place.dims.rows)
    rows, cols = math.prod(x.shape[1 : 1 + count]), math.prod(x.shape[1 + count :])
    x = f(x.reshape(-1, rows, cols)).reshape(x.shape)
    for d, names in reversed(place.exchanged):
        x = lax.all_to_all(x, names, split_axis=d, concat_axis=0, tiled=True)
    if place.copies:
        x = lax.all_gather(x, place.copies, tiled=True)
    return x[:number]
