"""Row filter, which detects degenerate rows (training sequences) while reading, and sets their loss weights to 0.

Degenerate rows are, for example, pages that repeat a phrase, binary data, or the middle of a 100 MB log file. The
filter is off by default, because valid text can be repetitive (long tables, genomes, music). Prose and source code are
far from the default limits. `jaxscale trace` shows filtered rows.

B rows  T position
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.core.batch import Batch
from jaxscale.runtime.data.config import NGRAM, RowFilterConfig
from jaxscale.runtime.data.permutation import permuted
from jaxscale.runtime.data.rows import LocatedPieces
from jaxscale.runtime.text.tokenizer.base import Tokenizer

RowFilter = Callable[[Batch, LocatedPieces, Sequence[int]], np.ndarray]  # (rows, locations, indices) -> bool[rows]

SAMPLE_POSITIONS = 128  # positions of a row that are tested first; only suspicious rows are fully tested
SLACK = 0.7  # factor for limits in a sample: a margin of 3.4 standard deviations at a share of 0.5
ANCHORS = (0.55, 0.75, 0.95)  # relative positions whose n-grams are searched for in the preceding tokens
MIN_TOKENS = 64  # rows with fewer tokens are not filtered, because their shares are not meaningful
REPLACEMENT = "\ufffd"  # character that replaces invalid bytes in decoders


class ReplacementTokens(NamedTuple):
    """Token ids of U+FFFD. Each id matches by itself or, if `in_order`, only the whole sequence does (byte tokens)."""

    ids: np.ndarray  # sorted
    in_order: bool


def make_row_filter(cfg: RowFilterConfig, tokenizer: Tokenizer | None) -> RowFilter | None:
    """Returns the row filter, or None if the filter is off."""
    if not cfg.on:
        return None
    damage = find_replacement_tokens(tokenizer) if tokenizer else None

    return lambda batch, located, chosen: degenerate_rows(cfg, batch, located.depths[list(chosen)], damage)


def find_replacement_tokens(tokenizer: Tokenizer) -> ReplacementTokens:
    """Returns the ids of U+FFFD and of repeated U+FFFD, which exist in vocabularies trained on damaged text."""
    alone = tokenizer.encode(REPLACEMENT)
    single_ids = [int(i) for i in alone if tokenizer.decode([int(i)]) == REPLACEMENT]
    if len(single_ids) != 1:  # byte tokens, possibly after a begin token
        return ReplacementTokens(np.asarray(alone)[-len(REPLACEMENT.encode()) :], True)
    found = {int(i) for times in range(1, 17) for i in tokenizer.encode(REPLACEMENT * times)}
    return ReplacementTokens(np.array(sorted(i for i in found if set(tokenizer.decode([i])) == {REPLACEMENT})), False)


def degenerate_rows(
    cfg: RowFilterConfig, batch: Batch, depths_B: np.ndarray, damage: ReplacementTokens | None = None
) -> np.ndarray:
    """Returns bool[B], True for rows that exceed a limit. depths_B: offset of each row in its first document."""
    T = batch.tokens.shape[1]
    last_B = batch.segment_ids[:, -1]
    bad_B = suspicious_rows(cfg, batch.tokens, damage) | (last_B == 0)  # rows with padding would bias the sample
    for row in np.flatnonzero(bad_B):
        num_tokens = np.count_nonzero(batch.segment_ids[row])
        bad_B[row] = num_tokens >= min(MIN_TOKENS, T) and is_degenerate(cfg, batch.tokens[row, :num_tokens], damage)
    if cfg.max_depth_rows:
        bad_B |= (last_B == 1) & (depths_B > cfg.max_depth_rows * T)
    return bad_B


def suspicious_rows(cfg: RowFilterConfig, tokens_BT: np.ndarray, damage: ReplacementTokens | None) -> np.ndarray:
    """Returns bool[B], True for rows that need the full test. Tests only a sample of positions, which is fast."""
    T = tokens_BT.shape[1]
    sample_BS = np.sort(tokens_BT.take(sample_places(T), axis=1), axis=1)
    S = sample_BS.shape[1]
    top = max(1, int(cfg.max_top_share * SLACK * S))
    bad_B = (sample_BS[:, top:] == sample_BS[:, : S - top]).any(axis=1)
    distinct_B = 1 + np.count_nonzero(sample_BS[:, 1:] != sample_BS[:, :-1], axis=1)
    bad_B |= distinct_B < cfg.min_distinct_share * T
    if cfg.max_run < T:
        strided_BS = tokens_BT[:, :: max(1, cfg.max_run // 4)]  # a longer run covers four of these positions
        same_BS = strided_BS[:, 1:] == strided_BS[:, :-1]
        bad_B |= (same_BS[:, 2:] & same_BS[:, 1:-1] & same_BS[:, :-2]).any(axis=1)
    if T > 4 * NGRAM:  # compares two tokens of each n-gram
        pairs_BT = tokens_BT[:, : 1 - NGRAM] * np.int32(65_599) + tokens_BT[:, NGRAM - 1 :]
        ends = [int(share * pairs_BT.shape[1]) for share in ANCHORS]
        seen_B = sum((pairs_BT[:, :end] == pairs_BT[:, end, None]).any(axis=1).astype(np.int32) for end in ends)
        bad_B |= seen_B >= len(ANCHORS) - 1
    if damage is not None and len(damage.ids):
        damaged_ids = damage.ids[-1:] if damage.in_order else damage.ids
        share = cfg.max_damaged_share * SLACK / (len(damage.ids) if damage.in_order else 1)
        bad_B |= np.isin(sample_BS, damaged_ids).sum(axis=1) > share * S
    return bad_B


@functools.lru_cache
def sample_places(T: int) -> np.ndarray:
    """Returns at most SAMPLE_POSITIONS positions of a row, which depend only on T and are not periodic."""
    return np.arange(T) if T <= SAMPLE_POSITIONS else permuted(np.arange(SAMPLE_POSITIONS), T, "gate")


def is_degenerate(cfg: RowFilterConfig, tokens: np.ndarray, damage: ReplacementTokens | None) -> bool:
    """Returns True if a row with these tokens exceeds a limit. tokens: without padding."""
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
    """Returns the length of the longest run of equal tokens."""
    edges = np.flatnonzero(tokens[1:] != tokens[:-1]) + 1
    return int(np.diff(edges, prepend=0, append=len(tokens)).max())


def repeated_share(tokens: np.ndarray) -> float:
    """Returns the fraction of n-grams that occurred earlier in the row."""
    if len(tokens) < 2 * NGRAM:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(tokens, NGRAM)
    factors = np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, NGRAM + 1, dtype=np.uint64)  # powers of an odd number
    hashes = (grams.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
    return 1 - len(np.unique(hashes)) / len(hashes)


def num_damaged(tokens: np.ndarray, damage: ReplacementTokens) -> int:
    """Returns the number of tokens that represent U+FFFD."""
    if not damage.in_order:
        return int(np.isin(tokens, damage.ids).sum())
    if len(tokens) < len(damage.ids):
        return 0
    grams = np.lib.stride_tricks.sliding_window_view(tokens, len(damage.ids))
    return int((grams == damage.ids).all(axis=1).sum()) * len(damage.ids)
