"""Adapters of low rank beside matrices of the blocks (LoRA, arXiv:2106.09685): what is learned while the rest stays.

The correction is a product beside that of the weight: x W + scale (x A) B. Adding A B to W first would be fewer
operations forward, but backward it asks for the gradient of all of W, a third of a training step's operations, which a
weight that is frozen spares; and it holds a second W. Each of the experts of a mixture has an adapter of its own.

L layers  E experts  R rank, or rows
"""

import dataclasses
import math
import re
import zlib
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxscale.models.config import LoraConfig, adapted
from jaxscale.ops.grouped import GroupedProject
from jaxscale.ops.project import Project, contracted_axes
from jaxscale.sharding.expert_axis import EXPERTS
from jaxscale.sharding.pipeline_axis import RESIDUAL_AXES
from jaxscale.sharding.rules import ROUTER
from jaxscale.sharding.shardings import Gather

RANK = "lora_rank"  # the logical axis between A and B
A, B = "_lora_a", "_lora_b"  # behind the name of the matrix
IS_ADAPTER = re.compile(rf"({A}|{B})$")
KEY = zlib.crc32(b"lora")  # folded into the model's key, so that the rest is drawn as without adapters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight with its adapter, in the place of the weight alone."""

    weight: jax.Array
    a: jax.Array  # the weight's contracted axes, then the rank; experts before them
    b: jax.Array  # the rank, then the weight's other axes; experts before them
    scale: float = dataclasses.field(metadata=dict(static=True))

    def __getitem__(self, index: Any) -> "Adapted":
        """Itself, for models write weight[...]."""
        assert index is ..., "an adapted weight is used whole"
        return self


def joined_weight(w: Any) -> jax.Array:
    """A weight with the correction of its adapter in it, if it has one; for a product that `project` cannot say."""
    return w.weight + w.scale * jnp.tensordot(w.a, w.b, axes=1) if isinstance(w, Adapted) else w


def adapting(project: Project) -> Project:
    """`project`, which takes adapted weights too."""

    def run(spec: str, x: jax.Array, w: Any) -> jax.Array:
        if not isinstance(w, Adapted):
            return project(spec, x, w)
        down, up = side_specs(spec)
        return project(spec, x, w.weight) + project(up, w.scale * project(down, x, w.a), w.b)

    return run


def adapting_groups(grouped: GroupedProject) -> GroupedProject:
    """`grouped`, which takes adapted weights too."""

    def run(x_RC: jax.Array, w_ECO: Any, counts_E: jax.Array, **how: Any) -> jax.Array:
        if not isinstance(w_ECO, Adapted):
            return grouped(x_RC, w_ECO, counts_E, **how)
        beside = w_ECO.scale * grouped(x_RC, w_ECO.a, counts_E)
        return grouped(x_RC, w_ECO.weight, counts_E, **how) + grouped(beside, w_ECO.b, counts_E)

    return run


def side_specs(spec: str) -> tuple[str, str]:
    """The two products of the adapter: 'BTNH,NHD->BTD' gives 'BTNH,NHr->BTr' and 'BTr,rD->BTD'."""
    count = contracted_axes(spec)
    inputs, output = spec.replace(" ", "").split("->")
    x_axes, w_axes = inputs.split(",")
    kept = x_axes[: len(x_axes) - count]
    return f"{x_axes},{w_axes[:count]}r->{kept}r", f"{kept}r,r{w_axes[count:]}->{output}"


def is_adapter(name: str) -> bool:
    """True for the name of a leaf that is A or B of an adapter, however its parts are joined."""
    return IS_ADAPTER.search(name) is not None


def frozen_but_adapters(gather: Gather) -> Gather:
    """`gather` that lets no gradient through to anything but adapters: then it is not computed."""

    def run(w: Any, axes: tuple[str, ...], dtype: Any) -> jax.Array:
        whole = gather(w, axes, dtype)
        return whole if RANK in axes else jax.lax.stop_gradient(whole)

    return run


