"""Keys of a config.json that a family does not read: refused where transformers computes another model by them, and
otherwise told by name."""

from collections.abc import Mapping
from typing import Any

from jaxscale.interop.families.family import Family
from jaxscale.interop.families.settings import refuse_unless

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
    "model_type", "n_ctx",
    "num_labels", "output_attentions", "output_hidden_states", "pretraining_tp", "problem_type", "quantization_config",
    "reorder_and_upcast_attn", "return_dict", "_sliding_window_pattern", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "task_specific_params", "text_config", "tokenizer_class", "torchscript",
    "transformers_version", "unsloth_fixed", "unsloth_version",
}  # fmt: skip


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
