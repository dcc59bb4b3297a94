"""Computes the rows of batch n as a pure function of (seed, n), and handles ranges of skipped batches."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxscale.core.batch import Batch
from jaxscale.runtime.data.config import check_skips
from jaxscale.runtime.data.mixture import Mixture
from jaxscale.runtime.data.permutation import permuted, unpermuted
from jaxscale.runtime.data.row_filter import RowFilter
from jaxscale.system.exits import BadInput
from jaxscale.units import BatchSizes

ORDER = 2  # version; increase it when the same settings give different batches; 1 was Grain's shuffle
Transform = Callable[[Batch, int, Sequence[int]], Batch]  # (rows, n, row indices) -> changed rows
Ranges = tuple[tuple[int, int], ...]
LOCATED = 1024  # number of rows that are located together


class RowOrder:
    """An endless stream of rows. Each epoch permutes the rows of each group (a source, or all rows)."""

    def __init__(self, rows: Any, seed: int, mixture: Mixture | None = None):
        """rows: DocumentRows or SyntheticRows; SyntheticRows only without a mixture."""
        self.rows, self.seed, self.mixture = rows, seed, mixture

    def row_numbers(self, positions: np.ndarray) -> np.ndarray:
        """Returns int64[m], the row at each position int64[m] of the stream."""
        groups, steps = np.zeros_like(positions), positions
        if self.mixture is not None:
            groups, steps = self.mixture.locate(positions)
        numbers = np.empty(len(positions), np.int64)
        for group in np.unique(groups):
            first, size, name = self._group(group)
            epochs, places = np.divmod(steps, size)
            for epoch in np.unique(epochs[groups == group]):
                mask = (groups == group) & (epochs == epoch)
                numbers[mask] = first + permuted(places[mask], size, order_key(self.seed, name, epoch))
        return numbers

    def places_of(self, row: int, stop: int) -> np.ndarray:
        """Returns the stream positions of a row before `stop`, one per epoch, in order (inverse of row_numbers)."""
        group = 0
        if self.mixture is not None:
            group = int(np.searchsorted(self.rows.group_rows, row, side="right")) - 1
            stop = self.mixture.rows_by_source(stop)[group]
        first, size, name = self._group(group)
        keys = enumerate(order_key(self.seed, name, epoch) for epoch in range(-(-int(stop) // size)))
        steps = np.array([epoch * size + int(unpermuted(row - first, size, key)) for epoch, key in keys], np.int64)
        steps = steps[steps < stop]
        return steps if self.mixture is None else self.mixture.find(group, steps)

    def _group(self, group: int) -> tuple[int, int, str]:
        """Returns (first row, number of rows, name) of a group."""
        if self.mixture is None:
            return 0, len(self.rows), ""
        first, stop = (int(bound) for bound in self.rows.group_rows[group : group + 2])
        return first, stop - first, self.mixture.names[group]


def order_key(seed: int, name: str, epoch: int) -> str:
    """Returns the key that determines the permutation of a group's rows in an epoch."""
    return f"row order {seed} {epoch} {name}"


