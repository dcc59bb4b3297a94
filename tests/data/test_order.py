"""Batch n is a pure function of (seed, n): of no host count, no order of access, no history."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rows import document_order

from jaxscale.runtime.data.order import Batches, RowOrder, batch_index, merge_skips, normalise_ranges
from jaxscale.runtime.data.rows import SyntheticRows
from jaxscale.runtime.data.stacking import tokens_hash

ROWS, T = 10, 8


@pytest.fixture(scope="module")
def rows():
    return SyntheticRows(seq_len=T, vocab_size=50, seed=3, num_rows=ROWS)


@pytest.fixture(scope="module")
def batches(rows):
    return Batches(RowOrder(rows, seed=7), rows_per_batch=4)


def row_numbers(rows, batch):
    """Which row of the source each row of the batch is."""
    known = {rows[i].tokens.tobytes(): i for i in range(len(rows))}
    return [known[tokens.tobytes()] for tokens in batch.tokens]


def test_every_epoch_has_each_row_once_and_another_order(rows, batches):
    stream = sum((row_numbers(rows, batches.batch(n)) for n in range(10)), [])  # 40 rows are four epochs
    epochs = [stream[i : i + ROWS] for i in range(0, 40, ROWS)]  # an epoch ends in the middle of batch 2
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_the_hosts_parts_make_the_same_global_batch_read_in_any_order(batches, hosts):
    for n in (5, 0, 123_456_789, 2):
        whole = batches.batch(n)
        per_host = 4 // hosts
        parts = {h: batches.rows(n, range(h * per_host, (h + 1) * per_host)) for h in reversed(range(hosts))}
        for i, field in enumerate(whole[:5]):
            np.testing.assert_array_equal(np.concatenate([parts[h][i] for h in range(hosts)]), field)


def test_rows_may_be_any_and_not_side_by_side(batches):
    picked = batches.rows(3, [3, 1])
    np.testing.assert_array_equal(picked.tokens, batches.batch(3).tokens[[3, 1]])
    with pytest.raises(ValueError, match="rows .* out of range: there are 4 rows"):
        batches.rows(3, [4])


def test_neighbouring_seeds_share_no_epoch(rows):
    def epochs(seed):
        stream = Batches(RowOrder(rows, seed), ROWS)
        return {tuple(row_numbers(rows, stream.batch(n))) for n in range(4)}

    assert not epochs(0) & epochs(1)


def test_the_order_is_the_one_of_order_2(batches):
    """A resumed run depends on it: these may only change with order.ORDER, which refuses the runs of before."""
    digest = lambda ids: hashlib.blake2b(ids.astype("<i4").tobytes() + str(ids.shape).encode(), digest_size=8)
    found = [digest(batches.batch(n).tokens).hexdigest() for n in (0, 7)]
    assert found == ["1d098ad7903f119b", "318a83f764fa010f"]
    assert document_order(8, seed=5).tolist() == [0, 7, 4, 2, 3, 1, 6, 5]


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_the_document_order_is_a_permutation(count):
    assert sorted(document_order(count, seed=1)) == list(range(count))


def test_the_hash_of_tokens_sees_ids_and_shape(batches):
    batch = batches.batch(0)
    changed = batch._replace(tokens=batch.tokens + (np.arange(T) == 3).astype(np.int32)[None])
    assert tokens_hash(batch) == tokens_hash(batch._replace(tokens=batch.tokens.astype(np.int64)))
    others = {tokens_hash(changed), tokens_hash(batch._replace(tokens=batch.tokens.reshape(8, 4)))}
    assert tokens_hash(batch) not in others and len(others) == 2
    assert tokens_hash(batch) == "5f1aeec33eac4907"  # metrics.jsonl of a run that goes on holds those of before


ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)).map(lambda r: (r[0], r[0] + r[1])), max_size=5)


@given(ranges)
@settings(max_examples=200, deadline=None)
def test_steps_walk_over_the_batches_that_are_not_skipped(skipped):
    banned = {n for start, stop in skipped for n in range(start, stop)}
    expected = [n for n in range(100) if n not in banned][:40]
    assert [batch_index(step, skipped) for step in range(40)] == expected


@pytest.mark.slow
@given(ranges, ranges, st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_merged_skips_leave_the_past_as_it_was(recorded, configured, at_step):
    past = [batch_index(step, recorded) for step in range(at_step)]
    try:
        merged = merge_skips(recorded, configured, at_step)
    except ValueError:
        touched = {n for start, stop in configured for n in range(start, stop)} & set(past)
        reached = batch_index(at_step, recorded)
        assert touched or any(start < reached for start, _ in configured)
        return
    assert [batch_index(step, merged) for step in range(at_step)] == past
    assert {n for a, b in merged for n in range(a, b)} == {n for a, b in [*recorded, *configured] for n in range(a, b)}


def test_a_skip_in_the_past_is_refused_and_one_line_says_where_to_begin():
    with pytest.raises(ValueError, match=r"range 3 to 4, but the run is at batch 12 \(step 10\)"):
        merge_skips([(4, 6)], [(3, 6)], at_step=10)
    assert merge_skips([(4, 6)], [(4, 6), (12, 14)], at_step=10) == ((4, 6), (12, 14))
    assert merge_skips([(4, 6)], [], at_step=10) == ((4, 6),)


def test_touching_ranges_become_one():
    assert normalise_ranges([(5, 7), (1, 3), (3, 4), (6, 9)]) == ((1, 4), (5, 9))
