"""External shuffle by key range: turns files that are each sorted by key into `outputs` files, one per key range.

If each range read every input directly, the number of file opens would grow quadratically. Here, a task opens at most
MAX_FAN_IN files, and a shuffle has as few levels as that allows. At each level, a task merges adjacent files of one
range, restricted to one part of the range, into one file for the next level:

    files  0 1 2 | 3 4 5 | 6 7 8        three tasks of level 1 read files 0 to 2, and each selects a third of the keys
    level 1: thirds of the keys, from three files each; level 2: ninths of the keys, from all files

Every byte is read and written once per level. For a fixed number of levels, the number of file opens is linear in the
input, and the input can grow 128 times before it needs another level. Records are merged in the order of their first
two numbers, so the result does not depend on the levels.

A level that splits ranges n ways opens each file n times, which is slow for many small files such as blocks. With
`merges_first`, the first level therefore merges adjacent files without splitting them, and opens each file only a few
times. Its tasks must bound their memory: records that do not fit are split in two by bisection until a part is small
enough.
"""

import bisect
import functools
import itertools
import os
import pathlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.system.paths import replacing
from jaxscale.tools.corpus.prepare.lookup import mark_done, numbered_path, read_done
from jaxscale.tools.corpus.prepare.sketches import MEMORY_BYTES, MEMORY_FACTOR, open_array, sort_unique

MAX_FAN_IN = 128  # maximum number of files that a task opens, and of parts that a level splits a range into
RunAll = Callable[[Callable[[Any], Any], Any, int], Iterator[Any]]  # Executor.run_all


