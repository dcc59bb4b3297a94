"""Training objectives: transforms of packed rows into inputs, targets and weights.

Each is a pure function of a row and (seed, batch, row index), so that any host makes the same rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxscale.core.batch import Batch, stack_rows
from jaxscale.runtime.data.objective_config import (
    DenoisingConfig,
    MaskedLmConfig,
    NextTokenConfig,
    ObjectiveConfig,
    PrefixLmConfig,
    denoisers,
)
from jaxscale.runtime.data.objectives.corrupt import corrupt_rows, max_spans
from jaxscale.runtime.data.objectives.ids import (
    SpecialIds,
    check_distinct,
    check_in_vocabulary,
    find_special,
    known_id,
    missing_id_reason,
)
from jaxscale.runtime.data.objectives.packed_row import (
    aranges,
    find_documents,
    random_floats,
    random_integers,
    random_words,
)
from jaxscale.runtime.text.tokenizer.base import ObjectiveTokens
from jaxscale.system.exits import BadInput


def reads_text_in_order(cfg: ObjectiveConfig) -> bool:
    """Returns True if targets are predicted in text order, so that bits per byte are defined."""
    return isinstance(cfg, (NextTokenConfig, PrefixLmConfig))


def find_ids(
    cfg: ObjectiveConfig, tokenizer: Any | None, token_bytes: np.ndarray | None, vocab_size: int, seq_len: int
) -> SpecialIds:
    """Returns the special ids of the objective. token_bytes: int32[tokenizer ids], 0 for special ones, or None.

    Raises: BadInput naming the setting if an id is unknown, outside the vocabulary, or used by text.
    """
    known = (tokenizer, token_bytes, vocab_size)
    if isinstance(cfg, MaskedLmConfig):
        mask_id = known_id("mask_id", cfg.mask_id, marks_of(tokenizer).mask_id, tokenizer, vocab_size)
        check_distinct({"mask_id": [mask_id]}, token_bytes)
        return SpecialIds(find_special([mask_id], *known), mask_id=mask_id)
    if not isinstance(cfg, DenoisingConfig):
        return SpecialIds(find_special([], *known))
    end_id = known_id("end_id", cfg.end_id, getattr(tokenizer, "eos_id", None), tokenizer, vocab_size)
    start_id = end_id if cfg.start_id is None else known_id("start_id", cfg.start_id, None, None, vocab_size)
    sentinels = find_sentinels(cfg, tokenizer, vocab_size, seq_len)
    modes = find_modes(cfg, vocab_size)
    check_distinct({"first_sentinel_id": sentinels, "mode_ids": [*modes.values()], "end_id": [end_id]}, token_bytes)
    is_special = find_special([start_id, end_id, *sentinels, *modes.values()], *known)
    return SpecialIds(
        is_special, sentinels=np.array(sentinels, np.int32), start_id=start_id, end_id=end_id, modes=modes
    )


def marks_of(tokenizer: Any | None) -> ObjectiveTokens:
    """Returns the special tokens of the tokenizer; none without a tokenizer."""
    return ObjectiveTokens() if tokenizer is None else tokenizer.marks


def find_sentinels(cfg: DenoisingConfig, tokenizer: Any | None, vocab_size: int, seq_len: int) -> list[int]:
    """Returns the sentinels, first to last."""
    if cfg.first_sentinel_id is not None:
        sentinels = [cfg.first_sentinel_id + i * cfg.sentinel_step for i in range(cfg.num_sentinels)]
    else:
        sentinels = [int(id) for id in marks_of(tokenizer).sentinel_ids]
    if not sentinels:
        raise BadInput(
            f"data.objective.first_sentinel_id must be given ({missing_id_reason(tokenizer)}): the first of "
            f"data.objective.num_sentinels ids that text does not use, below model.vocab_size={vocab_size}"
        )
    check_in_vocabulary("first_sentinel_id", sentinels, vocab_size)
    if (needed := max_spans(cfg, seq_len)) > len(sentinels):
        raise BadInput(
            f"seq_len={seq_len} has up to {needed} spans, and there are {len(sentinels)} sentinels; shorten the row, "
            "raise data.objective.mean_span, or set first_sentinel_id and num_sentinels"
        )
    return sentinels


def find_modes(cfg: DenoisingConfig, vocab_size: int) -> dict[str, int]:
    """Returns the id of each mode of the denoisers."""
    modes = sorted({denoiser.mode for denoiser in denoisers(cfg)} - {""})
    given = getattr(cfg, "mode_ids", {})
    if missing := [mode for mode in modes if mode not in given]:
        raise BadInput(f"data.objective.mode_ids has no id for the modes {', '.join(missing)}; it needs one for each")
    check_in_vocabulary("mode_ids", list(given.values()), vocab_size)
    return {mode: given[mode] for mode in modes}


def apply_objective(
    cfg: ObjectiveConfig, ids: SpecialIds, batch: Batch, n: int, row_indices: Sequence[int], seed: int
) -> Batch:
    """Applies the objective to rows `row_indices` of batch n, which are packed in `batch`."""
    return apply_with_origin(cfg, ids, batch, n, row_indices, seed)[0]


def apply_with_origin(
    cfg: ObjectiveConfig, ids: SpecialIds, batch: Batch, n: int, row_indices: Sequence[int], seed: int
) -> tuple[Batch, np.ndarray]:
    """Returns (result of apply_objective, int32[rows, T]: position of each target in its packed row)."""
    rows = [Batch(*fields) for fields in zip(*batch[:5], strict=True)]
    indexed_rows = list(zip(rows, map(int, row_indices), strict=True))
    origin_BT = np.broadcast_to(np.arange(batch.tokens.shape[1], dtype=np.int32), batch.tokens.shape)
    if isinstance(cfg, DenoisingConfig):
        result, origin_BT = corrupt_rows(cfg, ids, batch, seed, int(n), list(map(int, row_indices)))
    elif isinstance(cfg, PrefixLmConfig):
        result = stack_rows([prefix_row(row, seed, int(n), number) for row, number in indexed_rows])
    elif isinstance(cfg, MaskedLmConfig):
        result = stack_rows([masked_row(cfg, ids, row, seed, int(n), number) for row, number in indexed_rows])
    else:
        return batch, origin_BT
    has_weight_B1 = np.any(batch.weights > 0, axis=1, keepdims=True)  # rows that had no weight get none
    sources = None if batch.sources is None else np.take_along_axis(batch.sources, origin_BT, axis=1)
    return result._replace(weights=result.weights * has_weight_B1, sources=sources), origin_BT


def prefix_row(row: Batch, seed: int, n: int, number: int) -> Batch:
    """Returns the row of [T] with prefixes; weights are zero for targets inside the prefix of their document.

    Prefix LM of arXiv:1910.10683, section 3.2.1: bidirectional attention over the prefix of each document, loss on the
    rest. The prefix length is uniform and leaves at least one token on either side.
    """
    documents = find_documents(row.segment_ids)
    words = random_words(seed, n, number, len(documents.lengths))
    prefix_lengths = 1 + random_integers(words, np.maximum(documents.lengths - 1, 1))  # 1 to length - 1
    place, first = aranges(documents.lengths), np.repeat(prefix_lengths, documents.lengths)
    where = np.repeat(documents.starts, documents.lengths) + place
    prefix_T, weights_T = np.zeros_like(row.tokens), np.zeros_like(row.weights)
    prefix_T[where] = place < first
    weights_T[where] = np.where(place >= first - 1, row.weights[where], 0)
    return row._replace(prefix=prefix_T, weights=weights_T)


def masked_row(cfg: MaskedLmConfig, ids: SpecialIds, row: Batch, seed: int, n: int, number: int) -> Batch:
    """Returns the row of [T] with masked tokens; targets are the original tokens, with weight 1 where selected.

    Masked language modelling (BERT, arXiv:1810.04805, section 3.1). Exactly round(rate * ordinary tokens) are
    selected, at least one, and never special tokens. Documents are unchanged, and attention does not cross them.
    """
    T = len(row.tokens)
    words = random_words(seed, n, number, 3 * T).reshape(3, T)
    candidates = np.flatnonzero((row.segment_ids > 0) & ~ids.is_special[row.tokens])
    num_selected = min(len(candidates), max(1, round(cfg.rate * len(candidates))))
    selected = candidates[np.argsort(words[0][candidates], kind="stable")[:num_selected]]
    draw = random_floats(words[1][selected])
    random_tokens = ids.ordinary[random_integers(words[2][selected], len(ids.ordinary))]
    tokens_T, weights_T = row.tokens.copy(), np.zeros_like(row.weights)
    changed = np.where(draw < cfg.mask_part + cfg.random_part, random_tokens, row.tokens[selected])
    tokens_T[selected] = np.where(draw < cfg.mask_part, ids.mask_id, changed)
    weights_T[selected] = 1
    return row._replace(tokens=tokens_T, targets=row.tokens, weights=weights_T)
