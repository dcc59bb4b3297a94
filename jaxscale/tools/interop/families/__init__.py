"""Mapping of settings and tensors between Hugging Face model families and jaxscale.

family, cfg, passthrough = read(json.loads(config_json))      # from Hugging Face
pairs, ignored = match(family, cfg, names_in_the_files)       # one TensorPair per tensor, and ignored names
config_json = write(family_for(cfg), cfg, passthrough)        # to Hugging Face
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
from jaxscale.tools.interop.families.experts import DEEPSEEK_V2, DEEPSEEK_V3, MIXTRAL, OLMOE, QWEN3_MOE
from jaxscale.tools.interop.families.family import HEAD, HfFamily, TensorPair, TensorSpec, matches_any, matrix_shape
from jaxscale.tools.interop.families.gemma import GEMMA1, GEMMA2, GEMMA3, GEMMA3_VISION
from jaxscale.tools.interop.families.gpt2 import GPT2
from jaxscale.tools.interop.families.llama_like import LLAMA, MISTRAL, OLMO2, PHI3, QWEN2, QWEN3
from jaxscale.tools.interop.families.settings import PASSTHROUGH, UNSUPPORTED, refuse_unread, unread
from jaxscale.units import or_list

__all__ = [
    "FAMILIES", "HfFamily", "TensorPair", "TensorSpec", "family_for", "family_of", "match", "notes", "read",
    "tensors", "untracked_leaves", "write",
]  # fmt: skip

ALL = (
    LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, GEMMA1, GEMMA2, GEMMA3, GEMMA3_VISION, PHI3, MIXTRAL, QWEN3_MOE, OLMOE,
    DEEPSEEK_V2, DEEPSEEK_V3, GPT2,
)  # fmt: skip
FAMILIES: dict[str, HfFamily] = {family.model_type: family for family in ALL}
# Settings of execution, which are not in config.json.
EXECUTION = (
    "compute_dtype", "embed_compute_dtype", "matmul_precision", "matmul_dtype", "attention", "scan_layers", "remat",
    "remat_save", "remat_offload", "row_parts", "loss_chunk_tokens", "dropout",
)  # fmt: skip
LOAD = "blocks/mlp/router_load"


def family_of(hf: Mapping[str, Any]) -> HfFamily:
    """Returns the family of a config.json. Raises BadInput for an unsupported family."""
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        if isinstance(model_type, str) and model_type in UNSUPPORTED:
            raise BadInput(f"config.json: model_type={model_type!r} is not supported: it has {UNSUPPORTED[model_type]}")
        raise BadInput(
            f"config.json: model_type={short(model_type)} is not supported; supported: {or_list(sorted(FAMILIES))}"
        )
    family = FAMILIES[model_type]
    architectures = hf.get("architectures") or []
    if not isinstance(architectures, list):
        raise BadInput(f"config.json: architectures={short(architectures)} must be a list of names; download it again")
    for architecture in architectures:
        if architecture not in family.architectures:
            known = or_list(list(family.architectures))
            raise BadInput(f"config.json: architecture {short(architecture)} is not supported; supported: {known}")
    return family


def read(hf: Mapping[str, Any]) -> tuple[HfFamily, AnyModelConfig, dict[str, Any]]:
    """Returns (family, model config, passed-through keys) of a config.json. Raises BadInput if it is not supported."""
    family = family_of(hf)
    if hf.get("quantization_config"):
        raise BadInput("config.json: quantization_config is not supported; convert the unquantized model")
    try:
        refuse_unread(family, hf)
        cfg = family.read_config(hf)
        cfg = schema.from_dict(type(cfg), schema.to_dict(cfg))  # checks types and rejects NaN
        values = {**hf, **(hf.get("text_config") or {})}
    except BadInput as error:
        raise BadInput(f"config.json: {error}") from None
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:  # the file is untrusted
        raise BadInput(
            f"config.json is not a valid {family.model_type} config ({type(error).__name__}: {error}); "
            "download it again"
        ) from None
    return family, cfg, {key: values[key] for key in PASSTHROUGH if key in values}


def notes(hf: Mapping[str, Any]) -> list[str]:
    """Returns lines to print about a config.json."""
    family, text = family_of(hf), hf.get("text_config") or {}
    found = unread(family, hf) + unread(FAMILIES[family.exported_as or family.model_type], text)
    lines = [f"config.json has {first_names(found)}, which {family.model_type} does not use; ignored"] if found else []
    if hf.get("auto_map"):
        lines.append(
            f"config.json has custom code (auto_map), which is never run. The model is read as {family.model_type} of "
            "transformers; results differ if the code changes the model"
        )
    return lines


def write(family: HfFamily, cfg: AnyModelConfig, passthrough: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the config.json of a model. passthrough: keys to add, such as those returned by `read`."""
    named = dict(architectures=[family.architectures[0]], model_type=family.model_type)
    return named | family.write_config(cfg) | dict(passthrough or {})


