"""A family of Hugging Face models: its settings and tensor names, one table for both directions.

A matrix of ours has its input axes first; a torch Linear keeps [out, in], heads and their sizes as one axis.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.models import AnyModelConfig
from jaxscale.models.llama_config import BLOCKS
from jaxscale.system.exits import BadInput

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor of theirs, and the leaves of ours that it holds.

    inputs: leading axes of ours that a product contracts; 0 for a vector. turned: theirs is [out, in]. paired: what
    RoPE turns, the last numbers of the last axis, are pairs of neighbours in theirs and halves in ours. Several leaves
    lie side by side along the outputs. A row counts where the model has its leaves. One of "blocks/" is also for the
    dense layers before those with experts, if it is of no expert.
    """

    ours: str | tuple[str, ...]  # "blocks/attention/wq": below "blocks/" there is one for each layer
    theirs: str  # behind the base of the family; {layer} and {expert} where there is one for each
    inputs: int = 0
    turned: bool = False
    paired: bool = False

    @property
    def leaves(self) -> tuple[str, ...]:
        """Our names."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    @property
    def per_layer(self) -> bool:
        """True if there is one for each layer."""
        return "{layer}" in self.theirs

    @property
    def per_expert(self) -> bool:
        """True if a layer has one for each of its experts."""
        return "{expert}" in self.theirs


@dataclasses.dataclass(frozen=True)
class Joined:
    """A tensor of theirs that holds those of all experts of a layer: [experts, their outputs one below the other, in].

    transformers 5 has them so in memory, and may save them so.
    """

    theirs: str  # behind the base of the family, as of a Row
    rows: tuple[str, ...]  # `theirs` of the rows that it holds of each expert, in their order


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers of ours that are alike."""

    name: str  # among our parameters
    first: int  # which layer of the model its own first one is
    layers: int
    scanned: bool

    def has(self, row: Row) -> bool:
        """Whether the row may be one of its layers: its leaves are not looked at."""
        return row.per_layer and (self.name == BLOCKS or not row.per_expert) and all(map(self.own, row.leaves))

    def own(self, name: str) -> str:
        """The leaf of a row in these layers; '' where that is none of theirs."""
        stack, _, inner = name.partition("/")
        return f"{self.name}/{inner}" if stack in (self.name, BLOCKS) else ""


