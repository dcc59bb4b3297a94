"""Families of Hugging Face models: settings and tensor names, one table for both directions.

Our weights have input axes first; a torch Linear stores [out, in], with heads and head_dim as one axis.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.llama_config import BLOCKS
from jaxscale.system.exits import BadInput

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One Hugging Face tensor, and the leaves that it holds, concatenated along the outputs.

    inputs: number of leading axes of our leaf that a matmul contracts; 0 for a vector. transposed: the file has
    [out, in]. interleaved: RoPE's dimensions, the end of the last axis, are interleaved pairs in the file and halves in
    ours. A spec applies if the model has its leaves; "blocks/" without experts also applies to the dense layers before
    those with experts.
    """

    leaf_names: str | tuple[str, ...]  # "blocks/attention/wq": below "blocks/" one per layer
    hf_name: str  # after the family's prefix; with {layer} and {expert}
    inputs: int = 0
    transposed: bool = False
    interleaved: bool = False

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of our leaves."""
        return (self.leaf_names,) if isinstance(self.leaf_names, str) else self.leaf_names

    @property
    def per_layer(self) -> bool:
        """True if there is one per layer."""
        return "{layer}" in self.hf_name

    @property
    def per_expert(self) -> bool:
        """True if there is one per expert."""
        return "{expert}" in self.hf_name


@dataclasses.dataclass(frozen=True)
class FusedExperts:
    """A tensor of all experts of a layer, [experts, concatenated outputs, in], which transformers 5 may save."""

    hf_name: str  # after the family's prefix, as in TensorSpec
    rows: tuple[str, ...]  # hf_name of the specs that it concatenates, in order


@dataclasses.dataclass(frozen=True)
class LayerStack:
    """Layers with equal parameter shapes."""

    name: str  # in our parameter tree
    first: int  # index of its first layer in the model
    layers: int
    scanned: bool

    def contains(self, row: TensorSpec) -> bool:
        """True if the spec may belong to these layers; its leaves are not checked."""
        return row.per_layer and (self.name == BLOCKS or not row.per_expert) and all(map(self.leaf_name, row.leaves))

    def leaf_name(self, name: str) -> str:
        """Returns the name of a spec's leaf in these layers; '' if it belongs to others."""
        stack, _, inner = name.partition("/")
        return f"{self.name}/{inner}" if stack in (self.name, BLOCKS) else ""


