"""Opens what is imported: a Hugging Face model, with a PEFT adapter merged or kept beside it."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.interop import adapters, families, tokenizer_files
from jaxscale.interop.chunking import check_tensors
from jaxscale.interop.families import Family, Match, TensorPair
from jaxscale.interop.fused_experts import experts_apart, start_of_load
from jaxscale.interop.hf_checkpoint import INDEX, WEIGHTS, check_counts, check_end_ids, open_checkpoint
from jaxscale.interop.safetensors import Tensor, same_bytes
from jaxscale.models import AnyModelConfig
from jaxscale.models.config import NO_LORA, LoraConfig
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True)
class Incoming:
    """Everything known about an import before a tensor is read."""

    name: str  # of the model's folder
    family: Family
    cfg: AnyModelConfig
    kept: dict[str, Any]
    pairs: Sequence[TensorPair]
    tensors: Mapping[str, Tensor]
    left_out: list[str]
    files: dict[str, bytes]  # of the tokenizer
    identity: str
    notes: list[str]
    lora: LoraConfig = NO_LORA
    adapter: str = ""  # what was done with one


def open_incoming(name: str, base: str | None = None, keep: bool = False) -> Incoming:
    """The model in a folder, or the adapter in it with its model. Args: base: the adapter's model, where its own config
    names another place. keep: the adapter stays beside the weights, to be trained on, and is not merged.

    Raises: BadInput, one line, for whatever cannot be read or computed here.
    """
    adapter = adapters.open_adapter(name)
    if adapter is None:
        if base is not None or keep:
            raise BadInput(
                f"--{'adapter' if keep else 'base'} is for an adapter of PEFT's, and --from={name} holds none"
            )
        return open_model(name, "--from")
    model = open_model(adapters.where_base_is(adapter, base), "--base")
    try:
        found = adapters.adapted(adapter, model.family, model.cfg, model.tensors)
    except BadInput as error:
        raise BadInput(f"--from={name}: {error}") from None
    own = tokenizer_files.read_files(adapter.folder, adapter.files)
    files = tokenizer_files.with_generation(own, model.kept) if tokenizer_files.main_file(own) else model.files
    notes = tokenizer_files.check_works(files, model.cfg.vocab_size, adapter.folder)
    identity = hashlib.sha256(f"{model.identity} {adapter.identity} {keep}".encode()).hexdigest()
    done, changes = f"{name}, {len(found)} matrices, merged", {}
    if keep:
        lora, pairs = adapters.start_of_run(adapter, found, model.cfg)
        check_tensors(pairs, adapter.tensors)
        done = f"{name}, {len(found)} matrices of rank {lora.rank}, kept beside the weights"
        changes = dict(lora=lora, pairs=[*model.pairs, *pairs], tensors={**model.tensors, **adapter.tensors})
    else:
        changes = dict(tensors=adapters.merged_tensors(adapter, found, model.pairs, model.tensors))
    notes = list(dict.fromkeys([*model.notes, *adapter_notes(adapter, model.name, own), *notes]))
    return dataclasses.replace(model, files=files, identity=identity, notes=notes, adapter=done, **changes)


def adapter_notes(adapter: adapters.Adapter, base: str, own: Mapping[str, bytes]) -> list[str]:
    """Returns lines on files of an adapter's folder that are not used.

    base: the folder of its model. own: the files of its tokenizer.
    """
    notes = []
    weights = [name for name in (WEIGHTS, INDEX) if name in adapter.files]
    if weights and not adapters.is_folder_of(adapter, base):
        notes.append(f"its adapter is read with the model in {base}, and not with {weights[0]} next to it")
    if own and not tokenizer_files.main_file(own):
        notes.append(
            f"the tokenizer is the model's; {', '.join(own)} of the adapter's folder has none, and is not read"
        )
    return notes


def open_model(name: str, named: str) -> Incoming:
    """The model in a folder. Args: named: the flag that gave it."""
    found = open_checkpoint(name, named)
    try:
        families.family_of(found.config)
        check_counts(found.config, found.tensors)
        family, cfg, kept = families.read(found.config)
        check_end_ids(kept, cfg.vocab_size, "config.json")
        tensors = experts_apart(family, cfg, found.tensors)
        matched = families.match(family, cfg, tensors)
    except BadInput as error:
        raise BadInput(f"{named}={name}: {error}") from None
    check_tensors(matched.pairs, tensors)
    check_tied_weights(matched, tensors)
    load_pairs, load = start_of_load(cfg)
    files = tokenizer_files.with_generation(tokenizer_files.read_files(found.folder, found.files), kept)
    odd = tokenizer_files.check_works(files, cfg.vocab_size, found.folder)
    return Incoming(
        name=name,
        family=family,
        cfg=cfg,
        kept=kept,
        pairs=[*matched.pairs, *load_pairs],
        tensors={**tensors, **load},
        left_out=matched.left_out,
        files=files,
        identity=found.identity,
        notes=[*found.notes, *families.notes(found.config), *odd],
    )


def check_tied_weights(matched: Match, tensors: Mapping[str, Tensor]) -> None:
    """Raises BadInput if an output projection that is left out, as tied to the embedding, holds other numbers."""
    for name in matched.left_out:
        if not name.endswith(f"{adapters.HEAD}.weight"):
            continue
        table = next(tensors[pair.theirs] for pair in matched.pairs if pair.ours == ("embedding",))
        if not same_bytes(table, tensors[name]):
            raise BadInput(
                f"{tensors[name].file.path}: {name} is not the same as {table.name}, though config.json says "
                "tie_word_embeddings; set that to false there"
            )
