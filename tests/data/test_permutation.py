"""A permutation by arithmetic: a bijection of any size, undone exactly, with no trace of the order it was given."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.runtime.data.permutation import LARGEST, permuted, unpermuted


@given(st.integers(1, 3000), st.text(max_size=5))
@settings(max_examples=150, deadline=None)
def test_every_number_is_met_once_and_found_again(size, key):
    order = permuted(np.arange(size), size, key)
    assert np.array_equal(np.sort(order), np.arange(size))
    assert np.array_equal(unpermuted(order, size, key), np.arange(size))


@pytest.mark.parametrize("size", [2**32 - 1, 2**32, 2**32 + 1, 10**12, LARGEST])
def test_sizes_beyond_32_bits_are_undone_and_spread_over_the_whole_range(size):
    indices = np.unique(np.linspace(0, size - 1, 20_000).astype(np.int64).clip(0, size - 1))
    places = permuted(indices, size, "large")
    assert np.array_equal(unpermuted(places, size, "large"), indices) and len(np.unique(places)) == len(indices)
    counts = np.histogram(places.astype(float), bins=20, range=(0, float(size)))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-square of 19 degrees of freedom: p = 0.0007


@pytest.mark.parametrize("size", [1000, 1024, 9973, 50_000])
def test_a_sorted_corpus_leaves_no_correlation_and_no_runs(size):
    bound = 4 / np.sqrt(size)  # four standard deviations of a coefficient of independent numbers
    for key in ("row order 0 0 ", "row order 0 1 ", "row order 1 0 "):
        order = permuted(np.arange(size), size, key).astype(float)
        assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < bound  # ranks: the values are their own
        for lag in (1, 2, 7, 31, 100):
            assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < bound, lag
        above = order >= size / 2
        runs = 1 + np.count_nonzero(above[1:] != above[:-1])  # Wald and Wolfowitz 1940
        assert abs(runs - size / 2 - 1) < 4 * np.sqrt(size / 4)
        ups = np.count_nonzero(order[1:] > order[:-1])
        assert abs(ups - (size - 1) / 2) < 4 * np.sqrt((size + 1) / 12)
        assert np.count_nonzero(np.abs(np.diff(order)) == 1) < 12  # neighbours that stay neighbours: 2 expected


def test_neighbouring_keys_and_sizes_share_nothing():
    size = 5000
    orders = [permuted(np.arange(size), size, f"row order {seed} {epoch} ") for seed in range(4) for epoch in range(3)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.count_nonzero(one == other) < 10  # 1 expected
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(size)


def test_all_orders_of_a_few_come_up_about_equally_often():
    found = [tuple(permuted(np.arange(4), 4, str(key))) for key in range(4800)]
    counts = np.unique(found, axis=0, return_counts=True)[1]
    assert len(counts) == 24 and ((counts - 200) ** 2 / 200).sum() < 53  # 23 degrees of freedom: p = 0.0004


def test_the_permutation_is_the_same_everywhere_for_good():
    assert permuted([0, 1, 2, 3, 4], 10, "key").tolist() == permuted(np.arange(10), 10, "key")[:5].tolist()
    assert permuted(np.arange(8), 8, "row order 0 0 ").tolist() == [7, 5, 0, 4, 1, 3, 2, 6]
    assert permuted([[0, 1]], 10**12, "row order 0 0 ").tolist() == [[435884157602, 249171012663]]


def test_what_is_outside_is_refused():
    for indices, size in (([5], 5), ([-1], 5), ([0], 0), ([0], LARGEST + 1)):
        with pytest.raises(ValueError, match=r"must be at least 0 and below|the permutation size"):
            permuted(indices, size, "")
    assert permuted(np.empty(0, np.int64), 5, "").shape == (0,)
