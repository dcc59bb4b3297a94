"""Best-fit packing: whole documents into rows of T so that hardly a position is left, planned once and kept on disk.

A document longer than a row is cut at multiples of T; what remains of it is packed like a short one. Windows of
documents in a shuffled order are packed one after the other (best fit decreasing, as in arXiv:2404.10830), so that the
memory for it is bounded whatever the corpus.
"""

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.data.bins import pack_bins
from jaxscale.data.packing import DocumentRows, DocumentTable, group_members, ranges
from jaxscale.data.permutation import permuted
from jaxscale.data.rows import Pieces
from jaxscale.data.shards import write_synced
from jaxscale.data.verified import Expected, Say, Unchanged, damaged, expected, of_size
from jaxscale.system.digest import file_sha256, json_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import Unreadable, is_of_storage, parse_json
from jaxscale.system.paths import read_bytes

WINDOW = 8192  # documents; 256 fill 0.984 of the rows, 1,024 0.991, 8,192 0.994 (mean document 812, T 2,048)
VERSION = 1  # of the plan: another number where the same documents would get other rows
FILES = ("first", "documents", "parts")
ORDERED_AT_ONCE = 64 * WINDOW  # positions of the shuffled order computed in one go


class Window(NamedTuple):
    """The rows of one window: p pieces, row after row."""

    documents: np.ndarray  # int64[p]
    parts: np.ndarray  # int64[p]: the piece is its document's tokens from parts * T on
    counts: np.ndarray  # int64[rows]: pieces of each


def windows(members: np.ndarray | None, lengths: np.ndarray, T: int, key: str) -> Iterator[Window]:
    """The plan of one group of documents. lengths: of every document of the table. members: those meant; None: all."""
    size = len(lengths if members is None else members)
    for start in range(0, size, ORDERED_AT_ONCE):
        chosen = permuted(np.arange(start, min(start + ORDERED_AT_ONCE, size)), size, key)
        chosen = chosen if members is None else members[chosen]
        for begin in range(0, len(chosen), WINDOW):
            documents = chosen[begin : begin + WINDOW]
            yield pack_window(documents, lengths[documents], T)


def pack_window(documents: np.ndarray, lengths: np.ndarray, T: int) -> Window:
    """Rows for these documents: first those that a piece fills alone, then the others."""
    whole, rest = np.divmod(lengths, T)
    _, parts = ranges(np.zeros_like(whole), whole)
    left = np.flatnonzero(rest)
    bins = pack_bins(rest[left], T)
    by_bin = np.argsort(bins, kind="stable")
    return Window(
        np.concatenate([np.repeat(documents, whole), documents[left][by_bin]]),
        np.concatenate([parts, whole[left][by_bin]]),
        np.concatenate([np.ones(len(parts), np.int64), np.bincount(bins)]),
    )


class Plan(NamedTuple):
    """A plan on disk, memory-mapped: 8 bytes a piece (12 beyond 2**32 documents) and 8 a row."""

    first: np.ndarray  # int64[rows + 1]: the first piece of each row, and the end
    documents: np.ndarray  # uint32 or int64[pieces]
    parts: np.ndarray  # uint32[pieces]
    group_rows: np.ndarray  # int64[groups + 1]


def write_plan(folder: Path, table: DocumentTable, *, seq_len: int, seed: int, num_groups: int) -> None:
    """Plans the rows of a table into `folder`, window by window."""
    documents_type = np.dtype("<u4") if len(table) <= 1 << 32 else np.dtype("<i8")
    group_rows, pieces = [0], 0
    with (
        open(folder / "first", "wb") as first,
        open(folder / "documents", "wb") as documents,
        open(folder / "parts", "wb") as parts,
    ):
        first.write(np.zeros(1, "<i8").tobytes())
        for group, members in enumerate([None] if num_groups == 1 else group_members(table, num_groups)):
            rows = group_rows[-1]
            for window in windows(members, table.lengths, seq_len, f"best fit {seed} {group}"):
                documents.write(window.documents.astype(documents_type).tobytes())
                parts.write(window.parts.astype("<u4").tobytes())
                first.write((pieces + np.cumsum(window.counts)).astype("<i8").tobytes())
                pieces, rows = pieces + len(window.documents), rows + len(window.counts)
            group_rows.append(rows)
        for file in (first, documents, parts):
            file.flush()
            os.fsync(file.fileno())
    header: dict[str, Any] = {"group_rows": group_rows, "pieces": pieces, "documents": documents_type.str}
    header |= {"sha256": {name: file_sha256(str(folder / name)) for name in FILES}}
    write_synced(folder / "plan.json", json.dumps({**header, "own": json_sha256(header)}).encode())


