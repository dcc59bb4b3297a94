"""Opens a Hugging Face model to import, optionally with a PEFT adapter that is merged or trained further.

transformers 5 stores a layer's experts as [experts, gate then up, in] and [experts, out, in]. The matrix of each expert
is contiguous, so it is read as a byte range of the file. Router loads are not in files and are initialized.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.lora_mup_config import NO_LORA, LoraConfig
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop import adapters, families, tokenizer_files
from jaxscale.tools.interop.chunking import check_tensors
from jaxscale.tools.interop.families import HfFamily, TensorPair, TensorSpec
from jaxscale.tools.interop.hf_checkpoint import INDEX, WEIGHTS, check_counts, check_end_ids, open_checkpoint
from jaxscale.tools.interop.safetensors import File, Tensor, same_bytes


@dataclasses.dataclass(frozen=True)
class SourceModel:
    """Everything known about an import before tensors are read."""

    name: str  # folder of the model
    family: HfFamily
    cfg: AnyModelConfig
    passthrough: dict[str, Any]
    pairs: Sequence[TensorPair]
    tensors: Mapping[str, Tensor]
    left_out: list[str]
    files: dict[str, bytes]  # tokenizer files
    identity: str
    notes: list[str]
    lora: LoraConfig = NO_LORA
    adapter: str = ""  # description for the record; '' without one


def open_source_model(name: str, base: str | None = None, keep: bool = False) -> SourceModel:
    """Opens a model, or an adapter and its base model. keep: load an adapter as LoRA leaves instead of merging it."""
    adapter = adapters.open_adapter(name)
    if adapter is None:
        if base is not None or keep:
            raise BadInput(
                f"--{'adapter' if keep else 'base'} requires a PEFT adapter, but --from={name} has none; omit this flag"
            )
        return open_model(name, "--from")
    model = open_model(adapters.base_model_folder(adapter, base), "--base")
    try:
        found = adapters.match_adapter(adapter, model.family, model.cfg, model.tensors)
    except BadInput as error:
        raise BadInput(f"--from={name}: {error}") from None
    adapter_files, files = tokenizer_files.read_files(adapter.folder, adapter.files), model.files
    if tokenizer_files.main_file(adapter_files):
        files = tokenizer_files.with_generation(adapter_files, model.passthrough)
    notes = tokenizer_files.check_tokenizer(files, model.cfg.vocab_size, adapter.folder)
    identity = hashlib.sha256(f"{model.identity} {adapter.identity} {keep}".encode()).hexdigest()
    done = f"{name}, {len(found)} matrices, merged"
    if keep:
        lora, pairs = adapters.run_from_adapter(adapter, found, model.cfg)
        check_tensors(pairs, adapter.tensors)
        done = f"{name}, {len(found)} matrices of rank {lora.rank}, not merged"
        changes = dict(lora=lora, pairs=[*model.pairs, *pairs], tensors={**model.tensors, **adapter.tensors})
    else:
        changes = dict(tensors=adapters.merged_tensors(adapter, found, model.pairs, model.tensors))
    notes = list(dict.fromkeys([*model.notes, *adapter_notes(adapter, model.name, adapter_files), *notes]))
    return dataclasses.replace(model, files=files, identity=identity, notes=notes, adapter=done, **changes)


def adapter_notes(adapter: adapters.Adapter, base: str, adapter_files: Mapping[str, bytes]) -> list[str]:
    """Returns messages about ignored files in an adapter's folder. base: folder of the base model."""
    notes = []
    weights = [name for name in (WEIGHTS, INDEX) if name in adapter.files]
    if weights and paths.absolute(base) != paths.absolute(adapter.folder):
        notes.append(f"the adapter is applied to the model in {base}; {weights[0]} next to it is ignored")
    if adapter_files and not tokenizer_files.main_file(adapter_files):
        notes.append(
            f"the tokenizer of the base model is used; the adapter's folder has none, and its "
            f"{', '.join(adapter_files)} is ignored"
        )
    return notes


