"""Checks values and unread keys of a config.json, and reads sliding windows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import short
from jaxscale.tools.interop.families.family import Family
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
# Keys that are dropped: origin, other heads, execution in torch; extra layers, whose tensors match() finds.
IGNORED = {
    "_name_or_path", "name_or_path", "_attn_implementation_autoset", "architectures", "auto_map",
    "cache_implementation", "chunk_size_feed_forward", "ep_size", "finetuning_task", "id2label", "is_decoder",
    "label2id", "model_type", "n_ctx", "num_labels", "num_mtp_layers", "num_nextn_predict_layers", "output_attentions",
    "output_hidden_states", "pretraining_tp", "problem_type", "quantization_config", "reorder_and_upcast_attn",
    "return_dict", "_sliding_window_pattern", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "task_specific_params", "text_config", "tokenizer_class", "torchscript",
    "transformers_version", "unsloth_fixed", "unsloth_version",
}  # fmt: skip


def refuse_unless(hf: Mapping[str, Any], **allowed: tuple) -> None:
    """Raises BadInput for the first of these keys whose value is not allowed."""
    for key, values in allowed.items():
        if key in hf and hf[key] not in values:
            known = or_list([repr(value) for value in values])
            raise BadInput(
                f"config.json: {key}={short(hf[key])} is not supported for {hf.get('model_type')}; it may be {known}"
            )


def number(values: Mapping[str, Any], key: str) -> float:
    """Returns a value as float. Raises BadInput unless it is a JSON number."""
    if type(values[key]) not in (int, float):
        raise BadInput(f"config.json: {key}={short(values[key])} must be a number; fetch it again")
    return float(values[key])


def expected_layer_types(num_layers: int, first: int = 0, every: int | None = None) -> list[str]:
    """Returns layer_types with full attention in the first `first` layers and in every `every`-th layer."""
    is_full = lambda layer: layer <= first or (every is not None and layer % every == 0)
    return [FULL if is_full(layer) else SLIDING for layer in range(1, num_layers + 1)]


def read_windows(hf: Mapping[str, Any], types: Sequence[str], usual: int | None = None) -> dict[str, Any]:
    """Returns attention_window, global_every and global_first for these layer_types.

    usual: the family's default global_every. Raises BadInput for other patterns, or if sliding_window is missing.
    """
    types, length = list(types), hf["num_hidden_layers"]
    if len(types) != length:
        raise BadInput(f"config.json: layer_types has {len(types)} entries and num_hidden_layers is {length}")
    if types == [FULL] * length:
        return {}
    window = hf.get("sliding_window")
    if window is None:
        raise BadInput("config.json: layer_types has sliding_attention, and sliding_window gives no width for it")
    first = types.index(SLIDING) if SLIDING in types else 0
    settings = dict(attention_window=window) | (dict(global_first=first) if first else {})
    for every in (usual, None, *range(2, length + 1)):
        if types == expected_layer_types(length, first, every):
            return settings if every is None else settings | dict(global_every=every)
    raise BadInput(
        "config.json: layer_types is not supported: full_attention must be the first layers, each n-th one, or both, "
        "and here it is layers " + ", ".join(str(layer) for layer, name in enumerate(types, 1) if name != SLIDING)
    )


def write_layer_types(cfg: LlamaConfig) -> list[str]:
    """Returns the layer_types of our model."""
    return [SLIDING if local else FULL for local in np.asarray(cfg.local_layers).tolist()]


def refuse_unread(family: Family, hf: Mapping[str, Any]) -> None:
    """Raises BadInput for an unread key that changes the model in transformers."""
    refuse_unless(
        {"model_type": family.model_type} | dict(hf),
        **{key: allowed for key, allowed in READ_BY_ALL.items() if key not in family.keys},
    )


def unread(family: Family, hf: Mapping[str, Any]) -> list[str]:
    """Returns the keys with a value that the family does not know."""
    known = {*family.keys, *READ_BY_ALL, *PASSTHROUGH, *IGNORED}
    return sorted(key for key, value in hf.items() if key not in known and value is not None)
