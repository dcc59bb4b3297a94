"""Sliding-window layers: `layer_types`, and the keys of older releases."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.interop.families.settings import FAR, NEAR
from jaxscale.models.llama_config import LlamaConfig
from jaxscale.system.exits import BadInput


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
