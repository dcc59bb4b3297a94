"""The join on disk finds what a dictionary would, however the work is divided."""

import collections
import io
import tracemalloc
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.runtime.text.document import Document
from jaxscale.system import digest
from jaxscale.tools.corpus.curate.hashes import Sketch, mix64
from jaxscale.tools.corpus.prepare import sketches
from jaxscale.tools.corpus.prepare.dedup import NEIGHBOURS, Join, find_pairs, sketch_path, write_pairs
from jaxscale.tools.corpus.prepare.lookup import block_base, numbered_path, to_table, write_blocks, write_table
from jaxscale.tools.corpus.prepare.shuffle import (
    Shuffle,
    ShuffleOutput,
    input_runs,
    merge_records,
    merge_runs,
    open_run,
    run_shuffle,
)
from jaxscale.tools.corpus.prepare.sketches import (
    MEMORY_BYTES,
    MEMORY_FACTOR,
    block_slice,
    components,
    even_bounds,
    external_components,
    item_numbers,
    num_partitions,
    pair_chunks,
    split_items,
    write_sketch,
)
from jaxscale.tools.corpus.prepare.tokens import write_merged

BLOCKS = st.lists(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20)), max_size=12), max_size=5)


def sketch_of(rows):
    keys, places = (np.array(column) for column in zip(*rows)) if rows else ([], [])
    return Sketch(mix64(np.array(keys, np.uint64)), np.array(places, np.int64))


def join_of(folder, sketches, threshold=None):
    """A join over blocks with these sketches."""
    name, rows = "near_dedup" if threshold else "exact_dedup", []
    for block, sketch in enumerate(sketches):
        base = block_base(str(folder), 0, block, 0)
        base.parent.mkdir(parents=True, exist_ok=True)
        write_sketch(sketch_path(str(base), name), sketch)
        rows.append((block, 0, 0, 0, len(sketch.keys)))
    (folder / "pass0").mkdir(exist_ok=True)
    blocks = write_blocks(str(folder), 0, np.array(rows, np.int64).reshape(-1, 5))
    return Join(str(folder / "join"), str(folder), 0, name, threshold, len(blocks), blocks.total(4))


def run_all(function, task, count):
    return [function(task._replace(number=number)) for number in range(count)]


def pairs_in(folder):
    found = [np.load(path) for path in sorted(folder.glob("*/*.npy"))]
    return np.concatenate(found).tolist() if found else []


def brute_force(blocks, neighbours):
    """The pairs by a dictionary of sets."""
    groups = collections.defaultdict(set)
    for block, rows in enumerate(blocks):
        for key, place in rows:
            groups[key].add(block << 32 | place)
    pairs = set()
    for group in map(sorted, groups.values()):
        for i, item in enumerate(group[1:], 1):
            pairs |= {(item, group[0])} | {(item, other) for other in group[max(0, i - neighbours) : i]}
    return sorted(pairs)


def linked(pairs):
    """{item: smallest item that it is linked to}, by walking the graph."""
    near = collections.defaultdict(set)
    for a, b in pairs:
        near[a].add(b)
        near[b].add(a)
    keepers, seen = {}, set()
    for start in sorted(near):
        stack = [start] if start not in seen else []
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                keepers[node] = start
                stack += near[node]
    return {item: keeper for item, keeper in keepers.items() if item != keeper}


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    BLOCKS.filter(len), st.integers(1, 7), st.sampled_from([None, 0.5]), st.sampled_from([1, 1000, MEMORY_BYTES]),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_pairs_are_those_of_a_dictionary_for_any_number_of_ranges_and_any_memory(
    tmp_path_factory, blocks, count, threshold, memory, random
):
    folder = tmp_path_factory.mktemp("sketches")
    for rows in blocks:
        random.shuffle(rows)
    whole = Shuffle(join_of(folder, map(sketch_of, blocks), threshold), str(folder), len(blocks), count)
    whole = whole._replace(out=str(folder / "pairs"), memory_bytes=memory)
    found = sum(run_shuffle(run_all, whole, merge_records, write_pairs))
    order = slice(None) if threshold is None else slice(None, None, -1)  # candidates are sorted by the smaller item
    pairs = [tuple(pair[order]) for pair in pairs_in(folder / "pairs")]
    expected = brute_force(blocks, 0 if threshold is None else NEIGHBOURS)
    assert len(pairs) == found and sorted(set(pairs)) == expected
    files = [np.load(path).tolist() for path in (folder / "pairs").glob("*/*.npy")]
    assert files == [[list(pair) for pair in sorted(set(map(tuple, file)))] for file in files]
    items, firsts = np.array(expected, np.uint64).reshape(-1, 2).T
    removed, keepers = components(items, firsts)
    assert dict(zip(removed.tolist(), keepers.tolist())) == linked(expected)


