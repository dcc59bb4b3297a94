"""Training objectives, which transform packed rows into inputs, targets and weights.

An objective is a pure function of a row and (seed, batch, row index), so all hosts compute the same rows.
"""

import functools
from collections.abc import Sequence

import numpy as np

from jaxscale.core.batch import Batch
from jaxscale.runtime.data.objective_config import (
    DenoisingConfig,
    MaskedLmConfig,
    NextTokenConfig,
    ObjectiveConfig,
    PrefixLmConfig,
)
from jaxscale.runtime.data.objectives.corrupt import corrupt_rows
from jaxscale.runtime.data.objectives.ids import SpecialIds
from jaxscale.runtime.data.stacking import (
    aranges,
    find_documents,
    random_floats,
    random_integers,
    random_words,
    stack_rows,
)


def apply_objective(
    cfg: ObjectiveConfig, ids: SpecialIds, batch: Batch, n: int, row_indices: Sequence[int], seed: int
) -> Batch:
    """Applies the objective to packed rows. row_indices: index in batch n of each row of `batch`."""
    return apply_with_origin(cfg, ids, batch, n, row_indices, seed)[0]


def apply_with_origin(
    cfg: ObjectiveConfig, ids: SpecialIds, batch: Batch, n: int, row_indices: Sequence[int], seed: int
) -> tuple[Batch, np.ndarray]:
    """Returns (result of apply_objective, int32[rows, T] with the position of each target in its packed row)."""
    numbers = list(map(int, row_indices))
    origin_BT = np.broadcast_to(np.arange(batch.tokens.shape[1], dtype=np.int32), batch.tokens.shape)
    if isinstance(cfg, NextTokenConfig):
        return batch, origin_BT
    if isinstance(cfg, DenoisingConfig):
        result, origin_BT = corrupt_rows(cfg, ids, batch, seed, int(n), numbers)
    else:
        make = prefix_row if isinstance(cfg, PrefixLmConfig) else functools.partial(masked_row, cfg, ids)
        rows = zip(zip(*batch[:5], strict=True), numbers, strict=True)
        result = stack_rows([make(Batch(*fields), seed, int(n), number) for fields, number in rows])
    has_weight_B1 = np.any(batch.weights > 0, axis=1, keepdims=True)  # keeps rows without weights at weight 0
    sources = None if batch.sources is None else np.take_along_axis(batch.sources, origin_BT, axis=1)
    return result._replace(weights=result.weights * has_weight_B1, sources=sources), origin_BT


def prefix_row(row: Batch, seed: int, n: int, number: int) -> Batch:
    """Returns a row of [T] with a prefix in each document. Targets in a prefix have weight 0.

    Prefix LM (arXiv:1910.10683, section 3.2.1): attention is bidirectional in the prefix of each document, and the loss
    covers the rest. The prefix length is sampled uniformly, with at least one token before and after the boundary.
    """
    starts, lengths = find_documents(row.segment_ids)
    words = random_words(seed, n, number, len(lengths))
    prefix_lengths = 1 + random_integers(words, np.maximum(lengths - 1, 1))  # 1 to length - 1
    place, first = aranges(lengths), np.repeat(prefix_lengths, lengths)
    where = np.repeat(starts, lengths) + place
    prefix_T, weights_T = np.zeros_like(row.tokens), np.zeros_like(row.weights)
    prefix_T[where] = place < first
    weights_T[where] = np.where(place >= first - 1, row.weights[where], 0)
    return row._replace(prefix=prefix_T, weights=weights_T)


def masked_row(cfg: MaskedLmConfig, ids: SpecialIds, row: Batch, seed: int, n: int, number: int) -> Batch:
    """Returns a row of [T] with masked tokens. Targets are the original tokens, with weight 1 at selected positions.

    Masked language modelling (BERT, arXiv:1810.04805, section 3.1). Selects max(1, round(rate * number of ordinary
    tokens)) positions, and never selects special tokens. Attention does not cross documents.
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
