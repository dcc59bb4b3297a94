"""Connected components of more pairs of duplicates than memory holds: what goes, and the item that is kept for it.

Items are cut into ranges, each of which has a file of pairs, those whose larger item is in the range, and about as many
as another. First down: a range's pairs are united in memory. Where they link items of lower ranges with each other,
that is one more pair of a lower range. Of its own items each has then one smaller item that it goes with, in a lower
range or, being the smallest that it is linked to, in this one. Then up: a range whose items' keepers are known answers
those that went with one of them. (What Chiang et al. call time-forward processing: External-Memory Graph Algorithms,
SODA 1995.) Every pair is read and written a few times, whatever its component looks like, and one range is in memory at
a time.
"""

import collections
import heapq
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxscale.corpus.prepare.join import components
from jaxscale.system.paths import replacing

PAIR_BYTES = 128  # of memory for a pair that is united, measured
LARGEST = 5  # groups of duplicates that a report shows
BINS = 1 << 20  # of items, whose pairs are counted before they are cut into ranges: 8 MiB
EDGES = (2, 3, 4, 5, 10, 100, 1000, 1 << 62)  # of a histogram of their sizes


class Ranges:
    """Rows of numbers, uint64[k, 2], in one file for each range of the first one."""

    def __init__(self, folder: pathlib.Path, bounds: np.ndarray, memory_bytes: int):
        self.folder, self.bounds, self.memory_bytes = folder, bounds, memory_bytes  # of each range, the first key
        self.held: dict[int, list[np.ndarray]] = collections.defaultdict(list)
        self.held_bytes = 0
        folder.mkdir(parents=True)

    def add(self, rows: np.ndarray) -> None:
        """Takes rows in any order. They are written when there are enough of them."""
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        for number, part in enumerate(np.split(rows, np.searchsorted(rows[:, 0], self.bounds[1:]))):
            if len(part):
                self.held[number].append(part.copy())
        self.held_bytes += rows.nbytes
        if self.held_bytes > self.memory_bytes:
            self.write()

    def write(self) -> None:
        """Writes what is held."""
        for number, parts in self.held.items():
            with open(self.folder / f"{number:06d}", "ab") as file:
                file.writelines(part.data for part in parts)
        self.held.clear()
        self.held_bytes = 0

    def parts(self, number: int) -> Iterator[np.ndarray]:
        """The rows of a range, a bounded number at a time, which are let go: one item may have more copies than fit."""
        for part in self.held.pop(number, ()):
            self.held_bytes -= part.nbytes
            yield part
        path = self.folder / f"{number:06d}"
        if path.exists():
            with open(path, "rb") as file:
                while len(part := np.fromfile(file, np.uint64, 2 * max(1, self.memory_bytes // 16))):
                    yield part.reshape(-1, 2)
            path.unlink()

    def take(self, number: int) -> np.ndarray:
        """uint64[k, 2]: the rows of a range, which are let go."""
        path = self.folder / f"{number:06d}"
        found = [np.zeros((0, 2), np.uint64), *self.held.pop(number, ())]
        self.held_bytes -= sum(part.nbytes for part in found)
        if path.exists():
            found.append(np.fromfile(path, np.uint64).reshape(-1, 2))
            path.unlink()
        return np.concatenate(found)


def unite(
    pairs: Callable[[], Iterable[np.ndarray]],
    num_pairs: int,
    span: int,
    folder: pathlib.Path,
    output: pathlib.Path,
    memory_bytes: int,
) -> dict[str, Any]:
    """Writes output, uint64[2, k], sorted: the items that go, and the smallest item that each is linked to.

    Args: pairs: gives uint64[k, 2] each: an item and a smaller one; called twice where there are many. num_pairs: of
    all. span: items are below it. folder: that does not exist, for what is in between.
    Returns how many groups have which size, and the keepers of the largest, as plain data.
    """
    count = max(1, -(-num_pairs * PAIR_BYTES // memory_bytes))
    bounds = even_bounds(pairs(), count, span) if count > 1 else np.zeros(1, np.uint64)
    count = len(bounds)
    edges, asked, known, answers, sizes = (
        Ranges(folder / name, bounds, memory_bytes // 8) for name in ("edges", "asked", "known", "answers", "sizes")
    )
    for part in pairs():
        edges.add(part)
    gone = 0
    for number in reversed(range(count)):
        found = edges.take(number)
        rows = np.stack(components(found[:, 0], found[:, 1]), axis=1)
        own = rows[:, 0] >= bounds[number]
        edges.add(rows[~own])
        rows = rows[own]
        final = rows[:, 1] >= bounds[number]
        known.add(rows[final])
        asked.add(rows[~final][:, ::-1])
        gone += len(rows)
    with replacing(output) as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u8", "fortran_order": False, "shape": (2, gone)})
        start, written = file.tell(), 0
        for number in range(count):
            rows = np.concatenate([known.take(number), answers.take(number)])
            rows = rows[np.argsort(rows[:, 0])]
            for column in (0, 1):
                file.seek(start + 8 * (column * gone + written))
                file.write(np.ascontiguousarray(rows[:, column]).data)
            written += len(rows)
            for part in asked.parts(number):
                answers.add(answered(part, rows))
            keepers, copies = np.unique(rows[:, 1], return_counts=True)
            sizes.add(np.stack([keepers, copies.astype(np.uint64)], axis=1))
    assert written == gone, (written, gone)
    return group_facts(sizes.take(number) for number in range(count))


def even_bounds(pairs: Iterable[np.ndarray], count: int, span: int) -> np.ndarray:
    """uint64[at most count]: where ranges of items begin, so that each has about as many pairs, wherever they are."""
    width = -(-span // BINS)
    found = np.zeros(BINS, np.int64)
    for part in pairs:
        bins, counts = np.unique(part[:, 0] // np.uint64(width), return_counts=True)
        found[bins.astype(np.int64)] += counts
    passed = np.cumsum(found)
    cuts = np.searchsorted(passed, passed[-1] * np.arange(1, count) / count, side="right")
    return np.unique(np.append(0, cuts)).astype(np.uint64) * np.uint64(width)


def answered(asked: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """uint64[k, 2]: (item, keeper) for each (smaller item, item), where `rows` has the keepers of those that go."""
    place = np.searchsorted(rows[:, 0], asked[:, 0])
    keepers = asked[:, 0].copy()
    goes = place < len(rows)
    goes[goes] = rows[place[goes], 0] == keepers[goes]
    keepers[goes] = rows[place[goes], 1]
    return np.stack([asked[:, 1], keepers], axis=1)


def group_facts(ranges: Iterable[np.ndarray]) -> dict[str, Any]:
    """Of (keeper, copies), several rows for some keepers: a histogram of group sizes, and the largest groups."""
    binned, largest = np.zeros(len(EDGES) - 1, np.int64), []
    for rows in ranges:
        keepers, place = np.unique(rows[:, 0], return_inverse=True)
        copies = np.bincount(place, rows[:, 1].astype(np.float64), len(keepers)).astype(np.int64)  # exact below 2^53
        binned += np.histogram(copies + 1, EDGES)[0] if len(copies) else 0
        order = np.lexsort((keepers, -copies))[:LARGEST]
        own = zip((-copies[order]).tolist(), keepers[order].tolist())
        largest = heapq.nsmallest(LARGEST, [*largest, *own])
    sizes = [(label(start, stop), int(n)) for start, stop, n in zip(EDGES, EDGES[1:], binned) if n]
    return {"sizes": sizes, "largest": [(keeper, 1 - copies) for copies, keeper in largest]}


def label(start: int, stop: int) -> str:
    """'2', '5 to 9', '1,000 or more'."""
    if stop == start + 1:
        return f"{start}"
    return f"{start:,} or more" if stop == 1 << 62 else f"{start:,} to {stop - 1:,}"
