"""Rows are windows over the stream of documents; no token is lost and none is predicted from another document."""

import functools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rows import document_order, make_files, make_rows

from jaxscale.runtime.data.stacking import split_rows, stack_rows

concat = functools.partial(make_rows, packing="concat")


def slow_rows(documents, T):
    """The same rows, one token at a time, as the text of the module says."""
    stream = [(token, d, i) for d, document in enumerate(documents) for i, token in enumerate(document)]
    for start in range(0, len(stream), T):
        rows = {name: [] for name in ("tokens", "targets", "positions", "segment_ids", "weights")}
        segment, position, before = 0, 0, None
        for at in range(start, start + T):
            here = stream[at] if at < len(stream) else None
            after = stream[at + 1] if at + 1 < len(stream) else None
            if here is None:
                segment, position = 0, 0
            else:
                new = before != here[1]
                segment, position, before = segment + new, 0 if new else position + 1, here[1]
            rows["tokens"].append(here[0] if here else 0)
            rows["targets"].append(after[0] if after else 0)
            rows["positions"].append(position)
            rows["segment_ids"].append(segment)
            rows["weights"].append(float(bool(here and after and here[1] == after[1])))
        yield rows


@pytest.mark.slow
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 7), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_rows_equal_those_made_one_token_at_a_time(tmp_path_factory, lengths, T, seed):
    ids = np.split(np.arange(sum(lengths)) + 1, np.cumsum(lengths)[:-1])
    documents = [ids[d].tolist() for d in document_order(len(lengths), seed)]
    rows = concat(tmp_path_factory.mktemp("rows"), lengths, T, seed=seed, wide=bool(seed % 2))
    expected = list(slow_rows(documents, T))
    assert len(rows) == len(expected)
    for r, row in enumerate(expected):
        for name, value in row.items():
            np.testing.assert_array_equal(getattr(rows[r], name), value, err_msg=f"{name} of row {r}")


@pytest.mark.slow
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_rows_that_are_cut_are_those_that_are_packed_so_short(tmp_path_factory, lengths, short, parts):
    folder = tmp_path_factory.mktemp("rows")
    whole, wanted = (concat(folder, lengths, T, seed=2) for T in (short * parts, short))
    cut = split_rows(stack_rows([whole[row] for row in range(len(whole))]), short)
    assert cut.tokens.shape == (len(whole) * parts, short)
    for row in range(len(wanted)):  # behind which all is padding
        for field, wanted_T in wanted[row]._asdict().items():
            if wanted_T is not None:
                found_T = getattr(cut, field)[row]
                assert found_T.dtype == wanted_T.dtype
                np.testing.assert_array_equal(found_T, wanted_T, err_msg=f"{field} of row {row}")
    assert not cut.weights[len(wanted) :].any() and not cut.segment_ids[len(wanted) :].any()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(2, 16))
@settings(max_examples=25, deadline=None)
def test_each_token_but_a_documents_first_is_a_target_exactly_once(tmp_path_factory, lengths, T):
    rows = concat(tmp_path_factory.mktemp("once"), lengths, T, seed=1)
    predicted = np.concatenate([rows[r].targets[rows[r].weights == 1] for r in range(len(rows))])
    firsts = set((np.cumsum([0, *lengths]) + 1).tolist())
    assert sorted(predicted) == [token for token in range(1, sum(lengths) + 1) if token not in firsts]
    tokens = np.concatenate([rows[r].tokens[rows[r].segment_ids > 0] for r in range(len(rows))])
    assert sorted(tokens) == list(range(1, sum(lengths) + 1))


def test_several_files_of_different_types_are_one_stream(tmp_path):
    files = make_files(tmp_path, [[3, 4], [], [5]], ["<u2", "<u2", "<u4"], [1, 1, 70_000])
    rows = concat(tmp_path, [3, 4, 5], 4, files=files)
    tokens = np.concatenate([rows[r].tokens for r in range(len(rows))])
    assert sorted(tokens) == [*range(1, 8), *range(70_000, 70_005)]
    assert rows[0].tokens.dtype == np.int32


def test_sources_are_those_of_the_targets_document(tmp_path):
    files = make_files(tmp_path, [[3, 4], [5, 9]], ["<u2", "<u2"], [1, 100])
    rows = concat(tmp_path, [3, 4, 5, 9], 4, seed=2, sources=[1, 1, 100, 100], files=files)
    for r in range(len(rows)):
        row, sources = rows[r], rows.row_sources(r)
        real = row.weights == 1
        assert sources.dtype == np.int32 and sources.shape == (4,)
        np.testing.assert_array_equal(sources[real], np.where(row.targets[real] >= 100, 100, 1))


def test_a_pickled_source_reads_the_same_rows(tmp_path):
    rows = concat(tmp_path, [200] * 50, 16, seed=2)
    before = rows[3]
    content = pickle.dumps(rows)
    copy = pickle.loads(content)
    np.testing.assert_array_equal(copy[3].tokens, before.tokens)
    assert len(content) < 6_000  # the tokens alone are 40,000 bytes


def test_a_row_that_is_not_there_is_an_error(tmp_path):
    rows = concat(tmp_path, [10], 4)
    for row in (-1, 3):
        with pytest.raises(IndexError):
            rows[row]
