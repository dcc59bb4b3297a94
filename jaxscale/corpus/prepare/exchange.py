"""Shuffles by key range: files that are each sorted by key become as many ranges of keys as are wanted.

Read directly, each range would open every file: their number would grow as the square of the input. Here a task opens
at most MOST_WAYS files. An exchange has as few levels as that allows. At each, a task takes some neighbouring files of
one range, and of their keys one part of the range, which it merges into one file for the next level:

    files  0 1 2 | 3 4 5 | 6 7 8        three tasks of level 1 read files 0 to 2, each another third of the keys
    level 1: thirds of the keys, from each three files; level 2: ninths of the keys, from all files

So every byte is read and written once a level, files grow from the size of an input to that of a range, and the number
of files opened is linear but for the number of levels, which grows by one each time that the input grows 128 times.
Records are merged in the order of their first two numbers, so what comes out does not depend on the levels.

A level that cuts ranges in n opens each file n times, which costs much where files are many and small, as blocks are.
Where `merges_first`, the first level therefore merges neighbouring files whole, each opened once; whoever does its
tasks must do it in bounded memory.
"""

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jaxscale.corpus.prepare.blocks import mark_done, read_done
from jaxscale.corpus.prepare.join import MEMORY_BYTES, WORK
from jaxscale.corpus.prepare.lookup import Numbered, numbered
from jaxscale.corpus.prepare.records import Run, merged, run_between, save_rows

MOST_WAYS = 128  # files that a task opens, and ranges that a level cuts a range into
RunAll = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]  # as of an Executor


class Source(Protocol):
    """Names the files that come in."""

    def read(self, number: int, begin: int, end: int) -> Run:
        """The records of a file with keys from begin up to but not including end."""
        ...


class Files(NamedTuple):
    """What the last level of another exchange has left in a folder."""

    folder: str

    def read(self, number: int, begin: int, end: int) -> Run:
        """See Source."""
        return run_between(numbered(self.folder, number, ".npy"), begin, end)


class Exchange(NamedTuple):
    """A shuffle, or by its level and number one task of it."""

    source: Any  # a Source; or as the functions that do the tasks have it
    folder: str  # of what the levels before the last leave
    inputs: int
    outputs: int  # ranges of keys
    span: int = 1 << 64  # keys are below it
    out: str = ""  # folder of what the last level leaves
    options: tuple[Any, ...] = ()  # for the last level
    merges_first: bool = False  # where there are several levels: the first merges whole files, and cuts no range
    memory_bytes: int = MEMORY_BYTES  # of a task
    level: int = 1
    number: int = 0

    @property
    def levels(self) -> int:
        """How many there are."""
        enough = lambda n: MOST_WAYS**n >= self.inputs and MOST_WAYS ** self.cutting(n) >= self.outputs
        return next(n for n in range(1, 64) if enough(n))

    @property
    def most_open(self) -> int:
        """How many files of documents a task holds open, two of each input."""
        return 2 * ways(self.inputs, self.levels) if self.levels > 1 else 2

    def cutting(self, levels: int) -> int:
        """How many of so many levels cut ranges."""
        return levels - (self.merges_first and levels > 1)

    @property
    def cuts(self) -> int:
        """Into how many a level cuts a range."""
        return ways(self.outputs, self.cutting(self.levels))

    def ranges(self, level: int) -> int:
        """Into how many ranges the keys are cut after a level."""
        return -(-self.outputs // self.cuts ** (self.levels - level))

    def runs(self, level: int) -> int:
        """How many files there are for each of these ranges."""
        return -(-self.inputs // ways(self.inputs, self.levels) ** level)

    def tasks(self, level: int) -> int:
        """How many tasks a level has: each leaves one file."""
        return self.ranges(level) * self.runs(level)

    def bound(self, number: int, level: int) -> int:
        """The first key of a range after a level."""
        first = number * self.cuts ** (self.levels - level)
        return min(first, self.outputs) * self.span // self.outputs

    def reads(self) -> tuple[list[int], int, int]:
        """(the numbers of the files that this task reads, its first key, the key after its last)."""
        part, run = divmod(self.number, self.runs(self.level))
        before, together = self.runs(self.level - 1), ways(self.inputs, self.levels)
        base = part // self.cuts * before
        files = [base + i for i in range(run * together, min((run + 1) * together, before))]
        return files, self.bound(part, self.level), self.bound(part + 1, self.level)

    def path(self, level: int, number: int, ending: str = "") -> pathlib.Path:
        """Where a task leaves its file."""
        last = level == self.levels and self.out
        return numbered(self.out if last else f"{self.folder}/level{level}", number, ending)

    def most(self, record_bytes: int) -> int:
        """How many records a task holds that need so many bytes of memory each."""
        return max(1, self.memory_bytes // record_bytes)


def ways(number: int, levels: int) -> int:
    """The smallest base with which so many levels reach so far."""
    found = max(1, round(number ** (1 / levels)) - 1)
    while found**levels < number:
        found += 1
    return found


def exchange(
    run_all: RunAll, whole: Exchange, merge: Callable[[Exchange], Any], last: Callable[[Exchange], Any]
) -> Iterator[Any]:
    """Yields what `last` returns for each range, in any order, after `merge` has done the levels before."""
    for level in range(1, whole.levels):
        for _ in run_all(merge, Numbered(whole._replace(level=level), whole.tasks(level))):
            pass
    yield from run_all(last, Numbered(whole._replace(level=whole.levels), whole.outputs))


def runs_of(call: Exchange) -> list[Run]:
    """What a task of an exchange of records reads."""
    files, begin, end = call.reads()
    if call.level == 1:
        return [call.source.read(number, begin, end) for number in files]
    return [run_between(call.path(call.level - 1, number, ".npy"), begin, end) for number in files]


def merge_records(call: Exchange) -> None:
    """A task before the last level of an exchange of records."""
    path = call.path(call.level, call.number, ".npy")

    def write() -> int:
        runs = runs_of(call)
        return save_rows(path, merged(runs, call.most(WORK * 8 * runs[0].width)))

    leave_once(path, write)


def leave_once(path: pathlib.Path, write: Callable[[], int]) -> int:
    """What `write` returned, now or when its file was made."""
    done = path.with_suffix(".done.json")
    if (found := read_done(done)) is not None:
        return found["records"]
    path.parent.mkdir(parents=True, exist_ok=True)
    number = write()
    mark_done(done, {"records": number}, [path])
    return number
