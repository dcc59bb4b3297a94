"""Sort-merge join over the sketches of all blocks: items with equal keys, one key range at a time.

A block is sketched wherever there is a free process; its file holds (key, item) sorted by key. exchange.py brings equal
keys together, a range of keys to a task. What is found depends neither on the number of ranges nor on the order in
which blocks are done.

A block's number is its place in the list of files, which nobody knows when a block is sketched: files say block 0.
An item is numbered block << 32 | its place in the block, a document's or a line's: in the order of the input, so the
first copy is the one with the smallest number.

The copies of one key are always in one partition, however many, which records.py takes a part at a time.
"""

import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxscale.corpus.curate.hashes import Sketch
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import replacing

BLOCK_BITS, PLACE_BITS = 32, 32  # 64 PiB in blocks of 16 MiB, and no block has as many lines
MOST_BLOCKS, WAY_OUT = 1 << BLOCK_BITS, "pack small files together, or take a larger block_bytes"
MEMORY_BYTES = 256 << 20  # of a partition of a join, in each process
WORK = 4  # bytes of memory per byte of a partition

ReadSignatures = Callable[[np.ndarray], np.ndarray]  # items -> uint32[items, permutations] of their documents


class Parts(NamedTuple):
    """Of each item, where it is."""

    blocks: np.ndarray  # int64[k]
    places: np.ndarray  # int64[k]: of the document in the block, or of the line


def item_numbers(block: int, places: Any) -> np.ndarray:
    """uint64[n]: the items of a block. Raises BadInput where a number has too many bits."""
    places = np.asarray(places, np.uint64)
    for name, value, bits in (("block", block, BLOCK_BITS), ("place in a block", places.max(initial=0), PLACE_BITS)):
        if not 0 <= int(value) < 1 << bits:
            raise BadInput(f"{name} number {int(value)} must be below {1 << bits}; {WAY_OUT}")
    return np.uint64(block) << np.uint64(PLACE_BITS) | places


def parts(items: np.ndarray) -> Parts:
    """(blocks, places) of the items, the inverse of item_numbers."""
    blocks, places = items >> np.uint64(PLACE_BITS), items & np.uint64((1 << PLACE_BITS) - 1)
    return Parts(blocks.astype(np.int64), places.astype(np.int64))


def of_block(items: np.ndarray, block: int) -> slice:
    """The slice of sorted items that lies in a block."""
    first, last = np.uint64(block << PLACE_BITS), np.uint64((block + 1 << PLACE_BITS) - 1)
    return slice(int(np.searchsorted(items, first)), int(np.searchsorted(items, last, side="right")))


def write_sketch(path: str | os.PathLike[str], sketch: Sketch) -> None:
    """Writes a block's sketch, whole or not at all: uint64[m, 2] keys and items, sorted, as a .npy file.

    Signatures lie beside it (signatures_path) and are written first, so where the sketch is, they are.
    """
    rows = np.stack([sketch.keys, item_numbers(0, sketch.places)], axis=1)
    if sketch.signatures is not None:
        save_whole(signatures_path(path), np.ascontiguousarray(sketch.signatures, np.uint32))
    save_whole(pathlib.Path(path), sorted_once(rows))


def signatures_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Where the signatures of the sketch at `path` are: x.npy has x.signatures.npy."""
    return pathlib.Path(path).with_suffix(".signatures.npy")


def save_whole(path: pathlib.Path, array: np.ndarray) -> None:
    """Writes a .npy file such that a reader, or a crash at any moment, sees all of it or nothing."""
    with replacing(path) as file:
        np.save(file, array, allow_pickle=False)


def open_array(path: str | os.PathLike[str]) -> np.memmap:
    """The array of a .npy file, memory-mapped. Raises BadInput that names the file if it is damaged."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise
    except (ValueError, EOFError, OSError) as error:
        raise BadInput(f"{path} is not a whole sketch file ({error}); delete it and prepare again") from None


