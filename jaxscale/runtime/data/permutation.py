"""Computes permutations of range(size) with random access, constant time per element, and no stored state.

Uses a Feistel network over Z_a x Z_b, with a b slightly above the size, which is repeated while the result is outside
the range ("Ciphers with arbitrary finite domains", Black and Rogaway, CT-RSA 2002, methods 2 and 3). The permutation is
not suitable for encryption.
"""

import functools
import hashlib
import math

import numpy as np
from numpy.typing import ArrayLike

from jaxscale.system.exits import BadInput

ROUNDS = 8  # four rounds are not enough for small sizes; a round costs about 12 ns per index
LARGEST = 1 << 62  # limits a b to less than 2**63
SHIFTS = tuple(map(np.uint64, (30, 27, 31)))
FACTORS = tuple(map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))


def mix64(values: np.ndarray) -> np.ndarray:
    """Applies the finalizer of SplitMix64, a bijection of uint64 (Steele, Lea, Flood, 2014)."""
    values = values ^ (values >> SHIFTS[0])
    values *= FACTORS[0]
    values ^= values >> SHIFTS[1]
    values *= FACTORS[1]
    values ^= values >> SHIFTS[2]
    return values


def permuted(indices: ArrayLike, size: int, key: str) -> np.ndarray:
    """Applies the permutation of range(size) given by `key` to the indices; returns int64 of the same shape."""
    return cycle_walk(indices, size, key, inverse=False)


def unpermuted(positions: ArrayLike, size: int, key: str) -> np.ndarray:
    """Applies the inverse permutation, so that unpermuted(permuted(i, size, key), size, key) == i."""
    return cycle_walk(positions, size, key, inverse=True)


def cycle_walk(indices: ArrayLike, size: int, key: str, *, inverse: bool) -> np.ndarray:
    """Applies a bijection of Z_a x Z_b to each index until the result is below `size` (cycle walking)."""
    indices = np.asarray(indices, np.int64)
    rounds = list(enumerate(round_keys(key)))
    if not 0 < size <= LARGEST:
        raise BadInput(f"the permutation size {size} must be between 1 and {LARGEST}")
    if indices.size and not (0 <= indices.min() and indices.max() < size):
        raise BadInput(f"indices from {indices.min()} to {indices.max()} must be at least 0 and below {size}")
    a = math.isqrt(size - 1) + 1  # ceil(sqrt(size))
    sizes = np.uint64(a), np.uint64(-(-size // a))
    found = indices.reshape(-1).astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):  # a b - size < a, so few results are outside the range after the first step
        halves = [found[outside] % sizes[0], found[outside] // sizes[0]]
        for number, salt in reversed(rounds) if inverse else rounds:  # adds a hash of one half to the other half
            half = number % 2
            added = mix64(halves[1 - half] + salt) % sizes[half]
            halves[half] = (halves[half] + (sizes[half] - added if inverse else added)) % sizes[half]
        found[outside] = halves[1] * sizes[0] + halves[0]
        outside = outside[found[outside] >= np.uint64(size)]
    return found.astype(np.int64).reshape(indices.shape)


@functools.lru_cache(maxsize=1024)
def round_keys(key: str) -> tuple[np.uint64, ...]:
    """Returns one key per round, computed by a hash, so that the keys of similar seeds are unrelated."""
    digest = hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=8 * ROUNDS).digest()
    return tuple(np.frombuffer(digest, "<u8").astype(np.uint64))
