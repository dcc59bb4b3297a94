"""Hugging Face model families by `model_type`: how their settings and tensors map to ours.

family, cfg, passthrough = read(json.loads(config_json))     # theirs -> ours
found = match(family, cfg, names_in_the_files)         # one TensorPair for each tensor, and ignored names
config_json = write(family_for(cfg), cfg, passthrough)        # ours -> theirs
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax

from jaxscale import schema
from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.config import ModelConfig
from jaxscale.core.models.layers import split_model
from jaxscale.core.models.llama_config import BLOCKS
from jaxscale.core.models.model import make_model
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.tools.interop.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from jaxscale.tools.interop.families.experts import MIXTRAL, OLMOE, QWEN3_MOE
from jaxscale.tools.interop.families.family import Family, LayerStack, TensorPair, TensorSpec, bind_spec, matches_any
from jaxscale.tools.interop.families.gemma import GEMMA1, GEMMA2, GEMMA3, GEMMA3_VISION
from jaxscale.tools.interop.families.gpt2 import GPT2
from jaxscale.tools.interop.families.llama_like import LLAMA, MISTRAL, OLMO2, QWEN2, QWEN3
from jaxscale.tools.interop.families.phi3 import PHI3
from jaxscale.tools.interop.families.settings import PASSTHROUGH, refuse_unread, unread
from jaxscale.tools.interop.families.unsupported import UNSUPPORTED
from jaxscale.units import or_list

__all__ = [
    "FAMILIES", "Family", "Match", "TensorPair", "TensorSpec", "family_for", "family_of", "match", "notes", "read",
    "tensors", "untracked_leaves", "write",
]  # fmt: skip

ALL = (
    LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GEMMA1, GEMMA2, GEMMA3, GEMMA3_VISION, PHI3, MIXTRAL, QWEN3_MOE, OLMOE,
    DEEPSEEK_V2, DEEPSEEK_V3, GPT2,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.model_type: family for family in ALL}
# Settings of execution, which no config.json holds.
EXECUTION = (
    "compute_dtype", "embed_compute_dtype", "matmul_precision", "matmul_dtype", "attention", "scan_layers", "remat",
    "remat_save", "remat_offload", "row_parts", "loss_chunk_tokens", "dropout",
)  # fmt: skip
LOAD = "blocks/mlp/router_load"


@dataclasses.dataclass(frozen=True)
class Match:
    """A checkpoint's tensors mapped to our leaves."""

    pairs: list[TensorPair]
    left_out: list[str]  # names of tensors that the model does not use


def family_of(hf: Mapping[str, Any]) -> Family:
    """Returns the family of a config.json. Raises BadInput if it is not supported."""
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        if isinstance(model_type, str) and model_type in UNSUPPORTED:
            raise BadInput(f"config.json: model_type={model_type!r} is not supported: it has {UNSUPPORTED[model_type]}")
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
    """Returns (family, our settings, passed-through keys) of a config.json.

    Raises BadInput for settings that our models do not support.
    """
    family = family_of(hf)
    if hf.get("quantization_config"):
        raise BadInput("config.json: quantization_config is not supported; convert the model's unquantized weights")
    refuse_unread(family, hf)
    try:
        cfg = family.read_config(hf)
        cfg = schema.from_dict(type(cfg), schema.to_dict(cfg))  # checks types, and rejects NaN
        values = {**hf, **(hf.get("text_config") or {})}
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:  # the file is untrusted
        raise BadInput(
            f"config.json is not that of a {family.model_type} ({type(error).__name__}: {error}); fetch it again"
        ) from None
    return family, cfg, {key: values[key] for key in PASSTHROUGH if key in values}


def notes(hf: Mapping[str, Any]) -> list[str]:
    """Returns lines to print about a config.json."""
    family, text = family_of(hf), hf.get("text_config") or {}
    found = unread(family, hf) + unread(FAMILIES[family.exported_as or family.model_type], text)
    lines = [f"config.json has {first_names(found)}, which {family.model_type} does not read: ignored"] if found else []
    if hf.get("auto_map"):
        lines.append(
            f"config.json has auto_map, custom code, which is never run. The model is read as transformers' "
            f"{family.model_type}, and differs if that code computes something else"
        )
    return lines