def num_partitions(total_bytes: int, memory_bytes: int) -> int:
    """How many partitions keep the join of sketch files of total_bytes within memory_bytes.

    Keys are hashes, so partitions are equal but for chance, for which a fifth is left free, and for keys with very many
    copies, whose partition is taken a part at a time.
    """
    return max(1, -(-total_bytes * WORK * 5 // (memory_bytes * 4)))


def pairs_of_keys(rows: np.ndarray, neighbours: int = 0) -> np.ndarray:
    """uint64[k, 2], sorted and each once: (item, first) of each key with several items, each later one with the first.

    Args: rows: uint64[n, 2], (key, item), sorted and each once. neighbours: pair each item also with so many before it
    of the same key. Needed where equal keys only make candidates: if the first of a bucket is unlike the others, those
    others still meet.
    """
    new = np.ones(len(rows), bool)
    new[1:] = rows[1:, 0] != rows[:-1, 0]
    several = ~new
    several[:-1] |= ~new[1:]
    items, new = rows[several, 1], new[several]  # few
    starts, places = np.flatnonzero(new), np.arange(len(items))
    first = np.repeat(starts, np.diff(np.append(starts, len(items))))
    later, earlier = [places[~new]], [first[~new]]
    for distance in range(1, neighbours + 1):
        reach = places - distance > first  # the first itself is paired already
        later.append(places[reach])
        earlier.append(places[reach] - distance)
    return sorted_once(np.stack([items[np.concatenate(later)], items[np.concatenate(earlier)]], axis=1))


def pairs_of_parts(parts: Iterable[np.ndarray], neighbours: int = 0) -> Iterator[np.ndarray]:
    """The pairs of each part of such rows, and of it with those before: a key may go on in the next one."""
    before = np.zeros((0, 2), np.uint64)
    for part in parts:
        rows = np.concatenate([before, part])
        yield pairs_of_keys(rows, neighbours)
        last = rows[rows[:, 0] == rows[-1:, 0]]
        before = np.concatenate([last[:1], last[max(1, len(last) - neighbours) :]])


def sorted_once(rows: np.ndarray) -> np.ndarray:
    """The rows, uint64[k, width], sorted by their first two numbers; each once, by the same two."""
    rows = rows[np.argsort(rows[:, 0], kind="stable")]  # which merges what is sorted already
    same = rows[1:, 0] == rows[:-1, 0]
    if np.any(same & (rows[1:, 1] < rows[:-1, 1])):
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    again = np.flatnonzero(same & (rows[1:, 1] == rows[:-1, 1])) + 1
    return np.delete(rows, again, axis=0) if len(again) else rows


def group_pairs(items: np.ndarray, neighbours: int, most: int) -> Iterator[np.ndarray]:
    """Yields the pairs of one key's items in any order, of so many items at a time, for engines that group.

    A pair that spans two parts may come twice.
    """
    items = np.sort(items)
    rows = (items[begin : begin + most] for begin in range(0, len(items), most))
    yield from pairs_of_parts((np.stack([np.zeros_like(part), part], axis=1) for part in rows), neighbours)


def signature_reader(sketch_of: Callable[[int], str | os.PathLike[str]]) -> ReadSignatures:
    """A function from items to the signatures of their documents, out of the files beside the blocks' sketches.

    Each block is opened once at each call, so items should come in their order.

    sketch_of: the path of a block's sketch.
    """

    def read(items: np.ndarray) -> np.ndarray:
        blocks, documents = parts(items)
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


def alike(left: np.ndarray, right: np.ndarray, threshold: float) -> np.ndarray:
    """bool[n]: whether row i of both, uint32[n, permutations], is equal in at least this share of its numbers.

    That share estimates the Jaccard similarity of two documents by their signatures (Broder, 1997); its standard error
    is at most 0.5 / sqrt(permutations).
    """
    return np.count_nonzero(left == right, axis=1) >= threshold * left.shape[1] - 1e-9  # 0.7 * 10 is above 7


def components(items: np.ndarray, firsts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(items, keepers), uint64[k] each, sorted: each item that is linked to smaller ones, with the smallest of them.

    These are the connected components of the pairs: each root is hooked on to the smallest root that it is paired with,
    then all paths are shortened (Shiloach and Vishkin, 1982), until no pair joins two roots.
    """
    nodes = np.unique(np.concatenate([items, firsts]))
    left, right = np.searchsorted(nodes, items), np.searchsorted(nodes, firsts)
    root = np.arange(len(nodes))
    while len(left):
        np.minimum.at(root, np.maximum(left, right), np.minimum(left, right))
        while not np.array_equal(shorter := root[root], root):
            root = shorter
        left, right = root[left], root[right]
        apart = left != right
        left, right = left[apart], right[apart]
    linked = root != np.arange(len(nodes))
    return nodes[linked], nodes[root[linked]]
