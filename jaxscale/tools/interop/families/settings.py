"""Validation of config.json keys, and conversion of sliding windows and RoPE.

RoPE base and scaling are read in the formats of transformers 4 and 5.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from jaxscale.core.models import AnyModelConfig
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.kernels.config import BY_LENGTH, RopeName, RopeScaling
from jaxscale.kernels.rope import dynamic_ntk_base, longrope_factors
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.tools.interop.families.family import HfFamily
from jaxscale.units import or_list

SLIDING, FULL = "sliding_attention", "full_attention"  # values of layer_types
# Keys that transformers reads for any model, with the supported values.
READ_BY_ALL = dict(
    add_cross_attention=(False,), attention_chunk_size=(None,), configuration_files=(None, []), is_causal=(True,),
    is_encoder_decoder=(False,),
    layer_types=(None,), per_layer_config=(None, {}), sliding_window=(None,), transformers_weights=(None,),
    use_bidirectional_attention=(None, False),
)  # fmt: skip
# Keys that do not affect the model and are passed through unchanged.
PASSTHROUGH = (
    "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings",
    "initializer_range", "use_cache", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux",
)  # fmt: skip
# Keys that are dropped: origin, other heads, execution in torch, and extra layers (match() finds their tensors).
IGNORED = {
    "_name_or_path", "name_or_path", "_attn_implementation_autoset", "architectures", "auto_map",
    "cache_implementation", "chunk_size_feed_forward", "ep_size", "finetuning_task", "id2label", "is_decoder",
    "label2id", "model_type", "n_ctx", "num_labels", "num_mtp_layers", "num_nextn_predict_layers", "output_attentions",
    "output_hidden_states", "pretraining_tp", "problem_type", "quantization_config", "reorder_and_upcast_attn",
    "return_dict", "_sliding_window_pattern", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "task_specific_params", "text_config", "tokenizer_class", "torchscript",
    "transformers_version", "unsloth_fixed", "unsloth_version",
}  # fmt: skip
# Frequently requested models that are not supported, with the missing feature.
INDEXED = "sparse attention with an indexer"
UNCOMPARED = "the attention of DeepSeek-V3 and was not verified against its reference code"
HYBRID = "layers without attention (a hybrid model)"
RECURRENT = "no attention"
PART = "partial RoPE (over part of each head)"
SHARED_GATE = "a gated shared expert"
UNSUPPORTED = dict(
    gpt_oss="attention sinks, and biases and clamping in its experts",
    llama4="layers without RoPE, and experts with inputs scaled by router scores",
    llama4_text="layers without RoPE, and experts with inputs scaled by router scores",
    qwen2_moe=SHARED_GATE, phimoe="another router (SparseMixer)", dbrx="LayerNorm and clipped queries, keys and values",
    granitemoe="scaled residual connections", granitemoeshared="scaled residual connections",
    deepseek_v32=INDEXED, kimi_k2=UNCOMPARED, glm4_moe_lite=UNCOMPARED,
    glm4_moe=PART, minimax_m2=PART, jetmoe="experts in attention",
    qwen3_next=HYBRID, qwen3_5=HYBRID, qwen3_5_text=HYBRID, qwen3_5_moe=HYBRID, qwen3_5_moe_text=HYBRID, jamba=HYBRID,
    bamba=HYBRID, nemotron_h=HYBRID, falcon_h1=HYBRID, zamba2=HYBRID, granitemoehybrid=HYBRID, lfm2=HYBRID,
    lfm2_moe=HYBRID, minimax=HYBRID, olmo_hybrid=HYBRID, mamba=RECURRENT, mamba2=RECURRENT,
)  # fmt: skip
MAX_POSITIONS, ORIGINAL_POSITIONS = "max_position_embeddings", "original_max_position_embeddings"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", ORIGINAL_POSITIONS)
LENGTH = "original_max_len"  # setting for the key ORIGINAL_POSITIONS; other settings have the names of their keys
SCALINGS: dict[str, tuple[str, ...]] = dict(  # {scaling: settings in addition to the factor}
    linear=(),
    dynamic=(),
    llama3=("low_freq_factor", "high_freq_factor", LENGTH),
    yarn=("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim", LENGTH),
    longrope=("short_factor", "long_factor", "attention_factor", LENGTH),
)


def refuse_unless(hf: Mapping[str, Any], **allowed: tuple) -> None:
    """Raises BadInput for the first key with a value that is not allowed. allowed: {key: values}."""
    for key, values in allowed.items():
        if key in hf and hf[key] not in values:
            known = or_list([repr(value) for value in values])
            raise BadInput(f"{key}={short(hf[key])} is not supported for {hf.get('model_type')}; supported: {known}")


def number(values: Mapping[str, Any], key: str) -> float:
    """Returns a value as a float. Raises BadInput unless it is a JSON number."""
    if type(values[key]) not in (int, float):
        raise BadInput(f"{key}={short(values[key])} must be a number; download the file again")
    return float(values[key])


def expected_layer_types(num_layers: int, first: int = 0, every: int | None = None) -> list[str]:
    """Returns layer_types with full attention in the first `first` layers and in every `every`-th layer."""
    is_full = lambda layer: layer <= first or (every is not None and layer % every == 0)
    return [FULL if is_full(layer) else SLIDING for layer in range(1, num_layers + 1)]


def read_windows(hf: Mapping[str, Any], types: Sequence[str], usual: int | None = None) -> dict[str, Any]:
    """Returns attention_window, global_every (tries `usual` first) and global_first. Raises BadInput if unsupported."""
    types, length = list(types), hf["num_hidden_layers"]
    if len(types) != length:
        raise BadInput(f"layer_types has {len(types)} entries, but num_hidden_layers is {length}")
    if types == [FULL] * length:
        return {}
    window = hf.get("sliding_window")
    if window is None:
        raise BadInput("layer_types has sliding_attention, but sliding_window is missing; set sliding_window")
    first = types.index(SLIDING) if SLIDING in types else 0
    settings = dict(attention_window=window) | (dict(global_first=first) if first else {})
    for every in (usual, None, *range(2, length + 1)):
        if types == expected_layer_types(length, first, every):
            return settings if every is None else settings | dict(global_every=every)
    raise BadInput(
        "unsupported layer_types: full_attention must be in the first k layers, every n-th layer, or "
        "both, but is in layers " + ", ".join(str(layer) for layer, name in enumerate(types, 1) if name != SLIDING)
    )


def write_layer_types(cfg: LlamaConfig) -> list[str]:
    """Returns the layer_types of a model."""
    return [SLIDING if local else FULL for local in np.asarray(cfg.local_layers).tolist()]


def refuse_unread(family: HfFamily, hf: Mapping[str, Any]) -> None:
    """Raises BadInput for a key that the family does not read but that changes the model in transformers."""
    others = {key: allowed for key, allowed in READ_BY_ALL.items() if key not in family.keys}
    refuse_unless({"model_type": family.model_type} | dict(hf), **others)


def unread(family: HfFamily, hf: Mapping[str, Any]) -> list[str]:
    """Returns the keys that have a value and are not known to the family."""
    known = {*family.keys, *READ_BY_ALL, *PASSTHROUGH, *IGNORED}
    return sorted(key for key, value in hf.items() if key not in known and value is not None)


def read_rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns (rope_base, rope_scaling) from the key rope_scaling (transformers 4), or rope_parameters (5)."""
    scaling, parameters = hf.get("rope_scaling") or {}, hf.get("rope_parameters") or {}
    rope = {"rope_theta": hf["rope_theta"], **(scaling or parameters)}
    if nested := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise BadInput(f"rope_parameters of {hf.get('model_type')} must not have groups of layers; remove {nested[0]}")
    found, unread = parse_rope(rope, hf), parameters.get("rope_theta", rope["rope_theta"])
    if scaling and "rope_theta" not in scaling and unread != rope["rope_theta"]:
        raise BadInput(
            f"transformers ignores rope_theta={short(unread)} in rope_parameters, since rope_scaling is set, and uses "
            f"{short(rope['rope_theta'])}; merge rope_parameters and rope_scaling into one of the two keys"
        )
    return found


