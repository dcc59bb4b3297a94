"""Best-fit rows: no document cut that fits, no token lost or met twice, nothing predicted across documents."""

import functools
import gzip
import pathlib
import pickle
import re

import english
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rows import make_rows, whole
from twins import twins

from jaxscale.runtime.data import array_folder, best_fit
from jaxscale.runtime.data.best_fit import best_fit_decreasing, fill_by_pairs, pack_bins
from jaxscale.runtime.data.row_plan import open_arrays, open_rows


def first_tokens(lengths):
    """The first token of each document that is not empty."""
    return {int(end - length) + 1 for end, length in zip(np.cumsum(lengths), lengths) if length}


lengths_of_documents = st.lists(st.integers(0, 50), min_size=1, max_size=40).filter(any)


@pytest.mark.slow
@given(lengths_of_documents, st.integers(2, 20), st.integers(0, 2), st.integers(1, 3), st.integers(3, 12))
@settings(max_examples=60, deadline=None)
def test_every_row_is_what_the_text_of_the_module_says(tmp_path_factory, lengths, T, seed, groups, window):
    folder = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_fit, "WINDOW", window)
        patch.setattr(array_folder, "BUCKET_RECORDS", 2 * window)
        rows = make_rows(folder, lengths, T, seed=seed, sources=np.arange(len(lengths)) % groups, groups=groups)
    document_of = np.repeat(np.arange(len(lengths)), lengths)  # of token t + 1
    place_of = np.concatenate([np.arange(n) for n in lengths])
    batch, seen, predicted, in_rows = whole(rows), [], [], {}
    for r in range(len(rows)):
        tokens, targets, positions, segments, weights = (field[r] for field in batch[:5])
        real = segments > 0
        count = int(real.sum())
        assert real[:count].all() and count  # padding is at the end
        assert not tokens[count:].any() and not positions[count:].any() and not weights[count:].any()
        ids = tokens[:count] - 1
        documents, places = document_of[ids], place_of[ids]
        starts = np.flatnonzero(np.diff(segments[:count], prepend=0))
        for number, (a, b) in enumerate(zip(starts, [*starts[1:], count]), 1):
            assert (segments[a:b] == number).all() and len(set(documents[a:b])) == 1
            assert (np.diff(places[a:b]) == 1).all() and (positions[a:b] == np.arange(b - a)).all()
            last_of_document = places[b - 1] + 1 == lengths[documents[a]]
            assert (targets[a : b - 1] == tokens[a + 1 : b]).all() and weights[a : b - 1].all()
            assert weights[b - 1] == (not last_of_document)
            if not last_of_document:  # a piece that is followed by another fills its row
                assert b - a == T and targets[b - 1] == tokens[b - 1] + 1
            in_rows.setdefault(int(documents[a]), []).append(r)
        seen.append(tokens[:count])
        predicted.append(targets[weights == 1])
        assert (rows.row_sources(r)[:count] == documents % groups).all()
        if groups > 1:
            group = int(np.searchsorted(rows.group_rows, r, side="right")) - 1
            assert set(documents % groups) == {group}
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(sum(lengths)) + 1)
    firsts = first_tokens(lengths)
    assert sorted(np.concatenate(predicted)) == [t for t in range(1, sum(lengths) + 1) if t not in firsts]
    for document, length in enumerate(lengths):
        where = in_rows.get(document, [])
        assert len(where) == -(-length // T) and rows.rows_of(document).tolist() == sorted(where)


@given(lengths_of_documents, st.integers(2, 20), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_concat_in_groups_loses_nothing_and_never_mixes_sources(tmp_path_factory, lengths, T, groups):
    sources = np.arange(len(lengths)) % groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_folder, "BUCKET_RECORDS", 8)
        make = dict(packing="concat", seed=1, sources=sources, groups=groups)
        rows = make_rows(tmp_path_factory.mktemp("rows"), lengths, T, **make)
    batch = whole(rows)
    assert np.array_equal(np.sort(batch.tokens[batch.segment_ids > 0]), np.arange(sum(lengths)) + 1)
    firsts = first_tokens(lengths)
    predicted = batch.targets[batch.weights == 1]
    assert sorted(predicted) == [t for t in range(1, sum(lengths) + 1) if t not in firsts]
    document_of, in_rows = np.repeat(np.arange(len(lengths)), lengths), {}
    for r in range(len(rows)):
        documents = document_of[batch.tokens[r][batch.segment_ids[r] > 0] - 1]
        group = int(np.searchsorted(rows.group_rows, r, side="right")) - 1
        assert groups == 1 or set(documents % groups) == {group}
        for document in set(documents.tolist()):
            in_rows.setdefault(document, []).append(r)
    for document in range(len(lengths)):
        assert rows.rows_of(document).tolist() == in_rows.get(document, [])


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 64))
@settings(max_examples=100, deadline=None)
def test_each_size_goes_into_the_fullest_bin_that_has_room(sizes, capacity):
    bins = best_fit_decreasing(np.array(sizes, np.int64), capacity)
    rooms, order = [], np.argsort(-np.array(sizes, np.int64), kind="stable")
    for size, bin_ in zip(np.array(sizes)[order], bins[order]) if sizes else ():
        fitting = [room for room in rooms if room >= size]
        if bin_ == len(rooms):
            assert not fitting
            rooms.append(capacity)
        else:
            assert rooms[bin_] == min(fitting)
        rooms[bin_] -= size
    assert all(room >= 0 for room in rooms)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 64))
