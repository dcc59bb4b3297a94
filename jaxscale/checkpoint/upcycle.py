"""A dense model's weights as those of a mixture of experts (upcycling: arXiv:2212.05055, arXiv:2410.07524).

Each expert begins as the dense MLP (copy), or as one of the equally wide parts that its columns are dealt into (split).
The router begins as in a new model. Where the weights of a token's experts add up to the number of parts, the mixture
computes what the dense model did.

L layers  E experts  D embed  F width of an expert  G parts  M width of the dense MLP, G * F
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.models.config import BLOCKS, DENSE, ModelConfig
from jaxscale.models.experts_config import ExpertsConfig
from jaxscale.sharding.rules import names_of
from jaxscale.system.exits import BadInput
from jaxscale.units import divisors, or_list

IN_STACK = re.compile(rf"params/(?P<stack>{BLOCKS}|{DENSE})/(?:(?P<layer>[0-9]+)/)?(?P<rest>.+)")
COLUMNS = {"mlp/gate": -1, "mlp/up": -1, "mlp/down": -2}  # the axis of an MLP's width in each of its matrices
OF_EXPERTS = re.compile("mlp/(router|router_bias|router_load|shared/.+)")  # which a dense model has not
ROUTER, SILENT = re.compile("mlp/router"), re.compile("mlp/shared/down")


@dataclasses.dataclass(frozen=True)
class Origin:
    """From which array of the dense model one of ours is made, and how."""

    name: str
    layers: tuple[int, int] | None = None  # which of the stacked layers, where it is not all
    columns: int | None = None  # the axis of the dense MLP's width, where experts are made of it

    @property
    def is_whole(self) -> bool:
        """Whether it is taken as it is."""
        return self.layers is None and self.columns is None


@dataclasses.dataclass(frozen=True)
class Upcycling:
    """How a dense model becomes a mixture."""

    experts: ExpertsConfig
    parts: int  # that the dense MLP is dealt into; 1: each expert is all of it
    layers: int  # in all

    def origin(self, name: str) -> Origin | None:
        """Where an array of ours comes from; None: it begins as in a new model, or as begun() has it."""
        found, first = IN_STACK.fullmatch(name), self.experts.first_dense
        if found is None:
            return Origin(name)
        sparse, rest = found["stack"] == BLOCKS, found["rest"]
        if sparse and OF_EXPERTS.fullmatch(rest):
            return None
        columns = COLUMNS.get(rest) if sparse else None
        if found["layer"] is not None:
            return Origin(f"params/{BLOCKS}/{int(found['layer']) + first * sparse}/{rest}", columns=columns)
        layers = None if not first else (first, self.layers) if sparse else (0, first)
        return Origin(f"params/{BLOCKS}/{rest}", layers, columns)

    def shape(self, origin: Origin, old: list[int]) -> list[int]:
        """The shape of what is made of an array of this one."""
        new = list(old)
        if origin.layers is not None:
            new[0] = min(origin.layers[1], old[0]) - origin.layers[0]
        if origin.columns is not None:
            new[origin.columns] //= self.parts
            new.insert(len(new) - 2, self.experts.number)
        return new

    def make(self, origin: Origin, read: Callable[[NamedSharding], jax.Array], own: Any) -> jax.Array:
        """Our array, placed as `own` says. read: gives the dense one, placed as it is told to.

        Each device makes its own experts from its own part of the dense array, and nothing is sent: only these two are
        in memory.
        """
        place = spec_of(own)
        if origin.columns is not None:
            del place[-3]
        there = NamedSharding(own.sharding.mesh, PartitionSpec(*place))
        return self.program(origin, there, own)(read(there))

    def program(self, origin: Origin, there: NamedSharding, own: Any) -> Callable[[jax.Array], jax.Array]:
        """The compiled function that makes ours of an array that lies `there`."""
        mesh = there.mesh
        axes = names_of(spec_of(own)[-3]) if origin.columns is not None else ()

        def make(old: jax.Array) -> jax.Array:
            kept = old if origin.layers is None else old[slice(*origin.layers)]
            if origin.columns is None:
                return kept
            number = self.experts.number // math.prod(mesh.shape[axis] for axis in axes)
            first = lax.axis_index(axes) * number if axes else 0
            return jnp.take(dealt(kept, origin.columns, self.parts), (first + jnp.arange(number)) % self.parts, axis=-3)

        mapped = jax.shard_map(
            make, mesh=mesh, in_specs=there.spec, out_specs=PartitionSpec(*spec_of(own)), check_vma=False
        )
        return jax.jit(mapped, out_shardings=own.sharding)

    def begun(self, name: str, fresh: jax.Array, own: Any) -> jax.Array:
        """An array that is of no dense one, from what a new model has in its place."""
        found = IN_STACK.fullmatch(name)
        rest = found["rest"] if found else ""
        if SILENT.fullmatch(rest):  # what every token has besides adds nothing yet
            return jax.jit(jnp.zeros_like, out_shardings=own.sharding, donate_argnums=0)(fresh)
        if ROUTER.fullmatch(rest) and self.parts > 1:  # the parts of one MLP are chosen together
            share = lambda x: jnp.repeat(x[..., :: self.parts], self.parts, axis=-1)
            return jax.jit(share, out_shardings=own.sharding, donate_argnums=0)(fresh)
        return fresh

    def describe(self) -> list[str]:
        """Lines for people: what was made, and whether the first loss is that of the dense model."""
        own, what = self.experts, "each is the dense MLP"
        if self.parts > 1:
            what = f"the dense MLP in {self.parts} parts, {own.number // self.parts} times"
        made = f"init: upcycled {own.number} experts a layer, {own.mlp_dim} wide: {what}; their routers begin at random"
        if wrong := self.why_another():
            return [made, f"init: WARNING: the first loss is not that of the dense model: {'; '.join(wrong)}"]
        return [made, "init: the first loss is that of the dense model, but for rounding"]

    def why_another(self) -> list[str]:
        """What keeps the first loss from being that of the dense model."""
        own, wrong = self.experts, []
        if not own.normalised:
            wrong.append("with model.experts.normalised=false a token's weights add up to no fixed number")
        elif own.scale != self.parts:
            wrong.append(f"model.experts.scale={own.scale:g}, and it would take {self.parts}")
        if own.chosen % self.parts:
            wrong.append(
                f"model.experts.chosen={own.chosen} cuts a copy, and it would take a multiple of its {self.parts} parts"
            )
        if (size := own.number // own.groups) % self.parts:
            wrong.append(f"model.experts.groups={own.groups} cuts a copy: {size} experts a group, {self.parts} parts")
        if own.capacity_factor:
            wrong.append(f"model.experts.capacity_factor={own.capacity_factor:g} may leave tokens out")
        return wrong


def dealt(old: jax.Array, columns: int, parts: int) -> jax.Array:
    """[..., G, D, F] of [..., D, M], or [..., G, F, D] of [..., M, D]: column i is part i % G's.

    So each device of the tensor axis, which has columns that lie side by side, deals its own.
    """
    axis = old.ndim + columns
    split = old.reshape(*old.shape[:axis], -1, parts, *old.shape[axis + 1 :])
    return jnp.moveaxis(split, axis + 1, old.ndim - 2)


def plan_upcycling(
    how: Literal["copy", "split"], model: ModelConfig, shapes: Mapping[str, list[int]], there: Any
) -> Upcycling:
    """How the arrays of these names and shapes, of the checkpoint `there`, become those of the model.

    Raises BadInput for widths and numbers that do not fit, and for a checkpoint that is a mixture already.
    """
    assert model.experts is not None, "RunConfig refuses init.experts for a model without experts"
    own, gates = model.experts, [name for name in shapes if re.fullmatch(rf"params/{BLOCKS}/(0/)?mlp/gate", name)]
    if any(re.fullmatch(rf"params/{BLOCKS}/(0/)?mlp/router", name) for name in shapes):
        raise BadInput(f"init.experts={how!r}: {there} has experts already; leave it out")
    if not gates:
        raise BadInput(f"init.experts={how!r}: {there} has no gated MLP, params/{BLOCKS}/mlp/gate, to make experts of")
    dense, width, named = shapes[gates[0]][-1], own.mlp_dim, f"model.experts.mlp_dim={own.mlp_dim}"
    if how == "copy" and width != dense:
        raise BadInput(
            f"init.experts='copy': an expert is as wide as the dense MLP of {there}, and {named} is not {dense}; set "
            "that, or init.experts='split' with a width that divides it"
        )
    if how == "split" and (dense % width or dense == width):
        widths = or_list([dense // parts for parts in divisors(dense)[1:4]])
        raise BadInput(
            f"init.experts='split': {named} does not divide the dense MLP of {there}, which is {dense} wide; "
            f"it may be {widths}, or init.experts='copy' with {dense}"
        )
    if own.number % (parts := dense // width):
        raise BadInput(
            f"init.experts='split': model.experts.number={own.number} must be a multiple of the {parts} parts of a "
            f"dense MLP of {dense} ({named})"
        )
    return Upcycling(own, parts, model.num_layers)


def is_dense_of(old: list[int], new: list[int], name: str) -> bool:
    """Whether the shapes are those of a dense MLP's array there, and of experts' here."""
    found = IN_STACK.fullmatch(name)
    return found is not None and found["rest"] in COLUMNS and len(new) == len(old) + 1


def spec_of(own: Any) -> list[Any]:
    """The mesh axes of each axis of an array."""
    spec = list(own.sharding.spec)
    return spec + [None] * (len(own.shape) - len(spec))
