"""Reads experts.jsonl: token counts per layer and expert, over windows of steps."""

import collections
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxscale.runtime.monitor.json_lines import LARGEST_NUMBER, read_lines

MOST_WINDOWS = 10_000  # the newest; a run writes some 130


class CountWindow(NamedTuple):
    """The steps from one record to the next."""

    step: int  # the last of them
    steps: int
    first_layer: int
    busiest: tuple[float | None, ...]  # of each layer: the busiest expert over the mean; None without any token


class ExpertCounts(NamedTuple):
    """All windows of a run, and the newest in full."""

    windows: tuple[CountWindow, ...]
    counts: tuple[tuple[int, ...], ...]  # of the newest window, by layer and expert

    @property
    def newest(self) -> CountWindow:
        """The window of `counts`."""
        return self.windows[-1]

    @property
    def layers(self) -> range:
        """The numbers of the layers that have experts."""
        return range(self.newest.first_layer, self.newest.first_layer + len(self.counts))


def read_expert_counts(folder: Any, problems: list[str]) -> ExpertCounts | None:
    """Reads the counts of a work folder; None without any. The last record of a step counts."""
    windows: collections.deque[CountWindow] = collections.deque(maxlen=MOST_WINDOWS)
    counts: tuple[tuple[int, ...], ...] = ()
    for record in read_lines(folder / "experts.jsonl", problems):
        found = counts_in(record)
        if found is None:
            continue
        while windows and windows[-1].step >= record["step"]:
            windows.pop()
        busiest = tuple(max_over_mean(layer_counts) for layer_counts in found)
        windows.append(CountWindow(record["step"], record["steps"], record["first_layer"], busiest))
        counts = found
    if not windows:
        return None
    similar = [one for one in windows if (one.first_layer, len(one.busiest)) == (windows[-1].first_layer, len(counts))]
    return ExpertCounts(tuple(similar), counts)


def counts_in(record: dict[str, Any]) -> tuple[tuple[int, ...], ...] | None:
    """Returns the table of a record; None if it is invalid."""
    facts = [record.get(name) for name in ("step", "steps", "first_layer")]
    table = record.get("counts")
    if not all(type(fact) is int and 0 <= fact <= LARGEST_NUMBER for fact in facts) or not isinstance(table, list):
        return None
    whole = all(isinstance(row, list) and row and len(row) == len(table[0]) for row in table)
    if not table or not whole:
        return None
    if not all(type(count) is int and 0 <= count <= LARGEST_NUMBER for row in table for count in row):
        return None
    return tuple(map(tuple, table))


def max_over_mean(counts: Sequence[int]) -> float | None:
    """The largest over the mean; None where all are 0."""
    return max(counts) / statistics.fmean(counts) if any(counts) else None
