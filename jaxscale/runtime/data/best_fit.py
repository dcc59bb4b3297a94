"""Best-fit packing of whole documents into rows of T tokens with little padding. The plan is stored on disk.

A document longer than T is cut at multiples of T, and its remainder is packed like a short document. Shuffled documents
are packed in windows (best fit decreasing, as in arXiv:2404.10830), so memory does not grow with the corpus. A full row
contains T tokens of a single document, and a mixed row contains short documents and remainders.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.runtime.data.array_folder import Arrays, ArrayWriter, DiskBuckets
from jaxscale.runtime.data.documents import DocumentIndex, bisect_right
from jaxscale.runtime.data.packing import DocumentRows, concat_ranges
from jaxscale.runtime.data.permutation import permuted, unpermuted
from jaxscale.runtime.data.rows import RowPieces

WINDOW = 8192  # documents; filled fraction: 0.984 with 256, 0.991 with 1,024, 0.994 with 8,192 (mean 812, T 2,048)
VERSION = 1  # version of the plan, part of the fingerprint; increase it if the same documents give different rows
SAMPLE_EVERY = 4  # documents of a window per stored count of preceding full rows
GOOD_FILL = 0.995  # filled fraction from which the second heuristic is not tried
CANDIDATES = 64  # number of sizes that best_pair() tries


def pack_window(lengths: np.ndarray, T: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packs one window. Returns (full rows per document, documents in mixed rows, documents per mixed row)."""
    whole, remainders = np.divmod(lengths, T)
    short = np.flatnonzero(remainders)
    bins = pack_bins(remainders[short], T)
    return whole, short[np.argsort(bins, kind="stable")], np.bincount(bins)


