"""A fingerprint sees every bit and every position, and not the mesh."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.runtime.checkpoint.fingerprint import fingerprints


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "complex64"])
def test_one_changed_element_changes_it_in_every_dtype(dtype):
    values = np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    changed = values.copy()
    changed[2, 1] = not changed[2, 1] if dtype == "bool" else changed[2, 1] + changed.dtype.type(1)
    before, after, same = fingerprints([jnp.asarray(values), jnp.asarray(changed), values])
    assert before != after and before == same  # numpy and jax arrays of the same bits agree


def test_every_single_bit_counts():
    words = np.zeros(4, np.uint32)
    flipped = [words.copy() for _ in range(128)]
    for bit, array in enumerate(flipped):
        array[bit // 32] ^= np.uint32(1 << (bit % 32))
    assert len(set(fingerprints([words, *flipped]))) == 129


def test_two_sign_flips_and_a_swap_are_seen():
    values = jnp.arange(1.0, 7.0)
    signs, swapped = values.at[1].multiply(-1).at[4].multiply(-1), values[jnp.array([1, 0, 2, 3, 4, 5])]
    assert len(set(fingerprints([values, signs, swapped]))) == 3


def test_64_bit_numpy_arrays_are_not_cut_to_32():
    low, high = np.array([1, 2], np.int64), np.array([1, 2 + (1 << 40)], np.int64)
    assert len(set(fingerprints([low, high]))) == 2


def test_python_numbers_count_too():
    assert len(set(fingerprints([1, 2, 1 << 80]))) == 3


@pytest.mark.parametrize("spec", [("data", "tensor"), ("tensor", None), (None, "data"), ()], ids=str)
def test_it_does_not_depend_on_the_sharding(spec):
    values = jax.random.normal(jax.random.key(0), (16, 24))
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    placed = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
    assert fingerprints([placed, placed[0]])[0] == fingerprints([values])[0]
