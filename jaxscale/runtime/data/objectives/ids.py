"""Determines the special token ids of an objective from its settings or the tokenizer."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.data.objective_config import (
    DenoisingConfig,
    MaskedLmConfig,
    ObjectiveConfig,
    denoisers,
    noise_amount,
)
from jaxscale.runtime.text.tokenizer.base import ObjectiveTokens
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, eq=False)
class SpecialIds:
    """Special token ids of an objective. Unused fields are 0 or empty."""

    is_special: np.ndarray  # bool[vocab_size of the model]
    mask_id: int = 0
    sentinels: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))  # int32, first to last
    start_id: int = 0  # first input of a decoder
    end_id: int = 0
    modes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def ordinary(self) -> np.ndarray:
        """Returns int32, the ids that are not special."""
        return np.flatnonzero(~self.is_special).astype(np.int32)


def find_ids(
    cfg: ObjectiveConfig, tokenizer: Any | None, token_bytes: np.ndarray | None, vocab_size: int, seq_len: int
) -> SpecialIds:
    """Returns the special ids of the objective. Raises BadInput for ids that are missing, too large or used by text."""
    known = (tokenizer, token_bytes, vocab_size)
    marks = ObjectiveTokens() if tokenizer is None else tokenizer.marks
    if isinstance(cfg, MaskedLmConfig):
        mask_id = known_id("mask_id", cfg.mask_id, marks.mask_id, tokenizer, vocab_size)
        check_distinct({"mask_id": [mask_id]}, token_bytes)
        return SpecialIds(find_special([mask_id], *known), mask_id=mask_id)
    if not isinstance(cfg, DenoisingConfig):
        return SpecialIds(find_special([], *known))
    end_id = known_id("end_id", cfg.end_id, getattr(tokenizer, "eos_id", None), tokenizer, vocab_size)
    start_id = end_id if cfg.start_id is None else known_id("start_id", cfg.start_id, None, None, vocab_size)
    sentinels = find_sentinels(cfg, marks, tokenizer, vocab_size, seq_len)
    given, needed = getattr(cfg, "mode_ids", {}), sorted({denoiser.mode for denoiser in denoisers(cfg)} - {""})
    if missing := [mode for mode in needed if mode not in given]:
        raise BadInput(f"data.objective.mode_ids has no id for the modes {', '.join(missing)}; add an id for each mode")
    check_in_vocabulary("mode_ids", list(given.values()), vocab_size)
    modes = {mode: given[mode] for mode in needed}
    check_distinct({"first_sentinel_id": sentinels, "mode_ids": [*modes.values()], "end_id": [end_id]}, token_bytes)
    is_special = find_special([start_id, end_id, *sentinels, *modes.values()], *known)
    return SpecialIds(
        is_special, sentinels=np.array(sentinels, np.int32), start_id=start_id, end_id=end_id, modes=modes
    )


def find_sentinels(
    cfg: DenoisingConfig, marks: ObjectiveTokens, tokenizer: Any | None, vocab_size: int, seq_len: int
) -> list[int]:
    """Returns the sentinel ids, from first to last."""
    if cfg.first_sentinel_id is not None:
        sentinels = [cfg.first_sentinel_id + i * cfg.sentinel_step for i in range(cfg.num_sentinels)]
    else:
        sentinels = [int(id) for id in marks.sentinel_ids]
    if not sentinels:
        raise BadInput(
            f"data.objective.first_sentinel_id must be given ({missing_id_reason(tokenizer)}); reserve "
            f"num_sentinels ids below model.vocab_size={vocab_size} that text does not use, and set the first"
        )
    check_in_vocabulary("first_sentinel_id", sentinels, vocab_size)
    needed = max(noise_amount(seq_len, d.noise_density, d.mean_span).spans for d in denoisers(cfg))
    if needed > len(sentinels):
        raise BadInput(
            f"seq_len={seq_len} needs {needed} sentinels, but there are only {len(sentinels)}; reduce "
            "seq_len, raise data.objective.mean_span, or set data.objective.first_sentinel_id and num_sentinels"
        )
    return sentinels


def find_special(
    named: Sequence[int], tokenizer: Any | None, token_bytes: np.ndarray | None, vocab_size: int
) -> np.ndarray:
    """Returns bool[vocab_size], True for `named` ids, the end token and, given token_bytes, all ids without text."""
    is_special = np.zeros(vocab_size, bool)
    if token_bytes is not None:
        is_special[:] = True  # ids beyond the tokenizer's vocabulary have no text
        is_special[: len(token_bytes)] = token_bytes[:vocab_size] == 0
    eos_id = getattr(tokenizer, "eos_id", None)
    is_special[[*named, *([] if eos_id is None else [eos_id])]] = True
    return is_special


class TokenizerIds(NamedTuple):
    """Name and special ids of an unknown or synthetic tokenizer."""

    name: str
    eos_id: int | None
    marks: ObjectiveTokens = ObjectiveTokens()


def synthetic_ids(vocab_size: int) -> TokenizerIds:
    """Returns special ids for random tokens. Most ids in the upper half of the vocabulary are sentinels."""
    last = vocab_size - 1
    sentinels = tuple(range(max(last - 2, 0), vocab_size // 2, -1))
    return TokenizerIds("synthetic", last, ObjectiveTokens(mask_id=max(last - 1, 0), sentinel_ids=sentinels))


def known_id(name: str, chosen: int | None, found: int | None, tokenizer: Any | None, vocab_size: int) -> int:
    """Returns `chosen` (from the settings) or else `found` (from the tokenizer). Raises BadInput if both are None."""
    found = found if chosen is None else chosen
    if found is None:
        raise BadInput(
            f"data.objective.{name} must be given ({missing_id_reason(tokenizer)}); use an id below "
            f"model.vocab_size={vocab_size} that text does not use"
        )
    check_in_vocabulary(name, [found], vocab_size)
    return int(found)


def check_in_vocabulary(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises BadInput if an id is outside the vocabulary."""
    outside = [id for id in ids if not 0 <= id < vocab_size]
    if outside:
        raise BadInput(
            f"data.objective.{name} uses id {outside[0]}, which is outside model.vocab_size={vocab_size}; "
            f"set model.vocab_size to at least {max(outside) + 1}"
        )


def check_distinct(named: Mapping[str, Sequence[int]], token_bytes: np.ndarray | None) -> None:
    """Raises BadInput if an id is listed twice, or is used by text. named: {setting: ids}."""
    used_by: dict[int, str] = {}
    for name, ids in named.items():
        for id in ids:
            if id in used_by:
                raise BadInput(f"data.objective.{used_by[id]} and {name} both use id {id}; use different ids")
            if token_bytes is not None and id < len(token_bytes) and token_bytes[id]:
                raise BadInput(
                    f"data.objective.{name} is id {id}, which the tokenizer uses for text; use an id outside its "
                    f"vocabulary, such as {len(token_bytes)}"
                )
            used_by[id] = name


def missing_id_reason(tokenizer: Any | None) -> str:
    """Returns the reason why the tokenizer provides no id, for error messages."""
    return f"data.tokenizer={tokenizer.name} has no such id" if tokenizer is not None else "no tokenizer is known"
