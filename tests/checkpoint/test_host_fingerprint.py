"""numpy's fingerprint is the one of the devices, of a whole array and of its pieces."""

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.runtime.checkpoint import fingerprint
from jaxscale.runtime.checkpoint.fingerprint import fingerprints, host_fingerprint

ON_DEVICE = [
    "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "int16", "int8", "uint32", "uint16",
    "uint8", "bool", "complex64",
]  # fmt: skip
ON_HOST = ["int64", "uint64", "float64", "complex128"]


def random_array(shape, dtype, seed=0):
    """Random bits, NaN and infinities among them; bools are 0 or 1."""
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
    bits = bits % 2 if dtype == "bool" else bits
    return np.frombuffer(bits.tobytes(), kind).reshape(shape)


@pytest.mark.slow
def test_it_is_the_number_of_the_device_in_every_dtype_and_shape():
    made = {(d, s): random_array(s, d) for d in ON_DEVICE for s in [(), (1,), (3, 1, 5), (300, 41)]}
    device = fingerprints([jnp.asarray(values) for values in made.values()])
    assert {key: host_fingerprint(values) for key, values in made.items()} == dict(zip(made, device))


@pytest.mark.parametrize("dtype", ON_HOST)
def test_it_is_the_number_that_training_gives_to_64_bit_numpy_arrays(dtype):
    values = random_array((5, 7), dtype)
    assert host_fingerprint(values) == fingerprints([values])[0]


def test_blocks_do_not_show(monkeypatch):
    values = random_array((37, 11, 5), "float32")
    want = fingerprints([jnp.asarray(values)])[0]
    for words in (1, 7, 64, 10**6):
        monkeypatch.setattr(fingerprint, "BLOCK_WORDS", words)
        assert host_fingerprint(values) == want


def test_an_array_that_is_not_contiguous_counts_as_its_values():
    values = random_array((6, 8), "float32")
    assert host_fingerprint(values.T) == host_fingerprint(values.T.copy()) != host_fingerprint(values)


@pytest.mark.slow
@given(data=st.data(), dtype=st.sampled_from(ON_DEVICE + ON_HOST), shape=st.lists(st.integers(1, 9), max_size=4))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_numbers_of_the_pieces_add_up_to_that_of_the_array(data, dtype, shape):
    values = random_array(tuple(shape), dtype, seed=data.draw(st.integers(0, 9)))
    sizes = [data.draw(st.integers(1, size)) for size in shape]
    total = 0
    for start in itertools.product(*[range(0, length, size) for length, size in zip(shape, sizes)]):
        piece = values[tuple(slice(begin, begin + size) for begin, size in zip(start, sizes))]
        total += host_fingerprint(piece, start=start, shape=values.shape)
    assert total % 2**32 == host_fingerprint(values)