def read_layer_type_rope(hf: Mapping[str, Any], layers: str) -> tuple[float, RopeScaling | None]:
    """Returns (rope_base, rope_scaling) for a layer type of Gemma 3. rope_scaling applies only to full_attention."""
    parameters = hf.get("rope_parameters") or {}
    if misplaced := [key for key in parameters if key not in (FULL, SLIDING)]:
        raise BadInput(
            f"rope_parameters has {misplaced[0]} outside the groups of layer types, where transformers "
            f"ignores it for {hf.get('model_type')}; move it into {FULL} and {SLIDING}"
        )
    usual = {"rope_theta": hf["rope_theta" if layers == FULL else "rope_local_base_freq"]}
    added = (hf.get("rope_scaling") or {}) if layers == FULL else {}
    rope = {**usual, **(parameters.get(layers) or {"rope_type": "default"}), **added}
    rope.pop("truncate", None)  # transformers ignores truncate inside a layer type
    rope.setdefault(ORIGINAL_POSITIONS, hf.get(MAX_POSITIONS))  # transformers ignores this key outside a layer type
    return parse_rope(rope, hf)


def parse_rope(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns (rope_base, rope_scaling) from RoPE keys. hf: the whole config.json."""
    base, name = number(rope, "rope_theta"), rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", name) != name:
        raise BadInput(
            f"RoPE type={short(rope['type'])} differs from rope_type={short(name)}, which takes priority; remove type"
        )
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor")) not in (None, 1.0):
        raise BadInput("partial_rotary_factor must be 1, since RoPE is applied to whole heads")
    if name == "default":
        return base, None
    if name not in SCALINGS:
        known = or_list([repr(one) for one in ("default", *get_args(RopeName))])
        raise BadInput(f"RoPE scaling {short(name)} is not supported; supported: {known}")
    return base, RopeScaling(name=name, **read_scaling(name, rope, hf))


def read_scaling(name: str, rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a RoPE scaling."""
    if name == "linear":
        return dict(factor=number(rope, "factor"))
    if name == "llama3":
        factors = {key: number(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        return factors | {LENGTH: original_of(rope, hf)}
    if name == "dynamic":  # transformers uses max_position_embeddings as the original length
        if hf.get(MAX_POSITIONS) is None:
            raise BadInput(f"RoPE scaling 'dynamic' requires {MAX_POSITIONS} in config.json")
        return {"factor": number(rope, "factor"), LENGTH: hf[MAX_POSITIONS]}
    found: dict[str, Any] = {}
    for key in ("short_factor", "long_factor") if name == "longrope" else ():
        if not isinstance(rope[key], list) or any(type(one) not in (int, float) for one in rope[key]):
            raise BadInput(f"{key}={short(rope[key])} must be a list of numbers; download it again")
        found[key] = tuple(map(float, rope[key]))
    found[LENGTH] = original_of(rope, hf)
    if rope.get("factor") is not None:
        found["factor"] = number(rope, "factor")
    elif hf.get(MAX_POSITIONS) is not None:
        found["factor"] = hf[MAX_POSITIONS] / found[LENGTH]
    else:
        raise BadInput(f"RoPE scaling has no factor, and config.json has no {MAX_POSITIONS} to derive it from; set one")
    if rope.get("attention_factor") is not None:
        found["attention_factor"] = number(rope, "attention_factor")
    if name == "longrope":
        return found
    found |= {key: number(rope, key) for key in ("beta_fast", "beta_slow") if rope.get(key)}  # in yarn, 0 means absent
    scales = [key for key in ("mscale", "mscale_all_dim") if rope.get(key)]
    if len(scales) == 2 and "attention_factor" not in found:
        found |= {key: number(rope, key) for key in scales}
    return found | ({"truncate": rope["truncate"]} if "truncate" in rope else {})


def original_of(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> int:
    """Returns the context length before RoPE scaling. Raises BadInput if the length is missing or ambiguous."""
    name = rope.get("rope_type", rope.get("type"))
    original = rope.get(ORIGINAL_POSITIONS, hf.get(MAX_POSITIONS))
    if name == "longrope":  # Phi-3 files have the length only outside rope_scaling
        original = rope.get(ORIGINAL_POSITIONS, hf.get(ORIGINAL_POSITIONS, hf.get(MAX_POSITIONS)))
    if original is None or hf.get(ORIGINAL_POSITIONS, original) != original:
        raise BadInput(f"RoPE scaling {name!r} requires one {ORIGINAL_POSITIONS}; set it only in rope_scaling")
    return original


def write_rope(cfg: LlamaConfig) -> dict[str, Any]:
    """Returns rope_theta and rope_scaling, in a form that transformers 4 and 5 can read.

    Adds max_position_embeddings if transformers derives RoPE from it: the original length for 'dynamic', and in
    transformers 4, the factor for 'yarn' and 'longrope'.
    """
    scaling = cfg.rope_scaling
    if scaling is None:
        return dict(rope_theta=cfg.rope_base, rope_scaling=None)
    rope: dict[str, Any] = dict(rope_type=scaling.name, factor=scaling.factor)
    for setting in SCALINGS[scaling.name]:
        value = getattr(scaling, setting)
        if value is not None and setting != "truncate":
            key = ORIGINAL_POSITIONS if setting == LENGTH else setting
            rope[key] = list(value) if isinstance(value, tuple) else value
    if not scaling.truncate:
        rope["truncate"] = False  # older releases do not know this key
    written: dict[str, Any] = dict(rope_theta=cfg.rope_base, rope_scaling=rope)
    if scaling.name == "dynamic":
        written[MAX_POSITIONS] = scaling.original_max_len
    elif scaling.name in ("yarn", "longrope"):
        written[MAX_POSITIONS] = round(scaling.factor * scaling.original_max_len)
    return written


def with_static_rope(cfg: AnyModelConfig) -> AnyModelConfig:
    """Returns cfg without length-dependent RoPE scaling: fixes the scaling for sequences of length row_len.

    'dynamic' becomes a larger rope_base, and 'longrope' uses one list of factors for all lengths.
    """
    scaling = getattr(cfg, "rope_scaling", None)
    if not isinstance(cfg, LlamaConfig) or scaling is None or scaling.row_len is None or scaling.name not in BY_LENGTH:
        return cfg
    if scaling.name == "dynamic":
        base = dynamic_ntk_base(cfg.rope_dim, cfg.rope_base, scaling)
        return dataclasses.replace(cfg, rope_base=base, rope_scaling=None)
    chosen = longrope_factors(scaling)
    one = dataclasses.replace(scaling, short_factor=chosen, long_factor=chosen, row_len=None)
    return dataclasses.replace(cfg, rope_scaling=one)
