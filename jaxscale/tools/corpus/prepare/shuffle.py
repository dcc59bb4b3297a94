"""External shuffle by key range: files that are each sorted by key become `outputs` files, one for each range of keys.

If each range read every input directly, the number of opened files would grow quadratically. Here a task opens at most
MAX_FAN_IN files, and a shuffle has as few levels as that allows. At each level a task merges neighbouring files of one
range, restricted to one part of the range, into one file for the next level:

    files  0 1 2 | 3 4 5 | 6 7 8        three tasks of level 1 read files 0 to 2, each another third of the keys
    level 1: thirds of the keys, from each three files; level 2: ninths of the keys, from all files

Every byte is read and written once per level. The number of opened files is linear in the input for a fixed number of
levels, and one level is added each time that the input grows 128 times. Records are merged in the order of their first
two numbers, so the result does not depend on the levels.

A level that splits ranges n ways opens each file n times, which is slow for many small files such as blocks. With
`merges_first` the first level therefore merges neighbouring files without splitting, and opens each once; its tasks
must run in bounded memory.
"""

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jaxscale.tools.corpus.prepare.block_files import mark_done, read_done
from jaxscale.tools.corpus.prepare.join import MEMORY_BYTES, MEMORY_FACTOR
from jaxscale.tools.corpus.prepare.lookup import NumberedTasks, numbered_path
from jaxscale.tools.corpus.prepare.sorted_records import Run, merge_runs, open_run, save_rows

MAX_FAN_IN = 128  # files that a task opens, and parts that a level splits a range into
RunAll = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]  # Executor.run_all


class Source(Protocol):
    """Input files of a shuffle."""

    def read(self, number: int, begin: int, end: int) -> Run:
        """Returns the records of a file with keys in [begin, end)."""
        ...


class ShuffleOutput(NamedTuple):
    """Output files of another shuffle's last level as input."""

    folder: str

    def read(self, number: int, begin: int, end: int) -> Run:
        """Returns the records of a file with keys in [begin, end)."""
        return open_run(numbered_path(self.folder, number, ".npy"), begin, end)


class Shuffle(NamedTuple):
    """Description of a shuffle, and with `level` and `number` one task of it."""

    source: Any  # a Source, or what the functions that run the tasks expect
    folder: str  # output of the levels before the last
    inputs: int
    outputs: int  # ranges of keys
    span: int = 1 << 64  # all keys are below it
    out: str = ""  # output folder of the last level
    options: tuple[Any, ...] = ()  # for the last level
    merges_first: bool = False  # with several levels: the first merges whole files and does not split ranges
    memory_bytes: int = MEMORY_BYTES  # per task
    level: int = 1
    number: int = 0

    @property
    def num_levels(self) -> int:
        """Number of levels."""
        enough = lambda n: MAX_FAN_IN**n >= self.inputs and MAX_FAN_IN ** self.num_splitting_levels(n) >= self.outputs
        return next(n for n in range(1, 64) if enough(n))

    @property
    def max_open_files(self) -> int:
        """Largest number of files that a task over documents holds open, two for each input."""
        return 2 * ceil_root(self.inputs, self.num_levels) if self.num_levels > 1 else 2

    def num_splitting_levels(self, num_levels: int) -> int:
        """Returns how many of `num_levels` levels split ranges."""
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

    def num_tasks(self, level: int) -> int:
        """Returns the number of tasks of a level; each writes one file."""
        return self.num_ranges(level) * self.num_runs(level)

    def bound(self, number: int, level: int) -> int:
        """Returns the first key of a range after a level."""
        first = number * self.fan_out ** (self.num_levels - level)
        return min(first, self.outputs) * self.span // self.outputs

    def inputs_of_task(self) -> tuple[list[int], int, int]:
        """Returns (numbers of the files that this task reads, its first key, the key after its last)."""
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
        """Returns how many records of this memory size a task may hold."""
        return max(1, self.memory_bytes // record_bytes)


def ceil_root(number: int, num_levels: int) -> int:
    """Returns the smallest base whose power `num_levels` is at least `number`."""
    found = max(1, round(number ** (1 / num_levels)) - 1)
    while found**num_levels < number:
        found += 1
    return found


def run_shuffle(
    run_all: RunAll, shuffle: Shuffle, merge_task: Callable[[Shuffle], Any], last_task: Callable[[Shuffle], Any]
) -> Iterator[Any]:
    """Runs `merge_task` on all levels but the last. Yields what `last_task` returns for each range, in any order."""
    for level in range(1, shuffle.num_levels):
        for _ in run_all(merge_task, NumberedTasks(shuffle._replace(level=level), shuffle.num_tasks(level))):
            pass
    yield from run_all(last_task, NumberedTasks(shuffle._replace(level=shuffle.num_levels), shuffle.outputs))


def input_runs(task: Shuffle) -> list[Run]:
    """Returns the inputs of a task over records."""
    files, begin, end = task.inputs_of_task()
    if task.level == 1:
        return [task.source.read(number, begin, end) for number in files]
    return [open_run(task.path(task.level - 1, number, ".npy"), begin, end) for number in files]


def merge_records(task: Shuffle) -> None:
    """Merges the inputs of a task before the last level."""
    path = task.path(task.level, task.number, ".npy")

    def write() -> int:
        runs = input_runs(task)
        return save_rows(path, merge_runs(runs, task.max_records(MEMORY_FACTOR * 8 * runs[0].width)))

    write_once(path, write)


def write_once(path: pathlib.Path, write: Callable[[], int]) -> int:
    """Runs `write` unless its file is done. Returns the number of records."""
    done = path.with_suffix(".done.json")
    if (found := read_done(done)) is not None:
        return found["records"]
    path.parent.mkdir(parents=True, exist_ok=True)
    number = write()
    mark_done(done, {"records": number}, [path])
    return number
