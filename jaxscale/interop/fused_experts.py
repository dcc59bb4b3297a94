"""Tensors that hold all experts of a layer, seen as one for each expert and matrix; and what of experts no file has.

transformers 5 has a layer's experts as [experts, gate then up, in] and [experts, out, in]. What one expert has of a
matrix lies in one piece there, so that each is a part of the file, read as a tensor of its own.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from jaxscale.interop import families
from jaxscale.interop.families import Family, Row, TensorPair
from jaxscale.interop.families.family import Joined
from jaxscale.interop.ranges import File
from jaxscale.interop.safetensors import Tensor
from jaxscale.models import AnyModelConfig
from jaxscale.system.exits import BadInput


def experts_apart(family: Family, cfg: AnyModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the names that the family has in files, each expert's by itself.

    Raises BadInput for one of another shape, and for what is there in both forms.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, written in family.renamed:
            name = re.sub(pattern, written, name)
        parts = [dataclasses.replace(tensor, name=name)] if name != tensor.name else [tensor]
        for joined in family.joined:
            if cfg.experts is not None and (inner := re.fullmatch(pattern_of(joined), name)):
                parts = list(split(joined, inner, tensor, cfg.experts.number))
        for part in parts:
            if part.name in found:
                raise BadInput(f"the checkpoint has {part.name} twice, under two names or by itself and in another")
            found[part.name] = part
    return found


def pattern_of(joined: Joined) -> str:
    """A regular expression for its name, behind any base: (base, layer)."""
    before, after = map(re.escape, joined.theirs.split("{layer}"))
    return rf"(|.*\.){before}(\d+){after}"


def split(joined: Joined, name: re.Match[str], tensor: Tensor, number: int) -> Iterator[Tensor]:
    """Yields the parts of a tensor. name: what pattern_of has found in it."""
    count = len(joined.rows)
    experts, outputs, *inputs = (*tensor.shape, 0, 0)[: max(2, len(tensor.shape))]
    if len(inputs) != 1 or experts != number or outputs % count:
        halves = f", {count} matrices of each" if count > 1 else ""
        raise BadInput(
            f"{tensor.file.path}: {tensor.name} has shape {list(tensor.shape)}, and by config.json it is of {number} "
            f"experts{halves}: [experts, outputs, inputs]; the two belong to different models: fetch both again"
        )
    size = (tensor.stop - tensor.start) // (number * count)
    shape = (outputs // count, *inputs)
    for expert in range(number):
        for place, row in enumerate(joined.rows):
            start = tensor.start + (expert * count + place) * size
            own = name[1] + row.format(layer=name[2], expert=expert)
            yield dataclasses.replace(tensor, name=own, shape=shape, start=start, stop=start + size)


@dataclasses.dataclass(frozen=True)
class Even(Tensor):
    """Not of a file: the same number for each expert, such that they add up to 1."""

    def read(self) -> np.ndarray:
        """Its values."""
        return np.full(self.shape, 1 / self.shape[-1], np.float32)


def start_of_load(cfg: AnyModelConfig) -> tuple[list[TensorPair], dict[str, Tensor]]:
    """(pairs, tensors) of what training counts and no file has, as it is in a model that was not trained yet."""
    pairs, tensors = [], {}
    for name, shape in families.unsaid(cfg).items():
        pairs.append(TensorPair((name,), None, (shape,), name, shape, Row(name, name)))
        tensors[name] = Even(name, File(name, 0, ""), "F32", shape, 0, 4 * math.prod(shape))
    return pairs, tensors
