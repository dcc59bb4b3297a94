"""Permutations of the numbers below any size by arithmetic alone: nothing is stored, any element is found at once.

A Feistel network over Z_a x Z_b with a b just above the size, where a step that leaves the range is taken again
("Ciphers with arbitrary finite domains", Black and Rogaway, CT-RSA 2002, methods 2 and 3). Not a cipher: the order has
to look random, not to keep a secret.
"""

import functools
import hashlib
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from jaxscale.system.exits import BadInput

ROUNDS = 8  # four are known to be few for small sizes; each costs about 12 ns an index
LARGEST = 1 << 62  # a b stays below 2**63
Halves = tuple[np.ndarray, np.ndarray]
SHIFTS = tuple(map(np.uint64, (30, 27, 31)))
FACTORS = tuple(map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))


def mix(values: np.ndarray) -> np.ndarray:
    """uint64 values spread over all 64 bits, one to one: the finaliser of SplitMix64 (Steele, Lea, Flood, 2014)."""
    values = values ^ (values >> SHIFTS[0])
    values *= FACTORS[0]
    values ^= values >> SHIFTS[1]
    values *= FACTORS[1]
    values ^= values >> SHIFTS[2]
    return values


def permuted(indices: ArrayLike, size: int, key: str) -> np.ndarray:
    """int64 of the same shape: where the permutation of range(size) that belongs to `key` sends each index."""
    return walked(indices, size, functools.partial(rounds, key=key))


def unpermuted(places: ArrayLike, size: int, key: str) -> np.ndarray:
    """The inverse: unpermuted(permuted(i, size, key), size, key) == i."""
    return walked(places, size, functools.partial(rounds, key=key, inverse=True))


def walked(indices: ArrayLike, size: int, step: Callable[[Halves, int, int], Halves]) -> np.ndarray:
    """`step`, a bijection of Z_a x Z_b, repeated on each index until it is below `size` again (cycle walking)."""
    indices = np.asarray(indices, np.int64)
    if not 0 < size <= LARGEST:
        raise BadInput(f"a permutation of {size} numbers; it may be of 1 to {LARGEST}")
    if indices.size and not (0 <= indices.min() and indices.max() < size):
        raise BadInput(f"indices from {indices.min()} to {indices.max()} are not below {size}")
    a = math.isqrt(size - 1) + 1  # the root, rounded up
    b = -(-size // a)
    found = indices.reshape(-1).astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):  # a b - size < a, so that few are outside after the first step
        moving = found[outside]
        low, high = step((moving % np.uint64(a), moving // np.uint64(a)), a, b)
        found[outside] = high * np.uint64(a) + low
        outside = outside[found[outside] >= np.uint64(size)]
    return found.astype(np.int64).reshape(indices.shape)


def rounds(halves: Halves, a: int, b: int, *, key: str, inverse: bool = False) -> Halves:
    """All rounds: each adds to one half a hash of the other. inverse: undoes them, the last one first."""
    found, sizes, keys = list(halves), (np.uint64(a), np.uint64(b)), list(enumerate(round_keys(key)))
    for number, salt in reversed(keys) if inverse else keys:
        half = number % 2
        size = sizes[half]
        added = mix(found[1 - half] + salt) % size
        found[half] = (found[half] + (size - added if inverse else added)) % size
    return found[0], found[1]


@functools.lru_cache(maxsize=1024)
def round_keys(key: str) -> tuple[np.uint64, ...]:
    """A number for each round. A hash, so that seeds which differ by one share nothing."""
    digest = hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=8 * ROUNDS).digest()
    return tuple(np.frombuffer(digest, "<u8").astype(np.uint64))
