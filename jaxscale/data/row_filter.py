"""Row filter: rows that nothing should be learned from are found as they are read. Their loss weights become 0, and
they are counted.

A last net under the curation, for what slipped through or was never curated: a page that repeats one phrase, bytes that
are no text, the middle of a log file of a hundred megabytes. It is off by default: which tokens a run has learned from
should follow from its data and settings alone as long as nobody asks for more, and honest text can be repetitive (long
tables, genomes, music). The thresholds are far from prose and from source code; what they catch is worth a look with
`jaxscale trace`.

B rows  T position
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.data.batch import Batch
from jaxscale.data.config import NGRAM, RowFilterConfig
from jaxscale.data.permutation import permuted
from jaxscale.data.rows import Located
from jaxscale.text.tokenizer.base import Tokenizer

RowFilter = Callable[
    [Batch, Located, Sequence[int]], np.ndarray
]  # (rows, where they lie, places there) -> bool[rows]: to be filtered

SAMPLED = 128  # positions of a row looked at first; only a row that looks bad there is read whole
SLACK = 0.7  # a share in a sample may be lower than in the row: 3.4 standard deviations at a share of a half
ANCHORS = (0.55, 0.75, 0.95)  # places in a row that are looked for in what comes before
FEWEST_TOKENS = 64  # a row with fewer real ones is let through: shares of so few mean nothing
REPLACEMENT = "\ufffd"  # what decoders put where bytes are no text


class Damage(NamedTuple):
    """How U+FFFD looks in tokens: as any of the ids, where it has ids of its own, else as the ids in this order."""

    ids: np.ndarray  # sorted
    in_order: bool


def make_row_filter(cfg: RowFilterConfig, tokenizer: Tokenizer | None) -> RowFilter | None:
    """The row filter, or None where it is off."""
    if not cfg.on:
        return None
    damage = find_damage(tokenizer) if tokenizer else None

    return lambda batch, located, chosen: degenerate_rows(cfg, batch, located.depths[list(chosen)], damage)


def find_damage(tokenizer: Tokenizer) -> Damage:
    """The ids of U+FFFD, alone and repeated (vocabularies made from damaged text have tokens for several)."""
    alone = tokenizer.encode(REPLACEMENT)
    own = [int(i) for i in alone if tokenizer.decode([int(i)]) == REPLACEMENT]
    if len(own) != 1:  # bytes that other characters have too; a mark for the beginning may come before them
        return Damage(np.asarray(alone)[-len(REPLACEMENT.encode()) :], True)
    found = {int(i) for times in range(1, 17) for i in tokenizer.encode(REPLACEMENT * times)}
    return Damage(np.array(sorted(i for i in found if set(tokenizer.decode([i])) == {REPLACEMENT})), False)


def degenerate_rows(
    cfg: RowFilterConfig, batch: Batch, depths_B: np.ndarray, damage: Damage | None = None
) -> np.ndarray:
    """bool[B]: the rows that some limit refuses. A function of each row alone, on whatever host it is read.

    Args: batch: numpy. depths_B: tokens of the row's first document that lie before the row.
    """
    T = batch.tokens.shape[1]
    last_B = batch.segment_ids[:, -1]
    bad_B = suspicious_rows(cfg, batch.tokens, damage) | (last_B == 0)  # padding would count as tokens
    for row in np.flatnonzero(bad_B):
        real = np.count_nonzero(batch.segment_ids[row])
        bad_B[row] = real >= min(FEWEST_TOKENS, T) and is_degenerate(cfg, batch.tokens[row, :real], damage)
    if cfg.max_depth_rows:
        bad_B |= (last_B == 1) & (depths_B > cfg.max_depth_rows * T)
    return bad_B


def suspicious_rows(cfg: RowFilterConfig, tokens_BT: np.ndarray, damage: Damage | None) -> np.ndarray:
    """bool[B]: rows worth reading whole. A look at some positions, which costs a few microseconds a row.

    A row beyond a limit on distinct tokens or on a run is always among them; one beyond a share nearly always.
    """
    T = tokens_BT.shape[1]
    sample_BS = np.sort(tokens_BT.take(sample_places(T), axis=1), axis=1)
    S = sample_BS.shape[1]
    top = max(1, int(cfg.max_top_share * SLACK * S))
    bad_B = (sample_BS[:, top:] == sample_BS[:, : S - top]).any(axis=1)
    distinct_B = 1 + np.count_nonzero(sample_BS[:, 1:] != sample_BS[:, :-1], axis=1)
    bad_B |= distinct_B < cfg.min_distinct_share * T
    if cfg.max_run < T:
        strided_BS = tokens_BT[:, :: max(1, cfg.max_run // 4)]  # a longer run covers four of these
        same_BS = strided_BS[:, 1:] == strided_BS[:, :-1]
        bad_B |= (same_BS[:, 2:] & same_BS[:, 1:-1] & same_BS[:, :-2]).any(axis=1)
    if T > 4 * NGRAM:  # two tokens out of NGRAM stand for all
        pairs_BT = tokens_BT[:, : 1 - NGRAM] * np.int32(65_599) + tokens_BT[:, NGRAM - 1 :]
        ends = [int(share * pairs_BT.shape[1]) for share in ANCHORS]
        seen_B = sum((pairs_BT[:, :end] == pairs_BT[:, end, None]).any(axis=1).astype(np.int32) for end in ends)
        bad_B |= seen_B >= len(ANCHORS) - 1
    if damage is not None and len(damage.ids):
        wanted = damage.ids[-1:] if damage.in_order else damage.ids
        share = cfg.max_damaged_share * SLACK / (len(damage.ids) if damage.in_order else 1)
        bad_B |= np.isin(sample_BS, wanted).sum(axis=1) > share * S
    return bad_B


@functools.lru_cache
def sample_places(T: int) -> np.ndarray:
    """int64[at most SAMPLED], in order: always the same for T, and of no period that a text could have."""
    if T <= SAMPLED:
        return np.arange(T)
    return np.sort(permuted(np.arange(SAMPLED), T, "gate"))


def is_degenerate(cfg: RowFilterConfig, tokens: np.ndarray, damage: Damage | None) -> bool:
    """True if some limit refuses the row of these real tokens, all of them read."""
    n = len(tokens)
    _, counts = np.unique(tokens, return_counts=True)
    return bool(
        counts.max() > cfg.max_top_share * n
        or len(counts) < cfg.min_distinct_share * n
        or longest_run(tokens) > cfg.max_run
        or repeated_share(tokens) > cfg.max_repeated_share
        or (damage is not None and num_damaged(tokens, damage) > cfg.max_damaged_share * n)
    )


def longest_run(tokens: np.ndarray) -> int:
    """How often a token comes on end at most."""
    edges = np.flatnonzero(tokens[1:] != tokens[:-1]) + 1
    return int(np.diff(edges, prepend=0, append=len(tokens)).max())


def repeated_share(tokens: np.ndarray) -> float:
    """The share of n-grams that came before: 0 where all are different."""
    if len(tokens) < 2 * NGRAM:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(tokens, NGRAM)
    factors = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, NGRAM + 1, dtype=np.uint64)  # powers of an odd number
    hashes = (grams.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
    return 1 - len(np.unique(hashes)) / len(hashes)


def num_damaged(tokens: np.ndarray, damage: Damage) -> int:
    """How many of the tokens stand for U+FFFD."""
    if not damage.in_order:
        return int(np.isin(tokens, damage.ids).sum())
    if len(tokens) < len(damage.ids):
        return 0
    grams = np.lib.stride_tricks.sliding_window_view(tokens, len(damage.ids))
    return int((grams == damage.ids).all(axis=1).sum()) * len(damage.ids)
