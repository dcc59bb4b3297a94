"""Converts weights of a dense model to experts, and weights of a muP model to a model without muP.

Upcycling converts a dense model to a mixture of experts (arXiv:2212.05055, arXiv:2410.07524). Each expert starts as a
copy of the dense MLP (copy), or as one of G equal parts of the dense MLP, where part g has the columns i with i % G = g
(split). The router is initialized as in a new model. If the weights of a token's experts sum to G, the mixture computes
the same function as the dense model.

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
COLUMNS = {"mlp/gate": -1, "mlp/up": -1, "mlp/down": -2}  # axis of the MLP width in each matrix
EXPERT_LEAVES = re.compile("mlp/(router|router_bias|router_load|shared/.+)")  # leaves that a dense model lacks
ROUTER, SHARED_DOWN = re.compile("mlp/router"), re.compile("mlp/shared/down")


@dataclasses.dataclass(frozen=True)
class Origin:
    """The array of the dense model from which a leaf is made."""

    name: str
    layers: tuple[int, int] | None = None  # selected range of stacked layers; None: all
    columns: int | None = None  # axis of the dense MLP's width; None: the leaf is not a matrix of experts


@dataclasses.dataclass(frozen=True)
class Upcycling:
    """Conversion of a dense model to a mixture of experts."""

    experts: ExpertsConfig
    parts: int  # number of parts of the dense MLP; 1: each expert is a copy of the whole MLP
    layers: int  # total number of layers

    def origin(self, name: str) -> Origin | None:
        """Returns the dense array from which a leaf is made; None for leaves that init_leaf() initializes."""
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
        """Returns the shape of the leaf that is made from an array with shape `old`."""
        new = list(old)
        if origin.layers is not None:
            new[0] = min(origin.layers[1], old[0]) - origin.layers[0]
        if origin.columns is not None:
            new[origin.columns] //= self.parts
            new.insert(len(new) - 2, self.experts.number)
        return new

    def make(self, origin: Origin, read: Callable[[NamedSharding], jax.Array], target: Any) -> jax.Array:
        """Returns the leaf with the sharding of `target`. read: function from a sharding to the dense array.

        Each device makes its experts from its shard of the dense array without communication. Only the dense array and
        the new leaf are in memory.
        """
        spec = spec_of(target)
        if origin.columns is not None:
            del spec[-3]
        sharding = NamedSharding(target.sharding.mesh, PartitionSpec(*spec))
        return self.program(origin, sharding, target)(read(sharding))

    def program(self, origin: Origin, sharding: NamedSharding, target: Any) -> Callable[[jax.Array], jax.Array]:
        """Returns the jitted function that makes the leaf from an array with the given sharding."""
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
        """Returns the initial value of a leaf that the dense model lacks. fresh: its value in a new model."""
        found = STACKED_LEAF.fullmatch(name)
        leaf = found["leaf"] if found else ""
        if SHARED_DOWN.fullmatch(leaf):  # zeros, so that shared experts contribute nothing at first
            return jax.jit(jnp.zeros_like, out_shardings=target.sharding, donate_argnums=0)(fresh)
        if ROUTER.fullmatch(leaf) and self.parts > 1:  # equal columns: selects all parts of an MLP together
            share = lambda x: jnp.repeat(x[..., :: self.parts], self.parts, axis=-1)
            return jax.jit(share, out_shardings=target.sharding, donate_argnums=0)(fresh)
        return fresh

    def describe(self) -> list[str]:
        """Returns log lines about the new experts and about whether the first loss equals the dense model's loss."""
        cfg, what = self.experts, "each is a copy of the dense MLP"
        if self.parts > 1:
            what = f"{cfg.number // self.parts} copies of the dense MLP, each split into {self.parts} parts"
        made = f"init: upcycled {cfg.number} experts per layer, mlp_dim {cfg.mlp_dim}: {what}; routers are random"
        if reasons := self.loss_changes():
            return [made, f"init: WARNING: the first loss differs from that of the dense model: {'; '.join(reasons)}"]
        return [made, "init: the first loss equals that of the dense model, except for rounding"]

    def loss_changes(self) -> list[str]:
        """Returns the reasons why the first loss differs from the dense model's loss."""
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
    """Splits [..., D, M] into [..., G, D, F], or [..., M, D] into [..., G, F, D]. Part g has columns i with i % G = g.

    Each device of the tensor axis splits its contiguous columns without communication.
    """
    axis = old.ndim + columns
    split = old.reshape(*old.shape[:axis], -1, parts, *old.shape[axis + 1 :])
    return jnp.moveaxis(split, axis + 1, old.ndim - 2)


def plan_upcycling(
    mode: Literal["copy", "split"], model: ModelConfig, shapes: Mapping[str, list[int]], source: Any
) -> Upcycling:
    """Returns the conversion of a dense checkpoint to the experts of `model`. Raises BadInput if sizes do not match."""
    assert model.experts is not None, "RunConfig refuses init.experts for a model without experts"
    cfg, gates = model.experts, [name for name in shapes if re.fullmatch(rf"params/{BLOCKS}/(0/)?mlp/gate", name)]
    if any(re.fullmatch(rf"params/{BLOCKS}/(0/)?mlp/router", name) for name in shapes):
        raise BadInput(f"init.experts={mode!r}: {source} already has experts; remove init.experts")
    if not gates:
        raise BadInput(f"init.experts={mode!r} needs a gated MLP (params/{BLOCKS}/mlp/gate), which {source} lacks")
    dense, width, named = shapes[gates[0]][-1], cfg.mlp_dim, f"model.experts.mlp_dim={cfg.mlp_dim}"
    if mode == "copy" and width != dense:
        raise BadInput(
            f"init.experts='copy': {named} must be {dense}, the MLP width of {source}; change it, or use "
            "init.experts='split' with a divisor of the MLP width"
        )
    if mode == "split" and (dense % width or dense == width):
        widths = or_list([dense // parts for parts in divisors(dense)[1:4]])
        raise BadInput(
            f"init.experts='split': {named} must be a proper divisor of {dense}, the MLP width of "
            f"{source}; use {widths}, or init.experts='copy' with mlp_dim={dense}"
        )
    if cfg.number % (parts := dense // width):
        raise BadInput(
            f"init.experts='split': model.experts.number={cfg.number} must be a multiple of {parts}, the number of "
            f"parts into which {named} splits the MLP of width {dense}"
        )
    return Upcycling(cfg, parts, model.num_layers)


def is_dense_mlp(old: list[int], new: list[int], name: str) -> bool:
    """Returns True if `old` is the shape of a dense MLP matrix, and `new` the shape of the same matrix with experts."""
    found = STACKED_LEAF.fullmatch(name)
    return found is not None and found["leaf"] in COLUMNS and len(new) == len(old) + 1


def spec_of(array: Any) -> list[Any]:
    """Returns the mesh axes over which each axis of an array is sharded."""
    spec = list(array.sharding.spec)
    return spec + [None] * (len(array.shape) - len(spec))


def folding_factors(model: ModelConfig) -> dict[str, float]:
    """Returns {parameter: factor} by which to multiply parameters to remove muP. Omits factors of 1."""
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
    """Returns the model config without muP, for weights multiplied by folding_factor()."""
    return model if getattr(model, "mup", None) is None else dataclasses.replace(model, mup=None)


def folding_factor(model: ModelConfig, name: str) -> float:
    """Returns the factor of folding_factors() for a parameter, such as 'blocks/attention/wq', or 1."""
    return folding_factors(model).get(STACKED.sub("", name.replace("/", "."), count=1), 1.0)