def shuffled_lengths(folder: Path, documents: DocumentIndex, part: str, group: int, key: str) -> Iterator[np.ndarray]:
    """Yields the document lengths of a group in shuffled order, as arrays that contain many windows."""
    size, rank = documents.size(part, group), 0
    buckets = DiskBuckets(folder, [("place", "<i8"), ("length", "<i8")], size)
    per_bucket = -(-size // buckets.number)
    width = -(-per_bucket // WINDOW) * WINDOW
    for numbers, lengths in documents.members(part, group):
        if len(numbers):
            positions = unpermuted(np.arange(rank, rank + len(numbers)), size, key)
            buckets.add(positions // width, place=positions % width, length=lengths)
            rank += len(numbers)
    for records in buckets:
        found = np.empty(len(records), np.int64)
        found[records["place"]] = records["length"]
        yield found


def order_key(seed: int, group: int) -> str:
    """Returns the key that determines the permutation of a group's documents."""
    return f"best fit {seed} {group}"


def write_best_fit(out: ArrayWriter, documents: DocumentIndex, part: str, *, seq_len: int, seed: int) -> dict[str, Any]:
    """Writes the plan of the training or validation rows; returns the header entry that BestFitRows reads.

    The size of the plan is 2 bytes per document in a mixed row (index in the window), 2 bytes per mixed row (its first
    document), 4 bytes per SAMPLE_EVERY documents (number of full rows), and 24 bytes per window.
    """
    names = [f"{part}.{name}" for name in ("pieces", "firsts", "whole", "window_rows", "window_rest", "window_pieces")]
    rows = mixed = pieces = 0
    group_rows, group_windows, windows = [0], [0], 0
    for name, dtype in zip(names, ("<u2", "<u2", "<u4", "<i8", "<i8", "<i8")):
        out.append(name, np.zeros(int(dtype == "<i8"), dtype))
    for group in range(len(documents.metadata["members"][part])):
        for lengths in shuffled_lengths(out.folder, documents, part, group, order_key(seed, group)):
            for begin in range(0, len(lengths), WINDOW):
                whole, fillers, counts = pack_window(lengths[begin : begin + WINDOW], seq_len)
                before = np.cumsum(whole) - whole
                sampled = np.full(-(-WINDOW // SAMPLE_EVERY), whole.sum())
                sampled[: -(-len(before) // SAMPLE_EVERY)] = before[::SAMPLE_EVERY]
                rows += int(whole.sum()) + len(counts)
                mixed, pieces, windows = mixed + len(counts), pieces + len(fillers), windows + 1
                found = (fillers, np.cumsum(counts) - counts, sampled, [rows], [mixed], [pieces])
                for name, array in zip(names, found):
                    out.append(name, np.asarray(array))
        group_rows.append(rows)
        group_windows.append(windows)
    plan = {"packing": "best_fit", "seq_len": seq_len, "seed": seed, "window": WINDOW}
    return plan | {"group_rows": group_rows, "group_windows": group_windows}


class BestFitRows(DocumentRows):
    """Rows of `best_fit` packing. If a document continues in another row, the last target is its next token."""

    def __init__(self, documents: DocumentIndex, arrays: Arrays, part: str):
        super().__init__(documents, arrays, part)
        plan = arrays.header["parts"][part]
        self._window, self._windows = plan["window"], np.array(plan["group_windows"], np.int64)
        self._samples_per_window = -(-self._window // SAMPLE_EVERY)

    def _array(self, name: str) -> np.ndarray:
        return self.arrays[f"{self.part}.{name}"]

    def pieces(self, rows: np.ndarray) -> RowPieces:
        self.arrays.check()
        T, windows = self.seq_len, self._array("window_rows").searchsorted(rows, side="right") - 1
        mixed_before, pieces_before = self._array("window_rest"), self._array("window_pieces")
        num_mixed = mixed_before[windows + 1] - mixed_before[windows]
        whole_end = self._array("window_rows")[windows + 1] - num_mixed
        mixed_index = rows - whole_end  # index of the mixed row in the window; negative for a full row
        is_full = mixed_index < 0
        at = mixed_before[windows] + np.maximum(mixed_index, 0)
        begin, end = (self._first_piece(at + more, windows, pieces_before) for more in (0, 1))
        begin[is_full], end[is_full] = 0, 1
        bounds, positions = concat_ranges(begin, end)
        row = np.repeat(np.arange(len(rows)), np.diff(bounds))
        local = np.zeros(len(positions), np.int64)
        part = np.zeros(len(positions), np.int64)
        in_full_row = is_full[row]
        local[~in_full_row] = self._array("pieces")[positions[~in_full_row]]
        local[in_full_row], part[in_full_row] = self._full_rows(
            windows[is_full], (rows - self._array("window_rows")[windows])[is_full]
        )
        documents = self._documents(windows[row], local)
        lengths = self.documents.lengths(documents, self.part)
        part[~in_full_row] = lengths[~in_full_row] // T
        skipped = part * T
        remaining = lengths - skipped
        last = bounds[1:] - 1
        continues = remaining[last] > T
        return RowPieces(
            first=bounds,
            documents=documents,
            skipped=skipped,
            lengths=np.minimum(remaining, T),
            ended=remaining <= T,
            after_documents=np.where(continues, documents[last], -1),
            after_skipped=skipped[last] + T,
        )

    def _first_piece(self, at: np.ndarray, windows: np.ndarray, pieces_before: np.ndarray) -> np.ndarray:
        """Returns the index of the first piece of mixed row `at`, or the end of the pieces after the last mixed row."""
        firsts = self._array("firsts")
        if not len(firsts):
            return np.zeros(len(at), np.int64)
        found = firsts[np.minimum(at, len(firsts) - 1)].astype(np.int64)
        is_end = at >= self._array("window_rest")[windows + 1]
        return np.where(is_end, pieces_before[windows + 1], pieces_before[windows] + found)

    def _full_rows(self, windows: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (position of the document in the window, index of the row in the document) for each full row."""
        sampled, first = self._array("whole"), windows * self._samples_per_window
        at = bisect_right(sampled, first, first + self._samples_per_window, numbers) - 1
        begin = (at - first) * SAMPLE_EVERY
        groups = self._windows.searchsorted(windows, side="right") - 1
        sizes = np.array([self.documents.size(self.part, group) for group in range(self._groups)], np.int64)[groups]
        stop = np.minimum(
            np.minimum(begin + SAMPLE_EVERY, self._window), sizes - (windows - self._windows[groups]) * self._window
        )
        bounds, local = concat_ranges(begin, stop)
        row = np.repeat(np.arange(len(windows)), np.diff(bounds))
        whole = self.documents.lengths(self._documents(windows[row], local), self.part) // self.seq_len
        until = np.cumsum(whole)
        until = until - (until - whole)[bounds[:-1]][row] + sampled[at][row]
        is_before = until <= numbers[row]
        chosen = bounds[:-1] + np.bincount(row, is_before, len(windows)).astype(np.int64)
        return local[chosen], numbers - (until - whole)[chosen]

    def _documents(self, windows: np.ndarray, local: np.ndarray) -> np.ndarray:
        """Returns the documents at positions `local` of the windows."""
        groups = self._windows.searchsorted(windows, side="right") - 1
        found = np.empty(len(windows), np.int64)
        for group in np.unique(groups):
            in_group = groups == group
            positions = (windows[in_group] - self._windows[group]) * self._window + local[in_group]
            ranks = permuted(positions, self.documents.size(self.part, group), order_key(self.seed, group))
            found[in_group] = self.documents.select(self.part, group, ranks)
        return found

    def _rows_of_member(self, group: int, rank: int, document: int) -> np.ndarray:
        size, key = self.documents.size(self.part, group), order_key(self.seed, group)
        window, local = divmod(int(unpermuted(rank, size, key)), self._window)
        window += int(self._windows[group])
        first_row, end_row = self._array("window_rows")[window : window + 2].tolist()
        first_mixed, end_mixed = self._array("window_rest")[window : window + 2].tolist()
        begin, end = self._array("window_pieces")[window : window + 2].tolist()
        earlier = np.arange(local - local % SAMPLE_EVERY, local)
        whole = self.documents.lengths(self._documents(np.full(len(earlier), window), earlier), self.part)
        before = int(self._array("whole")[window * self._samples_per_window + local // SAMPLE_EVERY]) + int(
            (whole // self.seq_len).sum()
        )
        length = int(self.documents.lengths(np.array([document]), self.part)[0])
        found = first_row + before + np.arange(length // self.seq_len)
        document_pieces = np.flatnonzero(self._array("pieces")[begin:end] == local)
        firsts = self._array("firsts")[first_mixed:end_mixed]
        mixed_rows = end_row - (end_mixed - first_mixed) + firsts.searchsorted(document_pieces, side="right") - 1
        return np.concatenate([found, mixed_rows])


def plan_settings(**settings: Any) -> dict[str, Any]:
    """Returns the cache key of a plan, from the given settings and the constants of this module."""
    return {**settings, "window": WINDOW, "version": VERSION}


def pack_bins(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Returns int64[n], the bin of each size. Bins are numbered from 0 without gaps.

    Best fit decreasing fills 0.994 to 0.999 of the bins for web text, which has many small sizes. If all sizes are
    similar, it leaves unused space in every bin, and fill_by_pairs() may need fewer bins.
    """
    bins = best_fit_decreasing(sizes, capacity)
    fewest = -(-int(sizes.sum()) // capacity)
    if not len(sizes) or fewest >= GOOD_FILL * (bins.max() + 1):
        return bins
    other = fill_by_pairs(sizes, capacity)
    return other if other.max() < bins.max() else bins


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Returns int64[n], the bin of each size. Assigns sizes in decreasing order to the fullest bin with enough space.

    Bit r of `open_rooms` is set if a bin has a free space of r, so the lowest set bit of `open_rooms >> size` is the
    smallest sufficient space. This takes 0.4 to 1.4 microseconds per document.
    """
    bins = np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    open_rooms, num_bins, found = 0, 0, []
    for size in sizes[order].tolist():
        fitting = open_rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            same = with_room[room]
            number = same.pop()
            if not same:
                open_rooms ^= 1 << room
            room -= size
        else:
            number, num_bins, room = num_bins, num_bins + 1, capacity - size
        found.append(number)
        if room:
            with_room[room].append(number)
            open_rooms |= 1 << room
    bins[order] = found
    return bins


def fill_by_pairs(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Returns int64[n], the bin of each size. Fills each bin with the largest sizes, and then with the best pair."""
    order = np.argsort(sizes, kind="stable")
    distinct, firsts = np.unique(sizes[order], return_index=True)
    indices_by_size = {size: part.tolist() for size, part in zip(distinct.tolist(), np.split(order, firsts[1:]))}
    remaining = sum(1 << size for size in indices_by_size)
    bins, number = np.empty(len(sizes), np.int64), -1
    while remaining:
        number, room = number + 1, capacity
        while fitting := remaining & ((2 << room) - 1):
            largest = fitting.bit_length() - 1
            chosen = [largest]
            if room <= 3 * largest:
                pair = best_pair(indices_by_size, remaining, fitting, room)
                if sum(pair) == room or room <= 2 * largest and sum(pair) > largest:
                    chosen = pair
            for size in chosen:
                bins[indices_by_size[size].pop()] = number
                room -= size
                if not indices_by_size[size]:
                    remaining ^= 1 << size
    return bins


def best_pair(indices_by_size: dict[int, list[int]], remaining: int, fitting: int, room: int) -> list[int]:
    """Returns the one or two remaining sizes with the largest sum of at most `room`. Tries CANDIDATES pairs."""
    best, untried = [fitting.bit_length() - 1], fitting
    for _ in range(CANDIDATES):
        if not untried or sum(best) == room:
            break
        size = untried.bit_length() - 1
        untried ^= 1 << size
        others = remaining & ((2 << (room - size)) - 1)
        if len(indices_by_size[size]) == 1:
            others &= ~(1 << size)
        if others and size + (other := others.bit_length() - 1) > sum(best):
            best = [size, other]
    return best
