"""Runs the tasks of a preparation on Apache Beam: Dataflow, Flink, Spark, or in this process for tests.

Every worker and this process must see the work folder under the same path. Tasks are the functions that run locally and
leave their results in files there, so the shards are the same, byte for byte. Beam's GroupByKey joins duplicates and
gathers shards. A graph holds the number of tasks and the work folder, so its size does not depend on the corpus.
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

from jaxscale.runtime.data.verified import remove
from jaxscale.runtime.text.sources.part import importing
from jaxscale.system.paths import write_text_atomic
from jaxscale.tools.corpus.prepare.dedup import Join
from jaxscale.tools.corpus.prepare.lookup import numbered_path
from jaxscale.tools.corpus.prepare.shuffle import Shuffle, read_runs
from jaxscale.tools.corpus.prepare.sketches import group_pairs, is_similar, save_array, split_items
from jaxscale.tools.corpus.prepare.tokens import documents_between, merge_by_key, shard_name, write_shard

with importing("a --runner but local", "apache-beam", "pip install 'jaxscale[beam]', in a separate environment"):
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

Signed = tuple[tuple[int, int], bytes]  # (pair, signature of its first item)
PAIRS_IN_FILE = (1 << 10, 1 << 17)  # minimum and maximum, except for the last file
RESULTS_IN_FILE = 256
BATCH_PAIRS = 1 << 15  # pairs with their signatures: 32 MiB of 128 permutations


class BeamExecutor(contextlib.AbstractContextManager):
    """dedup.Executor on a Beam runner."""

    def __init__(self, runner: str, flags: Sequence[str]):
        self.options = lambda: PipelineOptions([f"--runner={runner}", *flags])

    def __exit__(self, *_: Any) -> None:
        """Does nothing: each pipeline ends by itself."""

    def run_all(self, function: Callable[[Any], Any], task: Any, count: int) -> Iterator[Any]:
        """Yields function(task) of each task in order, once all are done; results are passed in files."""
        folder = pathlib.Path(task.folder) / "results"
        remove(folder)  # left by a killed process
        with beam.Pipeline(options=self.options()) as pipeline:
            done = spread_numbers(pipeline, count) | "do" >> beam.Map(run_task_to_json, function, task)
            _ = done | beam.GroupByKey() | "write" >> beam.Map(write_results, str(folder))
        for number in range(-(-count // RESULTS_IN_FILE)):
            yield from json.loads(numbered_path(folder, number, ".json").read_text("utf-8"))
        remove(folder)

    def find_pairs(self, join: Join) -> None:
        """Writes the pairs within groups of equal keys, verified if there is a threshold, to files below join.pairs."""
        remove(pathlib.Path(join.pairs))  # left by a killed process, in other batches, possibly damaged
        with beam.Pipeline(options=self.options()) as pipeline:
            keyed = spread_numbers(pipeline, join.blocks) | "keys" >> beam.FlatMap(keyed_items, join)
            pairs = keyed | "by key" >> beam.GroupByKey() | "pairs" >> beam.FlatMap(pair_group, join.neighbours)
            if join.threshold is not None:
                firsts = pairs | beam.Distinct() | "first's block" >> beam.Map(with_block_of_first)
                found = firsts | "by first" >> beam.GroupByKey() | "attach" >> beam.FlatMap(attached, join)
                pairs = found | "by item" >> beam.GroupByKey() | "compare" >> beam.FlatMap(verified_pairs, join)
            _ = pairs | beam.BatchElements(*PAIRS_IN_FILE) | "write" >> beam.Map(write_batch, join.pairs)

    def write_shards(self, shards: Shuffle) -> Iterator[str]:
        """Yields the name of each shard, in order, once all are written."""
        with beam.Pipeline(options=self.options()) as pipeline:
            slices = spread_numbers(pipeline, shards.inputs) | "slices" >> beam.FlatMap(shard_slices, shards)
            _ = slices | beam.GroupByKey() | "write" >> beam.Map(write_group, shards)
        yield from (shard_name(number, shards.outputs) for number in range(shards.outputs))


def spread_numbers(pipeline: Any, count: int) -> Any:
    """Returns a PCollection of the numbers below count, spread over the workers."""
    return pipeline | beam.Create([count]) | "numbers" >> beam.FlatMap(count_up) | beam.Reshuffle()


def count_up(count: int) -> Iterator[int]:
    """Yields 0, 1, 2, ... count - 1."""
    yield from range(count)


def run_task_to_json(number: int, function: Callable[[Any], Any], task: Any) -> tuple[int, tuple[int, str]]:
    """Runs a task. Returns (file of results, (number, result as JSON))."""
    return number // RESULTS_IN_FILE, (number, json.dumps(function(task._replace(number=number))))


def write_results(group: tuple[int, Iterable[tuple[int, str]]], folder: str) -> None:
    """Writes results in task order."""
    file, results = group
    path = numbered_path(folder, file, ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, "[" + ",".join(text for _, text in sorted(results)) + "]")


def keyed_items(block: int, join: Join) -> Iterator[tuple[int, int]]:
    """Yields (key, item) of a block's sketch as signed numbers; Beam has no unsigned ones."""
    keys, items = read_runs([join.read(block)]).view(np.int64).T
    return zip(keys.tolist(), items.tolist())


