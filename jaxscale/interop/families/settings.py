"""Reads a config.json: unsupported values and unread keys, RoPE in both of its spellings, layers with a window."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.interop.families.family import Family
from jaxscale.models.llama_config import LlamaConfig
from jaxscale.ops.config import RopeScaling
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.units import or_list

NEAR, FAR = "sliding_attention", "full_attention"  # the types of layers
ORIGINAL = "original_max_position_embeddings"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", ORIGINAL)  # all that RoPE reads
# transformers reads these of any model: its masks, its cache of keys and values, its layers, its files.
READ_OF_ALL = dict(
    add_cross_attention=(False,), attention_chunk_size=(None,), is_causal=(True,), is_encoder_decoder=(False,),
    layer_types=(None,), per_layer_config=(None, {}), sliding_window=(None,), transformers_weights=(None,),
    use_bidirectional_attention=(None, False),
)  # fmt: skip
# Keys that say nothing about what is computed, and are handed through as they are.
KEPT = (
    "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings",
    "initializer_range", "use_cache", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop",
)  # fmt: skip
# And those that nobody misses: where a file came from, heads for other tasks, how torch computes.
FORGOTTEN = {
    "_name_or_path", "name_or_path", "_attn_implementation_autoset", "architectures", "auto_map",
    "cache_implementation", "chunk_size_feed_forward", "finetuning_task", "id2label", "is_decoder", "label2id",
    "model_type", "n_ctx", "num_labels", "output_attentions", "output_hidden_states", "pretraining_tp",
    "problem_type", "quantization_config", "reorder_and_upcast_attn", "return_dict", "_sliding_window_pattern",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "text_config", "tokenizer_class", "torchscript", "transformers_version",
    "unsloth_fixed", "unsloth_version",
}  # fmt: skip


def refuse_unless(hf: Mapping[str, Any], **allowed: tuple) -> None:
    """Raises BadInput for the first of these keys that is there with another value than one of those allowed."""
    for key, values in allowed.items():
        if key in hf and hf[key] not in values:
            known = or_list([repr(value) for value in values])
            raise BadInput(
                f"config.json: {key}={short(hf[key])} is not supported for {hf.get('model_type')}; it may be {known}"
            )


def number(values: Mapping[str, Any], key: str) -> float:
    """A value of a config.json, as float. Raises BadInput for what is no number: a text of digits is none either."""
    if type(values[key]) not in (int, float):
        raise BadInput(f"config.json: {key}={short(values[key])} must be a number; fetch it again")
    return float(values[key])


def read_rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(rope_base, rope_scaling) of a config.json, in the words of transformers 4 (rope_theta and rope_scaling) or 5
    (rope_parameters). Where both stand there, rope_scaling is taken whole and rope_parameters not at all, as
    transformers 5 does.

    Raises BadInput for a scaling that our RoPE does not have.
    """
    scaling, parameters = hf.get("rope_scaling") or {}, hf.get("rope_parameters") or {}
    rope = {"rope_theta": hf["rope_theta"], **(scaling or parameters)}
    if nested := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise BadInput(
            f"config.json: rope_parameters of {nested[0]} alone are not supported for {hf.get('model_type')}"
        )
    found, unread = scaled(rope, hf), parameters.get("rope_theta", rope["rope_theta"])
    if scaling and "rope_theta" not in scaling and unread != rope["rope_theta"]:
        raise BadInput(
            f"config.json: rope_scaling stands beside rope_parameters, whose rope_theta={short(unread)} transformers "
            f"then does not read: it takes {short(rope['rope_theta'])}; write one of the two, with rope_theta in it"
        )
    return found


def read_rope_of(hf: Mapping[str, Any], layers: str) -> tuple[float, RopeScaling | None]:
    """read_rope of one of Gemma 3's types of layers. rope_scaling is added to what rope_parameters say of the global
    ones. Raises BadInput as read_rope does."""
    parameters = hf.get("rope_parameters") or {}
    if beside := [key for key in parameters if key not in (FAR, NEAR)]:
        raise BadInput(
            f"config.json: rope_parameters has {beside[0]} beside the types of layers, where transformers does not "
            f"read it for {hf.get('model_type')}; put it into {FAR} and {NEAR}"
        )
    usual = {"rope_theta": hf["rope_theta" if layers == FAR else "rope_local_base_freq"]}
    added = (hf.get("rope_scaling") or {}) if layers == FAR else {}
    return scaled({**usual, **(parameters.get(layers) or {"rope_type": "default"}), **added}, hf)


