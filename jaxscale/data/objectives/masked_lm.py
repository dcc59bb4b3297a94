"""Masked language modelling (BERT, arXiv:1810.04805, section 3.1): some tokens are hidden, and they are the targets."""

import numpy as np

from jaxscale.data.batch import Batch
from jaxscale.data.objective_config import MaskedLmConfig
from jaxscale.data.objectives.draws import below, draws, unit
from jaxscale.data.objectives.ids import SpecialIds


def masked_row(cfg: MaskedLmConfig, ids: SpecialIds, row: Batch, seed: int, n: int, number: int) -> Batch:
    """The row of [T] with tokens hidden; targets are the tokens as they were, with weight 1 at the chosen places.

    Exactly round(rate * ordinary tokens) are chosen, but at least one; a special token never is. Documents stay
    closed: only attention would join them.
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
