"""What objectives need of one packed row: where its documents lie, and random numbers for it.

The numbers are a pure function of the seed and of the row's place, on any machine.
"""

import hashlib
from typing import NamedTuple

import numpy as np


class Documents(NamedTuple):
    """The D documents of a row, in their order; padding is in none of them."""

    starts: np.ndarray  # int64[D]
    lengths: np.ndarray  # int64[D]


def find_documents(segment_ids_T: np.ndarray) -> Documents:
    """The runs of one segment number that is not 0."""
    edges = np.flatnonzero(np.diff(segment_ids_T)) + 1
    starts = np.concatenate([[0], edges])
    lengths = np.diff(np.concatenate([starts, [len(segment_ids_T)]]))
    real = (segment_ids_T[starts] > 0) & (lengths > 0) if len(segment_ids_T) else np.zeros(1, bool)
    return Documents(starts[real], lengths[real])


def ramps(lengths: np.ndarray) -> np.ndarray:
    """int64[sum of lengths]: 0, 1, 2, ... for each of the lengths, one after another."""
    first = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) - np.repeat(first, lengths)


def draws(seed: int, n: int, row: int, number: int) -> np.ndarray:
    """uint64[number]: uniform words for row `row` of batch `n`.

    Raw output of Philox, which numpy promises for good; it does not promise what Generator makes of it.
    """
    key = hashlib.blake2b(f"objective {seed} {n} {row}".encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(key, "little")).random_raw(number)


def below(words: np.ndarray, bounds: np.ndarray | int) -> np.ndarray:
    """int64: each word as an integer from 0 up to its bound, which is below 2**31. A bound of 0 gives 0."""
    return ((words >> np.uint64(32)) * np.asarray(bounds).astype(np.uint64) >> np.uint64(32)).astype(np.int64)


def unit(words: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) from the upper 53 bits of each word."""
    return (words >> np.uint64(11)) * 2.0**-53
