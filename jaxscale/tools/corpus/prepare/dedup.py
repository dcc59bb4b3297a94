"""Deduplication across blocks: exact, line and near duplicates, from sketches to removed documents.

work/pass0/.../000000012-000003.near_dedup.npy, .signatures.npy   sketch of a block
work/joins/0-near_dedup/keys/                        a shuffle of (key, item), and its pairs
work/joins/0-near_dedup/firsts/, pairs/              pairs with the signature of the first item; verified pairs
work/joins/0-near_dedup/removed.npy                  uint64[2, k]: removed items, and the retained duplicate of each

Two shuffles, by first item and by item, verify candidates, so that signatures are read in file order.
"""

import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxscale.runtime.data.verified import remove
from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate import duplicates
from jaxscale.tools.corpus.curate.hashes import Sketch
from jaxscale.tools.corpus.prepare import lookup, shuffle, sketches
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.corpus.prepare.tally import Tally

NEIGHBOURS = 2  # earlier items of a near-duplicate key that each item is paired with; see pair_equal_keys
PAIRING_BYTES = 300  # memory per (key, item) with copies; measured: 250 for pairs, plus merging
REASONS = {"exact_dedup": "exact duplicate", "near_dedup": "near duplicate"}
SKETCHES: dict[str, Callable[[Sequence[Document], Any], Sketch]] = {
    "exact_dedup": duplicates.exact_sketch,
    "line_dedup": duplicates.line_sketch,
    "near_dedup": duplicates.near_sketch,
}


class Join(NamedTuple):
    """Search for duplicates in the sketches of all blocks of a pass."""

    folder: str  # folder of the results
    work: str  # work folder
    number: int  # number of the pass
    name: str
    threshold: float | None  # minimum similarity of verified near duplicates; None: no verification
    blocks: int
    keys: int  # number of keys in all sketches
    memory_bytes: int = sketches.MEMORY_BYTES  # per task

    def read(self, block: int, begin: int = 0, end: int = 1 << 64) -> shuffle.RecordRun:
        """Returns (key, item) of a block, with keys in [begin, end)."""
        path = sketch_path(lookup.blocks_of(self.work, self.number)[block], self.name)
        return shuffle.open_run(path, begin, end, int(sketches.item_numbers(block, 0)))

    def signatures(self, items: np.ndarray) -> np.ndarray:
        """Returns the signatures of the items' documents."""
        blocks = lookup.blocks_of(self.work, self.number)
        return sketches.read_signatures(items, lambda block: sketch_path(blocks[block], self.name))

    @property
    def neighbours(self) -> int:
        """Number of preceding items with the same key that an item is compared with, in addition to the first one."""
        return 0 if self.threshold is None else NEIGHBOURS

    @property
    def pairs(self) -> str:
        """Folder of the pairs (item, smaller item), in files of uint64[k, 2]."""
        return f"{self.folder}/pairs"


class Executor(AbstractContextManager, Protocol):
    """Runs tasks on this machine or a cluster. A task writes its results to files and may run more than once."""

    def run_all(self, function: Callable[[Any], Any], task: Any, count: int) -> Iterator[Any]:
        """Yields function(task._replace(number=n)) for n = 0 to count - 1, in any order. Raises exceptions of tasks."""
        ...


def sketch_path(base: str, join: str) -> pathlib.Path:
    """Returns the path of the sketch of the block at `base`."""
    return pathlib.Path(f"{base}.{join}.npy")


def write_sketches(cfg: PrepareConfig, joins: Sequence[str], base: str, documents: Sequence[Document]) -> list[int]:
    """Writes a block's sketch for each join. Returns the number of keys of each sketch."""
    counts = []
    for join in joins:
        sketch = SKETCHES[join](documents, getattr(cfg, join))
        sketches.write_sketch(sketch_path(base, join), sketch)
        counts.append(len(sketch.keys))
    return counts


