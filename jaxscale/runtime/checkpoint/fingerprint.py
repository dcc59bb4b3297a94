"""Fingerprints of arrays, and copies of the train state with fingerprints.

A fingerprint is a 32-bit checksum of an array that does not depend on the sharding. It is computed on device or by
numpy.

One compiled program copies the state and computes the fingerprints. The caller only dispatches this program, so
training continues at once: the devices copy between two steps, and the next step may donate the old buffers. If devices
can write to host memory (TPU, GPU), the copy is in host memory and uses no device memory.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.kernels.compiler_options import fast_compile_options

HOST = "pinned_host"
GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: spreads consecutive positions over all bits
FINALISER = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))  # finalizer of MurmurHash3, 32 bits, Appleby 2011
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # word type by itemsize; larger elements consist of several words
BLOCK_WORDS = 1 << 16  # a block and its two temporaries fit the second-level cache (one core, 2026-11)


def fingerprints(leaves: Sequence[Any]) -> list[int]:
    """Returns a uint32 checksum of each leaf that depends on the values and positions of its elements.

    Each word is mixed with its position by a bijection, and the results are summed modulo 2**32, so the checksum does
    not depend on the sharding. A single flipped bit is always detected; any other change is missed with a probability
    of about 1 in 4e9. The cost is one pass over memory without a copy. Python numbers are hashed as text.
    """
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    sums = iter(np.asarray(make_fingerprints(replicated_sharding(arrays))(arrays)).tolist() if arrays else ())
    return [next(sums) if isinstance(leaf, jax.Array) else fingerprint_on_host(leaf) for leaf in leaves]


def fingerprint_on_host(leaf: Any) -> int:
    """Returns the fingerprint of a numpy array or Python number. Uses numpy, because JAX truncates 64-bit types."""
    return host_fingerprint(leaf) if hasattr(leaf, "dtype") else zlib.crc32(repr(leaf).encode())


def replicated_sharding(arrays: Sequence[Any]) -> Any:
    """Returns a sharding that replicates a result over the arrays' mesh, or None without a mesh."""
    for array in arrays:
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return None


@functools.lru_cache(maxsize=8)  # without this cache every save would compile
def make_fingerprints(out_sharding: Any) -> Any:
    """Returns the jitted function (arrays) -> uint32[number of arrays]."""
    return jax.jit(lambda arrays: jnp.stack([fingerprint(array) for array in arrays]), out_shardings=out_sharding)


def fingerprint(array: jax.Array) -> jax.Array:
    """Returns the fingerprint of one array, uint32[]: the sum of its words, each mixed with its position."""
    words = as_words(on_device(array))
    position = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        position += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride)
    mixed = words ^ (position * jnp.uint32(GOLDEN))
    for shift, factor in FINALISER:
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def on_device(array: jax.Array) -> jax.Array:
    """Returns the array in device memory."""
    if jax.typeof(array).memory_space == jax.memory.Space.Host:
        return jax.device_put(array, jax.memory.Space.Device)
    return array


def as_words(array: jax.Array) -> jax.Array:
    """Returns the bits of the array as uint32, one word per element. 64-bit types give two words in a new last axis."""
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


