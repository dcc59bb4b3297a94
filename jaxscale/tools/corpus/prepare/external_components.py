"""Connected components of more duplicate pairs than fit in memory: removed items, and the item kept for each.

Items are partitioned into ranges with about equally many pairs; a pair is in the range of its larger item. Downward,
the components within a range are computed in memory; links between items of lower ranges become pairs of those ranges.
Each item of the range then points to one smaller item, in a lower range or, for the smallest of its component, in this
one. Upward, a range whose keepers are known answers the items that point to it (time-forward processing: Chiang et al.,
External-Memory Graph Algorithms, SODA 1995). Every pair is read and written a few times whatever the components look
like, and one range is in memory at a time.
"""

import collections
import heapq
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxscale.system.paths import replacing
from jaxscale.tools.corpus.prepare.sketches import components

PAIR_BYTES = 128  # of memory per pair, measured
LARGEST = 5  # groups of duplicates in the report
BINS = 1 << 20  # of items, whose pairs are counted to choose the ranges: 8 MiB
EDGES = (2, 3, 4, 5, 10, 100, 1000, 1 << 62)  # of the histogram of group sizes


class Ranges:
    """Rows uint64[k, 2] partitioned by their first number, one file for each range."""

    def __init__(self, folder: pathlib.Path, bounds: np.ndarray, memory_bytes: int):
        self.folder, self.bounds, self.memory_bytes = folder, bounds, memory_bytes  # bounds: first key of each range
        self.buffered: dict[int, list[np.ndarray]] = collections.defaultdict(list)
        self.buffered_bytes = 0
        folder.mkdir(parents=True)

    def add(self, rows: np.ndarray) -> None:
        """Adds rows in any order; they are appended to the files when memory_bytes are buffered."""
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
        """Yields and removes the rows of a range in bounded parts: one item may have more copies than fit in memory."""
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
    """Writes output, uint64[2, k], sorted: the removed items, and the smallest item that each is linked to.

    Args: pairs: returns parts uint64[k, 2] of an item and a smaller one; called twice if there are many. num_pairs: in
    all parts. span: upper bound of items. folder: for intermediate files; must not exist.
    Returns the histogram of group sizes and the keepers of the largest groups, as plain data.
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
    """Finds the components within a range: links of lower items go back to `edges`. Returns the number of its items.

    An item points to one of this range, in `resolved`, or to one of a lower range, in `queries`.
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
    """Returns uint64[at most count], the first items of ranges with about equally many pairs."""
    width = -(-span // BINS)
    found = np.zeros(BINS, np.int64)
    for part in pairs:
        bins, counts = np.unique(part[:, 0] // np.uint64(width), return_counts=True)
        found[bins.astype(np.int64)] += counts
    cumulative = np.cumsum(found)
    cuts = np.searchsorted(cumulative, cumulative[-1] * np.arange(1, count) / count, side="right")
    return np.unique(np.append(0, cuts)).astype(np.uint64) * np.uint64(width)


def answer_queries(queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns uint64[k, 2] of (item, keeper) for each (smaller item, item); `rows` has the known (item, keeper)."""
    place = np.searchsorted(rows[:, 0], queries[:, 0])
    keepers = queries[:, 0].copy()
    is_removed = place < len(rows)
    is_removed[is_removed] = rows[place[is_removed], 0] == keepers[is_removed]
    keepers[is_removed] = rows[place[is_removed], 1]
    return np.stack([queries[:, 1], keepers], axis=1)


def group_facts(ranges: Iterable[np.ndarray]) -> dict[str, Any]:
    """Returns a histogram of group sizes and the largest groups. ranges: (keeper, copies), keepers may repeat."""
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
