"""Deduplication across blocks: exact, line and near duplicates, from sketches to the documents removed.

work/pass0/.../000000012-000003.near_dedup.npy, .signatures.npy   a block's sketch
work/joins/0-near_dedup/keys/                        an exchange of (key, item), and the pairs that it gives
work/joins/0-near_dedup/firsts/, pairs/              pairs with the first's signature, by their item; those verified
work/joins/0-near_dedup/removed.npy                  uint64[2, k]: what goes, and the item that is kept for it

Candidates are verified by two exchanges, so that whoever needs a signature has the pairs of its blocks in their order.
"""

import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxscale.corpus.curate.duplicates import (
    cut_lines,
    drop_documents,
    lines_at,
    make_exact_sketch,
    make_line_sketch,
    make_near_sketch,
)
from jaxscale.corpus.prepare.blocks import document_at, from_table, mark_done, read_done, read_table
from jaxscale.corpus.prepare.config import PrepareConfig
from jaxscale.corpus.prepare.exchange import (
    Exchange,
    Files,
    RunAll,
    exchange,
    leave_once,
    merge_records,
    runs_of,
)
from jaxscale.corpus.prepare.join import (
    MEMORY_BYTES,
    PLACE_BITS,
    WORK,
    alike,
    item_numbers,
    num_partitions,
    of_block,
    open_array,
    pairs_of_parts,
    parts,
    signature_reader,
    signatures_path,
    sorted_once,
    write_sketch,
)
from jaxscale.corpus.prepare.lookup import COLUMNS, Blocks, Numbered, blocks_of
from jaxscale.corpus.prepare.records import Run, merged, read_parts, run_between, save_rows, save_sorted
from jaxscale.corpus.prepare.tally import Tally
from jaxscale.corpus.prepare.unite import unite
from jaxscale.data.verified import remove
from jaxscale.text.document import Document

NEIGHBOURS = 2  # in a bucket of near duplicates; see pairs_of_keys
PAIRING_BYTES = 300  # of memory for each (key, item) that has copies, measured: 250 while pairs are made; more to merge
REASONS = {"exact_dedup": "exact duplicate", "near_dedup": "near duplicate"}


class Join(NamedTuple):
    """What duplicates are looked for in: the sketches of all blocks of a pass."""

    folder: str  # of what is found
    work: str
    number: int  # of the pass
    name: str
    threshold: float | None  # of near duplicates, which are verified
    blocks: int
    keys: int  # of all sketches
    memory_bytes: int = MEMORY_BYTES  # of a task

    def read(self, block: int, begin: int = 0, end: int = 1 << 64) -> Run:
        """(key, item) of a block, with keys from begin up to end; see exchange.Source."""
        path = sketch_path(blocks_of(self.work, self.number)[block], self.name)
        return run_between(path, begin, end, int(item_numbers(block, 0)))

    def signatures(self) -> Callable[[np.ndarray], np.ndarray]:
        """A function from items to the signatures of their documents."""
        blocks = blocks_of(self.work, self.number)
        return signature_reader(lambda block: sketch_path(blocks[block], self.name))

    @property
    def neighbours(self) -> int:
        """How many items before it each is paired with, beside the first of its key."""
        return 0 if self.threshold is None else NEIGHBOURS

    @property
    def pairs(self) -> str:
        """The folder of the pairs, where each file is uint64[k, 2]: an item and a smaller one."""
        return f"{self.folder}/pairs"


class Executor(AbstractContextManager, Protocol):
    """All cores of this machine, or a cluster. Pieces write their results to files, and may be done twice."""

    def run_all(self, function: Callable[[Any], Any], calls: Numbered) -> Iterator[Any]:
        """Yields function(call) of each call, in any order. Raises what a call raised."""
        ...

    def find_pairs(self, join: Join) -> None:
        """Leaves the pairs of a join, verified where there is a threshold, in files below join.pairs."""
        ...

    def write_shards(self, shards: Exchange) -> Iterator[str]:
        """Yields the name of each shard, in any order, when it is written: see tokens.write_shard."""
        ...


def sketch_path(base: str, join: str) -> pathlib.Path:
    """Where the sketch of the block at `base` lies."""
    return pathlib.Path(f"{base}.{join}.npy")


