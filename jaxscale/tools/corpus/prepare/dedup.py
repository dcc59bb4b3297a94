"""Deduplication across blocks: exact, line and near duplicates, from sketches to the documents removed.

work/pass0/.../000000012-000003.near_dedup.npy, .signatures.npy   a block's sketch
work/joins/0-near_dedup/keys/                        a shuffle of (key, item), and its pairs
work/joins/0-near_dedup/firsts/, pairs/              pairs with the signature of the first item; verified pairs
work/joins/0-near_dedup/removed.npy                  uint64[2, k]: removed items, and the item kept for each

Candidates are verified by two shuffles, by first item and by item, so that signatures are read in file order.
"""

import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxscale.runtime.data.verified import remove
from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.duplicates import (
    cut_lines,
    drop_documents,
    lines_at,
    make_exact_sketch,
    make_line_sketch,
    make_near_sketch,
)
from jaxscale.tools.corpus.prepare.block_files import document_at, from_table, mark_done, read_done, read_table
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.corpus.prepare.external_components import external_components
from jaxscale.tools.corpus.prepare.join import (
    MEMORY_BYTES,
    MEMORY_FACTOR,
    PLACE_BITS,
    block_slice,
    is_similar,
    item_numbers,
    num_partitions,
    open_array,
    pair_chunks,
    signature_reader,
    signatures_path,
    sort_unique,
    split_items,
    write_sketch,
)
from jaxscale.tools.corpus.prepare.lookup import COLUMNS, Blocks, NumberedTasks, blocks_of
from jaxscale.tools.corpus.prepare.shuffle import (
    RunAll,
    Shuffle,
    ShuffleOutput,
    input_runs,
    merge_records,
    run_shuffle,
    write_once,
)
from jaxscale.tools.corpus.prepare.sorted_records import Run, merge_runs, open_run, read_chunks, save_rows, save_sorted
from jaxscale.tools.corpus.prepare.tally import Tally

NEIGHBOURS = 2  # to pair in a bucket of near duplicates; see pair_equal_keys
PAIRING_BYTES = 300  # of memory per (key, item) that has copies; measured: 250 for pairs, and more to merge
REASONS = {"exact_dedup": "exact duplicate", "near_dedup": "near duplicate"}


class Join(NamedTuple):
    """Search for duplicates in the sketches of all blocks of a pass."""

    folder: str  # of the results
    work: str  # folder of the work
    number: int  # of the pass
    name: str
    threshold: float | None  # of near duplicates, whose pairs are verified
    blocks: int
    keys: int  # of all sketches
    memory_bytes: int = MEMORY_BYTES  # per task

    def read(self, block: int, begin: int = 0, end: int = 1 << 64) -> Run:
        """Returns (key, item) of a block, with keys in [begin, end); see shuffle.Source."""
        path = sketch_path(blocks_of(self.work, self.number)[block], self.name)
        return open_run(path, begin, end, int(item_numbers(block, 0)))

    def signatures(self) -> Callable[[np.ndarray], np.ndarray]:
        """Returns a function from items to the signatures of their documents."""
        blocks = blocks_of(self.work, self.number)
        return signature_reader(lambda block: sketch_path(blocks[block], self.name))

    @property
    def neighbours(self) -> int:
        """Number of earlier items that each item is paired with, in addition to the first of its key."""
        return 0 if self.threshold is None else NEIGHBOURS

    @property
    def pairs(self) -> str:
        """Folder of the pairs; each file is uint64[k, 2] of an item and a smaller one."""
        return f"{self.folder}/pairs"


class Executor(AbstractContextManager, Protocol):
    """Runs tasks on this machine or a cluster. Tasks write their results to files and may run twice."""

    def run_all(self, function: Callable[[Any], Any], tasks: NumberedTasks) -> Iterator[Any]:
        """Yields function(task) of each task, in any order. Raises what a task raised."""
        ...

    def find_pairs(self, join: Join) -> None:
        """Writes the pairs of a join, verified if there is a threshold, to files below join.pairs."""
        ...

    def write_shards(self, shards: Shuffle) -> Iterator[str]:
        """Yields the name of each finished shard, in any order; see tokens.write_shard."""
        ...