@settings(max_examples=150, deadline=None)
def test_no_bin_overflows_and_none_is_left_out(sizes, capacity):
    sizes = np.array(sizes, np.int64)
    for pack in (best_fit_decreasing, fill_by_pairs, pack_bins):
        bins = pack(sizes, capacity)
        filled = np.bincount(bins, weights=sizes)
        assert len(bins) == len(sizes) and (filled > 0).all() and (filled <= capacity).all()
    assert bins.max() <= best_fit_decreasing(sizes, capacity).max()


def test_documents_all_alike_fill_their_rows_too():
    sizes = np.random.default_rng(0).normal(84, 12, 8192).astype(np.int64)
    fill = lambda bins: sizes.sum() / 2048 / (bins.max() + 1)
    assert fill(best_fit_decreasing(sizes, 2048)) < 0.993 < 0.996 < fill(pack_bins(sizes, 2048))


def test_a_plan_is_the_same_for_a_seed_and_another_for_another(tmp_path):
    plans = [make_rows(tmp_path, [3, 8, 5, 4, 2, 9, 21, 7, 6] * 20, 16, seed=seed).arrays for seed in (1, 1, 2)]
    content = [{name: plan[name].tobytes() for name in plan} for plan in plans]
    assert content[0] == content[1] != content[2]


@pytest.mark.slow
def test_a_plan_takes_at_most_12_bytes_a_document_whatever_their_lengths(tmp_path):
    rng, number = np.random.default_rng(0), 2 * best_fit.WINDOW
    for mean in (2, 700, 9000):  # of rows of 1,024: many in one, one in one, one in many
        lengths = rng.poisson(mean, number) + 1
        for packing, groups in (("best_fit", 3), ("concat", 1)):
            make = dict(packing=packing, sources=np.arange(number) % 3, groups=groups)
            rows = make_rows(tmp_path, lengths, 1024, files=(), **make)
            size = sum(array.nbytes for array in rows.arrays.values())
            assert size <= 12 * number + 1000, (mean, packing, groups, size / number)


def test_a_plan_that_was_cut_short_is_refused_and_named(tmp_path):
    rows = make_rows(tmp_path, [5, 6, 7], 8)
    folder = rows.arrays.folder
    open_again = lambda: open_rows(open_arrays(pathlib.Path(folder), tmp_path), rows.documents.files)
    pathlib.Path(folder, "small").write_bytes(b"\0\0")
    with pytest.raises(ValueError, match="the index .* cannot be read: .*small was changed after"):
        open_again()
    pathlib.Path(folder, "small").unlink()
    with pytest.raises(ValueError, match="the index .* cannot be read"):
        open_again()


def test_a_pickle_carries_neither_tokens_nor_plan(tmp_path):
    rows = make_rows(tmp_path, [200] * 300, 256)
    before = rows[7]
    content = pickle.dumps(rows)
    copy = pickle.loads(content)
    np.testing.assert_array_equal(copy[7].tokens, before.tokens)
    assert len(content) < 6_000
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.parametrize("mean", [200, 800])
def test_at_least_99_percent_of_positions_are_real_at_2048(tmp_path, mean):
    lengths = np.random.default_rng(0).lognormal(np.log(mean) - 0.5, 1.0, 3 * best_fit.WINDOW).astype(np.int64) + 1
    assert lengths.sum() > 0.99 * 2048 * len(make_rows(tmp_path, lengths, 2048, files=()))


def count_gpt2(texts):
    """int64[n]: tokens of each text with GPT-2's vocabulary, and one for its end. Encoded in pieces: threads share."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = english.CORPORA / "tokenizers"
    encode = tokenizers.ByteLevelBPETokenizer(str(folder / "gpt2_vocab.json"), str(folder / "gpt2_merges.txt"))
    cut = [text.splitlines(keepends=True) for text in texts]
    counts = iter(encode.encode_batch([line for lines in cut for line in lines]))
    return np.array([sum(len(next(counts).ids) for _ in lines) + 1 for lines in cut])


def openwebtext():
    path = english.CORPORA / "web_openwebtext" / "meg-gpt2-openwebtext_text_document.idx"
    return np.fromfile(path, "<i4", count=1000, offset=34)  # Megatron's index: magic, version, type, 2 counts


def gutenberg():
    books = sorted((english.CORPORA / "gutenberg").glob("*.txt.gz"))
    return count_gpt2([gzip.decompress(book.read_bytes()).decode("utf-8", "replace") for book in books])


def wikitext():
    text = (english.CORPORA / "wikitext-2" / "valid.txt").read_text(encoding="utf-8")
    return count_gpt2(re.split(r"\n(?= = [^=])", text))  # articles


REAL = {
    "c4": lambda: count_gpt2(english.c4()),
    "openwebtext": openwebtext,
    "gutenberg": gutenberg,
    "wikitext": wikitext,
}


@functools.cache
def real_lengths(name):
    """Tokens of each document; whole books and whole articles."""
    if not english.CORPORA.is_dir():
        pytest.skip(f"needs the corpora at {english.CORPORA}")
    return np.concatenate([real_lengths(each) for each in REAL]) if name == "all" else REAL[name]()


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", twins([*REAL, "all"], "c4", "openwebtext", "wikitext"))
def test_at_least_99_percent_of_positions_are_real_on_real_text(tmp_path, name):
    """The last row of a set may be empty but for one token: of wikitext's 128 rows that alone may be 0.8%.

    Found: c4 0.991, openwebtext 0.997, gutenberg 0.999, wikitext 0.987 (0.994 without the last row), all 0.999.
    """
    lengths = real_lengths(name)
    rows = make_rows(tmp_path, lengths, 2048, files=())
    assert lengths.sum() >= 0.99 * 2048 * (len(rows) - 1)
    assert lengths.sum() / (2048 * len(rows)) > (0.99 if len(rows) > 200 else 0.98)