def write_sketches(cfg: PrepareConfig, joins: Sequence[str], base: str, documents: Sequence[Document]) -> list[int]:
    """How many keys a block brings to each of the joins, after its sketches are written."""
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
    """Writes folder/removed.npy, unless it is there: what is to go from the blocks. Returns unite's facts of it.

    column: of the join among those of the pass.
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
    remove(folder / "ranges")  # of a process that was killed
    most = max(1, join.memory_bytes // (WORK * 16))
    pairs = lambda: (part for path in paths for part in read_parts(path, most))
    span = len(blocks) << PLACE_BITS
    facts = unite(pairs, number, span, folder / "ranges", folder / "removed.npy", join.memory_bytes)
    mark_done(done, facts, [folder / "removed.npy"])
    for between in ("keys", "firsts", "items", "pairs", "ranges"):
        shutil.rmtree(folder / between, ignore_errors=True)
    return facts


def pairs_by_exchange(run_all: RunAll, join: Join) -> None:
    """Leaves the pairs of a join in join.pairs, as an executor without a shuffle of its own does it."""
    is_verified = join.threshold is not None
    folder = lambda name: f"{join.folder}/{name}"
    out = folder("keys/pairs") if is_verified else join.pairs
    count = num_partitions(16 * join.keys, join.memory_bytes)
    by_key = Exchange(join, folder("keys"), join.blocks, count, out=out, memory_bytes=join.memory_bytes)
    found = sum(exchange(run_all, by_key, merge_records, leave_pairs))
    if not is_verified:
        return
    width = 2 + record_width(join)
    count = num_partitions(8 * width * found, join.memory_bytes)
    by_first = Exchange(
        Files(out),
        folder("firsts"),
        by_key.outputs,
        count,
        span=join.blocks << PLACE_BITS,
        out=folder("firsts/attached"),
        options=(join,),
        memory_bytes=join.memory_bytes,
    )
    for _ in exchange(run_all, by_first, merge_records, leave_attached):
        pass
    by_item = by_first._replace(source=Files(by_first.out), folder=folder("items"), inputs=count, out=join.pairs)
    for _ in exchange(run_all, by_item, merge_records, leave_verified):
        pass


def leave_pairs(call: Exchange) -> int:
    """The last level by keys: leaves the pairs of a range. Returns how many.

    uint64[k, 2]: an item, and the first of those that have a key in common with it; the other way round for candidates.
    """
    path, neighbours = call.path(call.level, call.number, ".npy"), call.source.neighbours

    def found_parts() -> Iterator[np.ndarray]:
        for pairs in pairs_of_parts(merged(runs_of(call), call.most(PAIRING_BYTES)), neighbours):
            yield pairs if call.source.threshold is None else sorted_once(pairs[:, ::-1])

    return leave_once(path, lambda: save_sorted(path, found_parts(), call.most(WORK * 16)))


def leave_attached(call: Exchange) -> int:
    """The last level by firsts: leaves (item, first, signature of the first), sorted by item."""
    path, (join,) = call.path(call.level, call.number, ".npy"), call.options
    width = 2 + record_width(join)
    most = call.most(WORK * 8 * width)

    def found_parts() -> Iterator[np.ndarray]:
        signatures = join.signatures()
        for pairs in merged(runs_of(call), most):
            found = packed(signatures(pairs[:, 0])).reshape(len(pairs), width - 2)
            yield sorted_once(np.column_stack([pairs[:, ::-1], found]))

    return leave_once(path, lambda: save_sorted(path, found_parts(), most))


def leave_verified(call: Exchange) -> int:
    """The last level by items: leaves those pairs whose signatures are alike, uint64[k, 2]."""
    path, (join,) = call.path(call.level, call.number, ".npy"), call.options

    def found_parts() -> Iterator[np.ndarray]:
        signatures = join.signatures()
        for records in merged(runs_of(call), call.most(WORK * 8 * (2 + record_width(join)))):
            own = signatures(records[:, 0])
            other = np.ascontiguousarray(records[:, 2:]).view(np.uint32)[:, : own.shape[1]]
            yield records[alike(own, other, join.threshold), :2]

    return leave_once(path, lambda: save_rows(path, found_parts()))


def packed(signatures: np.ndarray) -> np.ndarray:
    """uint64[k, record_width]: the numbers of signatures two by two, the last perhaps with a zero."""
    even = np.pad(signatures, ((0, 0), (0, signatures.shape[1] % 2)))
    return np.ascontiguousarray(even).view(np.uint64)


def record_width(join: Join) -> int:
    """How many numbers of 64 bits a signature takes."""
    base = blocks_of(join.work, join.number)[0]
    return -(-open_array(signatures_path(sketch_path(base, join.name))).shape[1] // 2)


def apply_joins(
    cfg: PrepareConfig, folders: dict[str, pathlib.Path], block: int, documents: Sequence[Document], tally: Tally
) -> list[Document]:
    """The documents of a block without what the joins found, which all saw it as it is given.

    folders: of each join, in order; what one has dropped, the next does not count.
    """
    places = np.arange(len(documents))  # of the documents that are left, in the block as the joins saw it
    left = list(documents)
    for join, folder in folders.items():
        removed = open_array(folder / "removed.npy")
        inside = of_block(removed[0], block)
        owners = parts(removed[0, inside]).places
        if join == "line_dedup":
            owners, lines = lines_at(documents, owners)
        now = np.searchsorted(places, owners)
        still = (now < len(places)) & (places[np.minimum(now, len(places) - 1)] == owners) if len(places) else []
        if join == "line_dedup":
            outcomes = cut_lines(left, now[still], lines[still], cfg.line_dedup)
        else:
            outcomes = drop_documents(left, now[still], REASONS[join])
        places = places[[outcome.document is not None for outcome in outcomes]]
        left = tally.take(join, left, outcomes)
    return left


def cluster_facts(join: str, found: dict[str, Any], bases: Sequence[str]) -> dict[str, Any]:
    """How large the groups of duplicates in the blocks at `bases` are, and the largest of them, for the report.

    found: of find_duplicates.
    """
    groups = []
    for keeper, size in found["largest"]:
        block, place = (int(part[0]) for part in parts(np.array([keeper], np.uint64)))
        if join == "line_dedup":
            documents = from_table(read_table(pathlib.Path(f"{bases[block]}.arrow")))
            ((owner,), (line,)) = lines_at(documents, np.array([place]))
            document, text = documents[owner], documents[owner].text.split("\n")[line]
        else:
            document = document_at(bases[block], place)
            text = document.text
        groups.append(dict(size=size, file=document.file, offset=document.offset, text=text[:1000]))
    return {"name": join, "sizes": found["sizes"], "largest": groups}