def test_keys_at_the_edges_of_ranges_are_in_one_of_them(tmp_path):
    keys = np.repeat(np.array([0, (1 << 63) - 1, 1 << 63, (1 << 64) - 1], np.uint64), 2)
    whole = Shuffle(join_of(tmp_path, [Sketch(keys, np.arange(8))]), str(tmp_path), 1, 2)
    for part, expected in enumerate([[1, 3], [5, 7]]):
        write_pairs(call := whole._replace(number=part))
        assert np.load(call.path(1, part, ".npy"))[:, 0].tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).filter(lambda pair: pair[0] > pair[1]), max_size=80))
def test_the_keeper_is_the_smallest_item_that_an_item_is_linked_to(pairs):
    items, firsts = (np.array([pair[i] for pair in pairs], np.uint64) for i in (0, 1))
    removed, keepers = components(items, firsts)
    assert dict(zip(removed.tolist(), keepers.tolist())) == linked(pairs)
    assert np.all(np.diff(removed.astype(np.int64)) > 0)


@pytest.mark.parametrize(("number", "memory"), [(0, 100), (1, 1), (20, 100), (40, 100), (40, 1 << 30), (200, 600)])
def test_pairs_are_united_the_same_in_many_ranges(tmp_path, number, memory):
    pairs = [(max(pair), min(pair)) for pair in np.random.default_rng(number).integers(0, 61, (number, 2)).tolist()]
    pairs = [pair for pair in pairs if pair[0] > pair[1]]
    rows = np.array(pairs, np.uint64).reshape(-1, 2)
    facts = external_components(
        lambda: np.array_split(rows, 3), len(rows), 61, tmp_path / "ranges", tmp_path / "removed.npy", memory
    )
    expected = linked(pairs)
    assert dict(zip(*np.load(tmp_path / "removed.npy").tolist())) == expected
    copies = collections.Counter(expected.values())
    assert sum(number for _, number in facts["sizes"]) == len(copies)
    largest = sorted(copies.items(), key=lambda item: (-item[1], item[0]))[:5]
    assert facts["largest"] == [(keeper, number + 1) for keeper, number in largest]


@pytest.mark.slow
def test_many_copies_of_one_key_are_joined_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(digest, "READ_BYTES", 1 << 16)  # of files that are hashed
    own = Sketch(np.full(4000, 7, np.uint64), np.arange(4000), np.zeros((4000, 4), np.uint32))
    whole = join_of(tmp_path, [own] * 10, 0.5)._replace(memory_bytes=1 << 20)
    tracemalloc.start()
    find_pairs(run_all, whole)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(pairs_in(tmp_path / "join/pairs")) == 3 * 40_000 - 6
    assert peak < 4 << 20  # Python's table of names may take 2 MB more at once; a record of all at once took 300 bytes


def test_ranges_have_as_many_pairs_though_all_are_in_one_part_of_the_input():
    items = np.random.default_rng(0).integers(900 << 32, 910 << 32, 10_000).astype(np.uint64)
    bounds = even_bounds([np.stack([items, items - np.uint64(1)], axis=1)], 4, 100_000 << 32)
    counts = np.bincount(np.searchsorted(bounds, items, side="right"))[1:]
    assert counts.sum() == 10_000 and len(counts) == 4 and counts.max() < 2500 + 1100  # and what one bin has