def family_for(cfg: AnyModelConfig, origin: str | None = None) -> HfFamily:
    """Returns a family that represents cfg, preferably `origin`. Raises BadInput if no family can represent it."""
    first = FAMILIES.get(origin or "")
    nearest: dict[str, Any] | None = None
    for family in ([FAMILIES[first.exported_as or first.model_type]] if first else []) + list(ALL):
        lost = lost_settings(family, cfg) if not family.exported_as else None
        if lost == {}:
            return family
        if lost is not None and (nearest is None or len(lost) < len(nearest)):
            nearest = lost
    named = ", ".join(f"model.{name}={value!r}" for name, value in (nearest or {"name": cfg.name}).items())
    raise BadInput(f"no Hugging Face model type supports {named}; supported model types: {or_list(sorted(FAMILIES))}")


def lost_settings(family: HfFamily, cfg: AnyModelConfig) -> dict[str, Any] | None:
    """Returns {setting: value} that config.json cannot represent, or None for a different kind of model."""
    if type(cfg) is not type(family.read_config({})):
        return None
    restored, settings = settings_of(family.read_config(family.write_config(cfg))), settings_of(cfg)
    more = restored.keys() - settings.keys()
    if "latent.kv_rank" in more or ("experts.number" in restored) != ("experts.number" in settings):
        return None
    return {name: value for name, value in settings.items() if name not in EXECUTION and restored.get(name) != value}


def settings_of(cfg: AnyModelConfig) -> dict[str, Any]:
    """Returns {setting: value} for settings that define the model, with nested settings flattened."""
    found: dict[str, Any] = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    experts = found.get("experts")
    for group in ("latent", "experts"):
        if (nested := found.get(group)) is not None:
            del found[group]
            found |= {f"{group}.{field.name}": getattr(nested, field.name) for field in dataclasses.fields(nested)}
    if experts is None:
        return found
    training_only = dict.fromkeys(("experts.bias_rate", "experts.capacity_factor"), True)
    unread = {"mlp_dim": not experts.first_dense, "experts.group_best": experts.groups == 1} | training_only
    return {name: value for name, value in found.items() if not unread.get(name)}


