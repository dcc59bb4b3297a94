"""Masked language modelling (BERT, arXiv:1810.04805, section 3.1): some tokens are hidden, and they are the targets."""

import dataclasses
from typing import Literal

import numpy as np

from jaxscale.data.batch import Batch
from jaxscale.data.objectives.draws import below, draws, unit
from jaxscale.data.objectives.ids import SpecialIds
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLmConfig:
    """BERT's: 15% of the tokens are targets; of these 80% become the mask, 10% another token, and 10% stay."""

    name: Literal["masked_lm"] = setting("masked_lm", "which objective this is")
    rate: float = setting(0.15, "part of a row's ordinary tokens that are targets")
    mask_part: float = setting(0.8, "part of the targets that the mask stands in for")
    random_part: float = setting(0.1, "part of the targets that an ordinary token drawn at random stands in for")
    mask_id: int | None = setting(None, "id of the mask; none: the tokenizer's")

    def __post_init__(self):
        if not 0 < self.rate < 1:
            raise BadInput(f"rate={self.rate} must lie between 0 and 1")
        if self.mask_part < 0 or self.random_part < 0 or self.mask_part + self.random_part > 1:
            raise BadInput(
                f"mask_part={self.mask_part} and random_part={self.random_part} must not be negative, "
                "and together at most 1"
            )


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
