"""Reads a config.json: unsupported values and unread keys, layers with a window."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.interop.families.family import Family
from jaxscale.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.units import or_list

NEAR, FAR = "sliding_attention", "full_attention"  # the types of layers
# transformers reads these of any model: its masks, its cache of keys and values, its layers, its files.
READ_OF_ALL = dict(
    add_cross_attention=(False,), attention_chunk_size=(None,), configuration_files=(None, []), is_causal=(True,),
    is_encoder_decoder=(False,),
    layer_types=(None,), per_layer_config=(None, {}), sliding_window=(None,), transformers_weights=(None,),
    use_bidirectional_attention=(None, False),
)  # fmt: skip
# Keys that say nothing about what is computed, and are handed through as they are.
KEPT = (
    "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings",
    "initializer_range", "use_cache", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux",
)  # fmt: skip
# And those that nobody misses: where a file came from, heads for other tasks, how torch computes; layers behind the
# last one, of which match() finds the tensors.
FORGOTTEN = {
    "_name_or_path", "name_or_path", "_attn_implementation_autoset", "architectures", "auto_map",
    "cache_implementation", "chunk_size_feed_forward", "ep_size", "finetuning_task", "id2label", "is_decoder",
    "label2id", "model_type", "n_ctx", "num_labels", "num_mtp_layers", "num_nextn_predict_layers", "output_attentions",
    "output_hidden_states", "pretraining_tp", "problem_type", "quantization_config", "reorder_and_upcast_attn",
    "return_dict", "_sliding_window_pattern", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "task_specific_params", "text_config", "tokenizer_class", "torchscript",
    "transformers_version", "unsloth_fixed", "unsloth_version",
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


def types_of(num_layers: int, first: int = 0, every: int | None = None) -> list[str]:
    """layer_types in which the first layers see all keys, and of the others each `every`-th by its place in all."""
    far = lambda layer: layer <= first or (every is not None and layer % every == 0)
    return [FAR if far(layer) else NEAR for layer in range(1, num_layers + 1)]


def read_windows(hf: Mapping[str, Any], types: Sequence[str], usual: int | None = None) -> dict[str, Any]:
    """attention_window, global_every and global_first for these layer_types.

    usual: n where each n-th layer of the family is global. Raises BadInput for layers in another order, or where
    sliding_window is missing.
    """
    types, length = list(types), hf["num_hidden_layers"]
    if len(types) != length:
        raise BadInput(f"config.json: layer_types has {len(types)} entries and num_hidden_layers is {length}")
    if types == [FAR] * length:
        return {}
    window = hf.get("sliding_window")
    if window is None:
        raise BadInput("config.json: layer_types has sliding_attention, and sliding_window gives no width for it")
    first = types.index(NEAR) if NEAR in types else 0
    told = dict(attention_window=window) | (dict(global_first=first) if first else {})
    for every in (usual, None, *range(2, length + 1)):
        if types == types_of(length, first, every):
            return told if every is None else told | dict(global_every=every)
    raise BadInput(
        "config.json: layer_types is not supported: full_attention must be the first layers, each n-th one, or both, "
        "and here it is layers " + ", ".join(str(layer) for layer, name in enumerate(types, 1) if name != NEAR)
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