class RecordRun(NamedTuple):
    """A range of records in a file, sorted by their first two numbers (key, item). read() loads the records."""

    path: str
    start: int  # byte offset of the first record
    count: int
    width: int  # number of 64-bit numbers in a record
    item: int = 0  # block bits, ORed into the second number of each record; sketch files do not store the block

    def numbers(self, file: BinaryIO, place: int) -> tuple[int, int]:
        """Returns the first two numbers of a record. Uses pread, since mapped pages would count as process memory."""
        key, item = struct.unpack("=2Q", os.pread(file.fileno(), 16, self.start + 8 * self.width * place))
        return key, item | self.item

    def middle(self) -> tuple[int, int]:
        """Returns the first two numbers of the middle record."""
        with open(self.path, "rb") as file:
            return self.numbers(file, self.count // 2)

    def count_before(self, numbers: tuple[int, int]) -> int:
        """Returns the number of records that sort before `numbers`."""
        with open(self.path, "rb") as file:
            return bisect.bisect_left(range(self.count), numbers, key=functools.partial(self.numbers, file))

    def slice_run(self, first: int, last: int) -> "RecordRun":
        """Returns the records in [first, last)."""
        return self._replace(start=self.start + 8 * self.width * first, count=last - first)

    def read(self, rows: np.ndarray) -> None:
        """Reads all records into uint64[count, width]."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            num_bytes = file.readinto(rows.data)
        if num_bytes != rows.nbytes:
            raise BadInput(f"{self.path} is truncated: read {num_bytes:,} of {rows.nbytes:,} bytes; run prepare again")
        rows[:, 1] |= np.uint64(self.item)


class ShuffleOutput(NamedTuple):
    """Output files of a previous shuffle, as the source of a shuffle."""

    folder: str

    def read(self, number: int, begin: int, end: int) -> RecordRun:
        """Returns the records of a file with keys in [begin, end)."""
        return open_run(numbered_path(self.folder, number, ".npy"), begin, end)


class Shuffle(NamedTuple):
    """Description of a shuffle. With `level` and `number`, it describes one task."""

    source: Any  # has read(number, begin, end) for records, or the methods that the task functions need
    folder: str  # output folder of all levels except the last
    inputs: int
    outputs: int  # number of key ranges
    span: int = 1 << 64  # upper bound of the keys
    out: str = ""  # output folder of the last level
    options: tuple[Any, ...] = ()  # arguments of the last level's tasks
    merges_first: bool = False  # with several levels, the first level merges whole files without splitting ranges
    memory_bytes: int = MEMORY_BYTES  # per task
    level: int = 1
    number: int = 0

    @property
    def num_levels(self) -> int:
        """Number of levels."""
        enough = lambda n: MAX_FAN_IN**n >= self.inputs and MAX_FAN_IN ** self.num_splitting_levels(n) >= self.outputs
        return next(n for n in range(1, 64) if enough(n))

    def num_splitting_levels(self, num_levels: int) -> int:
        """Returns how many of `num_levels` levels split key ranges."""
        return num_levels - (self.merges_first and num_levels > 1)

    @property
    def fan_out(self) -> int:
        """Number of parts that a level splits a range into."""
        return ceil_root(self.outputs, self.num_splitting_levels(self.num_levels))

    def num_ranges(self, level: int) -> int:
        """Returns the number of key ranges after a level."""
        return -(-self.outputs // self.fan_out ** (self.num_levels - level))

    def num_runs(self, level: int) -> int:
        """Returns the number of files of each key range after a level."""
        return -(-self.inputs // ceil_root(self.inputs, self.num_levels) ** level)

    def bound(self, number: int, level: int) -> int:
        """Returns the first key of a range after a level."""
        first = number * self.fan_out ** (self.num_levels - level)
        return min(first, self.outputs) * self.span // self.outputs

    def inputs_of_task(self) -> tuple[list[int], int, int]:
        """Returns (numbers of the input files, first key, last key + 1) of this task."""
        part, run = divmod(self.number, self.num_runs(self.level))
        before, fan_in = self.num_runs(self.level - 1), ceil_root(self.inputs, self.num_levels)
        base = part // self.fan_out * before
        files = [base + i for i in range(run * fan_in, min((run + 1) * fan_in, before))]
        return files, self.bound(part, self.level), self.bound(part + 1, self.level)

    def path(self, level: int, number: int, ending: str = "") -> pathlib.Path:
        """Returns the path of a task's output."""
        is_last = level == self.num_levels and self.out
        return numbered_path(self.out if is_last else f"{self.folder}/level{level}", number, ending)

    def max_records(self, record_bytes: int) -> int:
        """Returns the number of records of `record_bytes` bytes that fit in the memory of a task."""
        return max(1, self.memory_bytes // record_bytes)


def ceil_root(number: int, num_levels: int) -> int:
    """Returns the smallest integer whose power `num_levels` is at least `number`."""
    found = max(1, round(number ** (1 / num_levels)) - 1)
    while found**num_levels < number:
        found += 1
    return found


def run_shuffle(
    run_all: RunAll, shuffle: Shuffle, merge_task: Callable[[Shuffle], Any], last_task: Callable[[Shuffle], Any]
) -> Iterator[Any]:
    """Runs merge_task for all levels except the last. Yields last_task's result for each key range, in any order."""
    for level in range(1, shuffle.num_levels):
        count = shuffle.num_ranges(level) * shuffle.num_runs(level)  # each task writes one file
        for _ in run_all(merge_task, shuffle._replace(level=level), count):
            pass
    yield from run_all(last_task, shuffle._replace(level=shuffle.num_levels), shuffle.outputs)


def input_runs(task: Shuffle) -> list[RecordRun]:
    """Returns the input records of a task."""
    files, begin, end = task.inputs_of_task()
    if task.level == 1:
        return [task.source.read(number, begin, end) for number in files]
    return [open_run(task.path(task.level - 1, number, ".npy"), begin, end) for number in files]


def merge_records(task: Shuffle) -> None:
    """Merges the input records of a task before the last level."""

    def write(path: pathlib.Path) -> int:
        runs = input_runs(task)
        return save_rows(path, merge_runs(runs, task.max_records(MEMORY_FACTOR * 8 * runs[0].width)))

    write_once(task, write)


def write_once(task: Shuffle, write: Callable[[pathlib.Path], int]) -> int:
    """Runs `write` for the output file of a task, unless the file is complete. Returns the number of records."""
    path = task.path(task.level, task.number, ".npy")
    done = path.with_suffix(".done.json")
    if (found := read_done(done)) is not None:
        return found["records"]
    path.parent.mkdir(parents=True, exist_ok=True)
    number = write(path)
    mark_done(done, {"records": number}, [path])
    return number


def open_run(path: pathlib.Path, begin: int, end: int, item: int = 0) -> RecordRun:
    """Opens the records in a .npy file, uint64[n, width], with keys in [begin, end). item: see RecordRun."""
    records = open_array(path)
    if records.ndim != 2 or records.shape[1] < 2 or records.dtype != np.uint64:
        raise BadInput(f"{path} has {records.dtype}{list(records.shape)}, not records; delete it and prepare again")
    keys = np.asarray(records)[:, 0]
    first = bisect.bisect_left(keys, begin)  # np.searchsorted would copy every key
    count, width = records.shape
    run = RecordRun(str(path), records.offset, count, width, item)
    return run.slice_run(first, bisect.bisect_left(keys, end, lo=first))


def merge_runs(runs: Sequence[RecordRun], max_rows: int) -> Iterator[np.ndarray]:
    """Yields the records of all runs, sorted and unique by their first two numbers, in parts of at most max_rows.

    A part can have up to two additional records per run, since equal records stay in one part, and a run that begins
    with the median record is not split.
    """
    runs = [run for run in runs if run.count] or runs[:1]
    if sum(run.count for run in runs) > max_rows and (halves := split_at_median(runs)):
        for half in halves:
            yield from merge_runs(half, max_rows)
        return
    yield sort_unique(read_runs(runs))


def read_runs(runs: Sequence[RecordRun]) -> np.ndarray:
    """Returns uint64[k, width], the concatenated records of all runs."""
    rows, begin = np.empty((sum(run.count for run in runs), runs[0].width), np.uint64), 0
    for run in runs:
        run.read(rows[begin : begin + run.count])
        begin += run.count
    return rows


def split_at_median(runs: Sequence[RecordRun]) -> tuple[list[RecordRun], list[RecordRun]] | None:
    """Splits each run at the median of the runs' medians. Returns None if no record is below that median."""
    middles, counts = zip(*sorted((run.middle(), run.count) for run in runs))
    middle = middles[int(np.searchsorted(np.cumsum(counts), sum(counts) / 2))]
    places = [run.count_before(middle) for run in runs]
    below = [run.slice_run(0, place) for run, place in zip(runs, places)]
    above = [run.slice_run(place, run.count) for run, place in zip(runs, places)]
    return (below, above) if any(places) else None


def read_chunks(path: pathlib.Path, max_rows: int) -> Iterator[np.ndarray]:
    """Yields the rows of a file, at most `max_rows` at a time."""
    for begin in range(0, len(open_array(path)), max_rows):
        yield np.array(open_array(path)[begin : begin + max_rows])  # mapped each time, so that pages are freed


def save_rows(path: pathlib.Path, parts: Iterable[np.ndarray]) -> int:
    """Writes parts, each uint64[k, width], to one .npy file atomically. Returns the number of records."""
    parts, count = iter(parts), 0
    first = next(parts)
    width = first.shape[1]
    with replacing(path) as file:
        write_header(file, count, width)
        start = file.tell()
        for part in itertools.chain([first], parts):
            file.write(np.ascontiguousarray(part).data)
            count += len(part)
            del part  # frees the part before the next one is created
        file.seek(0)
        write_header(file, count, width)
        assert file.tell() == start, path  # the header has a fixed size for any count
    return count


def write_header(file: BinaryIO, count: int, width: int) -> None:
    """Writes the header of a .npy file of uint64[count, width]."""
    np.lib.format.write_array_header_1_0(file, {"descr": "<u8", "fortran_order": False, "shape": (count, width)})


def save_sorted(path: pathlib.Path, parts: Iterable[np.ndarray], max_rows: int) -> int:
    """Merges sorted parts into one sorted file of unique records. Returns the number of records."""
    bounds = [0]

    def count_rows() -> Iterator[np.ndarray]:
        for part in parts:
            bounds.append(bounds[-1] + len(part))
            yield part

    unsorted = path.with_suffix(f".{os.urandom(8).hex()}.runs")  # Beam may run a task twice at the same time
    save_rows(unsorted, count_rows())
    if len(bounds) == 2:
        os.replace(unsorted, path)
        return bounds[-1]
    run = open_run(unsorted, 0, 0)  # provides the offset of the first record
    count = save_rows(path, merge_runs([run.slice_run(*ends) for ends in itertools.pairwise(bounds)], max_rows))
    unsorted.unlink()
    return count
