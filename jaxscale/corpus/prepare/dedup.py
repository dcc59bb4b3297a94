"""Deduplication across blocks: exact, line and near duplicates, from sketches to the documents removed.

work/pass0/000012-00003.near_dedup.npy, .signatures.npy      a block's sketch
work/joins/0-near_dedup/pairs-00001.npy                      items with a key in common, of one range of keys
work/joins/0-near_dedup/removed.npy                          uint64[2, k]: what goes, and the item that is kept for it
"""

import pathlib
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
from jaxscale.corpus.prepare.join import (
    components,
    duplicate_pairs,
    num_partitions,
    of_block,
    open_array,
    parts,
    save_whole,
    signature_reader,
    unique_pairs,
    verified,
    write_sketch,
)
from jaxscale.corpus.prepare.tally import Tally
from jaxscale.text.document import Document

MEMORY_BYTES = 256 << 20  # of one partition of a join, in each process
LARGEST = 5  # groups of duplicates that a report shows
NEIGHBOURS = 2  # in a bucket of near duplicates; see duplicate_pairs
REASONS = {"exact_dedup": "exact duplicate", "near_dedup": "near duplicate"}


class Executor(AbstractContextManager, Protocol):
    """All cores of this machine, or a cluster. Pieces write their results to files, and may be done twice."""

    def run_all(self, function: Callable[[Any], Any], calls: Sequence[Any]) -> Iterator[Any]:
        """Yields function(call) of each call, in any order. Raises what a call raised."""

    def write_pairs(self, paths: Sequence[str], threshold: float | None, folder: pathlib.Path) -> None:
        """Writes folder/pairs-*.npy, uint64[2, k]: the join of the blocks' sketches at `paths`."""


class PairsCall(NamedTuple):
    """One partition of a join."""

    paths: tuple[str, ...]  # of the sketches, in the order of blocks
    threshold: float | None  # of near duplicates, which are verified
    partition: int
    num_partitions: int
    output: str


def sketch_path(base: str, join: str) -> pathlib.Path:
    """Where the sketch of the block at `base` lies."""
    return pathlib.Path(f"{base}.{join}.npy")


def write_sketches(cfg: PrepareConfig, joins: Sequence[str], base: str, documents: Sequence[Document]) -> None:
    """Writes what a block brings to each of the joins."""
    makers = dict(exact_dedup=make_exact_sketch, line_dedup=make_line_sketch, near_dedup=make_near_sketch)
    for join in joins:
        write_sketch(sketch_path(base, join), makers[join](getattr(cfg, join))(documents))


def find_duplicates(
    cfg: PrepareConfig, join: str, folder: pathlib.Path, bases: Sequence[str], executor: Executor
) -> None:
    """Writes folder/removed.npy, unless it is there: what is to go from the blocks at `bases`."""
    done = folder / "removed.done.json"
    if read_done(done) is not None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    paths = [sketch_path(base, join) for base in bases]
    threshold = cfg.near_dedup.threshold if join == "near_dedup" else None
    executor.write_pairs([str(path) for path in paths], threshold, folder)
    found = [np.load(path, allow_pickle=False) for path in sorted(folder.glob("pairs-*.npy"))]
    items, firsts = unique_pairs(*np.concatenate([np.zeros((2, 0), np.uint64), *found], axis=1))
    save_whole(folder / "removed.npy", np.stack(components(items, firsts)))
    mark_done(done, {}, [folder / "removed.npy"])


def local_pair_calls(paths: Sequence[str], threshold: float | None, folder: pathlib.Path) -> list[PairsCall]:
    """The partitions of a join on this machine, and where each leaves its pairs."""
    count = num_partitions(sum(pathlib.Path(path).stat().st_size for path in paths), MEMORY_BYTES)
    output = lambda i: str(folder / f"pairs-{i:05d}.npy")
    return [PairsCall(tuple(paths), threshold, i, count, output(i)) for i in range(count)]


def write_pairs(call: PairsCall) -> None:
    """Writes uint64[2, k]: items with a key in common and the first of them, verified where there is a threshold."""
    output = pathlib.Path(call.output)
    done = output.with_suffix(".done.json")
    if read_done(done) is not None:
        return
    neighbours = 0 if call.threshold is None else NEIGHBOURS
    items, firsts = duplicate_pairs(call.paths, call.partition, call.num_partitions, neighbours)
    if call.threshold is not None:
        items, firsts = verified(items, firsts, signature_reader(dict(enumerate(call.paths))), call.threshold)
    save_whole(output, np.stack([items, firsts]))
    mark_done(done, {}, [output])


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


def cluster_facts(join: str, folder: pathlib.Path, bases: Sequence[str]) -> dict[str, Any]:
    """How large the groups of duplicates in the blocks at `bases` are, and the largest of them, for the report."""
    keepers, counts = np.unique(open_array(folder / "removed.npy")[1], return_counts=True)
    sizes, numbers = np.unique(counts + 1, return_counts=True)
    edges = [2, 3, 4, 5, 10, 100, 1000, 1 << 62]
    binned = [
        (label(start, stop), int(numbers[(sizes >= start) & (sizes < stop)].sum()))
        for start, stop in zip(edges, edges[1:])
    ]
    order = np.lexsort((keepers, -counts))[:LARGEST]
    groups = []
    for keeper, count in zip(keepers[order], counts[order]):
        block, place = (int(part[0]) for part in parts(np.array([keeper])))
        if join == "line_dedup":
            documents = from_table(read_table(pathlib.Path(f"{bases[block]}.arrow")))
            ((owner,), (line,)) = lines_at(documents, np.array([place]))
            document, text = documents[owner], documents[owner].text.split("\n")[line]
        else:
            document = document_at(bases[block], place)
            text = document.text
        groups.append(dict(size=int(count) + 1, file=document.file, offset=document.offset, text=text[:1000]))
    return {"name": join, "sizes": [pair for pair in binned if pair[1]], "largest": groups}


def label(start: int, stop: int) -> str:
    """'2', '5 to 9', '1,000 or more'."""
    if stop == start + 1:
        return f"{start}"
    return f"{start:,} or more" if stop == 1 << 62 else f"{start:,} to {stop - 1:,}"