@pytest.mark.parametrize("merges_first", [False, True])
def test_a_shuffle_sorts_more_files_than_a_task_opens(tmp_path, merges_first):
    rng, inputs, outputs = np.random.default_rng(0), 130, 5
    keys = rng.integers(0, 1000, (inputs, 20)).astype(np.uint64)
    keys[:, 10:] = 500  # of which there are more than a task holds
    keys.sort(axis=1)
    for number, own in enumerate(keys):
        path = numbered_path(tmp_path / "in", number, ".npy")
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.stack([own, np.arange(20, dtype=np.uint64) + np.uint64(20 * number)], axis=1))
    whole = Shuffle(ShuffleOutput(str(tmp_path / "in")), str(tmp_path), inputs, outputs, span=1000)
    whole = whole._replace(merges_first=merges_first)
    assert (whole.num_ranges(1) == 1) == merges_first  # each file is opened once
    assert whole.num_levels == 2 and max(whole.num_ranges(1), len(whole.inputs_of_task()[0])) < 13
    whole = whole._replace(memory_bytes=16 * MEMORY_FACTOR * 30)
    taken = [
        list(merge_runs(input_runs(call), 30)) for call in run_shuffle(run_all, whole, merge_records, lambda call: call)
    ]
    assert max(len(part) for parts in taken for part in parts) <= 30
    found = [np.concatenate(parts) for parts in taken]
    order = np.argsort(keys.ravel(), kind="stable")  # equal keys stay in the order of the files
    assert np.array_equal(np.concatenate(found), np.stack([keys.ravel()[order], order.astype(np.uint64)], axis=1))
    assert [int(part[0, 0]) // 200 for part in found] == list(range(outputs))


def test_a_chain_of_a_hundred_thousand_links_has_one_keeper():
    order = np.random.default_rng(0).permutation(100_000).astype(np.uint64)
    ends = np.stack([order[1:], order[:-1]])
    removed, keepers = components(ends.max(0), ends.min(0))
    assert np.array_equal(removed, np.arange(1, 100_000)) and not keepers.any()


@given(st.lists(st.integers(0, 2**50), unique=True, min_size=1, max_size=20), st.integers(0, 4))
def test_one_key_gives_the_same_pairs_in_parts(items, neighbours):
    group = sorted(items)
    rows = np.stack([np.zeros(len(group), np.uint64), np.array(group, np.uint64)], axis=1)
    expected = {(b, group[0]) for b in group[1:]}
    expected |= {(group[i], group[j]) for i in range(len(group)) for j in range(max(0, i - neighbours), i)}
    found = np.concatenate([*pair_chunks((rows[begin : begin + 4] for begin in range(0, len(rows), 4)), neighbours)])
    assert {(later, first) for later, first in found.tolist()} == expected


def test_an_item_number_is_in_the_order_of_the_input_and_can_be_taken_apart():
    numbers = item_numbers(3, [0, 5, 2**32 - 1])
    assert numbers.tolist() == [3 << 32, 3 << 32 | 5, (4 << 32) - 1]
    blocks, places = split_items(numbers)
    assert blocks.tolist() == [3] * 3 and places.tolist() == [0, 5, 2**32 - 1]
    everything = np.sort(np.concatenate([item_numbers(block, [0, 7]) for block in (0, 1, 2**32 - 1)]))
    assert [block_slice(everything, block) for block in (0, 1, 2, 2**32 - 1)] == [
        slice(0, 2), slice(2, 4), slice(4, 4), slice(4, 6)
    ]  # fmt: skip


@pytest.mark.parametrize("too_large", [(1 << 32, [0]), (0, [1 << 32])])
def test_a_number_that_has_no_room_is_refused(too_large):
    with pytest.raises(ValueError, match="must be below"):
        item_numbers(*too_large)


def test_partitions_grow_with_the_input_and_shrink_with_the_memory():
    assert num_partitions(0, 1 << 30) == 1
    assert num_partitions(1 << 30, 1 << 34) == 1
    assert num_partitions(1 << 40, 1 << 30) == 5120  # 4 times the bytes, a fifth of the memory free


def test_a_sketch_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    sketch = sketch_of([(1, 0), (1, 1)])
    monkeypatch.setattr(sketches.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        write_sketch(tmp_path / "0.npy", sketch)
    assert list(tmp_path.iterdir()) == []


def test_signatures_are_there_before_their_sketch(tmp_path):
    (tmp_path / "0.npy").mkdir()  # which no file can replace
    with pytest.raises(IsADirectoryError):
        write_sketch(tmp_path / "0.npy", Sketch(*sketch_of([])[:2], np.zeros((1, 4), np.uint32)))
    assert (tmp_path / "0.signatures.npy").is_file()


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b"", lambda data: b"x" + data[1:]])
def test_a_torn_sketch_is_named(tmp_path, damage):
    write_sketch(tmp_path / "0.npy", sketch_of([(1, 0), (1, 1)]))
    (tmp_path / "0.npy").write_bytes(damage((tmp_path / "0.npy").read_bytes()))
    with pytest.raises(ValueError, match=r"0\.npy"):
        open_run(tmp_path / "0.npy", 0, 1)


