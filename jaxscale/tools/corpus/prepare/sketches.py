"""Sort-merge join over the sketches of all blocks. Finds items with equal keys, one key range at a time.

A block's sketch is a file of (key, item) sorted by key. shuffle.py partitions all sketches by key range. One task per
partition reads it in parts that fit in memory. The result depends neither on the number of ranges nor on the order in
which blocks finish.

An item is block << 32 | index of the document or line in the block, so items are in input order and the first copy is
the smallest item. Sketch files store block 0, since a block's number is unknown when its sketch is written.

Connected components of the pairs give the removed items and the retained item of each. The pairs may exceed the
memory, so items are partitioned into ranges with about equally many pairs. A pair is in the range of its larger item.
First, ranges are processed in descending order. The components within a range are computed in memory, and links between
items of lower ranges become pairs of those ranges. Each item of the range then points to one smaller item, which is in
a lower range, or is the smallest of its component in this range. Then, in ascending order, each range knows its kept
items and answers the items that point to it (time-forward processing: Chiang et al., External-Memory Graph Algorithms,
SODA 1995). Every pair is read and written a few times for any components, and one range is in memory at a time.
"""

import collections
import heapq
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.system.paths import replacing
from jaxscale.tools.corpus.curate.hashes import Sketch

BLOCK_BITS, PLACE_BITS = 32, 32  # enough for 64 PiB in blocks of 16 MiB, and 2^32 lines per block
MAX_BLOCKS, BLOCK_LIMIT_FIX = 1 << BLOCK_BITS, "merge small files, or increase block_bytes"
MEMORY_BYTES = 256 << 20  # memory per process, for one partition of a join
MEMORY_FACTOR = 4  # bytes of memory per byte of a partition
PAIR_BYTES = 128  # memory per pair, measured
LARGEST = 5  # groups of duplicates in the report
BINS = 1 << 20  # histogram bins of items, for choosing the ranges: 8 MiB
EDGES = (2, 3, 4, 5, 10, 100, 1000, 1 << 62)  # bin edges of the histogram of group sizes


def item_numbers(block: int, places: Any) -> np.ndarray:
    """Returns uint64[n], the item numbers for `places` in a block. Raises BadInput if a number needs too many bits."""
    places = np.asarray(places, np.uint64)
    for name, value, bits in (("block", block, BLOCK_BITS), ("item in a block", places.max(initial=0), PLACE_BITS)):
        if not 0 <= int(value) < 1 << bits:
            raise BadInput(f"{name} number {int(value)} must be below {1 << bits}; {BLOCK_LIMIT_FIX}")
    return np.uint64(block) << np.uint64(PLACE_BITS) | places