@dataclasses.dataclass(eq=False)
class Batches:
    """Random access to batches by index, without state. Any host can read any rows of any batch.

    Rows of consecutive batches are located in groups of about LOCATED rows, because a NumPy call takes about as long
    for one number as for a thousand.
    """

    order: RowOrder
    rows_per_batch: BatchSizes | int
    row_filter: RowFilter | None = None  # selects rows whose weights are set to 0
    transform: Transform | None = None

    def __post_init__(self):
        self.sizes = BatchSizes.of(self.rows_per_batch)
        self._recent: tuple[Any, Any] = (None, None)  # threads replace the tuple atomically

    def rows(self, n: int, row_indices: Sequence[int]) -> Batch:
        """Returns the rows of batch n with the given indices, with fields of [len(row_indices), T]."""
        if outside := [row for row in row_indices if not 0 <= row < self.sizes.size(n)]:
            raise BadInput(f"rows {outside} are out of range: there are {self.sizes.size(n)} rows in batch {n}")
        located, sources, first = self._locate(n)
        chosen = [first + int(row) for row in row_indices]
        text = self.order.rows.read(located, chosen)
        batch_rows = text if self.transform is None else self.transform(text, n, row_indices)
        if self.row_filter is not None and (bad := self.row_filter(text, located, chosen)).any():
            batch_rows = batch_rows._replace(weights=np.where(bad[:, None], np.float32(0), batch_rows.weights))
        if sources is not None:
            sources_BT = np.empty(batch_rows.tokens.shape, np.int32)
            sources_BT[:] = sources[chosen, None]
            batch_rows = batch_rows._replace(sources=sources_BT)
        return batch_rows

    def batch(self, n: int) -> Batch:
        """Returns the whole batch n, with fields of [rows, T]."""
        return self.rows(n, range(self.sizes.size(n)))

    def text(self, n: int) -> Batch:
        """Returns the packed rows of batch n before the transform and row filter, with fields of [rows, T]."""
        located, _, first = self._locate(n)
        return self.order.rows.read(located, range(first, first + self.sizes.size(n)))

    def row_numbers(self, n: int) -> np.ndarray:
        """Returns int64[rows], the row numbers in the corpus of batch n."""
        return self.order.row_numbers(np.arange(self.sizes.begin(int(n)), self.sizes.begin(int(n) + 1)))

    def _locate(self, n: int) -> tuple[Any, np.ndarray | None, int]:
        """Returns (locations of a group of rows, their mixture sources or None, offset of batch n in the group)."""
        rows, stage = self.sizes.size(int(n)), self.sizes.stage(int(n))
        together = max(1, LOCATED // rows)  # number of batches that are located together
        part, batch = divmod(int(n) - self.sizes.stages[stage][0], together)
        known, found = self._recent
        if known != (stage, part):
            size = together * rows
            begin = self.sizes.starts()[stage] + part * size
            positions = np.arange(begin, begin + size)
            mixture = self.order.mixture
            sources = None if mixture is None else mixture.source_numbers(positions).astype(np.int32)
            found = self.order.rows.locate(self.order.row_numbers(positions)), sources
            self._recent = ((stage, part), found)
        located, sources = found
        return located, sources, batch * rows

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_recent": (None, None)}


def batch_index(step: int, skipped: Iterable[Sequence[int]]) -> int:
    """Returns the index of the batch that a step trains on. skipped: ranges [start, stop) of skipped batches."""
    n = int(step)
    for start, stop in normalise_ranges(skipped):
        if n < start:
            break
        n += stop - start
    return n


def step_of(n: int, skipped: Iterable[Sequence[int]]) -> int | None:
    """Returns the step that trains on batch n (the inverse of batch_index), or None if the batch is skipped."""
    before = 0
    for start, stop in normalise_ranges(skipped):
        if start <= n < stop:
            return None
        before += max(0, min(stop, n) - start)
    return n - before


def rows_trained(step: int, sizes: BatchSizes, skipped: Iterable[Sequence[int]]) -> int:
    """Returns the number of rows in the first `step` steps."""
    n = batch_index(step - 1, skipped) + 1 if step else 0
    return sizes.begin(n) - sum(
        sizes.begin(stop) - sizes.begin(start) for start, stop in normalise_ranges(skipped) if start < n
    )


def merge_skips(recorded: Iterable[Sequence[int]], configured: Iterable[Sequence[int]], at_step: int) -> Ranges:
    """Merges recorded and configured ranges. Raises BadInput if the batch of a step before at_step would change."""
    check_skips(configured)
    reached = batch_index(at_step, recorded)
    added = normalise_ranges(configured)  # recorded ranges are removed below
    for gap_start, gap_stop in normalise_ranges(recorded):
        cut = [part for start, stop in added for part in ((start, min(stop, gap_start)), (max(start, gap_stop), stop))]
        added = tuple((start, stop) for start, stop in cut if start < stop)
    if too_early := [(start, stop) for start, stop in added if start < reached]:
        start, stop = too_early[0]
        raise BadInput(
            f"data.skip_batches has the range {start} to {stop}, but the run is at batch {reached} "
            f"(step {at_step}), and earlier batches cannot be skipped; start at {reached} or later, or resume "
            "from an earlier checkpoint"
        )
    return normalise_ranges([*recorded, *configured])


def normalise_ranges(ranges: Iterable[Sequence[int]]) -> Ranges:
    """Returns the ranges sorted, with overlapping and adjacent ranges merged."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted((int(start), int(stop)) for start, stop in ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)
