"""Runs the tasks of a preparation on Apache Beam: Dataflow, Flink, Spark, or in this process for tests.

The work folder must be one that every worker and this process see under the same path. Pieces are the same functions
as on one machine, and leave their results in files there, so the set that comes out is the same, byte for byte.
Duplicates are joined and shards gathered by Beam's own GroupByKey. A graph holds how many tasks there are and where
they look up what they are, so its size does not depend on the corpus.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from jaxscale.corpus.prepare.dedup import Join
from jaxscale.corpus.prepare.exchange import Exchange
from jaxscale.corpus.prepare.join import alike, group_pairs, parts, save_whole
from jaxscale.corpus.prepare.lookup import Numbered, numbered
from jaxscale.corpus.prepare.records import in_memory
from jaxscale.corpus.prepare.tokens import documents_between, laid_together, shard_name, write_shard
from jaxscale.data.verified import remove
from jaxscale.system.paths import write_text_atomic
from jaxscale.text.sources.part import needs

with needs("a --runner but local", "apache-beam", "pip install 'jaxscale[beam]', in an environment of its own"):
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

Signed = tuple[tuple[int, int], bytes]  # a pair, and the signature of its first
PAIRS_IN_FILE = (1 << 10, 1 << 17)  # fewest and most, but for the last
RESULTS_IN_FILE = 256
AT_ONCE = 1 << 15  # pairs, with their signatures: 32 MiB of 128 permutations


class BeamExecutor(contextlib.AbstractContextManager):
    """A Beam runner as an executor; see dedup.Executor."""

    def __init__(self, runner: str, flags: Sequence[str]):
        self.options = lambda: PipelineOptions([f"--runner={runner}", *flags])

    def __exit__(self, *_: Any) -> None:
        """Nothing to shut down: each pipeline ends by itself."""

    def run_all(self, function: Callable[[Any], Any], calls: Numbered) -> Iterator[Any]:
        """Yields function(call) of each call, in the order of the calls, once all are done.

        Results come by way of files in the work folder, so that this process holds few of them.
        """
        folder = pathlib.Path(calls.call.folder) / "results"
        remove(folder)  # of a process that was killed
        with beam.Pipeline(options=self.options()) as pipeline:
            done = numbers(pipeline, len(calls)) | "do" >> beam.Map(done_task, function, calls.call)
            _ = done | beam.GroupByKey() | "write" >> beam.Map(write_results, str(folder))
        for number in range(-(-len(calls) // RESULTS_IN_FILE)):
            yield from json.loads(numbered(folder, number, ".json").read_text("utf-8"))
        remove(folder)

    def find_pairs(self, join: Join) -> None:
        """Leaves the pairs of a join below join.pairs: what the groups of equal keys pair, verified if need be."""
        remove(pathlib.Path(join.pairs))  # of a process that was killed, in other batches, and perhaps damaged since
        with beam.Pipeline(options=self.options()) as pipeline:
            keyed = numbers(pipeline, join.blocks) | "keys" >> beam.FlatMap(keyed_items, join)
            pairs = keyed | "by key" >> beam.GroupByKey() | "pairs" >> beam.FlatMap(pairs_in, join.neighbours)
            if join.threshold is not None:
                firsts = pairs | beam.Distinct() | "first's block" >> beam.Map(with_block_of_first)
                found = firsts | "by first" >> beam.GroupByKey() | "attach" >> beam.FlatMap(attached, join)
                pairs = found | "by item" >> beam.GroupByKey() | "compare" >> beam.FlatMap(verified_pairs, join)
            _ = pairs | beam.BatchElements(*PAIRS_IN_FILE) | "write" >> beam.Map(write_batch, join.pairs)

    def write_shards(self, shards: Exchange) -> Iterator[str]:
        """Yields the name of each shard, in order, once all are written."""
        with beam.Pipeline(options=self.options()) as pipeline:
            slices = numbers(pipeline, shards.inputs) | "slices" >> beam.FlatMap(shard_slices, shards)
            _ = slices | beam.GroupByKey() | "write" >> beam.Map(write_group, shards)
        yield from (shard_name(number, shards.outputs) for number in range(shards.outputs))


def numbers(pipeline: Any, count: int) -> Any:
    """The numbers below count, spread over the workers."""
    return pipeline | beam.Create([count]) | "numbers" >> beam.FlatMap(below) | beam.Reshuffle()


def below(count: int) -> Iterator[int]:
    """0, 1, 2, ... count - 1."""
    yield from range(count)


def done_task(number: int, function: Callable[[Any], Any], call: Any) -> tuple[int, tuple[int, str]]:
    """(file of results, (number, result as JSON)) of a task."""
    return number // RESULTS_IN_FILE, (number, json.dumps(function(call._replace(number=number))))


def write_results(group: tuple[int, Iterable[tuple[int, str]]], folder: str) -> None:
    """Writes results in the order of their tasks."""
    file, results = group
    path = numbered(folder, file, ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, "[" + ",".join(text for _, text in sorted(results)) + "]")


def keyed_items(block: int, join: Join) -> Iterator[tuple[int, int]]:
    """(key, item) for everything in the sketch of a block, as signed numbers: Beam knows no others."""
    keys, items = in_memory([join.read(block)]).view(np.int64).T
    return zip(keys.tolist(), items.tolist())


def unsigned(pairs: Iterable[Sequence[int]]) -> np.ndarray:
    """uint64[k, 2] of pairs of signed numbers."""
    return np.array(list(pairs), np.int64).reshape(-1, 2).view(np.uint64)


def signed(pairs: np.ndarray) -> list[tuple[int, int]]:
    """The inverse of unsigned."""
    return [tuple(pair) for pair in np.ascontiguousarray(pairs, np.uint64).view(np.int64).tolist()]


def pairs_in(group: tuple[int, Iterable[int]], neighbours: int) -> Iterator[tuple[int, int]]:
    """Yields the pairs, still signed, of the items of one key, which come in any order.

    None is held where only the first one is wanted; neighbours are known when all are sorted, in 16 bytes each.
    """
    items = group[1]
    if not neighbours:
        first = min(items, key=lambda item: item % (1 << 64))
        yield from ((item, first) for item in items if item != first)
        return
    for pairs in group_pairs(np.fromiter(items, np.int64).view(np.uint64), neighbours, AT_ONCE):
        yield from signed(pairs)


def batches(group: Iterable[Any]) -> Iterator[list[Any]]:
    """Yields what is in a group, a bounded number at a time."""
    left = iter(group)
    while batch := list(itertools.islice(left, AT_ONCE)):
        yield batch


def with_block_of_first(pair: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """(block of the first, pair)."""
    return int(parts(unsigned([pair])[:, 1]).blocks[0]), pair


def attached(group: tuple[int, Iterable[tuple[int, int]]], join: Join) -> Iterator[tuple[int, Signed]]:
    """(block of the item, (pair, signature of the first)) of the pairs whose firsts are in one block."""
    read = join.signatures()
    for pairs in batches(group[1]):
        rows = unsigned(pairs)
        blocks = parts(rows[:, 0]).blocks.tolist()
        for block, pair, signature in zip(blocks, pairs, read(rows[:, 1])):
            yield block, (pair, signature.tobytes())


def verified_pairs(group: tuple[int, Iterable[Signed]], join: Join) -> Iterator[tuple[int, int]]:
    """Those of the pairs whose items are in one block that are alike."""
    assert join.threshold is not None, "only pairs of joins with a threshold are verified"
    read = join.signatures()
    for batch in batches(group[1]):
        pairs, firsts = zip(*batch)
        own = read(unsigned(pairs)[:, 0])
        other = np.frombuffer(b"".join(firsts), np.uint32).reshape(own.shape)
        yield from signed(unsigned(pairs)[alike(own, other, join.threshold)])


def write_batch(pairs: Iterable[tuple[int, int]], folder: str) -> None:
    """Writes the pairs to a file named by what is in it, so that doing it twice leaves one."""
    found = np.array(sorted(set(pairs)), np.int64).reshape(-1, 2).view(np.uint64)
    name = hashlib.blake2b(found.tobytes(), digest_size=8).hexdigest()
    path = pathlib.Path(folder) / name[:3] / f"{name}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_whole(path, found)


def shard_slices(block: int, shards: Exchange) -> Iterator[tuple[int, tuple[int, bytes, bytes]]]:
    """(shard, (block, ids, rows as Arrow)) for each shard that has documents of a block; of the first block for all."""
    base, dtype = shards.source.base(block), shards.source.dtype
    ids, rows = documents_between(base, 0, 1 << 64, dtype)
    owners = bounds_of(shards).searchsorted(rows.column("key").to_numpy(), side="right") - 1
    numbers, places = np.unique(owners, return_index=True)
    found = dict(zip(numbers.tolist(), zip(places.tolist(), [*places[1:].tolist(), len(rows)])))
    wanted = range(shards.outputs) if block == 0 else found
    ends = np.concatenate([[0], np.cumsum(rows.column("tokens").to_numpy())])
    for number in wanted:
        first, last = found.get(number, (0, 0))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows.slice(first, last - first))
        yield number, (block, ids[ends[first] : ends[last]].tobytes(), sink.getvalue().to_pybytes())


@functools.lru_cache(maxsize=4)
def bounds_of(shards: Exchange) -> np.ndarray:
    """uint64[shards]: the first key of each."""
    return np.array([shards.bound(number, shards.levels) for number in range(shards.outputs)], np.uint64)


def write_group(group: tuple[int, Iterable[tuple[int, bytes, bytes]]], shards: Exchange) -> None:
    """Writes the shard that a group of slices is."""
    number, slices = group

    def collect() -> tuple[np.ndarray, pa.Table]:
        read = lambda rows: pa.ipc.open_stream(rows).read_all()
        return laid_together([(np.frombuffer(ids, shards.source.dtype), read(rows)) for _, ids, rows in sorted(slices)])

    write_shard(shards._replace(level=shards.levels, number=number), collect)
