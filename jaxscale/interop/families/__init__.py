"""Hugging Face model families by `model_type`: how their settings and tensors map to ours.

family, cfg, kept = read(json.loads(config_json))     # theirs -> ours
found = match(family, cfg, names_in_the_files)         # one TensorPair for each tensor, and what is left out
config_json = write(family_for(cfg), cfg, kept)        # ours -> theirs
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax

from jaxscale import schema
from jaxscale.interop.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from jaxscale.interop.families.experts import MIXTRAL, OLMOE, QWEN3_MOE
from jaxscale.interop.families.family import Family, Row, Stack, TensorPair, matches_any, pair_of
from jaxscale.interop.families.gemma import GEMMA1, GEMMA2, GEMMA3, GEMMA3_VISION
from jaxscale.interop.families.gpt2 import GPT2
from jaxscale.interop.families.llama import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3
from jaxscale.interop.families.phi3 import PHI3
from jaxscale.interop.families.settings import KEPT, refuse_unread, unread
from jaxscale.interop.families.unsupported import OTHERS
from jaxscale.models import AnyModelConfig
from jaxscale.models.config import ModelConfig
from jaxscale.models.layers import split_model
from jaxscale.models.llama_config import BLOCKS
from jaxscale.models.model import make_model
from jaxscale.ops.kernels import XLA_KERNELS
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.units import or_list

__all__ = [
    "FAMILIES", "Family", "Match", "Row", "TensorPair", "family_for", "family_of", "match", "notes", "read", "tensors",
    "unsaid", "write",
]  # fmt: skip

ALL = (
    LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GEMMA1, GEMMA2, GEMMA3, GEMMA3_VISION, PHI3, MIXTRAL, QWEN3_MOE, OLMOE,
    DEEPSEEK_V2, DEEPSEEK_V3, GPT2,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.model_type: family for family in ALL}
# Settings that choose how a model is computed, not which: a family says nothing of them.
EXECUTION = (
    "compute_dtype", "embed_compute_dtype", "matmul_precision", "matmul_dtype", "attention", "scan_layers", "remat",
    "remat_save", "remat_offload", "row_parts", "loss_chunk_tokens", "dropout",
)  # fmt: skip
LOAD = "blocks/mlp/router_load"


@dataclasses.dataclass(frozen=True)
class Match:
    """The tensors of a checkpoint as ours."""

    pairs: list[TensorPair]
    left_out: list[str]  # names that the model has no use for


def family_of(hf: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises BadInput for one that is not here."""
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        if isinstance(model_type, str) and model_type in OTHERS:
            raise BadInput(f"config.json: model_type={model_type!r} is not supported: it has {OTHERS[model_type]}")
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
    back, own = (settings_of(one) for one in (family.read_config(family.write_config(cfg)), cfg))
    if ("experts.number" in back) != ("experts.number" in own) or "latent.kv_rank" in back.keys() - own.keys():
        return None
    return {name: value for name, value in own.items() if name not in EXECUTION and back.get(name) != value}


def settings_of(cfg: AnyModelConfig) -> dict[str, Any]:
    """{setting: value} of what is computed, those of latents and experts one by one."""
    found = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    if (latent := found.get("latent")) is not None:
        del found["latent"]
        found |= {f"latent.{field.name}": getattr(latent, field.name) for field in dataclasses.fields(latent)}
    if (experts := found.get("experts")) is None:
        return found
    del found["experts"]
    found |= {f"experts.{field.name}": getattr(experts, field.name) for field in dataclasses.fields(experts)}
    of_training = dict.fromkeys(("experts.bias_rate", "experts.capacity_factor"), True)
    unread = {"mlp_dim": not experts.first_dense, "experts.group_best": experts.groups == 1} | of_training
    return {name: value for name, value in found.items() if not unread.get(name)}


def leaf_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{name of a leaf: its shape}, of one layer below the name of a stack of layers."""
    cfg = dataclasses.replace(cfg, scan_layers=True)
    abstract = jax.eval_shape(lambda key: make_model(cfg, key=key, kernels=XLA_KERNELS), jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(split_model(abstract)[1])
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}
    return {name: shape[1:] if name.partition("/")[0] in cfg.layer_stacks else shape for name, shape in named.items()}


def tensors(family: Family, cfg: AnyModelConfig, base: str | None = None) -> list[TensorPair]:
    """Every tensor of a model of ours as the family names it, layer by layer.

    base: what their names begin with, where that is not the family's first.
    """
    shapes = leaf_shapes(cfg)
    base = family.bases[0] if base is None else base
    rope_dim = getattr(cfg, "rope_dim", 0)
    make = lambda row, *place: pair_of(row, family, shapes, base, *place, rope_dim=rope_dim)
    once = [row for row in family.rows if not row.per_layer and set(row.leaves) <= set(shapes)]
    covered = {name for row in once for name in row.leaves} | {LOAD}
    pairs, first = [make(row) for row in once], 0
    for name, layers in cfg.layer_stacks.items():
        stack = Stack(name, first, layers, cfg.scan_layers)
        rows = [row for row in family.rows if stack.has(row) and set(map(stack.own, row.leaves)) <= set(shapes)]
        covered |= {stack.own(leaf) for row in rows for leaf in row.leaves}
        for layer in range(first, first + layers):
            pairs += [make(row, stack, layer) for row in rows if not row.per_expert]
            of_experts = [row for row in rows if row.per_expert]
            number = cfg.experts.number if of_experts and cfg.experts is not None else 0
            pairs += [make(row, stack, layer, expert) for expert in range(number) for row in of_experts]
        first += layers
    assert covered >= set(shapes), f"{family.model_type} has no row for {sorted(set(shapes) - covered)}"
    return pairs


def unsaid(cfg: AnyModelConfig) -> dict[str, tuple[int, ...]]:
    """{leaf: shape} of what is in no file, for training moves it and nothing else reads it: the load of experts.

    With nothing known of it each expert's is 1 / their number, the last axis.
    """
    experts = getattr(cfg, "experts", None)
    if experts is None:
        return {}
    layers, number = cfg.layer_stacks[BLOCKS], experts.number
    if cfg.scan_layers:
        return {LOAD: (layers, number)}
    return {LOAD.replace("/", f"/{layer}/", 1): (number,) for layer in range(layers)}


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
    unknown = sorted(names - known - set(left_out))
    if beyond := [name for name in unknown if family.beyond and layer_of(name) >= cfg.num_layers]:
        raise BadInput(
            f"the checkpoint has {some(beyond)}: {family.beyond}, which are not computed here and would be lost; to "
            "convert the model without them, take their names out of model.safetensors.index.json"
        )
    if unknown:
        raise BadInput(
            f"the checkpoint has {some(unknown)}, for which a {family.model_type} of config.json has no place"
        )
    return Match(pairs, left_out)


def layer_of(name: str) -> int:
    """The number of the layer in the name of a tensor of theirs; -1 where there is none."""
    found = re.match(r"(?:.*\.)?layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def some(names: list[str]) -> str:
    """The first names of many."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
