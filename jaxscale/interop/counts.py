"""Checks the sizes in a config.json against the tensors before anything is allocated."""

from collections.abc import Mapping
from typing import Any

from jaxscale.interop.safetensors import Tensor
from jaxscale.system.exits import BadInput

LAYERS = ("num_hidden_layers", "n_layer")  # each has tensors of its own
MOST_LAYERS = 4096  # the deepest published models have about 130
SIZES = (  # each is an axis of some tensor, or divides one
    "vocab_size", "hidden_size", "n_embd", "intermediate_size", "n_inner", "num_attention_heads", "n_head",
    "num_key_value_heads", "head_dim", "n_positions",
)  # fmt: skip
TOKENS = ("max_position_embeddings", "sliding_window")
LONGEST = 1 << 31  # tokens: no model reads so many
END_IDS = ("bos_token_id", "eos_token_id")


def check_counts(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises BadInput for a number that no model with these tensors can have."""
    whole = [tensor.shape for tensor in tensors.values() if tensor.stop > tensor.start]  # others may have any shape
    longest = max((size for shape in whole for size in shape), default=0)
    rules = [
        (LAYERS, min(len(tensors), MOST_LAYERS), f"there are {len(tensors):,} tensors"),
        (SIZES, longest, f"the longest axis of a tensor has {longest:,}"),
        (TOKENS, LONGEST, "no model reads so many"),
    ]
    inner = config.get("text_config")
    for group in (config, inner if isinstance(inner, Mapping) else {}):
        for names, most, why in rules:
            for name in names:
                check_count(name, group.get(name), most, why)


def check_count(name: str, value: Any, most: int, why: str) -> None:
    """Raises BadInput unless it is a whole number from 1 to `most`, or not told."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(f"config.json: {name}={short(value)} must be a whole number, 1 or more")
    if value > most:
        raise BadInput(f"config.json: {name}={short(value)} is too much: {why}; fetch it again")


def check_end_ids(told: Mapping[str, Any], vocab_size: int, where: str) -> None:
    """Raises BadInput for a bos_token_id or eos_token_id that is no id, or no list of ids, of such a vocabulary."""
    for name in END_IDS:
        value = told.get(name)
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            if type(one) is not int or not 0 <= one < vocab_size:
                raise BadInput(
                    f"{where}: {name}={short(value)} must be an id from 0 to {vocab_size - 1}, or a list of them"
                )


def short(value: Any) -> str:
    """A value for a message: a hostile one may be long."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 200:
        return f"a number of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
