"""Hugging Face model families by `model_type`: how their settings and tensors map to ours.

family, cfg, kept = read(json.loads(config_json))     # theirs -> ours
found = match(family, cfg, names_in_the_files)         # one TensorPair for each tensor, and what is left out
config_json = write(family_for(cfg), cfg, kept)        # ours -> theirs
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax

from jaxscale import schema
from jaxscale.interop.families.family import Family, Row, TensorPair, matches_any, pair_of
from jaxscale.interop.families.gemma import GEMMA1, GEMMA2, GEMMA3, GEMMA3_VISION
from jaxscale.interop.families.gpt2 import GPT2
from jaxscale.interop.families.llama import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3
from jaxscale.interop.families.phi3 import PHI3
from jaxscale.interop.families.settings import KEPT, refuse_unread, unread
from jaxscale.models import AnyModelConfig
from jaxscale.models.config import ModelConfig
from jaxscale.models.layers import split_model
from jaxscale.models.model import make_model
from jaxscale.ops.kernels import PLAIN
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.units import or_list

__all__ = [
    "FAMILIES", "Family", "Match", "Row", "TensorPair", "family_for", "family_of", "match", "notes", "read", "tensors",
    "write",
]  # fmt: skip

ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GEMMA1, GEMMA2, GEMMA3, GEMMA3_VISION, PHI3, GPT2)
FAMILIES: dict[str, Family] = {family.model_type: family for family in ALL}
# Settings that choose how a model is computed, not which: a family says nothing of them.
EXECUTION = (
    "compute_dtype", "embed_compute_dtype", "matmul_precision", "matmul_dtype", "attention", "scan_layers", "remat",
    "remat_save", "remat_offload", "row_parts", "loss_chunk_tokens", "dropout",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Match:
    """The tensors of a checkpoint as ours."""

    pairs: list[TensorPair]
    left_out: list[str]  # names that the model has no use for


def family_of(hf: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises BadInput for one that is not here."""
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise BadInput(
            f"config.json: model_type={short(model_type)} is not supported; it may be {or_list(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    architectures = hf.get("architectures") or []
    if not isinstance(architectures, list):
        raise BadInput(f"config.json: architectures={short(architectures)} must be a list of names; fetch it again")
    for architecture in architectures:
        if architecture not in family.architectures:
            known = or_list(list(family.architectures))
            raise BadInput(f"config.json: architecture {short(architecture)} is not supported; it may be {known}")
    return family


def read(hf: Mapping[str, Any]) -> tuple[Family, AnyModelConfig, dict[str, Any]]:
    """(family, our settings, the keys that are handed through) of a config.json.

    Raises BadInput for what our models do not compute.
    """
    family = family_of(hf)
    if hf.get("quantization_config"):
        raise BadInput("config.json: quantization_config is not supported; convert the model's unquantized weights")
    refuse_unread(family, hf)
    try:
        cfg = family.read_config(hf)
        cfg = schema.from_dict(type(cfg), schema.to_dict(cfg))  # numbers that are numbers, and none that is NaN
        values = {**hf, **(hf.get("text_config") or {})}
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:  # an untrusted file may hold anything
        raise BadInput(
            f"config.json is not that of a {family.model_type} ({type(error).__name__}: {error}); fetch it again"
        ) from None
    return family, cfg, {key: values[key] for key in KEPT if key in values}


def notes(hf: Mapping[str, Any]) -> list[str]:
    """Lines to print about a config.json that is read."""
    family, text = family_of(hf), hf.get("text_config") or {}
    found = unread(family, hf) + unread(FAMILIES[family.goes_out_as or family.model_type], text)
    lines = [f"config.json has {some(found)}, which no {family.model_type} reads: left out"] if found else []
    if hf.get("auto_map"):
        lines.append(
            f"config.json has auto_map, code of its author's: it is never run here. The model is read as transformers' "
            f"own {family.model_type}, and is another one if that code computes something else"
        )
    return lines


def write(family: Family, cfg: AnyModelConfig, kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a model of ours. kept: as `read` gave it, or what the caller knows."""
    named = dict(architectures=[family.architectures[0]], model_type=family.model_type)
    return named | family.write_config(cfg) | dict(kept or {})


def family_for(cfg: AnyModelConfig, origin: str | None = None) -> Family:
    """The family whose config.json says all that this config says: `origin`'s, the model_type that the model was
    brought in as, or else the first that does.

    Raises BadInput, naming the settings that the nearest family has no word for.
    """
    first = FAMILIES.get(origin or "")
    nearest: dict[str, Any] | None = None
    for family in ([FAMILIES[first.goes_out_as or first.model_type]] if first else []) + list(ALL):
        lost = lost_settings(family, cfg) if not family.goes_out_as else None
        if lost == {}:
            return family
        if lost is not None and (nearest is None or len(lost) < len(nearest)):
            nearest = lost
    named = ", ".join(f"model.{name}={value!r}" for name, value in (nearest or {"name": cfg.name}).items())
    raise BadInput(f"no Hugging Face family has {named}; the families are {or_list(sorted(FAMILIES))}")


def lost_settings(family: Family, cfg: AnyModelConfig) -> dict[str, Any] | None:
    """{setting: value} that the family's config.json would not bring back; None where its model is another."""
    if type(cfg) is not type(family.read_config({})):
        return None
    back = family.read_config(family.write_config(cfg))
    return {
        field.name: getattr(cfg, field.name)
        for field in dataclasses.fields(cfg)
        if field.name not in EXECUTION and getattr(back, field.name) != getattr(cfg, field.name)
    }


def leaf_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{name of a leaf: its shape}, of one layer below "blocks/"."""
    cfg = dataclasses.replace(cfg, scan_layers=True)
    abstract = jax.eval_shape(lambda key: make_model(cfg, key=key, kernels=PLAIN), jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(split_model(abstract)[1])
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}
    return {name: shape[1:] if name.startswith("blocks/") else shape for name, shape in named.items()}


def tensors(family: Family, cfg: AnyModelConfig, base: str | None = None) -> list[TensorPair]:
    """Every tensor of a model of ours as the family names it, layer by layer.

    base: what their names begin with, where that is not the family's first.
    """
    shapes = leaf_shapes(cfg)
    base = family.bases[0] if base is None else base
    rows = [row for row in family.rows if set(row.leaves) <= set(shapes)]
    covered = {name for row in rows for name in row.leaves}
    assert covered == set(shapes), f"{family.model_type} has no row for {sorted(set(shapes) - covered)}"
    make = lambda row, layer: pair_of(row, family, shapes, layer, cfg.scan_layers, base)
    once = [make(row, None) for row in rows if "{layer}" not in row.theirs]
    each = [row for row in rows if "{layer}" in row.theirs]
    return once + [make(row, layer) for layer in range(cfg.num_layers) for row in each]


def match(family: Family, cfg: AnyModelConfig, names: Collection[str]) -> Match:
    """The tensors of a checkpoint with these names, whatever base they have.

    Raises BadInput for a tensor that is missing, or that the model has no place for.
    """
    names = set(names)
    attempts = [tensors(family, cfg, base) for base in family.bases]
    pairs = max(attempts, key=lambda pairs: len(names & {pair.theirs for pair in pairs}))
    known = {pair.theirs for pair in pairs}
    patterns = family.left_out
    if "lm_head.weight" in family.outside and getattr(cfg, "tied_embeddings", True):
        patterns += (r"(.*\.)?lm_head\.weight",)  # some write the tied table twice
    left_out = sorted(name for name in names - known if matches_any(name, patterns))
    if missing := sorted(known - names):
        raise BadInput(f"the checkpoint has no {some(missing)}, which config.json calls for")
    if unknown := sorted(names - known - set(left_out)):
        raise BadInput(
            f"the checkpoint has {some(unknown)}, for which a {family.model_type} of config.json has no place"
        )
    return Match(pairs, left_out)


def some(names: list[str]) -> str:
    """The first names of many."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
