"""LoRA adapters for matrices of the blocks (arXiv:2106.09685). Other parameters are frozen.

The correction is a separate product, x W + scale (x A) B. Adding A B to W first would need fewer forward FLOPs and a
second W in memory, and the backward pass would compute the gradient of W, a third of the FLOPs of a training step,
which a frozen weight avoids. Each expert of a mixture has a separate adapter.

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

from jaxscale.core.axes.expert_axis import EXPERTS
from jaxscale.core.axes.pipeline_axis import RESIDUAL_AXES
from jaxscale.core.models.lora_mup_config import LoraConfig, adapted_matrices
from jaxscale.core.shardings import ROUTER, Gather
from jaxscale.kernels.matmul.project import Project, contracted_axes
from jaxscale.kernels.matmul.slots import GroupedProject

RANK = "lora_rank"  # the logical axis between A and B
A, B = "_lora_a", "_lora_b"  # suffixes added to the name of a matrix
IS_ADAPTER = re.compile(rf"({A}|{B})$")
KEY = zlib.crc32(b"lora")  # folded into the model's key, so that adapters do not change the other parameters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight with its adapter, in place of the weight."""

    weight: jax.Array
    a: jax.Array  # axes: experts, if any; the contracted axes of the weight; rank
    b: jax.Array  # axes: experts, if any; rank; the other axes of the weight
    scale: float = dataclasses.field(metadata=dict(static=True))

    def __getitem__(self, index: Any) -> "Adapted":
        """Returns self, because models read a weight as weight[...]."""
        assert index is ..., "an adapted weight supports only weight[...]"
        return self


def merged_weight(w: Any) -> jax.Array:
    """Returns the weight with its adapter's correction added, if it has an adapter."""
    return w.weight + w.scale * jnp.tensordot(w.a, w.b, axes=1) if isinstance(w, Adapted) else w


def make_lora_project(project: Project) -> Project:
    """Returns `project` extended to adapted weights."""

    def run(spec: str, x: jax.Array, w: Any) -> jax.Array:
        if not isinstance(w, Adapted):
            return project(spec, x, w)
        down, up = adapter_specs(spec)
        return project(spec, x, w.weight) + project(up, w.scale * project(down, x, w.a), w.b)

    return run


def make_lora_grouped_project(grouped: GroupedProject) -> GroupedProject:
    """Returns `grouped` extended to adapted weights."""

    def run(x_RC: jax.Array, w_ECO: Any, counts_E: jax.Array, **options: Any) -> jax.Array:
        if not isinstance(w_ECO, Adapted):
            return grouped(x_RC, w_ECO, counts_E, **options)
        h_Rr = w_ECO.scale * grouped(x_RC, w_ECO.a, counts_E)
        return grouped(x_RC, w_ECO.weight, counts_E, **options) + grouped(h_Rr, w_ECO.b, counts_E)

    return run


def adapter_specs(spec: str) -> tuple[str, str]:
    """Returns the einsum specs of an adapter: 'BTNH,NHD->BTD' gives 'BTNH,NHr->BTr' and 'BTr,rD->BTD'."""
    count = contracted_axes(spec)
    inputs, output = spec.replace(" ", "").split("->")
    x_axes, w_axes = inputs.split(",")
    batch_axes = x_axes[: len(x_axes) - count]
    return f"{x_axes},{w_axes[:count]}r->{batch_axes}r", f"{batch_axes}r,r{w_axes[count:]}->{output}"


def is_adapter(name: str) -> bool:
    """Returns True for the name of an adapter matrix, A or B."""
    return IS_ADAPTER.search(name) is not None


def make_adapter_only_gather(gather: Gather) -> Gather:
    """Returns `gather` with stop_gradient on frozen weights, so that only gradients of adapters are computed."""

    def run(w: Any, axes: tuple[str, ...], dtype: Any) -> jax.Array:
        gathered = gather(w, axes, dtype)
        return gathered if RANK in axes else jax.lax.stop_gradient(gathered)

    return run


class HasBlocks(Protocol):
    """A model with blocks, to which adapters can be added."""

    blocks: Any


M = TypeVar("M", bound=HasBlocks)


def add_adapters(model: M, cfg: LoraConfig, key: jax.Array) -> M:
    """Adds adapters to the matrices in blocks whose names match cfg.targets.

    A is drawn from a normal distribution with std 1 / sqrt(fan_in). B is 0. Raises BadInput for an unmatched target.
    """
    matrices = list(block_matrices(model.blocks))
    targets = adapted_matrices(cfg, {name for name, *_ in matrices})
    key = jax.random.fold_in(key, KEY)
    for name, layer, owner, leaf in matrices:
        if name in targets:
            matrix_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
            add_adapter(owner, name.rpartition(".")[2], leaf, layer, cfg, matrix_key)
    return model


def add_adapter(owner: Any, name: str, leaf: nnx.Param, layer: int | None, cfg: LoraConfig, key: jax.Array) -> None:
    """Adds an adapter to a matrix. layer: index of the layer, or None if layers are stacked."""
    stacked, shape = layer is None, leaf.get_value().shape
    num_outer = stacked + (EXPERTS in leaf.axes)  # leading axes of layers and experts
    outer_axes, axes = leaf.axes[:num_outer], leaf.axes[num_outer:]
    outer_shape, shape = shape[:num_outer], shape[num_outer:]
    count = num_contracted(axes)
    fan_in, a_shape = math.prod(shape[:count]), (*outer_shape[stacked:], *shape[:count], cfg.rank)
    draw = lambda number: fan_in**-0.5 * jax.random.normal(jax.random.fold_in(key, number), a_shape, jnp.float32)
    a = jax.vmap(draw)(jnp.arange(outer_shape[0])) if stacked else draw(layer)
    b = jnp.zeros((*outer_shape, cfg.rank, *shape[count:]), jnp.float32)
    setattr(owner, name + A, nnx.Param(a, axes=(*outer_axes, *axes[:count], RANK), lora_scale=cfg.scale))
    setattr(owner, name + B, nnx.Param(b, axes=(*outer_axes, RANK, *axes[count:]), lora_scale=cfg.scale))


def block_matrices(blocks: nnx.Module) -> Iterator[tuple[str, int | None, nnx.Module, nnx.Param]]:
    """Yields (name such as 'blocks.attention.wq', layer or None if stacked, module, parameter) of each matrix.
    Excludes routers, because rounding differences can change the selected experts."""
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


def num_contracted(axes: tuple[str, ...]) -> int:
    """Returns how many leading axes a projection contracts: 1 if axis 0 is a residual axis, else all but the last."""
    return 1 if axes[0] in RESIDUAL_AXES else len(axes) - 1


def join_adapters(params: nnx.State) -> nnx.State:
    """Returns a block's parameters with each adapted matrix replaced by an Adapted."""
    flat = dict(nnx.to_flat_state(params))
    for path in [path for path in flat if str(path[-1]).endswith(A)]:
        inner = str(path[-1]).removesuffix(A)
        weight, a, b = (flat[*path[:-1], inner + ending] for ending in ("", A, B))
        joined = Adapted(weight.get_value(), a.get_value(), b.get_value(), a.lora_scale)
        flat[*path[:-1], inner] = nnx.Param(joined, axes=weight.axes)
    return nnx.from_flat_state(sorted(flat.items(), key=lambda item: tuple(map(str, item[0]))))
