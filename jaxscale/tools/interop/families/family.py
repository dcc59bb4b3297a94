"""Data classes for families of Hugging Face models, whose tables of names are used in both directions."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.core.models import AnyModelConfig
from jaxscale.system.exits import BadInput

Shape = tuple[int, ...]
HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Names of a Hugging Face tensor and of its leaves, which are concatenated along the output axis.

    inputs: number of leading axes of a leaf that a matmul contracts, or 0 for a vector. transposed: the file has
    [out, in]. interleaved: at the end of the last axis, the RoPE dimensions are interleaved pairs in the file and two
    halves in the leaf. A spec applies if the model has its leaves. Specs for "blocks/", except for experts, also apply
    to the dense layers before the layers with experts.
    """

    leaf_names: str | tuple[str, ...]  # such as "blocks/attention/wq"; "blocks/" means one per layer
    hf_name: str  # name after the family's prefix, with {layer} and {expert}
    inputs: int = 0
    transposed: bool = False
    interleaved: bool = False

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the leaves."""
        return (self.leaf_names,) if isinstance(self.leaf_names, str) else self.leaf_names

    @property
    def per_layer(self) -> bool:
        """True if there is one tensor per layer."""
        return "{layer}" in self.hf_name

    @property
    def per_expert(self) -> bool:
        """True if there is one tensor per expert."""
        return "{expert}" in self.hf_name


@dataclasses.dataclass(frozen=True)
class TensorPair:
    """One Hugging Face tensor and its leaves, with their shapes. Leaves of a pair are read and written together."""

    leaves: tuple[str, ...]  # such as "blocks/attention/wq", or "blocks/0/attention/wq" if layers are not scanned
    layer: int | None  # index on the leading axis of the leaves, or None without a layer axis
    leaf_shapes: tuple[Shape, ...]  # without the axes of layers and experts
    hf_name: str
    hf_shape: Shape
    row: TensorSpec
    expert: int | None = None  # index on the next axis, or None without an expert axis
    interleaved_dims: int = 0  # number of entries at the end of the last axis that are interleaved in the file

    @property
    def place(self) -> tuple[int, ...]:
        """Index on the leading axes of the leaves."""
        return tuple(at for at in (self.layer, self.expert) if at is not None)

    def to_leaves(self, tensor: np.ndarray) -> tuple[np.ndarray, ...]:
        """Splits the tensor into leaves, which are views if possible. Raises BadInput for a wrong shape."""
        self.check(self.hf_name, tensor.shape, self.hf_shape)
        flat = tensor.T if self.row.transposed else tensor
        ends = np.cumsum([math.prod(shape[self.row.inputs :]) for shape in self.leaf_shapes])[:-1]
        parts = np.split(flat, ends, axis=-1) if len(ends) else [flat]
        leaves = (part.reshape(shape) for part, shape in zip(parts, self.leaf_shapes, strict=True))
        return tuple(map(self.deinterleave, leaves))

    def to_hf(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the Hugging Face tensor. This is the exact inverse of to_leaves()."""
        for name, leaf, shape in zip(self.leaves, leaves, self.leaf_shapes, strict=True):
            self.check(name, leaf.shape, shape)
        ordered = (self.deinterleave(leaf, inverse=True) for leaf in leaves)
        parts = [leaf.reshape(matrix_shape(leaf.shape, self.row.inputs)) for leaf in ordered]
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return flat.T if self.row.transposed else flat

    def deinterleave(self, leaf: np.ndarray, inverse: bool = False) -> np.ndarray:
        """Converts interleaved pairs at the end of the last axis to two halves, or back if `inverse`."""
        if not self.interleaved_dims:
            return leaf
        order = np.arange(self.interleaved_dims).reshape(-1, 2).T.reshape(-1)
        first = leaf.shape[-1] - self.interleaved_dims
        return np.take(leaf, [*range(first), *(first + (np.argsort(order) if inverse else order))], axis=-1)

    def check(self, name: str, shape: Shape, expected: Shape) -> None:
        """Raises BadInput unless the shapes are equal."""
        if tuple(shape) != expected:
            raise BadInput(f"{name} has shape {list(shape)}, but the config requires {list(expected)}")


@dataclasses.dataclass(frozen=True)
class HfFamily:
    """A class of transformers models: config keys and tensor names."""

    model_type: str  # model_type in config.json
    architectures: tuple[str, ...]  # accepted architectures; the first is written
    read_config: Callable[[Mapping[str, Any]], AnyModelConfig]  # raises BadInput for unsupported settings
    write_config: Callable[[Any], dict[str, Any]]  # inverse of read_config, in keys that every release reads
    rows: tuple[TensorSpec, ...]
    keys: tuple[str, ...]  # config.json keys that read_config uses
    prefixes: tuple[str, ...] = ("model.",)  # prefixes of all names except HEAD; the first is written
    left_out: tuple[str, ...] = ()  # patterns for names that are not parameters of the language model
    exported_as: str = ""  # model_type of the family for exports
    # {fused name: hf_names of specs}. transformers 5 may save fused tensors [experts, concatenated outputs, in] for all
    # experts of a layer instead of one tensor per expert.
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()  # (pattern, replacement) for names in transformers 5
    extra_layers: str = ""  # description of layers after the last layer of the model, which are refused


def matrix_shape(shape: Shape, inputs: int) -> Shape:
    """Flattens the shape of a leaf to (inputs, outputs) for a matrix, or (entries,) for a vector."""
    return (math.prod(shape[:inputs]), math.prod(shape[inputs:])) if inputs else (math.prod(shape),)


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Returns True if a pattern matches the full name."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)