def test_a_file_of_other_numbers_is_no_sketch(tmp_path):
    np.save(tmp_path / "0.npy", np.zeros(3))
    with pytest.raises(ValueError, match=", not records; delete it and prepare again"):
        open_run(tmp_path / "0.npy", 0, 1)


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 1.0])
def test_candidates_are_kept_by_the_share_of_equal_numbers(tmp_path, threshold):
    rng = np.random.default_rng(0)
    signatures = rng.integers(0, 3, (3, 5, 9)).astype(np.uint32)  # of three blocks of five documents
    signatures[2, 4], signatures[2, 1, :8] = signatures[0, 0], signatures[1, 1, :8]
    blocks = [[(key, place) for place in range(5) for key in {place % 2, 7}] for _ in signatures]
    sketches = [Sketch(*sketch_of(rows)[:2], own) for rows, own in zip(blocks, signatures)]
    find_pairs(run_all, join_of(tmp_path, sketches, threshold)._replace(memory_bytes=3000))  # 13 at once
    of = lambda item: signatures[item >> 32, item & (1 << 32) - 1]
    candidates = brute_force(blocks, NEIGHBOURS)
    expected = [[a, b] for a, b in candidates if np.mean(of(a) == of(b)) >= threshold - 1e-12]
    assert sorted(pairs_in(tmp_path / "join/pairs")) == expected
    assert 0 < len(expected) < len(candidates)


class Written(NamedTuple):
    """Blocks of tokens in a folder, as the source of a shuffle."""

    folder: str
    dtype: np.dtype = np.dtype(np.uint16)

    def base(self, number):
        return f"{self.folder}/{number}"


def test_blocks_with_and_without_scores_are_merged(tmp_path):
    """As where a stage scores one source alone, and where nothing was left of a block."""
    for block, scores in enumerate([(), (("quality", 0.5),), (), None]):
        documents = [] if scores is None else [Document(f"{block}{i}", scores=scores) for i in range(2)]
        rows = to_table(documents).append_column("key", pa.array(range(block, block + len(documents)), pa.uint64()))
        rows = rows.append_column("tokens", pa.array([block + 1] * len(documents), pa.int64()))
        write_table(tmp_path / f"{block}.arrow", rows, packed=False)
        np.full((block + 1) * len(documents), block, np.uint16).tofile(tmp_path / f"{block}.ids")
    call = Shuffle(Written(str(tmp_path)), str(tmp_path), 4, 1, span=8)
    ids, rows = io.BytesIO(), io.BytesIO()
    write_merged(call, ids, rows)
    table = pa.ipc.open_file(pa.py_buffer(rows.getvalue())).read_all()
    assert table.column("text").to_pylist() == ["00", "01", "10", "11", "20", "21"]
    assert table.column("score.quality").to_pylist() == [None, None, 0.5, 0.5, None, None]
    assert np.frombuffer(ids.getvalue(), np.uint16).tolist() == [0, 0, 1, 1, 1, 1, *[2] * 6]