def write(family: Family, cfg: AnyModelConfig, passthrough: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the config.json of our model. passthrough: as returned by `read`, or from the caller."""
    named = dict(architectures=[family.architectures[0]], model_type=family.model_type)
    return named | family.write_config(cfg) | dict(passthrough or {})


def family_for(cfg: AnyModelConfig, origin: str | None = None) -> Family:
    """Returns the first family whose config.json represents all of cfg; origin: model_type to try first.

    Raises BadInput naming the settings that the nearest family cannot represent.
    """
    first = FAMILIES.get(origin or "")
    nearest: dict[str, Any] | None = None
    for family in ([FAMILIES[first.exported_as or first.model_type]] if first else []) + list(ALL):
        lost = lost_settings(family, cfg) if not family.exported_as else None
        if lost == {}:
            return family
        if lost is not None and (nearest is None or len(lost) < len(nearest)):
            nearest = lost
    named = ", ".join(f"model.{name}={value!r}" for name, value in (nearest or {"name": cfg.name}).items())
    raise BadInput(f"no Hugging Face family has {named}; the families are {or_list(sorted(FAMILIES))}")


def lost_settings(family: Family, cfg: AnyModelConfig) -> dict[str, Any] | None:
    """Returns {setting: value} lost in a round trip through config.json; None for another kind of model."""
    if type(cfg) is not type(family.read_config({})):
        return None
    restored, settings = (settings_of(one) for one in (family.read_config(family.write_config(cfg)), cfg))
    if ("experts.number" in restored) != (
        "experts.number" in settings
    ) or "latent.kv_rank" in restored.keys() - settings.keys():
        return None
    return {name: value for name, value in settings.items() if name not in EXECUTION and restored.get(name) != value}


def settings_of(cfg: AnyModelConfig) -> dict[str, Any]:
    """Returns {setting: value} that define the model, with nested settings flattened."""
    found = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    if (latent := found.get("latent")) is not None:
        del found["latent"]
        found |= {f"latent.{field.name}": getattr(latent, field.name) for field in dataclasses.fields(latent)}
    if (experts := found.get("experts")) is None:
        return found
    del found["experts"]
    found |= {f"experts.{field.name}": getattr(experts, field.name) for field in dataclasses.fields(experts)}
    training_only = dict.fromkeys(("experts.bias_rate", "experts.capacity_factor"), True)
    unread = {"mlp_dim": not experts.first_dense, "experts.group_best": experts.groups == 1} | training_only
    return {name: value for name, value in found.items() if not unread.get(name)}


def leaf_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns {leaf: shape}, of one layer for leaves of a layer stack."""
    cfg = dataclasses.replace(cfg, scan_layers=True)
    abstract = jax.eval_shape(lambda key: make_model(cfg, key=key), jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(split_model(abstract)[1])
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}
    return {name: shape[1:] if name.partition("/")[0] in cfg.layer_stacks else shape for name, shape in named.items()}


def tensors(family: Family, cfg: AnyModelConfig, base: str | None = None) -> list[TensorPair]:
    """Returns every tensor of our model under the family's names, layer by layer.

    base: prefix of the names; None: the family's first.
    """
    shapes = leaf_shapes(cfg)
    base = family.prefixes[0] if base is None else base
    rope_dim = getattr(cfg, "rope_dim", 0)
    make = lambda row, *place: bind_spec(row, family, shapes, base, *place, rope_dim=rope_dim)
    once = [row for row in family.rows if not row.per_layer and set(row.leaves) <= set(shapes)]
    covered = {name for row in once for name in row.leaves} | {LOAD}
    pairs, first = [make(row) for row in once], 0
    for name, layers in cfg.layer_stacks.items():
        stack = LayerStack(name, first, layers, cfg.scan_layers)
        rows = [
            row for row in family.rows if stack.contains(row) and set(map(stack.leaf_name, row.leaves)) <= set(shapes)
        ]
        covered |= {stack.leaf_name(leaf) for row in rows for leaf in row.leaves}
        for layer in range(first, first + layers):
            pairs += [make(row, stack, layer) for row in rows if not row.per_expert]
            expert_specs = [row for row in rows if row.per_expert]
            number = cfg.experts.number if expert_specs and cfg.experts is not None else 0
            pairs += [make(row, stack, layer, expert) for expert in range(number) for row in expert_specs]
        first += layers
    assert covered >= set(shapes), f"{family.model_type} has no row for {sorted(set(shapes) - covered)}"
    return pairs


def untracked_leaves(cfg: AnyModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns {leaf: shape} of leaves that no file has: router loads, which training updates.

    Their initial value is 1 / number of experts, the last axis.
    """
    experts = getattr(cfg, "experts", None)
    if experts is None:
        return {}
    layers, number = cfg.layer_stacks[BLOCKS], experts.number
    if cfg.scan_layers:
        return {LOAD: (layers, number)}
    return {LOAD.replace("/", f"/{layer}/", 1): (number,) for layer in range(layers)}


def match(family: Family, cfg: AnyModelConfig, names: Collection[str]) -> Match:
    """Matches a checkpoint's tensor names, with any of the family's prefixes.

    Raises BadInput for missing and unknown tensors.
    """
    names = set(names)
    attempts = [tensors(family, cfg, base) for base in family.prefixes]
    pairs = max(attempts, key=lambda pairs: len(names & {pair.hf_name for pair in pairs}))
    known = {pair.hf_name for pair in pairs}
    patterns = family.left_out
    if "lm_head.weight" in family.unprefixed and getattr(cfg, "tied_embeddings", True):
        patterns += (r"(.*\.)?lm_head\.weight",)  # some files store the tied embedding twice
    left_out = sorted(name for name in names - known if matches_any(name, patterns))
    if missing := sorted(known - names):
        raise BadInput(f"the checkpoint has no {first_names(missing)}, which config.json calls for")
    unknown = sorted(names - known - set(left_out))
    if extra_layers := [name for name in unknown if family.extra_layers and layer_of(name) >= cfg.num_layers]:
        raise BadInput(
            f"the checkpoint has {first_names(extra_layers)}: {family.extra_layers}, which are not supported and would "
            "be lost; to "
            "convert the model without them, take their names out of model.safetensors.index.json"
        )
    if unknown:
        raise BadInput(
            f"the checkpoint has {first_names(unknown)}, which a {family.model_type} with this config.json has not"
        )
    return Match(pairs, left_out)


def layer_of(name: str) -> int:
    """Returns the layer number in a Hugging Face tensor name; -1 without one."""
    found = re.match(r"(?:.*\.)?layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def first_names(names: list[str]) -> str:
    """Formats up to three names and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
