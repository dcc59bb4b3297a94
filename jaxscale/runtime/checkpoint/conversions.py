"""Weights of one model as those of another: experts of a dense MLP, and a muP model without muP.

Upcycling makes a mixture of experts of a dense model (arXiv:2212.05055, arXiv:2410.07524). Each expert starts as the
dense MLP (copy), or as one of the equal parts into which its columns are interleaved (split). The router is initialized
as in a new model. If the weights of a token's experts add up to the number of parts, the mixture computes the same
function as the dense model.

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

from jaxscale.core.models.config import BLOCKS, DENSE, ExpertsConfig, ModelConfig
from jaxscale.core.models.lora_mup_config import STACKED, mup_scales
from jaxscale.core.shardings import mesh_axis_names
from jaxscale.system.exits import BadInput
from jaxscale.units import divisors, or_list

STACKED_LEAF = re.compile(rf"params/(?P<stack>{BLOCKS}|{DENSE})/(?:(?P<layer>[0-9]+)/)?(?P<leaf>.+)")
COLUMNS = {"mlp/gate": -1, "mlp/up": -1, "mlp/down": -2}  # the axis of an MLP's width in each of its matrices
EXPERT_LEAVES = re.compile("mlp/(router|router_bias|router_load|shared/.+)")  # leaves that a dense model lacks
ROUTER, SHARED_DOWN = re.compile("mlp/router"), re.compile("mlp/shared/down")


@dataclasses.dataclass(frozen=True)
class Origin:
    """The array of the dense model from which a leaf is made."""

    name: str
    layers: tuple[int, int] | None = None  # range of the stacked layers, if not all
    columns: int | None = None  # axis of the dense MLP's width, if experts are made of it


@dataclasses.dataclass(frozen=True)
class Upcycling:
    """Conversion of a dense model to a mixture of experts."""

    experts: ExpertsConfig
    parts: int  # of the dense MLP; 1: each expert is a copy of it
    layers: int  # total number

    def origin(self, name: str) -> Origin | None:
        """Returns the origin of a leaf; None if it is initialized, by a new model or by init_leaf()."""
        found, first = STACKED_LEAF.fullmatch(name), self.experts.first_dense
        if found is None:
            return Origin(name)
        is_mixture, leaf = found["stack"] == BLOCKS, found["leaf"]
        if is_mixture and EXPERT_LEAVES.fullmatch(leaf):
            return None
        columns = COLUMNS.get(leaf) if is_mixture else None
        if found["layer"] is not None:
            return Origin(f"params/{BLOCKS}/{int(found['layer']) + first * is_mixture}/{leaf}", columns=columns)
        layers = None if not first else (first, self.layers) if is_mixture else (0, first)
        return Origin(f"params/{BLOCKS}/{leaf}", layers, columns)

    def shape(self, origin: Origin, old: list[int]) -> list[int]:
        """Returns the shape of the leaf made of an array of this shape."""
        new = list(old)
        if origin.layers is not None:
            new[0] = min(origin.layers[1], old[0]) - origin.layers[0]
        if origin.columns is not None:
            new[origin.columns] //= self.parts
            new.insert(len(new) - 2, self.experts.number)
        return new

    def make(self, origin: Origin, read: Callable[[NamedSharding], jax.Array], target: Any) -> jax.Array:
        """Returns the leaf, sharded as `target`. read: (sharding) -> the dense array.

        Each device makes its experts from its part of the dense array without communication, and only these two are in
        memory.
        """
        spec = spec_of(target)
        if origin.columns is not None:
            del spec[-3]
        sharding = NamedSharding(target.sharding.mesh, PartitionSpec(*spec))
        return self.program(origin, sharding, target)(read(sharding))

    def program(self, origin: Origin, sharding: NamedSharding, target: Any) -> Callable[[jax.Array], jax.Array]:
        """Returns the compiled function that makes the leaf of an array with this sharding."""
        mesh = sharding.mesh
        axes = mesh_axis_names(spec_of(target)[-3]) if origin.columns is not None else ()

        def make(old: jax.Array) -> jax.Array:
            layers = old if origin.layers is None else old[slice(*origin.layers)]
            if origin.columns is None:
                return layers
            number = self.experts.number // math.prod(mesh.shape[axis] for axis in axes)
            first = lax.axis_index(axes) * number if axes else 0
            indices = (first + jnp.arange(number)) % self.parts
            return jnp.take(interleaved_parts(layers, origin.columns, self.parts), indices, axis=-3)

        mapped = jax.shard_map(
            make, mesh=mesh, in_specs=sharding.spec, out_specs=PartitionSpec(*spec_of(target)), check_vma=False
        )
        return jax.jit(mapped, out_shardings=target.sharding)

    def init_leaf(self, name: str, fresh: jax.Array, target: Any) -> jax.Array:
        """Returns a leaf without an origin, made of its initial value in a new model."""
        found = STACKED_LEAF.fullmatch(name)
        leaf = found["leaf"] if found else ""
        if SHARED_DOWN.fullmatch(leaf):  # zeros, so that shared experts contribute nothing at first
            return jax.jit(jnp.zeros_like, out_shardings=target.sharding, donate_argnums=0)(fresh)
        if ROUTER.fullmatch(leaf) and self.parts > 1:  # equal columns, so that the parts of one MLP are chosen together
            share = lambda x: jnp.repeat(x[..., :: self.parts], self.parts, axis=-1)
            return jax.jit(share, out_shardings=target.sharding, donate_argnums=0)(fresh)
        return fresh

    def describe(self) -> list[str]:
        """Returns log lines: what was made, and whether the first loss equals that of the dense model."""
        cfg, what = self.experts, "each is a copy of the dense MLP"
        if self.parts > 1:
            what = f"{cfg.number // self.parts} copies of the dense MLP, each split into {self.parts} parts"
        made = f"init: upcycled {cfg.number} experts per layer, mlp_dim {cfg.mlp_dim}: {what}; routers are random"
        if reasons := self.loss_changes():
            return [made, f"init: WARNING: the first loss differs from that of the dense model: {'; '.join(reasons)}"]
        return [made, "init: the first loss equals that of the dense model, except for rounding"]

    def loss_changes(self) -> list[str]:
        """Returns reasons for which the first loss differs from that of the dense model."""
        cfg, reasons = self.experts, []
        if not cfg.normalised:
            reasons.append("with model.experts.normalised=false the sum of a token's weights varies")
        elif cfg.scale != self.parts:
            reasons.append(f"model.experts.scale={cfg.scale:g} instead of {self.parts}")
        if cfg.chosen % self.parts:
            reasons.append(f"model.experts.chosen={cfg.chosen} splits a copy: not a multiple of its {self.parts} parts")
        if (size := cfg.number // cfg.groups) % self.parts:
            reasons.append(
                f"model.experts.groups={cfg.groups} splits a copy: {size} experts per group are not a multiple of its "
                f"{self.parts} parts"
            )
        if cfg.capacity_factor:
            reasons.append(f"model.experts.capacity_factor={cfg.capacity_factor:g} may drop tokens")
        return reasons


def interleaved_parts(old: jax.Array, columns: int, parts: int) -> jax.Array:
    """Returns [..., G, D, F] of [..., D, M], or [..., G, F, D] of [..., M, D]: column i is in part i % G.

    So each device of the tensor axis, which has contiguous columns, splits its own without communication.
    """
    axis = old.ndim + columns
    split = old.reshape(*old.shape[:axis], -1, parts, *old.shape[axis + 1 :])
    return jnp.moveaxis(split, axis + 1, old.ndim - 2)


def plan_upcycling(
    mode: Literal["copy", "split"], model: ModelConfig, shapes: Mapping[str, list[int]], source: Any
) -> Upcycling:
    """Returns the conversion of the arrays of `source` to the model's. Raises BadInput for numbers that do not fit."""
    assert model.experts is not None, "RunConfig refuses init.experts for a model without experts"
    cfg, gates = model.experts, [name for name in shapes if re.fullmatch(rf"params/{BLOCKS}/(0/)?mlp/gate", name)]
    if any(re.fullmatch(rf"params/{BLOCKS}/(0/)?mlp/router", name) for name in shapes):
        raise BadInput(f"init.experts={mode!r}: {source} already has experts; remove init.experts")
    if not gates:
        raise BadInput(f"init.experts={mode!r}: {source} has no gated MLP, params/{BLOCKS}/mlp/gate, to convert")
    dense, width, named = shapes[gates[0]][-1], cfg.mlp_dim, f"model.experts.mlp_dim={cfg.mlp_dim}"
    if mode == "copy" and width != dense:
        raise BadInput(
            f"init.experts='copy': {named} must be {dense}, the width of the dense MLP of {source}; set it, or use "
            "init.experts='split' with a divisor of that width"
        )
    if mode == "split" and (dense % width or dense == width):
        widths = or_list([dense // parts for parts in divisors(dense)[1:4]])
        raise BadInput(
            f"init.experts='split': {named} must be a proper divisor of {dense}, the width of the dense MLP of "
            f"{source}; use {widths}, or init.experts='copy' with {dense}"
        )
    if cfg.number % (parts := dense // width):
        raise BadInput(
            f"init.experts='split': model.experts.number={cfg.number} must be a multiple of the {parts} parts of a "
            f"dense MLP of {dense} ({named})"
        )
    return Upcycling(cfg, parts, model.num_layers)


def is_dense_mlp(old: list[int], new: list[int], name: str) -> bool:
    """True for the shapes of a dense MLP's array in the checkpoint and of experts' in the new model."""
    found = STACKED_LEAF.fullmatch(name)
    return found is not None and found["leaf"] in COLUMNS and len(new) == len(old) + 1


def spec_of(array: Any) -> list[Any]:
    """Returns the mesh axes of each axis of an array."""
    spec = list(array.sharding.spec)
    return spec + [None] * (len(array.shape) - len(spec))


def folding_factors(model: ModelConfig) -> dict[str, float]:
    """Returns {parameter, relative to its layer: factor of its weights} that give the same model without muP.
    Factors of 1 are omitted."""
    if getattr(model, "mup", None) is None:
        return {}
    scales = mup_scales(model)
    factors = {"final_norm": scales.output}
    query = ("q_norm",) if model.qk_norm else ("wq", "bias_q")
    factors |= {f"attention.{name}": scales.scores for name in query}
    outputs = ("attention_out_norm", "mlp_out_norm")
    if getattr(model, "norm_placement", "before") == "before":
        outputs = ("attention.wo", "attention.bias_o", "mlp.down", "mlp.shared.down")
    factors |= {name: scales.residual for name in outputs}
    return {name: factor for name, factor in factors.items() if factor != 1.0}


def without_mup(model: ModelConfig) -> ModelConfig:
    """Returns the config of the model whose weights are multiplied by folding_factor()."""
    return model if getattr(model, "mup", None) is None else dataclasses.replace(model, mup=None)


def folding_factor(model: ModelConfig, name: str) -> float:
    """Returns the factor of a parameter ('blocks/attention/wq') that gives the same model without muP."""
    return folding_factors(model).get(STACKED.sub("", name.replace("/", "."), count=1), 1.0)
