"""Record files sorted by their first two numbers: split, merged and written in bounded memory.

Runs with more records than fit in memory are split in two by bisection until a part is small enough, and merged part by
part, however many records share a key.
"""

import bisect
import functools
import itertools
import os
import pathlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.system.paths import replacing
from jaxscale.tools.corpus.prepare.join import open_array, sort_unique


class Run(NamedTuple):
    """Records in a file, sorted by their first two numbers (key, item). Nothing is read yet."""

    path: str
    start: int  # byte offset of the first record
    count: int
    width: int  # 64-bit numbers in a record
    item: int = 0  # ORed into the second number of each record: the block, which sketch files do not store

    def numbers(self, file: BinaryIO, place: int) -> tuple[int, int]:
        """Returns the first two numbers of a record. pread, since mapped pages would count as memory of the process."""
        key, item = struct.unpack("=2Q", os.pread(file.fileno(), 16, self.start + 8 * self.width * place))
        return key, item | self.item

    def middle(self) -> tuple[int, int]:
        """Returns the first two numbers of the middle record."""
        with open(self.path, "rb") as file:
            return self.numbers(file, self.count // 2)

    def count_before(self, numbers: tuple[int, int]) -> int:
        """Returns how many records sort before `numbers`."""
        with open(self.path, "rb") as file:
            return bisect.bisect_left(range(self.count), numbers, key=functools.partial(self.numbers, file))

    def slice_run(self, first: int, last: int) -> "Run":
        """Returns the records in [first, last)."""
        return self._replace(start=self.start + 8 * self.width * first, count=last - first)

    def read(self, rows: np.ndarray) -> None:
        """Reads all records into uint64[count, width]."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            num_bytes = file.readinto(rows.data)
        if num_bytes != rows.nbytes:
            raise BadInput(f"{self.path} has {num_bytes:,} bytes where {rows.nbytes:,} were written; prepare again")
        rows[:, 1] |= np.uint64(self.item)


def open_run(path: pathlib.Path, begin: int, end: int, item: int = 0) -> Run:
    """Returns the records of a file, uint64[n, width], with keys in [begin, end). item: see Run."""
    records = open_array(path)
    if records.ndim != 2 or records.shape[1] < 2 or records.dtype != np.uint64:
        raise BadInput(f"{path} holds {records.dtype}{list(records.shape)}, not keys and items; delete it")
    keys = np.asarray(records)[:, 0]
    first = bisect.bisect_left(keys, begin)  # searchsorted would copy every key first
    count, width = records.shape
    run = Run(str(path), records.offset, count, width, item)
    return run.slice_run(first, bisect.bisect_left(keys, end, lo=first))


def merge_runs(runs: Sequence[Run], max_rows: int) -> Iterator[np.ndarray]:
    """Yields the records of all runs, sorted and unique by their first two numbers, at most `max_rows` at a time.

    Equal records, at most one per run, stay together, and runs whose smallest record is the median of all are not
    split, so a part may have up to two more records for each run.
    """
    runs = [run for run in runs if run.count] or runs[:1]
    if sum(run.count for run in runs) > max_rows and (halves := split_at_median(runs)):
        for half in halves:
            yield from merge_runs(half, max_rows)
        return
    yield sort_unique(read_runs(runs))


def read_runs(runs: Sequence[Run]) -> np.ndarray:
    """Returns uint64[k, width], the concatenated records of all runs."""
    rows, begin = np.empty((sum(run.count for run in runs), runs[0].width), np.uint64), 0
    for run in runs:
        run.read(rows[begin : begin + run.count])
        begin += run.count
    return rows


def split_at_median(runs: Sequence[Run]) -> tuple[list[Run], list[Run]] | None:
    """Splits each run at the median of the runs' medians; None if no record is below it.

    Each side has about a quarter of the records or more.
    """
    middles, counts = zip(*sorted((run.middle(), run.count) for run in runs))
    middle = middles[int(np.searchsorted(np.cumsum(counts), sum(counts) / 2))]
    places = [run.count_before(middle) for run in runs]
    below = [run.slice_run(0, place) for run, place in zip(runs, places)]
    above = [run.slice_run(place, run.count) for run, place in zip(runs, places)]
    return (below, above) if any(places) else None


def read_chunks(path: pathlib.Path, max_rows: int) -> Iterator[np.ndarray]:
    """Yields the rows of a file, at most `max_rows` at a time."""
    for begin in range(0, len(open_array(path)), max_rows):
        yield np.array(open_array(path)[begin : begin + max_rows])  # remapped each time, or all pages would stay


def save_rows(path: pathlib.Path, parts: Iterable[np.ndarray]) -> int:
    """Writes the parts, uint64[k, width] each, as one .npy file, atomically. Returns the number of records."""
    parts, count = iter(parts), 0
    first = next(parts)
    width = first.shape[1]
    with replacing(path) as file:
        write_header(file, count, width)
        start = file.tell()
        for part in itertools.chain([first], parts):
            file.write(np.ascontiguousarray(part).data)
            count += len(part)
            del part  # frees the part before the next is made
        file.seek(0)
        write_header(file, count, width)
        assert file.tell() == start, path  # the header has a fixed size for any count
    return count


def write_header(file: BinaryIO, count: int, width: int) -> None:
    """Writes the header of a .npy file of uint64[count, width]."""
    np.lib.format.write_array_header_1_0(file, {"descr": "<u8", "fortran_order": False, "shape": (count, width)})


def save_sorted(path: pathlib.Path, parts: Iterable[np.ndarray], max_rows: int) -> int:
    """Saves parts that are only sorted individually as one sorted file of unique records. Returns their number."""
    bounds = [0]

    def count_rows() -> Iterator[np.ndarray]:
        for part in parts:
            bounds.append(bounds[-1] + len(part))
            yield part

    unsorted = path.with_suffix(".runs")
    save_rows(unsorted, count_rows())
    if len(bounds) == 2:
        os.replace(unsorted, path)
        return bounds[-1]
    run = open_run(unsorted, 0, 0)  # for the offset of its first record
    count = save_rows(path, merge_runs([run.slice_run(*ends) for ends in itertools.pairwise(bounds)], max_rows))
    unsorted.unlink()
    return count
