"""Runs the tasks of a preparation on Apache Beam: Dataflow, Flink, Spark, or in this process for tests.

The work folder must be one that every worker and this process see under the same path. Pieces are the same functions
as on one machine, and leave their results in files there, so the set that comes out is the same, byte for byte. The
join of duplicates is a GroupByKey over the keys of all sketches.
"""

import contextlib
import hashlib
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxscale.corpus.prepare.dedup import NEIGHBOURS
from jaxscale.corpus.prepare.join import group_pairs, item_numbers, open_array, save_whole, signature_reader, verified
from jaxscale.data.verified import remove
from jaxscale.text.sources.part import needs

with needs("a --runner but local", "apache-beam", "pip install 'jaxscale[beam]', in an environment of its own"):
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

PAIRS_IN_FILE = (1 << 10, 1 << 17)  # fewest and most, but for the last


class BeamExecutor(contextlib.AbstractContextManager):
    """A Beam runner as an executor; see dedup.Executor."""

    def __init__(self, runner: str, flags: Sequence[str]):
        self.options = lambda: PipelineOptions([f"--runner={runner}", *flags])

    def __exit__(self, *_: Any) -> None:
        """Nothing to shut down: each pipeline ends by itself."""

    def run_all(self, function: Callable[[Any], Any], calls: Sequence[Any]) -> Iterator[Any]:
        """Yields function(call) of each call, in the order of the calls, once all are done.

        A function that finds its result in the work folder returns it at once: so it comes back from a worker.
        """
        with beam.Pipeline(options=self.options()) as pipeline:
            spread = pipeline | beam.Create(list(calls)) | beam.Reshuffle()
            _ = spread | "do" >> beam.Map(lambda call: function(call) and None)
        yield from map(function, calls)

    def write_pairs(self, paths: Sequence[str], threshold: float | None, folder: pathlib.Path) -> None:
        """Writes folder/pairs-*.npy: what the groups of equal keys pair, verified where there is a threshold."""
        for left in folder.glob("pairs-*"):  # of a process that was killed, in other batches, and perhaps damaged since
            remove(left)
        neighbours = 0 if threshold is None else NEIGHBOURS
        with beam.Pipeline(options=self.options()) as pipeline:
            groups = (
                pipeline
                | beam.Create(list(enumerate(paths)))
                | beam.Reshuffle()
                | "keys" >> beam.FlatMap(keyed_items)
                | beam.GroupByKey()
            )
            pairs = groups | "pairs" >> beam.FlatMap(pairs_in, neighbours)
            batches = pairs | beam.BatchElements(*PAIRS_IN_FILE)
            _ = batches | "write" >> beam.Map(write_batch, list(paths), threshold, str(folder))


def keyed_items(block: tuple[int, str]) -> Iterator[tuple[int, int]]:
    """(key, item) for everything in the sketch of a block, as signed numbers: Beam knows no others."""
    number, path = block
    keys, items = open_array(path)
    numbered = items | item_numbers(number, 0)  # the block, which its own file does not know
    return zip(keys.view(np.int64).tolist(), numbered.view(np.int64).tolist())


def pairs_in(group: tuple[int, Iterable[int]], neighbours: int) -> list[tuple[int, int]]:
    """The pairs, still signed, of the items of one key."""
    items = np.fromiter(group[1], np.int64).view(np.uint64)
    pairs = np.array(group_pairs(items, neighbours), np.uint64).reshape(-1, 2)
    return [tuple(pair) for pair in pairs.view(np.int64).tolist()]


def write_batch(pairs: Iterable[tuple[int, int]], paths: Sequence[str], threshold: float | None, folder: str) -> None:
    """Writes the pairs to a file named by what is in it, so that doing it twice leaves one."""
    items, firsts = np.array(sorted(set(pairs)), np.int64).reshape(-1, 2).view(np.uint64).T
    if threshold is not None:
        items, firsts = verified(items, firsts, signature_reader(dict(enumerate(paths))), threshold)
    found = np.stack([items, firsts])
    save_whole(pathlib.Path(folder) / f"pairs-{hashlib.blake2b(found.tobytes(), digest_size=8).hexdigest()}.npy", found)