def sketch_path(base: str, join: str) -> pathlib.Path:
    """Returns the path of the sketch of the block at `base`."""
    return pathlib.Path(f"{base}.{join}.npy")


def write_sketches(cfg: PrepareConfig, joins: Sequence[str], base: str, documents: Sequence[Document]) -> list[int]:
    """Writes a block's sketch for each of the joins. Returns the numbers of keys."""
    makers = dict(exact_dedup=make_exact_sketch, line_dedup=make_line_sketch, near_dedup=make_near_sketch)
    counts = []
    for join in joins:
        sketch = makers[join](getattr(cfg, join))(documents)
        write_sketch(sketch_path(base, join), sketch)
        counts.append(len(sketch.keys))
    return counts


def find_duplicates(
    cfg: PrepareConfig, name: str, folder: pathlib.Path, blocks: Blocks, column: int, executor: Executor
) -> dict[str, Any]:
    """Writes folder/removed.npy, unless it exists: the documents or lines to remove. Returns the facts of its groups.

    column: index of the join among those of the pass.
    """
    done = folder / "removed.done.json"
    if (found := read_done(done)) is not None:
        return found
    threshold = cfg.near_dedup.threshold if name == "near_dedup" else None
    keys = blocks.total(COLUMNS + column)
    join = Join(str(folder), blocks.folder, blocks.number, name, threshold, len(blocks), keys)
    folder.mkdir(parents=True, exist_ok=True)
    executor.find_pairs(join)
    paths = sorted(pathlib.Path(join.pairs).glob("*/*.npy"))
    number = sum(open_array(path).shape[0] for path in paths)
    remove(folder / "ranges")  # left by a killed process
    max_rows = max(1, join.memory_bytes // (MEMORY_FACTOR * 16))
    pairs = lambda: (part for path in paths for part in read_chunks(path, max_rows))
    span = len(blocks) << PLACE_BITS
    facts = external_components(pairs, number, span, folder / "ranges", folder / "removed.npy", join.memory_bytes)
    mark_done(done, facts, [folder / "removed.npy"])
    for name in ("keys", "firsts", "items", "pairs", "ranges"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return facts


def find_pairs_by_shuffle(run_all: RunAll, join: Join) -> None:
    """Writes the pairs of a join to join.pairs, for an executor without a built-in shuffle."""
    is_verified = join.threshold is not None
    folder = lambda name: f"{join.folder}/{name}"
    out = folder("keys/pairs") if is_verified else join.pairs
    count = num_partitions(16 * join.keys, join.memory_bytes)
    by_key = Shuffle(join, folder("keys"), join.blocks, count, out=out, memory_bytes=join.memory_bytes)
    found = sum(run_shuffle(run_all, by_key, merge_records, write_pairs))
    if not is_verified:
        return
    width = 2 + record_width(join)
    count = num_partitions(8 * width * found, join.memory_bytes)
    by_first = Shuffle(
        ShuffleOutput(out),
        folder("firsts"),
        by_key.outputs,
        count,
        span=join.blocks << PLACE_BITS,
        out=folder("firsts/attached"),
        options=(join,),
        memory_bytes=join.memory_bytes,
    )
    for _ in run_shuffle(run_all, by_first, merge_records, write_attached_signatures):
        pass
    by_item = by_first._replace(
        source=ShuffleOutput(by_first.out), folder=folder("items"), inputs=count, out=join.pairs
    )
    for _ in run_shuffle(run_all, by_item, merge_records, write_verified_pairs):
        pass


def write_pairs(task: Shuffle) -> int:
    """Writes the pairs of a key range, in the last level by keys. Returns their number.

    uint64[k, 2]: an item, and the first item that shares a key with it; reversed for candidates.
    """
    path, neighbours = task.path(task.level, task.number, ".npy"), task.source.neighbours

    def found_parts() -> Iterator[np.ndarray]:
        for pairs in pair_chunks(merge_runs(input_runs(task), task.max_records(PAIRING_BYTES)), neighbours):
            yield pairs if task.source.threshold is None else sort_unique(pairs[:, ::-1])

    return write_once(path, lambda: save_sorted(path, found_parts(), task.max_records(MEMORY_FACTOR * 16)))


def write_attached_signatures(task: Shuffle) -> int:
    """Writes (item, first, signature of the first), sorted by item, in the last level by first items."""
    path, (join,) = task.path(task.level, task.number, ".npy"), task.options
    width = 2 + record_width(join)
    max_rows = task.max_records(MEMORY_FACTOR * 8 * width)

    def found_parts() -> Iterator[np.ndarray]:
        signatures = join.signatures()
        for pairs in merge_runs(input_runs(task), max_rows):
            found = pack_signatures(signatures(pairs[:, 0])).reshape(len(pairs), width - 2)
            yield sort_unique(np.column_stack([pairs[:, ::-1], found]))

    return write_once(path, lambda: save_sorted(path, found_parts(), max_rows))


def write_verified_pairs(task: Shuffle) -> int:
    """Writes the pairs whose signatures are similar, uint64[k, 2], in the last level by items."""
    path, (join,) = task.path(task.level, task.number, ".npy"), task.options

    def found_parts() -> Iterator[np.ndarray]:
        signatures = join.signatures()
        for records in merge_runs(input_runs(task), task.max_records(MEMORY_FACTOR * 8 * (2 + record_width(join)))):
            item_signatures = signatures(records[:, 0])
            first_signatures = np.ascontiguousarray(records[:, 2:]).view(np.uint32)[:, : item_signatures.shape[1]]
            yield records[is_similar(item_signatures, first_signatures, join.threshold), :2]

    return write_once(path, lambda: save_rows(path, found_parts()))


def pack_signatures(signatures: np.ndarray) -> np.ndarray:
    """Returns uint64[k, record_width], signatures packed two numbers to one and padded with zeros."""
    even = np.pad(signatures, ((0, 0), (0, signatures.shape[1] % 2)))
    return np.ascontiguousarray(even).view(np.uint64)


def record_width(join: Join) -> int:
    """Returns the number of 64-bit numbers in a signature."""
    base = blocks_of(join.work, join.number)[0]
    return -(-open_array(signatures_path(sketch_path(base, join.name))).shape[1] // 2)


def apply_joins(
    cfg: PrepareConfig, folders: dict[str, pathlib.Path], block: int, documents: Sequence[Document], tally: Tally
) -> list[Document]:
    """Returns the documents of a block without the duplicates that the joins of one pass found.

    folders: of each join, in order; a document that one join drops is not counted by the next.
    """
    places = np.arange(len(documents))  # indices, in the block as the joins saw it, of the documents that remain
    remaining = list(documents)
    for join, folder in folders.items():
        removed = open_array(folder / "removed.npy")
        rows = block_slice(removed[0], block)
        owners = split_items(removed[0, rows]).places
        if join == "line_dedup":
            owners, lines = lines_at(documents, owners)
        positions = np.searchsorted(places, owners)
        remains = (
            (positions < len(places)) & (places[np.minimum(positions, len(places) - 1)] == owners)
            if len(places)
            else []
        )
        if join == "line_dedup":
            outcomes = cut_lines(remaining, positions[remains], lines[remains], cfg.line_dedup)
        else:
            outcomes = drop_documents(remaining, positions[remains], REASONS[join])
        places = places[[outcome.document is not None for outcome in outcomes]]
        remaining = tally.record(join, remaining, outcomes)
    return remaining


def cluster_facts(join: str, found: dict[str, Any], bases: Sequence[str]) -> dict[str, Any]:
    """Returns the histogram of group sizes and excerpts of the largest groups, for the report.

    found: of find_duplicates. bases: path prefixes of the blocks.
    """
    groups = []
    for keeper, size in found["largest"]:
        block, place = (int(part[0]) for part in split_items(np.array([keeper], np.uint64)))
        if join == "line_dedup":
            documents = from_table(read_table(pathlib.Path(f"{bases[block]}.arrow")))
            ((owner,), (line,)) = lines_at(documents, np.array([place]))
            document, text = documents[owner], documents[owner].text.split("\n")[line]
        else:
            document = document_at(bases[block], place)
            text = document.text
        groups.append(dict(size=size, file=document.file, offset=document.offset, text=text[:1000]))
    return {"name": join, "sizes": found["sizes"], "largest": groups}