def unsigned(pairs: Iterable[Sequence[int]]) -> np.ndarray:
    """Returns uint64[k, 2] of pairs of signed numbers."""
    return np.array(list(pairs), np.int64).reshape(-1, 2).view(np.uint64)


def signed(pairs: np.ndarray) -> list[tuple[int, int]]:
    """Returns the inverse of unsigned."""
    return [tuple(pair) for pair in np.ascontiguousarray(pairs, np.uint64).view(np.int64).tolist()]


def pair_group(group: tuple[int, Iterable[int]], neighbours: int) -> Iterator[tuple[int, int]]:
    """Yields the pairs, still signed, of one key's items in any order; with neighbours, all items are in memory."""
    items = group[1]
    if not neighbours:
        first = min(items, key=lambda item: item % (1 << 64))
        yield from ((item, first) for item in items if item != first)
        return
    for pairs in group_pairs(np.fromiter(items, np.int64).view(np.uint64), neighbours, BATCH_PAIRS):
        yield from signed(pairs)


def batches(group: Iterable[Any]) -> Iterator[list[Any]]:
    """Yields the elements of a group in bounded batches."""
    remaining = iter(group)
    while batch := list(itertools.islice(remaining, BATCH_PAIRS)):
        yield batch


def with_block_of_first(pair: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    """Returns (block of the first item, pair)."""
    ((block,), _) = split_items(unsigned([pair])[:, 1])
    return int(block), pair


def attached(group: tuple[int, Iterable[tuple[int, int]]], join: Join) -> Iterator[tuple[int, Signed]]:
    """Yields (block of the item, (pair, signature of its first item)) for pairs whose first items are in one block."""
    read = join.signatures()
    for pairs in batches(group[1]):
        rows = unsigned(pairs)
        blocks, _ = split_items(rows[:, 0])
        for block, pair, signature in zip(blocks.tolist(), pairs, read(rows[:, 1])):
            yield block, (pair, signature.tobytes())


def verified_pairs(group: tuple[int, Iterable[Signed]], join: Join) -> Iterator[tuple[int, int]]:
    """Yields the pairs, of items in one block, whose signatures are similar."""
    assert join.threshold is not None, "only pairs of joins with a threshold are verified"
    read = join.signatures()
    for batch in batches(group[1]):
        pairs, firsts = zip(*batch)
        item_signatures = read(unsigned(pairs)[:, 0])
        first_signatures = np.frombuffer(b"".join(firsts), np.uint32).reshape(item_signatures.shape)
        yield from signed(unsigned(pairs)[is_similar(item_signatures, first_signatures, join.threshold)])


def write_batch(pairs: Iterable[tuple[int, int]], folder: str) -> None:
    """Writes the pairs to a file named by its content, so that a repeated task leaves one file."""
    found = np.array(sorted(set(pairs)), np.int64).reshape(-1, 2).view(np.uint64)
    name = hashlib.blake2b(found.tobytes(), digest_size=8).hexdigest()
    path = pathlib.Path(folder) / name[:3] / f"{name}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_array(path, found)


def shard_slices(block: int, shards: Shuffle) -> Iterator[tuple[int, tuple[int, bytes, bytes]]]:
    """Yields (shard, (block, ids, rows as Arrow)) for each shard with documents of a block; block 0 for every shard."""
    base, dtype = shards.source.base(block), shards.source.dtype
    ids, rows = documents_between(base, 0, 1 << 64, dtype)
    owners = shard_bounds(shards).searchsorted(rows.column("key").to_numpy(), side="right") - 1
    numbers, places = np.unique(owners, return_index=True)
    found = dict(zip(numbers.tolist(), zip(places.tolist(), [*places[1:].tolist(), len(rows)])))
    shards_with_slice = range(shards.outputs) if block == 0 else found
    ends = np.concatenate([[0], np.cumsum(rows.column("tokens").to_numpy())])
    for number in shards_with_slice:
        first, last = found.get(number, (0, 0))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows.slice(first, last - first))
        yield number, (block, ids[ends[first] : ends[last]].tobytes(), sink.getvalue().to_pybytes())


@functools.lru_cache(maxsize=4)
def shard_bounds(shards: Shuffle) -> np.ndarray:
    """Returns uint64[shards], the first key of each."""
    return np.array([shards.bound(number, shards.num_levels) for number in range(shards.outputs)], np.uint64)


def write_group(group: tuple[int, Iterable[tuple[int, bytes, bytes]]], shards: Shuffle) -> None:
    """Writes one shard from its slices."""
    number, slices = group

    def collect() -> tuple[np.ndarray, pa.Table]:
        read = lambda rows: pa.ipc.open_stream(rows).read_all()
        return merge_by_key([(np.frombuffer(ids, shards.source.dtype), read(rows)) for _, ids, rows in sorted(slices)])

    write_shard(shards._replace(level=shards.num_levels, number=number), collect)
