"""Runs the tasks of a preparation on Apache Beam: Dataflow, Flink, Spark, or in this process for tests.

Every worker and this process must see the work folder under the same path. Tasks are the same functions that run
locally. They write their results to files there, so the shards are identical. Each pass and each level of a shuffle is
one pipeline. A graph stores the number of tasks and the work folder, so its size does not depend on the corpus.
"""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxscale.runtime.data.verified import remove
from jaxscale.runtime.text.sources.part import importing
from jaxscale.system.paths import write_text_atomic
from jaxscale.tools.corpus.prepare.lookup import numbered_path

with importing("any --runner except local", "apache-beam", "pip install 'jaxscale[beam]', in a separate environment"):
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

RESULTS_IN_FILE = 256


class BeamExecutor(contextlib.AbstractContextManager):
    """Implements dedup.Executor on a Beam runner."""

    def __init__(self, runner: str, flags: Sequence[str]):
        self.options = lambda: PipelineOptions([f"--runner={runner}", *flags])

    def __exit__(self, *_: Any) -> None:
        """Does nothing, since each pipeline ends by itself."""

    def run_all(self, function: Callable[[Any], Any], task: Any, count: int) -> Iterator[Any]:
        """Once all tasks are done, yields function(task) for each, in order. Tasks write results to files."""
        folder = pathlib.Path(task.folder) / "results"
        remove(folder)  # left by a killed process
        with beam.Pipeline(options=self.options()) as pipeline:
            numbers = pipeline | beam.Create([count]) | "numbers" >> beam.FlatMap(count_up) | beam.Reshuffle()
            done = numbers | "do" >> beam.Map(run_task_to_json, function, task)
            _ = done | beam.GroupByKey() | "write" >> beam.Map(write_results, str(folder))
        for number in range(-(-count // RESULTS_IN_FILE)):
            yield from json.loads(numbered_path(folder, number, ".json").read_text("utf-8"))
        remove(folder)


def count_up(count: int) -> Iterator[int]:
    """Yields the integers from 0 to count - 1. beam.FlatMap does not accept the built-in `range`."""
    yield from range(count)


def run_task_to_json(number: int, function: Callable[[Any], Any], task: Any) -> tuple[int, tuple[int, str]]:
    """Runs a task. Returns (index of the result file, (task number, result as JSON))."""
    return number // RESULTS_IN_FILE, (number, json.dumps(function(task._replace(number=number))))


def write_results(group: tuple[int, Iterable[tuple[int, str]]], folder: str) -> None:
    """Writes the results of one file in task order."""
    file, results = group
    path = numbered_path(folder, file, ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, "[" + ",".join(text for _, text in sorted(results)) + "]")
