"""Documents of a packed row, and its random numbers: a pure function of seed, batch and row, on any machine."""

import hashlib

import numpy as np


def find_documents(segment_ids_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (starts int64[D], lengths int64[D]) of the documents of a row: runs of equal nonzero segment ids."""
    edges = np.flatnonzero(np.diff(segment_ids_T)) + 1
    starts = np.concatenate([[0], edges])
    lengths = np.diff(np.concatenate([starts, [len(segment_ids_T)]]))
    is_document = (segment_ids_T[starts] > 0) & (lengths > 0) if len(segment_ids_T) else np.zeros(1, bool)
    return starts[is_document], lengths[is_document]


def aranges(lengths: np.ndarray) -> np.ndarray:
    """Returns int64[sum of lengths]: 0, 1, 2, ... for each length, concatenated."""
    first = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(first, lengths)


def random_words(seed: int, n: int, row: int, number: int) -> np.ndarray:
    """Returns uint64[number] for row `row` of batch `n`: raw output of Philox, which numpy guarantees to stay."""
    key = hashlib.blake2b(f"objective {seed} {n} {row}".encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(key, "little")).random_raw(number)


def random_integers(words: np.ndarray, bounds: np.ndarray | int) -> np.ndarray:
    """Returns int64: each word scaled to [0, bound), for bounds below 2**31. A bound of 0 gives 0."""
    return ((words >> np.uint64(32)) * np.asarray(bounds).astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def random_floats(words: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1) from the upper 53 bits of each word."""
    return (words >> np.uint64(11)) * 2.0**-53