def read_plan(folder: Path) -> dict[str, Any]:
    """What plan.json says. Raises BadInput that names the folder unless it is as it was written."""
    try:
        header = parse_json(read_bytes(folder / "plan.json"))
    except (OSError, BadInput) as error:
        raise damaged_plan(folder, error) from None
    if not isinstance(header, dict) or header.pop("own", None) != json_sha256(header):
        raise damaged_plan(folder, "plan.json was changed after it was written")
    return header


def damaged_plan(folder: Path, why: str | Exception) -> BadInput:
    """The error for a plan that is not whole, or that the storage does not give."""
    kind = Unreadable if isinstance(why, Exception) and is_of_storage(why) else BadInput
    return kind(f"the row plan {folder} cannot be read: {why}; delete the folder to have it made again")


def verify_plan(folder: Path, cache: Path, verify: str, say: Say | None) -> dict[str, Expected]:
    """What the plan's files must stay while they are read. Raises BadInput if one is not as it was written.

    Args: cache: where it is remembered what was found good, as `damaged` has it. verify: data.verify.
    """
    header = read_plan(folder)
    sums = {str(folder / name): sha256 for name, sha256 in header["sha256"].items()}
    try:
        known = expected(sums)
    except OSError as error:
        raise damaged_plan(folder, error) from None
    sizes = {
        "first": 8 * (header["group_rows"][-1] + 1),
        "documents": np.dtype(header["documents"]).itemsize * header["pieces"],
        "parts": 4 * header["pieces"],
    }
    for name, size in sizes.items():
        if known[path := str(folder / name)].stamp[0] != size:
            raise damaged_plan(folder, f"{path} was changed after it was written: it has not {size:,} bytes")
    if verify == "size":
        return of_size(known)
    for path, problem in damaged(sums, cache, str(folder), say, remember=verify == "hash").items():
        raise damaged_plan(folder, problem or f"{path} was changed after it was written")
    return known


def open_plan(folder: Path) -> Plan:
    """The plan in a folder, which verify_plan found whole. Raises BadInput that names it if a file cannot be mapped."""
    header = read_plan(folder)
    types = {"first": "<i8", "documents": header["documents"], "parts": "<u4"}
    try:
        arrays = {name: np.asarray(np.memmap(folder / name, dtype=dtype, mode="r")) for name, dtype in types.items()}
    except OSError as error:
        raise damaged_plan(folder, error) from None
    return Plan(**arrays, group_rows=np.array(header["group_rows"], np.int64))


class BestFitRows(DocumentRows):
    """`best_fit`: every document that fits into a row lies whole in one, and no token is left out or seen twice.

    A document's target behind the cut between two of its pieces counts as any other. The rows of a window are not
    shuffled here.
    """

    def __init__(
        self,
        table: DocumentTable,
        folder: Path,
        *,
        seq_len: int,
        cache: Path,
        verify: str = "hash",
        say: Say | None = None,
    ):
        """folder: holds the plan of this very table, and is named by what that was made from. The rest: verify_plan's.

        Raises: BadInput if the plan is not as it was written.
        """
        self._plan_files = verify_plan(folder, cache, verify, say)
        self.table, self.seq_len, self.folder = table, seq_len, folder
        self.group_rows = self._plan.group_rows

    @functools.cached_property
    def _unchanged(self) -> Unchanged:
        return Unchanged({**self.table.expected, **self._plan_files})

    @functools.cached_property
    def _plan(self) -> Plan:
        self._unchanged.check_unopened(self._plan_files)
        return open_plan(self.folder)

    def pieces(self, rows: np.ndarray) -> Pieces:
        """What the rows int64[m] are made of."""
        T, plan = self.seq_len, self._plan
        self._unchanged.check(self._plan_files)
        bounds, places = ranges(plan.first[rows], plan.first[rows + 1])
        documents = plan.documents[places].astype(np.int64)
        skipped = plan.parts[places].astype(np.int64) * T
        remaining = self.table.lengths[documents] - skipped
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

    def rows_of(self, document: int) -> np.ndarray:
        """int64: the rows that hold a piece of the table's document, in order. Looks through all documents."""
        pieces = np.flatnonzero(self._plan.documents == document)
        return self._plan.first.searchsorted(pieces, side="right") - 1


def plan_settings(**settings: Any) -> dict[str, Any]:
    """What a plan is found by: the settings given, and those of this file."""
    return {**settings, "window": WINDOW, "version": VERSION}