def leaf_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns {leaf: shape}. Leaves of a layer stack have the shape of one layer."""
    cfg = dataclasses.replace(cfg, scan_layers=True)
    abstract = jax.eval_shape(lambda key: make_model(cfg, key=key), jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(split_model(abstract)[1])
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}
    return {name: shape[1:] if name.partition("/")[0] in cfg.layer_stacks else shape for name, shape in named.items()}


def tensors(family: HfFamily, cfg: AnyModelConfig, base: str | None = None) -> list[TensorPair]:
    """Returns all tensors of a model with the family's names, layer by layer. base: name prefix; default: the first."""
    shapes = leaf_shapes(cfg)
    prefix = family.prefixes[0] if base is None else base
    rope_dim = getattr(cfg, "rope_dim", 0)

    def make_pair(
        row: TensorSpec, leaves: tuple[str, ...], first: int = 0, at: int | None = None, expert: int | None = None
    ) -> TensorPair:  # at: index of the layer in its stack. first: index of the stack's first layer in the model
        sizes = tuple(shapes[name] if expert is None else shapes[name][1:] for name in leaves)
        flats = [matrix_shape(shape, row.inputs) for shape in sizes]
        fused = (*flats[0][:-1], sum(flat[-1] for flat in flats))
        hf_name = row.hf_name.format(layer=None if at is None else first + at, expert=expert)
        hf_name = hf_name if row.hf_name == HEAD else prefix + hf_name
        if at is not None and not cfg.scan_layers:
            leaves, at = tuple(name.replace("/", f"/{at}/", 1) for name in leaves), None
        hf_shape = fused[::-1] if row.transposed else fused
        return TensorPair(leaves, at, sizes, hf_name, hf_shape, row, expert, rope_dim if row.interleaved else 0)

    once = [row for row in family.rows if not row.per_layer and set(row.leaves) <= set(shapes)]
    covered = {name for row in once for name in row.leaves} | {LOAD}
    pairs, first = [make_pair(row, row.leaves) for row in once], 0
    for name, layers in cfg.layer_stacks.items():
        rows = []  # (spec, its leaves in this stack)
        for row in family.rows:
            leaves = tuple(f"{name}/{leaf.partition('/')[2]}" for leaf in row.leaves)
            others = [leaf for leaf in row.leaves if leaf.partition("/")[0] not in (name, BLOCKS)]
            if row.per_layer and not others and (name == BLOCKS or not row.per_expert) and set(leaves) <= set(shapes):
                rows.append((row, leaves))
                covered |= set(leaves)
        number = getattr(getattr(cfg, "experts", None), "number", 0)
        for at in range(layers):
            pairs += [make_pair(row, leaves, first, at) for row, leaves in rows if not row.per_expert]
            experts = [(row, leaves) for row, leaves in rows if row.per_expert]
            pairs += [make_pair(row, leaves, first, at, expert) for expert in range(number) for row, leaves in experts]
        first += layers
    assert covered >= set(shapes), f"{family.model_type} has no row for {sorted(set(shapes) - covered)}"
    return pairs


def untracked_leaves(cfg: AnyModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns {leaf: shape} of the router loads, which training updates but Hugging Face files do not contain."""
    experts = getattr(cfg, "experts", None)
    if experts is None:
        return {}
    layers, number = cfg.layer_stacks[BLOCKS], experts.number
    if cfg.scan_layers:
        return {LOAD: (layers, number)}
    return {LOAD.replace("/", f"/{layer}/", 1): (number,) for layer in range(layers)}


def match(family: HfFamily, cfg: AnyModelConfig, names: Collection[str]) -> tuple[list[TensorPair], list[str]]:
    """Returns (pairs, ignored names) for a checkpoint's tensor names. Raises BadInput for missing or unknown names."""
    names = set(names)
    attempts = [tensors(family, cfg, base) for base in family.prefixes]
    pairs = max(attempts, key=lambda pairs: len(names & {pair.hf_name for pair in pairs}))
    known = {pair.hf_name for pair in pairs}
    patterns = family.left_out
    if getattr(cfg, "tied_embeddings", True):
        patterns += (r"(.*\.)?lm_head\.weight",)  # some files store the tied embedding twice
    left_out = sorted(name for name in names - known if matches_any(name, patterns))
    if missing := sorted(known - names):
        raise BadInput(f"the checkpoint has no {first_names(missing)}, which config.json requires; download it again")
    unknown = sorted(names - known - set(left_out))
    layer_of = lambda name: int(found[1]) if (found := re.match(r"(?:.*\.)?layers\.(\d+)\.", name)) else -1
    if extra_layers := [name for name in unknown if family.extra_layers and layer_of(name) >= cfg.num_layers]:
        raise BadInput(
            f"the checkpoint has {first_names(extra_layers)}: {family.extra_layers}, which are not supported and would "
            "be lost; to convert the model without these layers, remove their names from model.safetensors.index.json"
        )
    if unknown:
        raise BadInput(
            f"the checkpoint has {first_names(unknown)}, which {family.model_type} with this config.json does not have"
            "; download config.json again"
        )
    return pairs, left_out


def first_names(names: list[str]) -> str:
    """Returns up to three names and the number of the other names, as text."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