def host_fingerprint(array: Any, *, start: Sequence[int] = (), shape: Sequence[int] | None = None) -> int:
    """Returns the fingerprint of an array. Uses numpy and a few MB of memory, and no device.

    If `array` is a part of a larger array, `start` is the index of its first element in the larger array, and `shape`
    is the shape of the larger array, whose fingerprint is the sum of the fingerprints of all parts, modulo 2**32.
    """
    array = np.asarray(array)
    size = array.dtype.itemsize
    view = np.ascontiguousarray(array).reshape(-1).view(WORDS.get(size, np.uint32))  # the words of as_words()
    words = view.reshape(array.shape + (() if size in WORDS else (size // 4,)))
    extra = words.shape[array.ndim :]  # words per element
    whole = tuple(array.shape if shape is None else shape) + extra
    begin = tuple(start or (0,) * array.ndim) + (0,) * len(extra)
    strides = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    run_axes = 0  # number of trailing axes over which the part is contiguous in the larger array
    while run_axes < len(whole) and (run_axes == 0 or words.shape[-run_axes:] == whole[len(whole) - run_axes :]):
        run_axes += 1
    split = len(whole) - run_axes
    bases = np.full(words.shape[:split], sum(b * s for b, s in zip(begin, strides)) % 2**32, np.uint64)
    for axis in range(split):
        steps = np.arange(words.shape[axis], dtype=np.uint64) * np.uint64(strides[axis] % 2**32)
        bases += steps.reshape([-1 if other == axis else 1 for other in range(split)])
    rows_RN = words.reshape(bases.size, math.prod(words.shape[split:]))
    return sum(mixed_sums(rows_RN, bases.reshape(-1).astype(np.uint32))) % 2**32  # uint32 positions wrap as on device


def mixed_sums(rows_RN: np.ndarray, bases_R: np.ndarray) -> Iterator[int]:
    """Yields the sum of the mixed words, as in fingerprint(), of each cache-sized block.

    rows_RN: words, contiguous within a row. bases_R: uint32 position of each row's first word.
    """
    num_rows, width = rows_RN.shape
    tall = max(1, BLOCK_WORDS // max(width, 1))
    for row in range(0, num_rows, tall):
        for column in range(0, width, BLOCK_WORDS):
            words = rows_RN[row : row + tall, column : column + BLOCK_WORDS]
            places = np.arange(column, column + words.shape[1], dtype=np.uint64).astype(np.uint32)
            mixed = bases_R[row : row + tall, None] + places[None]
            mixed *= np.uint32(GOLDEN)
            mixed ^= words
            shifted = np.empty_like(mixed)
            for shift, factor in FINALISER:
                np.right_shift(mixed, np.uint32(shift), out=shifted)
                mixed ^= shifted
                mixed *= np.uint32(factor)
            np.right_shift(mixed, np.uint32(16), out=shifted)
            mixed ^= shifted
            yield int(np.sum(mixed, dtype=np.uint64))


@dataclasses.dataclass
class Snapshot:
    """Copies of leaves. The devices may still be computing the copies."""

    leaves: dict[str, Any]
    device_fingerprints: jax.Array | None  # fingerprints of the device arrays, in the order of `leaves`

    def fingerprints(self) -> dict[str, int]:
        """Returns {name: fingerprint}; waits for the devices."""
        found = iter(np.asarray(self.device_fingerprints).tolist() if self.device_fingerprints is not None else ())
        return {
            name: next(found) if isinstance(leaf, jax.Array) else fingerprint_on_host(leaf)
            for name, leaf in self.leaves.items()
        }


def take_snapshot(leaves: Mapping[str, Any]) -> Snapshot:
    """Dispatches a program that copies all device arrays. Copies Python numbers and numpy arrays immediately."""
    arrays = [leaf for leaf in leaves.values() if isinstance(leaf, jax.Array)]
    copies, fingerprints = copy_program(array_formats(arrays))(arrays) if arrays else ((), None)
    made = iter(copies)
    copied = {
        name: next(made) if isinstance(leaf, jax.Array) else leaf.copy() if isinstance(leaf, np.ndarray) else leaf
        for name, leaf in leaves.items()
    }
    return Snapshot(copied, fingerprints)


def array_formats(arrays: Sequence[Any]) -> tuple:
    """Returns (shape, dtype, sharding) of each array, as the cache key of copy_program()."""
    return tuple((tuple(array.shape), array.dtype, array.sharding) for array in arrays)


@functools.lru_cache(maxsize=8)
def copy_program(described: tuple) -> Any:
    """Returns the compiled function (arrays) -> (copies, uint32[number of arrays])."""
    abstract = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype, sharding in described]
    device = next(iter(described[0][2].device_set))
    shardings = [sharding for *_, sharding in described]
    if device.platform != "cpu" and HOST in {memory.kind for memory in device.addressable_memories()}:
        shardings = [sharding.with_memory_kind(HOST) for sharding in shardings]

    def copy(arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        arrays = [on_device(array) for array in arrays]
        return [jnp.copy(array) for array in arrays], jnp.stack([fingerprint(array) for array in arrays])

    program = jax.jit(copy, out_shardings=(shardings, replicated_sharding(abstract)))
    options = fast_compile_options(device.platform) or None
    return program.lower(abstract).compile(options)  # compiles here, in any thread, and not at the first call
