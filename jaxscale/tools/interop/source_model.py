"""Opens the model to import: a Hugging Face model, with a PEFT adapter merged or trained further."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.lora_mup_config import NO_LORA, LoraConfig
from jaxscale.system.exits import BadInput
from jaxscale.tools.interop import adapters, families, tokenizer_files
from jaxscale.tools.interop.chunking import check_tensors
from jaxscale.tools.interop.families import Family, Match, TensorPair
from jaxscale.tools.interop.fused_experts import initial_router_load, split_fused_experts
from jaxscale.tools.interop.hf_checkpoint import INDEX, WEIGHTS, check_counts, check_end_ids, open_checkpoint
from jaxscale.tools.interop.safetensors import Tensor, same_bytes


@dataclasses.dataclass(frozen=True)
class SourceModel:
    """Everything known about an import before tensors are read."""

    name: str  # of the model's folder
    family: Family
    cfg: AnyModelConfig
    passthrough: dict[str, Any]
    pairs: Sequence[TensorPair]
    tensors: Mapping[str, Tensor]
    left_out: list[str]
    files: dict[str, bytes]  # of the tokenizer
    identity: str
    notes: list[str]
    lora: LoraConfig = NO_LORA
    adapter: str = ""  # description for the record; '' without one


def open_source_model(name: str, base: str | None = None, keep: bool = False) -> SourceModel:
    """Opens the model or the adapter with its base model in a folder.

    Args: base: the base model's folder, if not
    the one in the adapter's config. keep: import the adapter as LoRA leaves instead of merging it.

    Raises: BadInput, one line, for anything that cannot be read or is not supported.
    """
    adapter = adapters.open_adapter(name)
    if adapter is None:
        if base is not None or keep:
            raise BadInput(
                f"--{'adapter' if keep else 'base'} is for an adapter of PEFT's, and --from={name} holds none"
            )
        return open_model(name, "--from")
    model = open_model(adapters.base_model_folder(adapter, base), "--base")
    try:
        found = adapters.match_adapter(adapter, model.family, model.cfg, model.tensors)
    except BadInput as error:
        raise BadInput(f"--from={name}: {error}") from None
    adapter_files = tokenizer_files.read_files(adapter.folder, adapter.files)
    files = (
        tokenizer_files.with_generation(adapter_files, model.passthrough)
        if tokenizer_files.main_file(adapter_files)
        else model.files
    )
    notes = tokenizer_files.check_tokenizer(files, model.cfg.vocab_size, adapter.folder)
    identity = hashlib.sha256(f"{model.identity} {adapter.identity} {keep}".encode()).hexdigest()
    done, changes = f"{name}, {len(found)} matrices, merged", {}
    if keep:
        lora, pairs = adapters.run_from_adapter(adapter, found, model.cfg)
        check_tensors(pairs, adapter.tensors)
        done = f"{name}, {len(found)} matrices of rank {lora.rank}, kept beside the weights"
        changes = dict(lora=lora, pairs=[*model.pairs, *pairs], tensors={**model.tensors, **adapter.tensors})
    else:
        changes = dict(tensors=adapters.merged_tensors(adapter, found, model.pairs, model.tensors))
    notes = list(dict.fromkeys([*model.notes, *adapter_notes(adapter, model.name, adapter_files), *notes]))
    return dataclasses.replace(model, files=files, identity=identity, notes=notes, adapter=done, **changes)


def adapter_notes(adapter: adapters.Adapter, base: str, adapter_files: Mapping[str, bytes]) -> list[str]:
    """Returns lines about unused files of an adapter's folder. base: folder of its base model."""
    notes = []
    weights = [name for name in (WEIGHTS, INDEX) if name in adapter.files]
    if weights and not adapters.is_folder_of(adapter, base):
        notes.append(f"its adapter is read with the model in {base}, and not with {weights[0]} next to it")
    if adapter_files and not tokenizer_files.main_file(adapter_files):
        notes.append(
            f"the tokenizer is the model's; the adapter's folder has none, and its "
            f"{', '.join(adapter_files)} is not read"
        )
    return notes


def open_model(name: str, named: str) -> SourceModel:
    """Opens the model in a folder. Args: named: the flag, for errors."""
    found = open_checkpoint(name, named)
    try:
        families.family_of(found.config)
        check_counts(found.config, found.tensors)
        family, cfg, passthrough = families.read(found.config)
        check_end_ids(passthrough, cfg.vocab_size, "config.json")
        tensors = split_fused_experts(family, cfg, found.tensors)
        matched = families.match(family, cfg, tensors)
    except BadInput as error:
        raise BadInput(f"{named}={name}: {error}") from None
    check_tensors(matched.pairs, tensors)
    check_tied_weights(matched, tensors)
    load_pairs, load = initial_router_load(cfg)
    files = tokenizer_files.with_generation(tokenizer_files.read_files(found.folder, found.files), passthrough)
    odd = tokenizer_files.check_tokenizer(files, cfg.vocab_size, found.folder)
    return SourceModel(
        name=name,
        family=family,
        cfg=cfg,
        passthrough=passthrough,
        pairs=[*matched.pairs, *load_pairs],
        tensors={**tensors, **load},
        left_out=matched.left_out,
        files=files,
        identity=found.identity,
        notes=[*found.notes, *families.notes(found.config), *odd],
    )


def check_tied_weights(matched: Match, tensors: Mapping[str, Tensor]) -> None:
    """Raises BadInput if an ignored lm_head, tied by config.json, differs from the embedding."""
    for name in matched.left_out:
        if not name.endswith(f"{adapters.HEAD}.weight"):
            continue
        table = next(tensors[pair.hf_name] for pair in matched.pairs if pair.leaves == ("embedding",))
        if not same_bytes(table, tensors[name]):
            raise BadInput(
                f"{tensors[name].file.path}: {name} is not the same as {table.name}, though config.json says "
                "tie_word_embeddings; set that to false there"
            )