def split_items(items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (blocks, indices in the blocks) of items, int64[k] each. Inverse of item_numbers."""
    blocks, places = items >> np.uint64(PLACE_BITS), items & np.uint64((1 << PLACE_BITS) - 1)
    return blocks.astype(np.int64), places.astype(np.int64)


def block_slice(items: np.ndarray, block: int) -> slice:
    """Returns the slice of sorted items that belong to a block."""
    first, last = np.uint64(block << PLACE_BITS), np.uint64((block + 1 << PLACE_BITS) - 1)
    return slice(int(np.searchsorted(items, first)), int(np.searchsorted(items, last, side="right")))


def write_sketch(path: str | os.PathLike[str], sketch: Sketch) -> None:
    """Writes a block's signatures, if any, and then its sketch: (key, item), uint64[m, 2], sorted."""
    rows = np.stack([sketch.keys, item_numbers(0, sketch.places)], axis=1)
    if sketch.signatures is not None:
        save_array(signatures_path(path), np.ascontiguousarray(sketch.signatures, np.uint32))
    save_array(pathlib.Path(path), sort_unique(rows))


def signatures_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of the signatures of a sketch: x.signatures.npy for x.npy."""
    return pathlib.Path(path).with_suffix(".signatures.npy")


def save_array(path: pathlib.Path, array: np.ndarray) -> None:
    """Writes a .npy file atomically."""
    with replacing(path) as file:
        np.save(file, array, allow_pickle=False)


def open_array(path: str | os.PathLike[str]) -> np.memmap:
    """Returns the array of a .npy file, memory-mapped. Raises BadInput with the path if the file is damaged."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise
    except (ValueError, EOFError, OSError) as error:
        raise BadInput(f"{path} is not a complete sketch file ({error}); delete it and prepare again") from None


def num_partitions(total_bytes: int, memory_bytes: int) -> int:
    """Returns how many partitions sketches of total_bytes need, so that a join of one partition fits in memory_bytes.

    Keys are hashes, so partition sizes differ only by chance. A margin of 20% allows for that.
    """
    return max(1, -(-total_bytes * MEMORY_FACTOR * 5 // (memory_bytes * 4)))


def pair_equal_keys(rows: np.ndarray, neighbours: int = 0) -> np.ndarray:
    """Returns uint64[k, 2], sorted and unique: (item, first item with the same key) for each repeated key.

    rows: (key, item), uint64[n, 2], sorted and unique. Each item is also paired with its `neighbours` preceding
    items with the same key, so that candidates are compared even if they differ from the first item.
    """
    new = np.ones(len(rows), bool)
    new[1:] = rows[1:, 0] != rows[:-1, 0]
    repeated = ~new
    repeated[:-1] |= ~new[1:]
    items, new = rows[repeated, 1], new[repeated]  # repeated keys are rare
    starts, places = np.flatnonzero(new), np.arange(len(items))
    first = np.repeat(starts, np.diff(np.append(starts, len(items))))
    later, earlier = [places[~new]], [first[~new]]
    for distance in range(1, neighbours + 1):
        reach = places - distance > first  # pairs with the first item are added above
        later.append(places[reach])
        earlier.append(places[reach] - distance)
    return sort_unique(np.stack([items[np.concatenate(later)], items[np.concatenate(earlier)]], axis=1))


def pair_chunks(parts: Iterable[np.ndarray], neighbours: int = 0) -> Iterator[np.ndarray]:
    """Yields the pairs of pair_equal_keys() for rows that arrive in parts. Equal keys may span several parts."""
    before = np.zeros((0, 2), np.uint64)
    for part in parts:
        rows = np.concatenate([before, part])
        yield pair_equal_keys(rows, neighbours)
        last = rows[rows[:, 0] == rows[-1:, 0]]
        before = np.concatenate([last[:1], last[max(1, len(last) - neighbours) :]])


def sort_unique(rows: np.ndarray) -> np.ndarray:
    """Returns the rows, uint64[k, width], sorted and unique by their first two numbers."""
    rows = rows[np.argsort(rows[:, 0], kind="stable")]  # stable sort merges sorted runs in linear time
    same = rows[1:, 0] == rows[:-1, 0]
    if np.any(same & (rows[1:, 1] < rows[:-1, 1])):
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    duplicates = np.flatnonzero(same & (rows[1:, 1] == rows[:-1, 1])) + 1
    return np.delete(rows, duplicates, axis=0) if len(duplicates) else rows


def read_signatures(items: np.ndarray, sketch_of: Callable[[int], str | os.PathLike[str]]) -> np.ndarray:
    """Returns uint32[items, permutations], signatures of the items' documents. sketch_of(block): path."""
    blocks, documents = split_items(items)
    order = np.lexsort((documents, blocks))
    starts = np.flatnonzero(np.diff(blocks[order], prepend=-1))
    signatures = np.empty((0, 0), np.uint32)
    for places in np.split(order, starts[1:]) if len(items) else ():
        found = open_array(signatures_path(sketch_of(int(blocks[places[0]]))))
        if not len(signatures):
            signatures = np.empty((len(items), found.shape[1]), np.uint32)
        signatures[places] = found[documents[places]]
    return signatures


def is_similar(left: np.ndarray, right: np.ndarray, threshold: float) -> np.ndarray:
    """Returns bool[n], True where two signatures agree in at least a fraction `threshold` of their numbers.

    Signatures are rows of `left` and `right`, uint32[n, permutations]. The fraction estimates the Jaccard similarity of
    two documents (Broder, 1997) with a standard error of at most 0.5 / sqrt(permutations).
    """
    return np.count_nonzero(left == right, axis=1) >= threshold * left.shape[1] - 1e-9  # in floats, 0.7 * 10 exceeds 7


def components(items: np.ndarray, firsts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (items, smallest item of each item's component), uint64[k] each, sorted. Omits the smallest items.

    Connected components are found by hooking and pointer jumping (Shiloach and Vishkin, 1982): each root is attached to
    the smallest root that it is paired with, and all paths are shortened, until no pair connects two roots.
    """
    nodes = np.unique(np.concatenate([items, firsts]))
    left, right = np.searchsorted(nodes, items), np.searchsorted(nodes, firsts)
    root = np.arange(len(nodes))
    while len(left):
        np.minimum.at(root, np.maximum(left, right), np.minimum(left, right))
        while not np.array_equal(shorter := root[root], root):
            root = shorter
        left, right = root[left], root[right]
        is_unmerged = left != right
        left, right = left[is_unmerged], right[is_unmerged]
    linked = root != np.arange(len(nodes))
    return nodes[linked], nodes[root[linked]]


class Ranges:
    """Rows, uint64[k, 2], partitioned into ranges of their first number. Each range has one file."""

    def __init__(self, folder: pathlib.Path, bounds: np.ndarray, memory_bytes: int):
        self.folder, self.bounds, self.memory_bytes = folder, bounds, memory_bytes  # bounds: first key of each range
        self.buffered: dict[int, list[np.ndarray]] = collections.defaultdict(list)
        self.buffered_bytes = 0
        folder.mkdir(parents=True)

    def add(self, rows: np.ndarray) -> None:
        """Adds rows in any order. Appends them to the files once more than memory_bytes are buffered."""
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        for number, part in enumerate(np.split(rows, np.searchsorted(rows[:, 0], self.bounds[1:]))):
            if len(part):
                self.buffered[number].append(part.copy())
        self.buffered_bytes += rows.nbytes
        if self.buffered_bytes <= self.memory_bytes:
            return
        for number, parts in self.buffered.items():
            with open(self.folder / f"{number:06d}", "ab") as file:
                file.writelines(part.data for part in parts)
        self.buffered.clear()
        self.buffered_bytes = 0

    def pop_chunks(self, number: int) -> Iterator[np.ndarray]:
        """Yields the rows of a range in parts, since they may not fit in memory. Deletes the rows."""
        for part in self.buffered.pop(number, ()):
            self.buffered_bytes -= part.nbytes
            yield part
        path = self.folder / f"{number:06d}"
        if path.exists():
            with open(path, "rb") as file:
                while len(part := np.fromfile(file, np.uint64, 2 * max(1, self.memory_bytes // 16))):
                    yield part.reshape(-1, 2)
            path.unlink()

    def pop_rows(self, number: int) -> np.ndarray:
        """Removes and returns the rows of a range, uint64[k, 2]."""
        return np.concatenate([np.zeros((0, 2), np.uint64), *self.pop_chunks(number)])


def external_components(
    pairs: Callable[[], Iterable[np.ndarray]],
    num_pairs: int,
    span: int,
    folder: pathlib.Path,
    output: pathlib.Path,
    memory_bytes: int,
) -> dict[str, Any]:
    """Writes uint64[2, k] to `output`, sorted: the removed items, and the item that is kept instead of each of them.

    pairs: returns num_pairs pairs (item, smaller item), uint64[k, 2], in parts. It is called twice if there are many.
    span: upper bound of the items. folder: folder for intermediate files, which must not exist.
    Returns a histogram of group sizes and the kept items of the largest groups, as plain data.
    """
    count = max(1, -(-num_pairs * PAIR_BYTES // memory_bytes))
    bounds = even_bounds(pairs(), count, span) if count > 1 else np.zeros(1, np.uint64)
    count = len(bounds)
    names = ("edges", "asked", "known", "answers", "sizes")
    edges, queries, resolved, answers, sizes = (Ranges(folder / name, bounds, memory_bytes // 8) for name in names)
    for part in pairs():
        edges.add(part)
    num_removed = sum(point_down(number, edges, resolved, queries) for number in reversed(range(count)))
    with replacing(output) as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u8", "fortran_order": False, "shape": (2, num_removed)})
        start, written = file.tell(), 0
        for number in range(count):
            rows = np.concatenate([resolved.pop_rows(number), answers.pop_rows(number)])
            rows = rows[np.argsort(rows[:, 0])]
            for column in (0, 1):
                file.seek(start + 8 * (column * num_removed + written))
                file.write(np.ascontiguousarray(rows[:, column]).data)
            written += len(rows)
            for part in queries.pop_chunks(number):
                answers.add(answer_queries(part, rows))
            keepers, copies = np.unique(rows[:, 1], return_counts=True)
            sizes.add(np.stack([keepers, copies.astype(np.uint64)], axis=1))
    assert written == num_removed, (written, num_removed)
    return group_facts(sizes.pop_rows(number) for number in range(count))


def point_down(number: int, edges: Ranges, resolved: Ranges, queries: Ranges) -> int:
    """Links the items of a range to smaller items. Adds pairs of lower items to `edges`. Returns the number of links.

    Items linked to an item of this range are added to `resolved`, and items linked to a lower range to `queries`.
    """
    rows = np.stack(components(*edges.pop_rows(number).T), axis=1)
    is_local = rows[:, 0] >= edges.bounds[number]
    edges.add(rows[~is_local])
    rows = rows[is_local]
    is_resolved = rows[:, 1] >= edges.bounds[number]
    resolved.add(rows[is_resolved])
    queries.add(rows[~is_resolved][:, ::-1])
    return len(rows)


def even_bounds(pairs: Iterable[np.ndarray], count: int, span: int) -> np.ndarray:
    """Returns uint64[at most count], the first item of each range. All ranges have about equally many pairs."""
    width = -(-span // BINS)
    found = np.zeros(BINS, np.int64)
    for part in pairs:
        bins, counts = np.unique(part[:, 0] // np.uint64(width), return_counts=True)
        found[bins.astype(np.int64)] += counts
    cumulative = np.cumsum(found)
    cuts = np.searchsorted(cumulative, cumulative[-1] * np.arange(1, count) / count, side="right")
    return np.unique(np.append(0, cuts)).astype(np.uint64) * np.uint64(width)


def answer_queries(queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Answers queries (smaller item, item) with (item, kept item), uint64[k, 2]. rows: (removed item, kept item)."""
    place = np.searchsorted(rows[:, 0], queries[:, 0])
    keepers = queries[:, 0].copy()
    is_removed = place < len(rows)
    is_removed[is_removed] = rows[place[is_removed], 0] == keepers[is_removed]
    keepers[is_removed] = rows[place[is_removed], 1]
    return np.stack([queries[:, 1], keepers], axis=1)


def group_facts(ranges: Iterable[np.ndarray]) -> dict[str, Any]:
    """Returns a histogram of group sizes and the largest groups. ranges: (kept item, number of copies), in parts."""
    binned, largest = np.zeros(len(EDGES) - 1, np.int64), []
    bins = zip(EDGES, EDGES[1:])
    labels = [f"{start}" if stop == start + 1 else f"{start:,} to {stop - 1:,}" for start, stop in bins]
    labels[-1] = f"{EDGES[-2]:,} or more"
    for rows in ranges:
        keepers, place = np.unique(rows[:, 0], return_inverse=True)
        copies = np.bincount(place, rows[:, 1].astype(np.float64), len(keepers)).astype(np.int64)  # exact below 2^53
        binned += np.histogram(copies + 1, EDGES)[0] if len(copies) else 0
        order = np.lexsort((keepers, -copies))[:LARGEST]
        candidates = zip((-copies[order]).tolist(), keepers[order].tolist())
        largest = heapq.nsmallest(LARGEST, [*largest, *candidates])
    sizes = [(label, int(n)) for label, n in zip(labels, binned) if n]
    return {"sizes": sizes, "largest": [(keeper, 1 - copies) for copies, keeper in largest]}