def scaled(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(rope_base, rope_scaling) of RoPE's own keys. Args: hf: the config.json they stand in."""
    base, name = number(rope, "rope_theta"), rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", name) != name:
        raise BadInput(
            f"config.json: RoPE has type={short(rope['type'])}, and transformers reads its rope_type={short(name)}; "
            "write rope_type alone"
        )
    if rope.get("partial_rotary_factor", hf.get("partial_rotary_factor")) not in (None, 1.0):
        raise BadInput("config.json: partial_rotary_factor is not supported: RoPE here turns whole heads")
    if name == "default":
        return base, None
    if name == "linear":
        return base, RopeScaling(name="linear", factor=number(rope, "factor"))
    if name != "llama3":
        raise BadInput(
            f"config.json: RoPE scaling {short(name)} is not supported; it may be 'default', 'linear' or 'llama3'"
        )
    original = rope.get(ORIGINAL, hf.get("max_position_embeddings"))
    if original is None or hf.get(ORIGINAL, original) != original:
        raise BadInput(f"config.json: RoPE scaling 'llama3' needs {ORIGINAL}, in rope_scaling and nowhere else")
    return base, RopeScaling(
        name="llama3",
        factor=number(rope, "factor"),
        low_freq_factor=number(rope, "low_freq_factor"),
        high_freq_factor=number(rope, "high_freq_factor"),
        original_max_len=original,
    )


def write_rope(cfg: LlamaConfig) -> dict[str, Any]:
    """rope_theta and rope_scaling: the spelling that transformers 4 and 5 both read."""
    scaling = cfg.rope_scaling
    if scaling is None:
        return dict(rope_theta=cfg.rope_base, rope_scaling=None)
    named = dict(rope_type=scaling.name, factor=scaling.factor)
    if scaling.name == "llama3":
        named |= dict(
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
        ) | {ORIGINAL: scaling.original_max_len}
    return dict(rope_theta=cfg.rope_base, rope_scaling=named)


def types_every(num_layers: int, every: int) -> list[str]:
    """layer_types in which each `every`-th layer sees all keys."""
    return [FAR if layer % every == 0 else NEAR for layer in range(1, num_layers + 1)]


def read_windows(hf: Mapping[str, Any], types: Sequence[str], usual: int | None = None) -> dict[str, Any]:
    """attention_window and global_every for these layer_types. usual: n where each n-th layer of the family is global.

    Raises BadInput for layers in another order, or where sliding_window is missing.
    """
    types, length = list(types), hf["num_hidden_layers"]
    if len(types) != length:
        raise BadInput(f"config.json: layer_types has {len(types)} entries and num_hidden_layers is {length}")
    if types == [FAR] * length:
        return {}
    window = hf.get("sliding_window")
    if window is None:
        raise BadInput("config.json: layer_types has sliding_attention, and sliding_window gives no width for it")
    for every in dict.fromkeys((usual, *range(2, length + 1))):
        if every is not None and types == types_every(length, every):
            return dict(attention_window=window, global_every=every)
    if types == [NEAR] * length:
        return dict(attention_window=window)
    raise BadInput(
        "config.json: layer_types is not supported: full_attention must be each n-th layer, and here it is layers "
        + ", ".join(str(layer) for layer, name in enumerate(types, 1) if name != NEAR)
    )


def write_types(cfg: LlamaConfig) -> list[str]:
    """layer_types of a model of ours."""
    return [NEAR if local else FAR for local in np.asarray(cfg.local_layers).tolist()]


def refuse_unread(family: Family, hf: Mapping[str, Any]) -> None:
    """Raises BadInput for a key that the family does not read and by which transformers computes another model."""
    refuse_unless(
        {"model_type": family.model_type} | dict(hf),
        **{key: allowed for key, allowed in READ_OF_ALL.items() if key not in family.keys},
    )


def unread(family: Family, hf: Mapping[str, Any]) -> list[str]:
    """The keys with a value that no model of the family knows."""
    known = {*family.keys, *READ_OF_ALL, *KEPT, *FORGOTTEN}
    return sorted(key for key, value in hf.items() if key not in known and value is not None)
