"""What a model is asked for: the next token, or what these transforms of packed rows make of them.

Each is a pure function of a row and of (seed, batch, place of the row in it), so that any host makes the same rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.data.batch import Batch, stack_rows
from jaxscale.data.objective_config import (
    DenoisingConfig,
    MaskedLmConfig,
    NextTokenConfig,
    ObjectiveConfig,
    PrefixLmConfig,
    denoisers,
)
from jaxscale.data.objectives.corrupt import corrupted, most_spans
from jaxscale.data.objectives.ids import (
    SpecialIds,
    check_apart,
    check_in_vocabulary,
    find_special,
    known_id,
    why_none,
)
from jaxscale.data.objectives.packed_row import below, draws, find_documents, ramps, unit
from jaxscale.system.exits import BadInput
from jaxscale.text.tokenizer.base import Marks


def reads_text_in_order(cfg: ObjectiveConfig) -> bool:
    """True if every target follows all that was read of its document: then its bits count the text's bytes."""
    return isinstance(cfg, (NextTokenConfig, PrefixLmConfig))


def find_ids(
    cfg: ObjectiveConfig, tokenizer: Any | None, token_bytes: np.ndarray | None, vocab_size: int, seq_len: int
) -> SpecialIds:
    """The ids that the objective needs. token_bytes: int32[ids of the tokenizer], 0 for special ones, or None.

    Raises BadInput, with the setting to mend, where one is not known, is not the model's, or stands for text.
    """
    known = (tokenizer, token_bytes, vocab_size)
    if isinstance(cfg, MaskedLmConfig):
        mask_id = known_id("mask_id", cfg.mask_id, marks_of(tokenizer).mask_id, tokenizer, vocab_size)
        check_apart({"mask_id": [mask_id]}, token_bytes)
        return SpecialIds(find_special([mask_id], *known), mask_id=mask_id)
    if not isinstance(cfg, DenoisingConfig):
        return SpecialIds(find_special([], *known))
    end_id = known_id("end_id", cfg.end_id, getattr(tokenizer, "eos_id", None), tokenizer, vocab_size)
    start_id = end_id if cfg.start_id is None else known_id("start_id", cfg.start_id, None, None, vocab_size)
    sentinels = find_sentinels(cfg, tokenizer, vocab_size, seq_len)
    modes = find_modes(cfg, vocab_size)
    check_apart({"first_sentinel_id": sentinels, "mode_ids": [*modes.values()], "end_id": [end_id]}, token_bytes)
    is_special = find_special([start_id, end_id, *sentinels, *modes.values()], *known)
    return SpecialIds(
        is_special, sentinels=np.array(sentinels, np.int32), start_id=start_id, end_id=end_id, modes=modes
    )


def marks_of(tokenizer: Any | None) -> Marks:
    """The special tokens that the tokenizer has; none where there is no tokenizer."""
    return Marks() if tokenizer is None else tokenizer.marks


def find_sentinels(cfg: DenoisingConfig, tokenizer: Any | None, vocab_size: int, seq_len: int) -> list[int]:
    """The sentinels, first to last."""
    if cfg.first_sentinel_id is not None:
        sentinels = [cfg.first_sentinel_id + i * cfg.sentinel_step for i in range(cfg.num_sentinels)]
    else:
        sentinels = [int(id) for id in marks_of(tokenizer).sentinel_ids]
    if not sentinels:
        raise BadInput(
            f"data.objective.first_sentinel_id must be given ({why_none(tokenizer)}): the first of "
            f"data.objective.num_sentinels ids that no text uses, below model.vocab_size={vocab_size}"
        )
    check_in_vocabulary("first_sentinel_id", sentinels, vocab_size)
    if (needed := most_spans(cfg, seq_len)) > len(sentinels):
        raise BadInput(
            f"seq_len={seq_len} has up to {needed} spans, and there are {len(sentinels)} sentinels; shorten the row, "
            "raise data.objective.mean_span, or set first_sentinel_id and num_sentinels"
        )
    return sentinels


def find_modes(cfg: DenoisingConfig, vocab_size: int) -> dict[str, int]:
    """The id of each mode that a denoiser has."""
    wanted = sorted({denoiser.mode for denoiser in denoisers(cfg)} - {""})
    given = getattr(cfg, "mode_ids", {})
    if missing := [mode for mode in wanted if mode not in given]:
        raise BadInput(f"data.objective.mode_ids has no id for the modes {', '.join(missing)}; it needs one for each")
    check_in_vocabulary("mode_ids", list(given.values()), vocab_size)
    return {mode: given[mode] for mode in wanted}


