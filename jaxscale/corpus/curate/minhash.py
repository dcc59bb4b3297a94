"""MinHash sketches for near-duplicates: documents whose n-gram sets have a large Jaccard similarity.

A signature holds, for each of some random orders of all n-grams, the document's smallest one: two documents agree in a
number with a probability that is their Jaccard similarity J (Broder, 1997). Signatures are cut into bands of rows;
those that agree in all rows of a band are candidates, which has the probability 1 - (1 - J^rows)^bands (Indyk and
Motwani, 1998; Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4). The join verifies them.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from jaxscale.corpus.curate.config import NearConfig
from jaxscale.corpus.curate.hashes import MULTIPLIER, Sketch, hash_words, mix, ngram_hashes, ngram_table
from jaxscale.text.document import Document
from jaxscale.text.sources.part import needs


def make_near_sketch(cfg: NearConfig) -> Callable[[Sequence[Document]], Sketch]:
    """A function from a block to its sketch: for each document one key per band, and its signature.

    A document of fewer words than an n-gram has is one n-gram by itself; one without words has no keys.
    """
    bands, rows = bands_and_rows(cfg)

    def sketch(documents: Sequence[Document]) -> Sketch:
        words = hash_words(documents)
        found = signatures(words, cfg)
        owners = np.flatnonzero([len(row) > 0 for row in words])
        keys = band_keys(found[owners], bands, rows)
        places = np.zeros(keys.size, np.uint32)
        return Sketch(keys.ravel(), np.repeat(owners.astype(np.uint32), bands), places, found)

    return sketch


def signatures(words: Sequence[np.ndarray], cfg: NearConfig) -> np.ndarray:
    """uint32[documents, permutations] of documents, each given as the hashes of its words."""
    with needs("finding near duplicates", "rensa"):
        import rensa
    flat, counts = ngram_table(words, cfg.ngram_words)
    counts = np.asarray(counts, np.int64)
    short = [i for i, row in enumerate(words) if 0 < len(row) < cfg.ngram_words]
    if short:  # each is one n-gram by itself, put where it belongs
        grams = np.concatenate([ngram_hashes(words[i], len(words[i])) for i in short])
        flat = np.insert(flat, (np.cumsum(counts) - counts)[short], grams)
        counts[short] = 1
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets, cfg.permutations, cfg.seed)
    numbers = itertools.chain.from_iterable(matrix.to_rows())
    return np.fromiter(numbers, np.uint32, len(words) * cfg.permutations).reshape(len(words), cfg.permutations)


def band_keys(found: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """uint64[documents, bands]: a hash of each band's number and of what a signature has in it."""
    keys = np.tile(mix(np.arange(bands, dtype=np.uint64)), (len(found), 1))
    for row in range(rows):
        keys = (keys ^ found[:, row : bands * rows : rows]) * np.uint64(MULTIPLIER)
        keys ^= keys >> np.uint64(32)
    return mix(keys)


def bands_and_rows(cfg: NearConfig) -> tuple[int, int]:
    """(bands, rows): the settings', or those chosen from the threshold."""
    if cfg.bands is not None:
        return cfg.bands, cfg.rows
    return choose_bands(cfg.threshold, cfg.permutations, cfg.miss_weight)


def detection_curve(jaccard: float | np.ndarray, bands: int, rows: int) -> np.ndarray:
    """The probability that two documents of this similarity become candidates: 1 - (1 - J^rows)^bands."""
    return 1 - (1 - np.asarray(jaccard, np.float64) ** rows) ** bands


def verification_curve(jaccard: float | np.ndarray, threshold: float, permutations: int) -> np.ndarray:
    """The probability that a candidate of this similarity passes the verification: a binomial's upper tail."""
    jaccard = np.clip(np.asarray(jaccard, np.float64), 1e-12, 1 - 1e-12)[..., None]
    counts = range(math.ceil(threshold * permutations - 1e-9), permutations + 1)
    log_ways = [
        math.lgamma(permutations + 1) - math.lgamma(count + 1) - math.lgamma(permutations - count + 1)
        for count in counts
    ]
    counts = np.array(counts)
    return np.exp(log_ways + counts * np.log(jaccard) + (permutations - counts) * np.log1p(-jaccard)).sum(-1)


@functools.cache
def choose_bands(threshold: float, permutations: int, miss_weight: float = 0.5) -> tuple[int, int]:
    """(bands, rows) with bands * rows <= permutations for which the weighted area of the two errors is smallest.

    Misses: the integral of 1 - detection_curve above the threshold. False candidates: that of detection_curve below.
    """
    below, above = ((np.arange(1000) + 0.5) / 1000 * width for width in (threshold, 1 - threshold))
    best = None
    for rows in range(1, permutations + 1):
        bands = permutations // rows  # for given rows, fewer bands never find more
        for count in range(1, bands + 1):
            false = detection_curve(below, count, rows).mean() * threshold
            missed = (1 - detection_curve(threshold + above, count, rows)).mean() * (1 - threshold)
            error = (1 - miss_weight) * false + miss_weight * missed
            if best is None or error < best[0] - 1e-12:
                best = (error, count, rows)
    return best[1], best[2]


def detection_table(cfg: NearConfig) -> list[tuple[float, float, float]]:
    """[(Jaccard similarity, P(candidate), P(a candidate passes))] from 0.3 to 1, for reports."""
    jaccard = np.arange(6, 21) / 20
    found = detection_curve(jaccard, *bands_and_rows(cfg))
    passed = verification_curve(jaccard, cfg.threshold, cfg.permutations)
    return list(zip(jaccard.tolist(), found.tolist(), passed.tolist()))