class HasBlocks(Protocol):
    """A model that can have adapters."""

    blocks: Any


M = TypeVar("M", bound=HasBlocks)


def add_adapters(model: M, cfg: LoraConfig, key: jax.Array) -> M:
    """Returns the model with parameters A, normal with std 1 / sqrt(fan_in), and B = 0 added for each matrix of the
    blocks that a target finds.

    Raises BadInput for a target that finds none, with the names there are.
    """
    matrices = list(block_matrices(model.blocks))
    chosen = adapted(cfg, {name for name, *_ in matrices})
    key = jax.random.fold_in(key, KEY)
    for name, layer, owner, leaf in matrices:
        if name in chosen:
            own = jax.random.fold_in(key, zlib.crc32(name.encode()))
            attach(owner, name.rpartition(".")[2], leaf, layer, cfg, own)
    return model


def attach(owner: nnx.Module, name: str, leaf: nnx.Param, layer: int | None, cfg: LoraConfig, key: jax.Array) -> None:
    """Gives a matrix its adapter. layer: its number, or None where the first axis is that of all layers."""
    stacked, shape = layer is None, leaf.get_value().shape
    each = stacked + (EXPERTS in leaf.axes)  # axes of matrices, before those of one
    axes, outer = leaf.axes[each:], leaf.axes[:each]
    many, shape = shape[:each], shape[each:]
    count = contracted(axes)
    fan_in, of_a = math.prod(shape[:count]), (*many[stacked:], *shape[:count], cfg.rank)
    draw = lambda number: fan_in**-0.5 * jax.random.normal(jax.random.fold_in(key, number), of_a, jnp.float32)
    a = jax.vmap(draw)(jnp.arange(many[0])) if stacked else draw(layer)
    b = jnp.zeros((*many, cfg.rank, *shape[count:]), jnp.float32)
    setattr(owner, name + A, nnx.Param(a, axes=(*outer, *axes[:count], RANK), lora_scale=cfg.scale))
    setattr(owner, name + B, nnx.Param(b, axes=(*outer, RANK, *axes[count:]), lora_scale=cfg.scale))


def block_matrices(blocks: nnx.Module) -> Iterator[tuple[str, int | None, nnx.Module, nnx.Param]]:
    """(name as 'blocks.attention.wq', layer or None where all are stacked, the module it is in, itself) of each, but
    for routers: which expert a token gets hangs on their last bits."""
    for path, leaf in nnx.to_flat_state(nnx.state(blocks, nnx.Param)):
        layer = path[0] if isinstance(path[0], int) else None
        inner = path if layer is None else path[1:]
        axes = tuple(axis for axis in leaf.axes[layer is None :] if axis != EXPERTS)
        if len(axes) < 2 or ROUTER in axes or not {axes[0], axes[-1]} & set(RESIDUAL_AXES):
            continue
        owner: Any = blocks
        for part in path[:-1]:
            owner = owner[part] if isinstance(part, int) else getattr(owner, str(part))
        yield ".".join(["blocks", *map(str, inner)]), layer, owner, getattr(owner, str(path[-1]))


def contracted(axes: tuple[str, ...]) -> int:
    """How many axes of a block's matrix a product sums over: those before the residual stream's, or that one."""
    return 1 if axes[0] in RESIDUAL_AXES else len(axes) - 1


def join_adapters(params: nnx.State) -> nnx.State:
    """A block's parameters with each adapted matrix and its adapter in the place of the matrix."""
    flat = dict(nnx.to_flat_state(params))
    for path in [path for path in flat if str(path[-1]).endswith(A)]:
        inner = str(path[-1]).removesuffix(A)
        weight, a, b = (flat[*path[:-1], inner + ending] for ending in ("", A, B))
        joined = Adapted(weight.get_value(), a.get_value(), b.get_value(), a.lora_scale)
        flat[*path[:-1], inner] = nnx.Param(joined, axes=weight.axes)
    return nnx.from_flat_state(sorted(flat.items(), key=lambda item: tuple(map(str, item[0]))))
