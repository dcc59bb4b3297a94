"""Rows are windows over the stream of documents; no token is lost and none is predicted from another document."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.data.packing import DocumentTable, PackedRows, document_order, join_tables


def make_table(folder, lengths, dtype="<u2", first_id=1):
    """A .bin in which every id is another one, and its documents."""
    path = str(folder / f"ids{first_id}.bin")
    total = sum(lengths)
    (np.arange(total) + first_id).astype(dtype).tofile(path)
    ends = np.cumsum(lengths, dtype=np.int64)
    zeros = np.zeros(len(lengths), np.uint32)
    sources = np.full(len(lengths), first_id % 1000, np.uint16)
    return DocumentTable((path,), (dtype,), ends - lengths, np.array(lengths), zeros, sources)


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


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 7), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_rows_equal_those_made_one_token_at_a_time(tmp_path_factory, lengths, T, seed):
    table = make_table(tmp_path_factory.mktemp("rows"), lengths)
    ids = np.fromfile(table.paths[0], "<u2")
    order = document_order(len(lengths), seed)
    documents = [ids[table.starts[d] : table.starts[d] + table.lengths[d]].tolist() for d in order]
    rows = PackedRows(table, seq_len=T, seed=seed)
    expected = list(slow_rows(documents, T))
    assert len(rows) == len(expected)
    for r, row in enumerate(expected):
        for name, value in row.items():
            np.testing.assert_array_equal(getattr(rows[r], name), value, err_msg=f"{name} of row {r}")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(2, 16))
@settings(max_examples=100, deadline=None)
def test_each_token_but_a_documents_first_is_a_target_exactly_once(tmp_path_factory, lengths, T):
    table = make_table(tmp_path_factory.mktemp("once"), lengths)
    rows = PackedRows(table, seq_len=T, seed=1)
    predicted = np.concatenate([rows[r].targets[rows[r].weights == 1] for r in range(len(rows))])
    firsts = set((table.starts + 1).tolist())
    assert sorted(predicted) == [token for token in range(1, sum(lengths) + 1) if token not in firsts]
    tokens = np.concatenate([rows[r].tokens[rows[r].segment_ids > 0] for r in range(len(rows))])
    assert sorted(tokens) == list(range(1, sum(lengths) + 1))


def test_several_files_of_different_types_are_one_stream(tmp_path):
    small, large = make_table(tmp_path, [3, 4], "<u2", 1), make_table(tmp_path, [5], "<u4", 70_000)
    table = join_tables([small, large])
    rows = PackedRows(table, seq_len=4, seed=0)
    tokens = np.concatenate([rows[r].tokens for r in range(len(rows))])
    assert sorted(tokens) == [*range(1, 8), *range(70_000, 70_005)]
    assert rows[0].tokens.dtype == np.int32


def test_sources_are_those_of_the_targets_document(tmp_path):
    table = join_tables([make_table(tmp_path, [3, 4], "<u2", 1), make_table(tmp_path, [5, 9], "<u2", 100)])
    rows = PackedRows(table, seq_len=4, seed=2)
    for r in range(len(rows)):
        row, sources = rows[r], rows.row_sources(r)
        real = row.weights == 1
        assert sources.dtype == np.int32 and sources.shape == (4,)
        np.testing.assert_array_equal(sources[real], np.where(row.targets[real] >= 100, 100, 1))


def test_a_pickled_source_reads_the_same_rows(tmp_path):
    rows = PackedRows(make_table(tmp_path, [200] * 50), seq_len=16, seed=2)
    before = rows[3]
    content = pickle.dumps(rows)
    copy = pickle.loads(content)
    np.testing.assert_array_equal(copy[3].tokens, before.tokens)
    assert len(content) < 10_000  # the tokens alone are 20,000 bytes


def test_a_row_that_is_not_there_is_an_error(tmp_path):
    rows = PackedRows(make_table(tmp_path, [10]), seq_len=4, seed=0)
    for row in (-1, 3):
        with pytest.raises(IndexError):
            rows[row]
