"""Files of records sorted by their first two numbers: cut, merged and written in memory that does not grow with them.

Where there are more records than memory holds, whoever merges them cuts the runs in two, each by bisection, until a
part is small enough, and takes one part after the other, however many records have one key.
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

from jaxscale.corpus.prepare.join import open_array, sorted_once
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import replacing


class Run(NamedTuple):
    """Records of a file that are sorted by their first two numbers: their key, and an item. None is in memory."""

    path: str
    start: int  # the first byte
    count: int
    width: int  # numbers of 64 bits in a record
    item: int = 0  # what is missing in the second number of each, which its file does not know

    def numbers(self, file: BinaryIO, place: int) -> tuple[int, int]:
        """The first two numbers of a record in the open file. Nothing is mapped: its pages would count as memory."""
        key, item = struct.unpack("=2Q", os.pread(file.fileno(), 16, self.start + 8 * self.width * place))
        return key, item | self.item

    def middle(self) -> tuple[int, int]:
        """The first two numbers of the record in the middle."""
        with open(self.path, "rb") as file:
            return self.numbers(file, self.count // 2)

    def before(self, numbers: tuple[int, int]) -> int:
        """How many records have smaller numbers."""
        with open(self.path, "rb") as file:
            return bisect.bisect_left(range(self.count), numbers, key=functools.partial(self.numbers, file))

    def between(self, first: int, last: int) -> "Run":
        """The records from a place up to another."""
        return self._replace(start=self.start + 8 * self.width * first, count=last - first)

    def read(self, rows: np.ndarray) -> None:
        """Fills uint64[count, width]."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            num_bytes = file.readinto(rows.data)
        if num_bytes != rows.nbytes:
            raise BadInput(f"{self.path} has {num_bytes:,} bytes where {rows.nbytes:,} were written; prepare again")
        rows[:, 1] |= np.uint64(self.item)


def run_between(path: pathlib.Path, begin: int, end: int, item: int = 0) -> Run:
    """The records of a file, uint64[n, width], with keys from begin up to but not including end. item: see Run."""
    records = open_array(path)
    if records.ndim != 2 or records.shape[1] < 2 or records.dtype != np.uint64:
        raise BadInput(f"{path} holds {records.dtype}{list(records.shape)}, not keys and items; delete it")
    keys = np.asarray(records)[:, 0]
    first = bisect.bisect_left(keys, begin)  # searchsorted would first copy every key
    count, width = records.shape
    whole = Run(str(path), records.offset, count, width, item)
    return whole.between(first, bisect.bisect_left(keys, end, lo=first))


def merged(runs: Sequence[Run], most: int) -> Iterator[np.ndarray]:
    """Yields the records of all runs, sorted by their first two numbers, each once, and at most so many at a time.

    But equal ones, of which a run has one, are never apart, nor are runs cut whose smallest is the median of all:
    a part may have up to two records of each run more.
    """
    runs = [run for run in runs if run.count] or runs[:1]
    if sum(run.count for run in runs) > most and (halves := halved(runs)):
        for half in halves:
            yield from merged(half, most)
        return
    yield sorted_once(in_memory(runs))


def in_memory(runs: Sequence[Run]) -> np.ndarray:
    """uint64[k, width]: the records of all runs, one after another."""
    rows, begin = np.empty((sum(run.count for run in runs), runs[0].width), np.uint64), 0
    for run in runs:
        run.read(rows[begin : begin + run.count])
        begin += run.count
    return rows


def halved(runs: Sequence[Run]) -> tuple[list[Run], list[Run]] | None:
    """What comes first of each run, and the rest of each; None if nothing comes first.

    They are cut at the median of their medians, so about a quarter of the records or more is on either side.
    """
    middles, counts = zip(*sorted((run.middle(), run.count) for run in runs))
    middle = middles[int(np.searchsorted(np.cumsum(counts), sum(counts) / 2))]
    places = [run.before(middle) for run in runs]
    first = [run.between(0, place) for run, place in zip(runs, places)]
    rest = [run.between(place, run.count) for run, place in zip(runs, places)]
    return (first, rest) if any(places) else None


def read_parts(path: pathlib.Path, most: int) -> Iterator[np.ndarray]:
    """The rows of a file, at most so many at a time."""
    for begin in range(0, len(open_array(path)), most):
        yield np.array(open_array(path)[begin : begin + most])  # mapped anew each time, or all its pages would stay


def save_rows(path: pathlib.Path, parts: Iterable[np.ndarray]) -> int:
    """How many records the parts have, uint64[k, width] each, after they are written as one .npy file, whole or not."""
    parts, count = iter(parts), 0
    first = next(parts)
    width = first.shape[1]
    with replacing(path) as file:
        write_header(file, count, width)
        start = file.tell()
        for part in itertools.chain([first], parts):
            file.write(np.ascontiguousarray(part).data)
            count += len(part)
            del part  # before the next one is made
        file.seek(0)
        write_header(file, count, width)
        assert file.tell() == start, path  # headers are as long as for the largest number
    return count


def write_header(file: BinaryIO, count: int, width: int) -> None:
    """Begins a .npy file of uint64[count, width]."""
    np.lib.format.write_array_header_1_0(file, {"descr": "<u8", "fortran_order": False, "shape": (count, width)})


def save_sorted(path: pathlib.Path, parts: Iterable[np.ndarray], most: int) -> int:
    """As save_rows, for parts that are only sorted each by itself: as a whole then too, with each record once."""
    bounds = [0]

    def told() -> Iterator[np.ndarray]:
        for part in parts:
            bounds.append(bounds[-1] + len(part))
            yield part

    between = path.with_suffix(".runs")
    save_rows(between, told())
    if len(bounds) == 2:
        os.replace(between, path)
        return bounds[-1]
    whole = run_between(between, 0, 0)  # so the place of its first record
    count = save_rows(path, merged([whole.between(*ends) for ends in itertools.pairwise(bounds)], most))
    between.unlink()
    return count