def find_duplicates(
    cfg: PrepareConfig, name: str, folder: pathlib.Path, blocks: lookup.PassBlocks, column: int, executor: Executor
) -> dict[str, Any]:
    """Writes the items to remove to folder/removed.npy, unless it exists. Returns statistics of the duplicate groups.

    column: index of the join among the joins of its pass.
    """
    done = folder / "removed.done.json"
    if (found := lookup.read_done(done)) is not None:
        return found
    threshold = cfg.near_dedup.threshold if name == "near_dedup" else None
    keys = blocks.total(lookup.COLUMNS + column)
    join = Join(str(folder), blocks.folder, blocks.number, name, threshold, len(blocks), keys)
    folder.mkdir(parents=True, exist_ok=True)
    find_pairs(executor.run_all, join)
    paths = sorted(pathlib.Path(join.pairs).glob("*/*.npy"))
    number = sum(sketches.open_array(path).shape[0] for path in paths)
    remove(folder / "ranges")  # left by a killed process
    max_rows = max(1, join.memory_bytes // (sketches.MEMORY_FACTOR * 16))
    pairs = lambda: (part for path in paths for part in shuffle.read_chunks(path, max_rows))
    span = len(blocks) << sketches.PLACE_BITS
    removed = folder / "removed.npy"
    facts = sketches.external_components(pairs, number, span, folder / "ranges", removed, join.memory_bytes)
    lookup.mark_done(done, facts, [removed])
    for name in ("keys", "firsts", "items", "pairs", "ranges"):
        shutil.rmtree(folder / name, ignore_errors=True)
    return facts


def find_pairs(run_all: shuffle.RunAll, join: Join) -> None:
    """Writes the pairs of a join to files in join.pairs. With a threshold, keeps only pairs with similar signatures."""
    is_verified = join.threshold is not None
    folder = lambda name: f"{join.folder}/{name}"
    out = folder("keys/pairs") if is_verified else join.pairs
    count = sketches.num_partitions(16 * join.keys, join.memory_bytes)
    by_key = shuffle.Shuffle(join, folder("keys"), join.blocks, count, out=out, memory_bytes=join.memory_bytes)
    found = sum(shuffle.run_shuffle(run_all, by_key, shuffle.merge_records, write_pairs))
    if not is_verified:
        return
    width = 2 + record_width(join)
    count = sketches.num_partitions(8 * width * found, join.memory_bytes)
    by_first = shuffle.Shuffle(
        shuffle.ShuffleOutput(out),
        folder("firsts"),
        by_key.outputs,
        count,
        span=join.blocks << sketches.PLACE_BITS,
        out=folder("firsts/attached"),
        options=(join,),
        memory_bytes=join.memory_bytes,
    )
    list(shuffle.run_shuffle(run_all, by_first, shuffle.merge_records, write_attached_signatures))
    source = shuffle.ShuffleOutput(by_first.out)
    by_item = by_first._replace(source=source, folder=folder("items"), inputs=count, out=join.pairs)
    list(shuffle.run_shuffle(run_all, by_item, shuffle.merge_records, write_verified_pairs))


def write_pairs(task: shuffle.Shuffle) -> int:
    """Writes k pairs, uint64[k, 2], of an item and the first item with its key (reversed for candidates). Returns k."""
    join, max_rows = task.source, task.max_records(sketches.MEMORY_FACTOR * 16)

    def found_parts() -> Iterator[np.ndarray]:
        rows = shuffle.merge_runs(shuffle.input_runs(task), task.max_records(PAIRING_BYTES))
        for pairs in sketches.pair_chunks(rows, join.neighbours):
            yield pairs if join.threshold is None else sketches.sort_unique(pairs[:, ::-1])

    return shuffle.write_once(task, lambda path: shuffle.save_sorted(path, found_parts(), max_rows))


def write_attached_signatures(task: shuffle.Shuffle) -> int:
    """Writes (item, first item, signature of the first item), sorted by item. Last level of a shuffle by first item."""
    (join,) = task.options
    width = 2 + record_width(join)
    max_rows = task.max_records(sketches.MEMORY_FACTOR * 8 * width)

    def found_parts() -> Iterator[np.ndarray]:
        for pairs in shuffle.merge_runs(shuffle.input_runs(task), max_rows):
            found = join.signatures(pairs[:, 0])
            even = np.pad(found, ((0, 0), (0, found.shape[1] % 2)))  # two 32-bit numbers are packed into 64 bits
            packed = np.ascontiguousarray(even).view(np.uint64).reshape(len(pairs), width - 2)
            yield sketches.sort_unique(np.column_stack([pairs[:, ::-1], packed]))

    return shuffle.write_once(task, lambda path: shuffle.save_sorted(path, found_parts(), max_rows))


def write_verified_pairs(task: shuffle.Shuffle) -> int:
    """Writes the pairs with similar signatures, uint64[k, 2]. Last level of the shuffle by item."""
    (join,) = task.options
    max_rows = task.max_records(sketches.MEMORY_FACTOR * 8 * (2 + record_width(join)))

    def found_parts() -> Iterator[np.ndarray]:
        for records in shuffle.merge_runs(shuffle.input_runs(task), max_rows):
            item_signatures = join.signatures(records[:, 0])
            first_signatures = np.ascontiguousarray(records[:, 2:]).view(np.uint32)[:, : item_signatures.shape[1]]
            yield records[sketches.is_similar(item_signatures, first_signatures, join.threshold), :2]

    return shuffle.write_once(task, lambda path: shuffle.save_rows(path, found_parts()))


def record_width(join: Join) -> int:
    """Returns the number of 64-bit numbers in a signature."""
    base = lookup.blocks_of(join.work, join.number)[0]
    return -(-sketches.open_array(sketches.signatures_path(sketch_path(base, join.name))).shape[1] // 2)


def apply_joins(
    cfg: PrepareConfig, folders: dict[str, pathlib.Path], block: int, documents: Sequence[Document], tally: Tally
) -> list[Document]:
    """Returns a block's documents without the duplicates that the joins of a pass found. folders: {join: folder}."""
    places = np.arange(len(documents))  # indices of the remaining documents in the block that the joins read
    remaining = list(documents)
    for join, folder in folders.items():
        removed = sketches.open_array(folder / "removed.npy")
        rows = sketches.block_slice(removed[0], block)
        _, owners = sketches.split_items(removed[0, rows])
        if join == "line_dedup":
            owners, lines = duplicates.lines_at(documents, owners)
        positions = np.searchsorted(places, owners)
        remains = np.isin(owners, places)
        if join == "line_dedup":
            outcomes = duplicates.cut_lines(remaining, positions[remains], lines[remains], cfg.line_dedup)
        else:
            outcomes = duplicates.drop_documents(remaining, positions[remains], REASONS[join])
        places = places[[outcome.document is not None for outcome in outcomes]]
        remaining = tally.record(join, remaining, outcomes)
    return remaining


def cluster_facts(join: str, found: dict[str, Any], bases: Sequence[str]) -> dict[str, Any]:
    """Returns the sizes of the groups of duplicates, and excerpts of the largest groups.

    found: result of find_duplicates. bases: path prefixes of the blocks.
    """
    groups = []
    for keeper, size in found["largest"]:
        block, place = (int(part[0]) for part in sketches.split_items(np.array([keeper], np.uint64)))
        table = lookup.read_table(pathlib.Path(f"{bases[block]}.arrow"))
        if join == "line_dedup":
            documents = lookup.from_table(table)
            ((owner,), (line,)) = duplicates.lines_at(documents, np.array([place]))
            document, text = documents[owner], documents[owner].text.split("\n")[line]
        else:
            (document,) = lookup.from_table(table.slice(place, 1))
            text = document.text
        groups.append(dict(size=size, file=document.file, offset=document.offset, text=text[:1000]))
    return {"name": join, "sizes": found["sizes"], "largest": groups}