def open_model(name: str, named: str) -> SourceModel:
    """Opens the model in a folder. named: flag in error messages."""
    found = open_checkpoint(name, named)
    try:
        families.family_of(found.config)
        check_counts(found.config, found.tensors)
        family, cfg, passthrough = families.read(found.config)
        check_end_ids(passthrough, cfg.vocab_size, "config.json")
        tensors = split_fused_experts(family, cfg, found.tensors)
        pairs, left_out = families.match(family, cfg, tensors)
    except BadInput as error:
        raise BadInput(f"{named}={name}: {error}") from None
    check_tensors(pairs, tensors)
    for copy in left_out:
        if copy.endswith(f"{adapters.HEAD}.weight"):  # tied by config.json
            table = next(tensors[pair.hf_name] for pair in pairs if pair.leaves == ("embedding",))
            if not same_bytes(table, tensors[copy]):
                raise BadInput(
                    f"{tensors[copy].file.path}: {copy} differs from {table.name}, but config.json has "
                    "tie_word_embeddings=true; set it to false"
                )
    load_pairs, load = initial_router_load(cfg)
    files = tokenizer_files.with_generation(tokenizer_files.read_files(found.folder, found.files), passthrough)
    odd = tokenizer_files.check_tokenizer(files, cfg.vocab_size, found.folder)
    notes = [*found.notes, *families.notes(found.config), *odd]
    pairs, tensors = [*pairs, *load_pairs], {**tensors, **load}
    return SourceModel(name, family, cfg, passthrough, pairs, tensors, left_out, files, found.identity, notes)


def split_fused_experts(family: HfFamily, cfg: AnyModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames tensors to the family's names and splits fused experts. Raises BadInput for mismatched shapes."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, written in family.renames:
            name = re.sub(pattern, written, name)
        parts = [dataclasses.replace(tensor, name=name)] if name != tensor.name else [tensor]
        for hf_name, rows in family.fused.items():
            before, after = map(re.escape, hf_name.split("{layer}"))
            if cfg.experts is not None and (inner := re.fullmatch(rf"(|.*\.){before}(\d+){after}", name)):
                parts = list(split_experts(rows, inner, tensor, cfg.experts.number))
        for part in parts:
            if part.name in found:
                raise BadInput(f"the checkpoint has {part.name} twice (two names, or separate and fused); remove one")
            found[part.name] = part
    return found


def split_experts(rows: Sequence[str], name: re.Match[str], tensor: Tensor, number: int) -> Iterator[Tensor]:
    """Yields one tensor per expert and matrix. name: match of the tensor's name, with groups (prefix, layer)."""
    count = len(rows)
    experts, outputs, *inputs = (*tensor.shape, 0, 0)[: max(2, len(tensor.shape))]
    if len(inputs) != 1 or experts != number or outputs % count:
        halves = f" and {count} matrices per expert" if count > 1 else ""
        raise BadInput(
            f"{tensor.file.path}: {tensor.name} has shape {list(tensor.shape)}, but config.json requires {number} "
            f"experts{halves}: [experts, outputs, inputs]; they are from different models: download both again"
        )
    size = (tensor.stop - tensor.start) // (number * count)
    shape = (outputs // count, *inputs)
    for expert in range(number):
        for index, row in enumerate(rows):
            start = tensor.start + (expert * count + index) * size
            hf_name = name[1] + row.format(layer=name[2], expert=expert)
            yield dataclasses.replace(tensor, name=hf_name, shape=shape, start=start, stop=start + size)


@dataclasses.dataclass(frozen=True)
class UniformRouterLoad(Tensor):
    """Uniform router loads that sum to 1, not read from a file."""

    def read(self) -> np.ndarray:
        """Returns the loads."""
        return np.full(self.shape, 1 / self.shape[-1], np.float32)


def initial_router_load(cfg: AnyModelConfig) -> tuple[list[TensorPair], dict[str, Tensor]]:
    """Returns (pairs, tensors) of the router loads of an untrained model."""
    pairs, tensors = [], {}
    for name, shape in families.untracked_leaves(cfg).items():
        pairs.append(TensorPair((name,), None, (shape,), name, shape, TensorSpec(name, name)))
        tensors[name] = UniformRouterLoad(name, File(name, 0, ""), "F32", shape, 0, 4 * math.prod(shape))
    return pairs, tensors