def apply(cfg: ObjectiveConfig, ids: SpecialIds, batch: Batch, n: int, row_indices: Sequence[int], seed: int) -> Batch:
    """Batch n's rows `row_indices`, as they are packed in `batch`, turned into what the objective asks for."""
    return apply_with_origin(cfg, ids, batch, n, row_indices, seed)[0]


def apply_with_origin(
    cfg: ObjectiveConfig, ids: SpecialIds, batch: Batch, n: int, row_indices: Sequence[int], seed: int
) -> tuple[Batch, np.ndarray]:
    """(what apply returns, int32[rows, T]: the place in its packed row that each target belongs to)."""
    rows = [Batch(*fields) for fields in zip(*batch[:5], strict=True)]
    numbered = list(zip(rows, map(int, row_indices), strict=True))
    origin_BT = np.broadcast_to(np.arange(batch.tokens.shape[1], dtype=np.int32), batch.tokens.shape)
    if isinstance(cfg, DenoisingConfig):
        made, origin_BT = corrupted(cfg, ids, batch, seed, int(n), list(map(int, row_indices)))
    elif isinstance(cfg, PrefixLmConfig):
        made = stack_rows([prefix_row(row, seed, int(n), number) for row, number in numbered])
    elif isinstance(cfg, MaskedLmConfig):
        made = stack_rows([masked_row(cfg, ids, row, seed, int(n), number) for row, number in numbered])
    else:
        return batch, origin_BT
    counts_B1 = np.any(batch.weights > 0, axis=1, keepdims=True)  # nothing is to be learned from the other rows
    sources = None if batch.sources is None else np.take_along_axis(batch.sources, origin_BT, axis=1)
    return made._replace(weights=made.weights * counts_B1, sources=sources), origin_BT


def prefix_row(row: Batch, seed: int, n: int, number: int) -> Batch:
    """The row of [T] with its prefixes, and weight only where the target lies behind the prefix of its document.

    As the prefix LM of arXiv:1910.10683, section 3.2.1: the first part of each document is read in both directions, the
    rest is predicted. Where it is cut is uniform among the places that leave a token on either side.
    """
    documents = find_documents(row.segment_ids)
    words = draws(seed, n, number, len(documents.lengths))
    prefix_lengths = 1 + below(words, np.maximum(documents.lengths - 1, 1))  # 1 to length - 1
    place, first = ramps(documents.lengths), np.repeat(prefix_lengths, documents.lengths)
    where = np.repeat(documents.starts, documents.lengths) + place
    prefix_T, weights_T = np.zeros_like(row.tokens), np.zeros_like(row.weights)
    prefix_T[where] = place < first
    weights_T[where] = np.where(place >= first - 1, row.weights[where], 0)
    return row._replace(prefix=prefix_T, weights=weights_T)


def masked_row(cfg: MaskedLmConfig, ids: SpecialIds, row: Batch, seed: int, n: int, number: int) -> Batch:
    """The row of [T] with tokens hidden; targets are the tokens as they were, with weight 1 at the chosen places.

    Masked language modelling (BERT, arXiv:1810.04805, section 3.1). Exactly round(rate * ordinary tokens) are chosen,
    but at least one; a special token never is. Documents stay closed: only attention would join them.
    """
    T = len(row.tokens)
    words = draws(seed, n, number, 3 * T).reshape(3, T)
    candidates = np.flatnonzero((row.segment_ids > 0) & ~ids.is_special[row.tokens])
    count = min(len(candidates), max(1, round(cfg.rate * len(candidates))))
    chosen = candidates[np.argsort(words[0][candidates], kind="stable")[:count]]
    kind = unit(words[1][chosen])
    others = ids.ordinary[below(words[2][chosen], len(ids.ordinary))]
    tokens_T, weights_T = row.tokens.copy(), np.zeros_like(row.weights)
    changed = np.where(kind < cfg.mask_part + cfg.random_part, others, row.tokens[chosen])
    tokens_T[chosen] = np.where(kind < cfg.mask_part, ids.mask_id, changed)
    weights_T[chosen] = 1
    return row._replace(tokens=tokens_T, targets=row.tokens, weights=weights_T)
