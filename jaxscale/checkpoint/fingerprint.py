"""One integer per array that changes if any bit of it does, computed on device and independent of the mesh."""

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def fingerprints(leaves: Sequence[Any]) -> list[int]:
    """A uint32 for every leaf. Equal arrays give equal numbers on any mesh; a changed or moved element changes it.

    Each word is mixed with its own position by a bijection and the results are added modulo 2**32, where the order of
    the sum, and with it the sharding, does not matter. One flipped bit is always seen, anything else is missed once in
    about 4e9. The work is one pass over the memory and no copy of it. Python numbers are hashed as text.
    """
    arrays = [host_words(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves if hasattr(leaf, "dtype")]
    sums = iter(np.asarray(sum_leaves(replicated(arrays))(arrays)).tolist() if arrays else ())
    return [next(sums) if hasattr(leaf, "dtype") else zlib.crc32(repr(leaf).encode()) for leaf in leaves]


def replicated(arrays: Sequence[Any]) -> Any:
    """The sharding under which every process can read the result: all of the arrays' mesh, or None off a mesh."""
    for array in arrays:
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return None


@functools.lru_cache(maxsize=8)  # or every save would compile it again
def sum_leaves(out_sharding: Any) -> Any:
    """The compiled function (arrays) -> uint32[number of arrays]."""
    return jax.jit(lambda arrays: jnp.stack([fingerprint(array) for array in arrays]), out_shardings=out_sharding)


def fingerprint(array: jax.Array) -> jax.Array:
    """uint32[]: the sum of the array's words, each mixed with its position."""
    if jax.typeof(array).memory_space == jax.memory.Space.Host:  # where nothing can be computed
        array = jax.device_put(array, jax.memory.Space.Device)
    words = as_words(array)
    position = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        position += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride)
    mixed = words ^ (position * jnp.uint32(0x9E3779B9))  # 2**32 / golden ratio: neighbours land far apart
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's 32-bit finaliser, Appleby 2011
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def as_words(array: jax.Array) -> jax.Array:
    """The bits of the array as uint32, one word an element (two for 64-bit types, in a last axis of their own)."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    bits = array.dtype.itemsize * 8
    if bits >= 32:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, {8: jnp.uint8, 16: jnp.uint16}[bits]).astype(jnp.uint32)


def host_words(array: np.ndarray) -> np.ndarray:
    """The words of a numpy array, as as_words gives them; JAX itself would first cut 64-bit types down to 32."""
    size = array.dtype.itemsize
    word, extra = {1: (np.uint8, ()), 2: (np.uint16, ()), 4: (np.uint32, ())}.get(size, (np.uint32, (size // 4,)))
    return np.frombuffer(array.tobytes(), word).reshape(array.shape + extra)
