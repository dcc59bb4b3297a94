"""Sort-merge join over the sketches of all blocks: finds items with equal keys, one key range at a time.

A block's sketch is a file of (key, item) sorted by key. shuffle.py partitions all sketches by key range, a task for
each, and reads a partition in parts that fit in memory. The result depends neither on the number of ranges nor on the
order in which blocks finish.

An item is block << 32 | index of the document or line in the block, so items are in input order and the first copy has
the smallest item. Sketch files store block 0, since a block's number is unknown when it is sketched.
"""

import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.system.paths import replacing
from jaxscale.tools.corpus.curate.hashes import Sketch

BLOCK_BITS, PLACE_BITS = 32, 32  # 64 PiB in blocks of 16 MiB; no block has 2^32 lines
MAX_BLOCKS, BLOCK_LIMIT_FIX = 1 << BLOCK_BITS, "pack small files together, or take a larger block_bytes"
MEMORY_BYTES = 256 << 20  # per process, for one partition of a join
MEMORY_FACTOR = 4  # bytes of memory per byte of a partition

ReadSignatures = Callable[[np.ndarray], np.ndarray]  # items -> uint32[items, permutations] of their documents


def item_numbers(block: int, places: Any) -> np.ndarray:
    """Returns uint64[n], the items of a block. Raises BadInput if a number needs too many bits."""
    places = np.asarray(places, np.uint64)
    for name, value, bits in (("block", block, BLOCK_BITS), ("place in a block", places.max(initial=0), PLACE_BITS)):
        if not 0 <= int(value) < 1 << bits:
            raise BadInput(f"{name} number {int(value)} must be below {1 << bits}; {BLOCK_LIMIT_FIX}")
    return np.uint64(block) << np.uint64(PLACE_BITS) | places


def split_items(items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (blocks, places in them), int64[k] each, of the items: the inverse of item_numbers."""
    blocks, places = items >> np.uint64(PLACE_BITS), items & np.uint64((1 << PLACE_BITS) - 1)
    return blocks.astype(np.int64), places.astype(np.int64)


def block_slice(items: np.ndarray, block: int) -> slice:
    """Returns the slice of sorted items that belong to a block."""
    first, last = np.uint64(block << PLACE_BITS), np.uint64((block + 1 << PLACE_BITS) - 1)
    return slice(int(np.searchsorted(items, first)), int(np.searchsorted(items, last, side="right")))


def write_sketch(path: str | os.PathLike[str], sketch: Sketch) -> None:
    """Writes a block's sketch, uint64[m, 2] of sorted (key, item), after its signatures: a sketch implies them."""
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
    """Returns the array of a .npy file, memory-mapped. Raises BadInput naming the file if it is damaged."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise
    except (ValueError, EOFError, OSError) as error:
        raise BadInput(f"{path} is not a whole sketch file ({error}); delete it and prepare again") from None


def num_partitions(total_bytes: int, memory_bytes: int) -> int:
    """Returns the number of partitions with which the join of total_bytes of sketches fits in memory_bytes.

    Keys are hashes, so partition sizes differ only by chance, for which 20% is left free.
    """
    return max(1, -(-total_bytes * MEMORY_FACTOR * 5 // (memory_bytes * 4)))


def pair_equal_keys(rows: np.ndarray, neighbours: int = 0) -> np.ndarray:
    """Returns uint64[k, 2], sorted and unique: (item, first item of its key) for each repeated key.

    Args: rows: uint64[n, 2], sorted and unique (key, item). neighbours: also pair each item with as many earlier
    items of its key. Needed for candidates: if the first of a bucket differs from the others, the others still meet.
    """
    new = np.ones(len(rows), bool)
    new[1:] = rows[1:, 0] != rows[:-1, 0]
    repeated = ~new
    repeated[:-1] |= ~new[1:]
    items, new = rows[repeated, 1], new[repeated]  # few
    starts, places = np.flatnonzero(new), np.arange(len(items))
    first = np.repeat(starts, np.diff(np.append(starts, len(items))))
    later, earlier = [places[~new]], [first[~new]]
    for distance in range(1, neighbours + 1):
        reach = places - distance > first  # the first item is paired above
        later.append(places[reach])
        earlier.append(places[reach] - distance)
    return sort_unique(np.stack([items[np.concatenate(later)], items[np.concatenate(earlier)]], axis=1))


def pair_chunks(parts: Iterable[np.ndarray], neighbours: int = 0) -> Iterator[np.ndarray]:
    """Yields the pairs within each part and with the part before, since a key may continue in the next part."""
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


def group_pairs(items: np.ndarray, neighbours: int, max_items: int) -> Iterator[np.ndarray]:
    """Yields the pairs of one key's items, given in any order, `max_items` at a time; some may occur twice."""
    items = np.sort(items)
    rows = (items[begin : begin + max_items] for begin in range(0, len(items), max_items))
    yield from pair_chunks((np.stack([np.zeros_like(part), part], axis=1) for part in rows), neighbours)


def signature_reader(sketch_of: Callable[[int], str | os.PathLike[str]]) -> ReadSignatures:
    """Returns a function from items to the signatures of their documents. sketch_of: path of a block's sketch."""

    def read(items: np.ndarray) -> np.ndarray:
        blocks, documents = split_items(items)
        order = np.lexsort((documents, blocks))
        starts = np.flatnonzero(np.diff(blocks[order], prepend=-1))
        rows = [places for places in np.split(order, starts[1:]) if len(places)]
        signatures = None
        for places in rows:
            found = open_array(signatures_path(sketch_of(int(blocks[places[0]]))))
            if signatures is None:
                signatures = np.empty((len(items), found.shape[1]), np.uint32)
            signatures[places] = found[documents[places]]
        return np.empty((0, 0), np.uint32) if signatures is None else signatures

    return read


def is_similar(left: np.ndarray, right: np.ndarray, threshold: float) -> np.ndarray:
    """Returns bool[n], True where rows of two uint32[n, permutations] agree in at least a share `threshold` of numbers.

    The share estimates the Jaccard similarity of two documents (Broder, 1997) with a standard error of at most
    0.5 / sqrt(permutations).
    """
    return np.count_nonzero(left == right, axis=1) >= threshold * left.shape[1] - 1e-9  # float 0.7 * 10 exceeds 7


def components(items: np.ndarray, firsts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (items, keepers), uint64[k] each, sorted: each item linked to smaller ones, and the smallest of them.

    Connected components by hooking and pointer jumping (Shiloach and Vishkin, 1982): each root is attached to the
    smallest root that it is paired with and all paths are shortened, until no pair joins two roots.
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
