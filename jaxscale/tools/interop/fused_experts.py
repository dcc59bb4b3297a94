"""Splits tensors that hold all experts of a layer, and initializes router loads, which no file has.

transformers 5 stores a layer's experts as [experts, gate then up, in] and [experts, out, in]. Each expert's matrix is
contiguous there, so it is read as a byte range of the file.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from jaxscale.core.models import AnyModelConfig
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop import families
from jaxscale.tools.interop.families import Family, TensorPair, TensorSpec
from jaxscale.tools.interop.families.family import FusedExperts
from jaxscale.tools.interop.ranges import File
from jaxscale.tools.interop.safetensors import Tensor


def split_fused_experts(family: Family, cfg: AnyModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors under the family's file names, with fused experts split.

    Raises BadInput for an unexpected shape, and for a tensor that is present in both forms.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, written in family.renames:
            name = re.sub(pattern, written, name)
        parts = [dataclasses.replace(tensor, name=name)] if name != tensor.name else [tensor]
        for fused in family.fused:
            if cfg.experts is not None and (inner := re.fullmatch(name_pattern(fused), name)):
                parts = list(split_experts(fused, inner, tensor, cfg.experts.number))
        for part in parts:
            if part.name in found:
                raise BadInput(f"the checkpoint has {part.name} twice, under two names or both alone and fused")
            found[part.name] = part
    return found


def name_pattern(fused: FusedExperts) -> str:
    """Returns a regular expression for the tensor's name with any prefix; groups: (prefix, layer)."""
    before, after = map(re.escape, fused.hf_name.split("{layer}"))
    return rf"(|.*\.){before}(\d+){after}"


def split_experts(fused: FusedExperts, name: re.Match[str], tensor: Tensor, number: int) -> Iterator[Tensor]:
    """Yields one tensor per expert and matrix. name: match of name_pattern."""
    count = len(fused.rows)
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
        for index, row in enumerate(fused.rows):
            start = tensor.start + (expert * count + index) * size
            hf_name = name[1] + row.format(layer=name[2], expert=expert)
            yield dataclasses.replace(tensor, name=hf_name, shape=shape, start=start, stop=start + size)


@dataclasses.dataclass(frozen=True)
class UniformRouterLoad(Tensor):
    """Uniform loads that sum to 1; not read from a file."""

    def read(self) -> np.ndarray:
        """Returns the values."""
        return np.full(self.shape, 1 / self.shape[-1], np.float32)


def initial_router_load(cfg: AnyModelConfig) -> tuple[list[TensorPair], dict[str, Tensor]]:
    """Returns (pairs, tensors) of the router loads of an untrained model."""
    pairs, tensors = [], {}
    for name, shape in families.untracked_leaves(cfg).items():
        pairs.append(TensorPair((name,), None, (shape,), name, shape, TensorSpec(name, name)))
        tensors[name] = UniformRouterLoad(name, File(name, 0, ""), "F32", shape, 0, 4 * math.prod(shape))
    return pairs, tensors
