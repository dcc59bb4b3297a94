"""Random numbers for one row of one batch: a pure function of the seed and of the row's place, on any machine."""

import hashlib

import numpy as np


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
