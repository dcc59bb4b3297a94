"""Best-fit packing: whole documents into rows of T so that hardly a position is left, planned once and kept on disk.

A document longer than a row is cut at multiples of T; what remains of it is packed like a short one. Windows of
documents in a shuffled order are packed one after the other (best fit decreasing, as in arXiv:2404.10830), so that the
memory for it is bounded whatever the corpus.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.array_folder import Arrays, ArrayWriter, Buckets
from jaxscale.data.bins import pack_bins
from jaxscale.data.documents import Documents, bisect
from jaxscale.data.packing import DocumentRows, ranges
from jaxscale.data.permutation import permuted, unpermuted
from jaxscale.data.rows import Pieces

WINDOW = 8192  # documents; 256 fill 0.984 of the rows, 1,024 0.991, 8,192 0.994 (mean document 812, T 2,048)
VERSION = 1  # of the plan: another number where the same documents would get other rows
SAMPLED = 4  # documents of a window between two of which it is kept how many whole rows come before


class Window(NamedTuple):
    """The rows of one window: first those that one piece fills, then the others."""

    whole: np.ndarray  # int64[n]: how many rows each of its documents fills alone
    pieces: np.ndarray  # int64[p]: the documents, by their places in the window, whose rest fills the other rows
    counts: np.ndarray  # int64[rows]: how many of the pieces each of these has


def pack_window(lengths: np.ndarray, T: int) -> Window:
    """Rows for documents of these lengths."""
    whole, rest = np.divmod(lengths, T)
    left = np.flatnonzero(rest)
    bins = pack_bins(rest[left], T)
    return Window(whole, left[np.argsort(bins, kind="stable")], np.bincount(bins))


def shuffled_lengths(folder: Path, documents: Documents, part: str, group: int, key: str) -> Iterator[np.ndarray]:
    """Yields the lengths of a group's documents in the shuffled order, many windows at a time."""
    size, turn = documents.size(part, group), 0
    buckets = Buckets.of(folder, [("place", "<i8"), ("length", "<i8")], size)
    per_bucket = -(-size // buckets.number)
    width = -(-per_bucket // WINDOW) * WINDOW
    for numbers, lengths in documents.members(part, group):
        if len(numbers):
            places = unpermuted(np.arange(turn, turn + len(numbers)), size, key)
            buckets.add(places // width, place=places % width, length=lengths)
            turn += len(numbers)
    for records in buckets:
        found = np.empty(len(records), np.int64)
        found[records["place"]] = records["length"]
        yield found


def order_key(seed: int, group: int) -> str:
    """What the shuffled order of a group's documents hangs on."""
    return f"best fit {seed} {group}"


def write_best_fit(out: ArrayWriter, documents: Documents, part: str, *, seq_len: int, seed: int) -> dict[str, Any]:
    """Plans the rows of a part window by window, and returns what BestFitRows needs to know of it.

    A window's documents are those at its places of the shuffled order, which is arithmetic: so a piece is 2 bytes, its
    place in the window, and so is a row, its first piece in the window. How many whole rows a document fills is in its
    length; their sum up to each SAMPLED-th is 4 bytes. For a window there are 24 bytes.
    """
    names = [f"{part}.{name}" for name in ("pieces", "firsts", "whole", "window_rows", "window_rest", "window_pieces")]
    rows = rest = pieces = 0
    group_rows, group_windows, windows = [0], [0], 0
    for name, dtype in zip(names, ("<u2", "<u2", "<u4", "<i8", "<i8", "<i8")):
        out.append(name, np.zeros(int(dtype == "<i8"), dtype))
    for group in range(len(documents.about["members"][part])):
        for lengths in shuffled_lengths(out.folder, documents, part, group, order_key(seed, group)):
            for begin in range(0, len(lengths), WINDOW):
                window = pack_window(lengths[begin : begin + WINDOW], seq_len)
                firsts = np.cumsum(window.counts) - window.counts
                before = np.cumsum(window.whole) - window.whole
                sampled = np.full(-(-WINDOW // SAMPLED), window.whole.sum())
                sampled[: -(-len(before) // SAMPLED)] = before[::SAMPLED]
                rows += int(window.whole.sum()) + len(firsts)
                rest, pieces, windows = rest + len(firsts), pieces + len(window.pieces), windows + 1
                found = (window.pieces, firsts, sampled, *(np.array([end]) for end in (rows, rest, pieces)))
                for name, array in zip(names, found):
                    out.append(name, array)
        group_rows.append(rows)
        group_windows.append(windows)
    about = {"packing": "best_fit", "seq_len": seq_len, "seed": seed, "window": WINDOW}
    return about | {"group_rows": group_rows, "group_windows": group_windows}


class BestFitRows(DocumentRows):
    """`best_fit`: every document that fits into a row lies whole in one, and no token is left out or seen twice.

    A document's target behind the cut between two of its pieces counts as any other. The rows of a window are not
    shuffled here.
    """

    def __init__(self, documents: Documents, arrays: Arrays, part: str):
        super().__init__(documents, arrays, part)
        plan = arrays.header["parts"][part]
        self._window, self._windows = plan["window"], np.array(plan["group_windows"], np.int64)
        self._sampled = -(-self._window // SAMPLED)

    def _array(self, name: str) -> np.ndarray:
        return self.arrays[f"{self.part}.{name}"]

    def pieces(self, rows: np.ndarray) -> Pieces:
        """What the rows int64[m] are made of."""
        self.arrays.check()
        T, windows = self.seq_len, self._array("window_rows").searchsorted(rows, side="right") - 1
        rest_before, pieces_before = self._array("window_rest"), self._array("window_pieces")
        num_rest = rest_before[windows + 1] - rest_before[windows]
        whole_end = self._array("window_rows")[windows + 1] - num_rest
        behind = rows - whole_end  # which of the window's rows of several pieces; below 0: a whole one
        is_whole = behind < 0
        at = rest_before[windows] + np.maximum(behind, 0)
        begin, end = (self._first_piece(at + more, windows, pieces_before) for more in (0, 1))
        begin[is_whole], end[is_whole] = 0, 1
        bounds, places = ranges(begin, end)
        row = np.repeat(np.arange(len(rows)), np.diff(bounds))
        local = np.zeros(len(places), np.int64)
        part = np.zeros(len(places), np.int64)
        single = is_whole[row]
        local[~single] = self._array("pieces")[places[~single]]
        local[single], part[single] = self._whole(
            windows[is_whole], (rows - self._array("window_rows")[windows])[is_whole]
        )
        documents = self._documents(windows[row], local)
        lengths = self.documents.lengths(documents, self.part)
        part[~single] = lengths[~single] // T
        skipped = part * T
        remaining = lengths - skipped
        last = bounds[1:] - 1
        goes_on = remaining[last] > T
        return Pieces(
            first=bounds,
            documents=documents,
            skipped=skipped,
            lengths=np.minimum(remaining, T),
            ended=remaining <= T,
            after_documents=np.where(goes_on, documents[last], -1),
            after_skipped=skipped[last] + T,
        )

    def _first_piece(self, at: np.ndarray, windows: np.ndarray, pieces_before: np.ndarray) -> np.ndarray:
        """The first piece of rows of several pieces, of which those of a window may be one too many: its end."""
        firsts = self._array("firsts")
        if not len(firsts):
            return np.zeros(len(at), np.int64)
        found = firsts[np.minimum(at, len(firsts) - 1)].astype(np.int64)
        is_end = at >= self._array("window_rest")[windows + 1]
        return np.where(is_end, pieces_before[windows + 1], pieces_before[windows] + found)

    def _whole(self, windows: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(place of its document in the window, which of that document's) of each whole row of a window."""
        sampled, first = self._array("whole"), windows * self._sampled
        at = bisect(sampled, first, first + self._sampled, numbers) - 1
        begin = (at - first) * SAMPLED
        groups = self._windows.searchsorted(windows, side="right") - 1
        sizes = np.array([self.documents.size(self.part, group) for group in range(self._groups)], np.int64)[groups]
        stop = np.minimum(
            np.minimum(begin + SAMPLED, self._window), sizes - (windows - self._windows[groups]) * self._window
        )
        bounds, local = ranges(begin, stop)
        row = np.repeat(np.arange(len(windows)), np.diff(bounds))
        whole = self.documents.lengths(self._documents(windows[row], local), self.part) // self.seq_len
        until = np.cumsum(whole)
        until = until - (until - whole)[bounds[:-1]][row] + sampled[at][row]
        is_before = until <= numbers[row]
        chosen = bounds[:-1] + np.bincount(row, is_before, len(windows)).astype(np.int64)
        return local[chosen], numbers - (until - whole)[chosen]

    def _documents(self, windows: np.ndarray, local: np.ndarray) -> np.ndarray:
        """The documents at places of windows."""
        groups = self._windows.searchsorted(windows, side="right") - 1
        found = np.empty(len(windows), np.int64)
        for group in np.unique(groups):
            here = groups == group
            places = (windows[here] - self._windows[group]) * self._window + local[here]
            turns = permuted(places, self.documents.size(self.part, group), order_key(self.seed, group))
            found[here] = self.documents.select(self.part, group, turns)
        return found

    def rows_of(self, document: int) -> np.ndarray:
        """int64: the rows that hold a piece of the document, in order; none where the part does not have it."""
        self.arrays.check()
        for group in range(self._groups):
            turn = self.documents.rank(self.part, group, document)
            if turn is not None:
                place = int(
                    unpermuted(np.array([turn]), self.documents.size(self.part, group), order_key(self.seed, group))[0]
                )
                window, local = divmod(place, self._window)
                return self._rows_in(int(self._windows[group]) + window, local, document)
        return np.zeros(0, np.int64)

    def _rows_in(self, window: int, local: int, document: int) -> np.ndarray:
        """The rows of the document at a place of a window."""
        first_row, end_row = self._array("window_rows")[window : window + 2].tolist()
        first_rest, end_rest = self._array("window_rest")[window : window + 2].tolist()
        begin, end = self._array("window_pieces")[window : window + 2].tolist()
        earlier = np.arange(local - local % SAMPLED, local)
        whole = self.documents.lengths(self._documents(np.full(len(earlier), window), earlier), self.part)
        before = int(self._array("whole")[window * self._sampled + local // SAMPLED]) + int(
            (whole // self.seq_len).sum()
        )
        length = int(self.documents.lengths(np.array([document]), self.part)[0])
        found = first_row + before + np.arange(length // self.seq_len)
        mine = np.flatnonzero(self._array("pieces")[begin:end] == local)
        firsts = self._array("firsts")[first_rest:end_rest]
        others = end_row - (end_rest - first_rest) + firsts.searchsorted(mine, side="right") - 1
        return np.concatenate([found, others])


def plan_settings(**settings: Any) -> dict[str, Any]:
    """What a plan is found by: the settings given, and those of this file."""
    return {**settings, "window": WINDOW, "version": VERSION}