@dataclasses.dataclass(frozen=True)
class TensorPair:
    """One Hugging Face tensor and its leaves, with shapes: the unit of reading and writing."""

    leaves: tuple[str, ...]  # "blocks/attention/wq", or "blocks/0/attention/wq" where not scanned
    layer: int | None  # index on the leading axis of the leaves; None: no layer axis
    leaf_shapes: tuple[Shape, ...]  # without the axes of layers and experts
    hf_name: str
    hf_shape: Shape
    row: TensorSpec
    expert: int | None = None  # index on the next axis; None: no expert axis
    interleaved_dims: int = 0  # entries at the end of our last axis that the file interleaves

    @property
    def place(self) -> tuple[int, ...]:
        """Index on the leading axes of the leaves."""
        return tuple(at for at in (self.layer, self.expert) if at is not None)

    def to_leaves(self, tensor: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns the leaves, as views where possible. Raises BadInput for another shape."""
        self.check(self.hf_name, tensor.shape, self.hf_shape)
        flat = tensor.T if self.row.transposed else tensor
        ends = np.cumsum([output_size(shape, self.row.inputs) for shape in self.leaf_shapes])[:-1]
        parts = np.split(flat, ends, axis=-1) if len(ends) else [flat]
        leaves = (part.reshape(shape) for part, shape in zip(parts, self.leaf_shapes, strict=True))
        return tuple(self.permute_last(leaf, deinterleaved_order(self.interleaved_dims)) for leaf in leaves)

    def to_hf(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the Hugging Face tensor: the exact inverse of to_leaves."""
        for name, leaf, shape in zip(self.leaves, leaves, self.leaf_shapes, strict=True):
            self.check(name, leaf.shape, shape)
        leaves = [self.permute_last(leaf, np.argsort(deinterleaved_order(self.interleaved_dims))) for leaf in leaves]
        parts = [leaf.reshape(matrix_shape(leaf.shape, self.row.inputs)) for leaf in leaves]
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return flat.T if self.row.transposed else flat

    def permute_last(self, leaf: np.ndarray, order: np.ndarray) -> np.ndarray:
        """Permutes the interleaved entries at the end of the last axis."""
        if not self.interleaved_dims:
            return leaf
        first = leaf.shape[-1] - self.interleaved_dims
        return np.take(leaf, [*range(first), *(first + order)], axis=-1)

    def check(self, name: str, shape: Shape, expected: Shape) -> None:
        """Raises BadInput unless the shapes are equal."""
        if tuple(shape) != expected:
            raise BadInput(f"{name} has shape {list(shape)}, and by the config it is {list(expected)}")


@dataclasses.dataclass(frozen=True)
class Family:
    """A class of transformers models: config keys and tensor names."""

    model_type: str  # of its config.json
    architectures: tuple[str, ...]  # accepted; the first is written
    read_config: Callable[[Mapping[str, Any]], AnyModelConfig]  # raises BadInput for unsupported settings
    write_config: Callable[[Any], dict[str, Any]]  # inverse of read_config, in keys that every release reads
    rows: tuple[TensorSpec, ...]
    keys: tuple[str, ...]  # config.json keys that read_config uses
    prefixes: tuple[str, ...] = ("model.",)  # of all names but `unprefixed`; the first is written
    unprefixed: tuple[str, ...] = ("lm_head.weight",)  # names without prefix
    left_out: tuple[str, ...] = ()  # patterns of names that are not parameters of the language model
    exported_as: str = ""  # model_type of the family that writes its models
    fused: tuple[FusedExperts, ...] = ()  # alternatives to one tensor per expert
    renames: tuple[tuple[str, str], ...] = ()  # (pattern, replacement) for names of transformers 5
    extra_layers: str = ""  # description of layers after the last one, which are refused


def deinterleaved_order(size: int) -> np.ndarray:
    """Returns the indices of the first entry of each interleaved pair, then of the second."""
    return np.arange(size).reshape(-1, 2).T.reshape(-1)


def output_size(shape: Shape, inputs: int) -> int:
    """Returns the size of the axes after the inputs."""
    return math.prod(shape[inputs:])


def matrix_shape(shape: Shape, inputs: int) -> Shape:
    """Returns (inputs, outputs), or (entries,) without inputs."""
    return (math.prod(shape[:inputs]), output_size(shape, inputs)) if inputs else (math.prod(shape),)


def bind_spec(
    row: TensorSpec,
    family: Family,
    shapes: Mapping[str, Shape],
    base: str,
    stack: LayerStack | None = None,
    layer: int | None = None,
    expert: int | None = None,
    rope_dim: int = 0,
) -> TensorPair:
    """Returns the pair of a spec, for one layer of a stack and one expert.

    Args: shapes: of our leaves, without the layer axis. layer, expert: Hugging Face's numbers. rope_dim: rotated
    dimensions of a head.
    """
    names, at = row.leaves, None
    if stack is not None:
        assert layer is not None, "a stack has layers"
        names, at = tuple(stack.leaf_name(name) for name in names), layer - stack.first
    leaf_shapes = tuple(shapes[name] if expert is None else shapes[name][1:] for name in names)
    if stack is not None and not stack.scanned:
        names, at = tuple(name.replace("/", f"/{at}/", 1) for name in names), None
    flats = [matrix_shape(shape, row.inputs) for shape in leaf_shapes]
    fused = (*flats[0][:-1], sum(flat[-1] for flat in flats))
    hf_shape = fused[::-1] if row.transposed else fused
    hf_name = ("" if row.hf_name in family.unprefixed else base) + row.hf_name.format(layer=layer, expert=expert)
    return TensorPair(names, at, leaf_shapes, hf_name, hf_shape, row, expert, rope_dim if row.interleaved else 0)


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Returns True if a pattern matches the full name."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)