@dataclasses.dataclass(frozen=True)
class TensorPair:
    """One tensor of theirs and what it is of ours, shapes known: the unit in which a checkpoint is read and written."""

    ours: tuple[str, ...]  # names of leaves: "blocks/attention/wq", or "blocks/0/attention/wq" where not scanned
    layer: int | None  # place along the leading axis of those leaves; None: they have none of layers
    our_shapes: tuple[Shape, ...]  # without the axes of layers and experts
    theirs: str
    their_shape: Shape
    row: Row
    expert: int | None = None  # place along the axis behind that one; None: the leaves are of no experts
    neighbours: int = 0  # how many numbers at the end of the last axis of ours are in pairs in theirs

    @property
    def place(self) -> tuple[int, ...]:
        """Along the leading axes of our leaves."""
        return tuple(at for at in (self.layer, self.expert) if at is not None)

    def to_ours(self, tensor: np.ndarray) -> tuple[np.ndarray, ...]:
        """Theirs as ours, views where that is possible. Raises BadInput for another shape."""
        self.check(self.theirs, tensor.shape, self.their_shape)
        flat = tensor.T if self.row.turned else tensor
        ends = np.cumsum([outputs(shape, self.row.inputs) for shape in self.our_shapes])[:-1]
        parts = np.split(flat, ends, axis=-1) if len(ends) else [flat]
        leaves = (part.reshape(shape) for part, shape in zip(parts, self.our_shapes, strict=True))
        return tuple(self.reordered(leaf, halves_of_pairs(self.neighbours)) for leaf in leaves)

    def to_theirs(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """Ours as theirs: the inverse of to_ours, bit for bit."""
        for name, leaf, shape in zip(self.ours, leaves, self.our_shapes, strict=True):
            self.check(name, leaf.shape, shape)
        leaves = [self.reordered(leaf, np.argsort(halves_of_pairs(self.neighbours))) for leaf in leaves]
        parts = [leaf.reshape(flat_shape(leaf.shape, self.row.inputs)) for leaf in leaves]
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return flat.T if self.row.turned else flat

    def reordered(self, leaf: np.ndarray, order: np.ndarray) -> np.ndarray:
        """The leaf with the last numbers of its last axis in this order."""
        if not self.neighbours:
            return leaf
        first = leaf.shape[-1] - self.neighbours
        return np.take(leaf, [*range(first), *(first + order)], axis=-1)

    def check(self, name: str, shape: Shape, expected: Shape) -> None:
        """Raises BadInput unless the shapes are equal."""
        if tuple(shape) != expected:
            raise BadInput(f"{name} has shape {list(shape)}, and by the config it is {list(expected)}")


@dataclasses.dataclass(frozen=True)
class Family:
    """Models that one class of transformers computes."""

    model_type: str  # of its config.json
    architectures: tuple[str, ...]  # that we read; the first is what we write
    read_config: Callable[[Mapping[str, Any]], AnyModelConfig]  # BadInput for what our model does not compute
    write_config: Callable[[Any], dict[str, Any]]  # the keys that read_config reads, as every release reads them
    rows: tuple[Row, ...]
    keys: tuple[str, ...]  # of a config.json that read_config looks at
    bases: tuple[str, ...] = ("model.",)  # what names of theirs begin with, all but `outside`; the first is written
    outside: tuple[str, ...] = ("lm_head.weight",)  # rows of the whole model, in front of whose names no base stands
    left_out: tuple[str, ...] = ()  # patterns of names that hold nothing which the model learns or which text needs
    goes_out_as: str = ""  # the model_type of another family, by which its models are written
    joined: tuple[Joined, ...] = ()  # tensors that may stand in the place of those of single experts
    renamed: tuple[tuple[str, str], ...] = ()  # (pattern, replacement) of names that transformers 5 has in memory
    beyond: str = ""  # what layers of theirs behind the last one are: a checkpoint that has some is refused


def halves_of_pairs(size: int) -> np.ndarray:
    """The places of the first of each pair of neighbours, and then of the second."""
    return np.arange(size).reshape(-1, 2).T.reshape(-1)


def outputs(shape: Shape, inputs: int) -> int:
    """Size of the axes behind the inputs."""
    return math.prod(shape[inputs:])


def flat_shape(shape: Shape, inputs: int) -> Shape:
    """(inputs, outputs), or (entries,) of what has no inputs."""
    return (math.prod(shape[:inputs]), outputs(shape, inputs)) if inputs else (math.prod(shape),)


def pair_of(
    row: Row,
    family: Family,
    shapes: Mapping[str, Shape],
    base: str,
    stack: Stack | None = None,
    layer: int | None = None,
    expert: int | None = None,
    rope_dim: int = 0,
) -> TensorPair:
    """The row for one layer of a stack and one of its experts, or for none.

    Args: shapes: of our leaves, without the axis of layers. layer, expert: numbered as theirs are. rope_dim: numbers of
    a head that RoPE turns.
    """
    names, at = row.leaves, None
    if stack is not None:
        assert layer is not None, "a stack has layers"
        names, at = tuple(stack.own(name) for name in names), layer - stack.first
    our_shapes = tuple(shapes[name] if expert is None else shapes[name][1:] for name in names)
    if stack is not None and not stack.scanned:
        names, at = tuple(name.replace("/", f"/{at}/", 1) for name in names), None
    flats = [flat_shape(shape, row.inputs) for shape in our_shapes]
    joined = (*flats[0][:-1], sum(flat[-1] for flat in flats))
    their_shape = joined[::-1] if row.turned else joined
    theirs = ("" if row.theirs in family.outside else base) + row.theirs.format(layer=layer, expert=expert)
    return TensorPair(names, at, our_shapes, theirs, their_shape, row, expert, rope_dim if row.paired else 0)


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Returns True if one of the patterns is the whole name."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)
