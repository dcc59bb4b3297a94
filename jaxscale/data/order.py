"""Which rows make up batch n: a pure function of the seed and n, and the list of batches never trained on."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxscale.data.batch import Batch
from jaxscale.data.config import check_skips
from jaxscale.data.mixture import Mixture
from jaxscale.data.permutation import permuted, unpermuted
from jaxscale.data.row_filter import RowFilter
from jaxscale.system.exits import BadInput
from jaxscale.units import BatchSizes

ORDER = 2  # another number where the same settings give other batches; 1 was the order of Grain's shuffle
Transform = Callable[[Batch, int, Sequence[int]], Batch]  # (rows, n, their numbers) -> the same rows, changed
Ranges = tuple[tuple[int, int], ...]


class RowOrder:
    """An endless stream of rows: each epoch of a group is another permutation of all its rows, found by arithmetic.

    Without a mixture there is one group; with one, it says which group each place of the stream takes a row from.
    """

    def __init__(self, rows: Any, seed: int, mixture: Mixture | None = None):
        """rows: with `locate` and `read`, and `group_rows` where there is a mixture."""
        self.rows, self.seed, self.mixture = rows, seed, mixture

    def row_numbers(self, places: np.ndarray) -> np.ndarray:
        """int64[m]: the row at each place int64[m] of the stream."""
        if self.mixture is None:
            return self.shuffled(places, 0, len(self.rows), "")
        groups, turns = self.mixture.locate(places)
        numbers = np.empty(len(places), np.int64)
        for group in np.unique(groups):
            here = groups == group
            numbers[here] = self.shuffled(turns[here], *self.group(group))
        return numbers

    def places_of(self, row: int, stop: int) -> np.ndarray:
        """The places below `stop` at which the stream has this row, in order: the inverse of row_numbers."""
        if self.mixture is None:
            return self.turns_of(row, 0, len(self.rows), "", stop)
        group = int(np.searchsorted(self.rows.group_rows, row, side="right")) - 1
        turns = self.turns_of(row, *self.group(group), self.mixture.taken(stop)[group])
        return self.mixture.find(group, turns)

    def group(self, group: int) -> tuple[int, int, str]:
        """(first row, number of rows, name) of a group."""
        assert self.mixture is not None, "groups are the sources of a mixture"
        first, stop = (int(bound) for bound in self.rows.group_rows[group : group + 2])
        return first, stop - first, self.mixture.names[group]

    def shuffled(self, turns: np.ndarray, first: int, size: int, name: str) -> np.ndarray:
        """The rows that a group of `size` rows from `first` on gives at its turns 0, 1, 2, ..."""
        epochs, places = np.divmod(turns, size)
        numbers = np.empty(len(turns), np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            numbers[here] = first + permuted(places[here], size, order_key(self.seed, name, epoch))
        return numbers

    def turns_of(self, row: int, first: int, size: int, name: str, stop: int) -> np.ndarray:
        """The turns below `stop` at which the group gives this row: one in each epoch."""
        turns = [
            epoch * size + int(unpermuted(row - first, size, order_key(self.seed, name, epoch)))
            for epoch in range(-(-int(stop) // size))
        ]
        return np.array([turn for turn in turns if turn < stop], np.int64)


def order_key(seed: int, name: str, epoch: int) -> str:
    """What the order of a group's rows in one epoch hangs on."""
    return f"row order {seed} {epoch} {name}"


class Batches:
    """Batches by number. Any host may read any rows of any batch, in any order, and nothing has to be remembered.

    Where the rows of a batch lie is found for the batches around it at once, since a call of numpy costs as much for a
    thousand numbers as for one.
    """

    LOCATED = 1024  # rows

    def __init__(
        self,
        order: RowOrder,
        rows_per_batch: BatchSizes | int,
        row_filter: RowFilter | None = None,
        transform: Transform | None = None,
    ):
        """rows_per_batch: of the whole batch, over all hosts. row_filter: which rows weigh nothing, by their text.

        transform(rows, n, row_indices): what becomes of these rows of batch n.
        """
        self.order, self.sizes, self.row_filter, self.transform = (
            order, BatchSizes.of(rows_per_batch), row_filter, transform,
        )  # fmt: skip
        self._recent: tuple[Any, Any] = (None, None)  # of any thread, replaced whole

    def rows(self, n: int, row_indices: Sequence[int] | slice) -> Batch:
        """The given rows, numbered from 0 within batch n, in the order given: fields of [len(row_indices), T]."""
        if isinstance(row_indices, slice):
            row_indices = range(*row_indices.indices(self.sizes.size(n)))
        if outside := [row for row in row_indices if not 0 <= row < self.sizes.size(n)]:
            raise BadInput(f"rows {outside} are not among the {self.sizes.size(n)} rows of batch {n}")
        located, sources, first = self.whereabouts(n)
        chosen = [first + int(row) for row in row_indices]
        text = self.order.rows.read(located, chosen)
        made = text if self.transform is None else self.transform(text, n, row_indices)
        if self.row_filter is not None and (bad := self.row_filter(text, located, chosen)).any():
            made = made._replace(weights=np.where(bad[:, None], np.float32(0), made.weights))
        if sources is not None:
            sources_BT = np.empty(made.tokens.shape, np.int32)
            sources_BT[:] = sources[chosen, None]
            made = made._replace(sources=sources_BT)
        return made

    def batch(self, n: int) -> Batch:
        """The whole batch n: fields of [its rows, T]."""
        return self.rows(n, range(self.sizes.size(n)))

    def text(self, n: int) -> Batch:
        """The packed rows of batch n as they are before transform and row filter: fields of [its rows, T]."""
        located, _, first = self.whereabouts(n)
        return self.order.rows.read(located, range(first, first + self.sizes.size(n)))

    def row_numbers(self, n: int) -> np.ndarray:
        """int64[rows of batch n]: which rows of the corpus it is made of."""
        return self.order.row_numbers(np.arange(self.sizes.begin(int(n)), self.sizes.begin(int(n) + 1)))

    def whereabouts(self, n: int) -> tuple[Any, np.ndarray | None, int]:
        """(where the rows of the batches around n lie, the source of each in a mixture, where among them n begins)."""
        rows, stage = self.sizes.size(int(n)), self.sizes.stage(int(n))
        together = max(1, self.LOCATED // rows)  # batches
        part, batch = divmod(int(n) - self.sizes.stages[stage][0], together)
        known, found = self._recent
        if known != (stage, part):
            size = together * rows
            begin = self.sizes.starts()[stage] + part * size
            places = np.arange(begin, begin + size)
            mixture = self.order.mixture
            sources = None if mixture is None else mixture.source_numbers(places).astype(np.int32)
            found = self.order.rows.locate(self.order.row_numbers(places)), sources
            self._recent = ((stage, part), found)
        located, sources = found
        return located, sources, batch * rows

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_recent": (None, None)}


def batch_index(step: int, skipped: Iterable[Sequence[int]]) -> int:
    """The number of the batch that step `step` trains on: the step-th one outside the skipped ranges [from, to)."""
    n = int(step)
    for start, stop in normalise(skipped):
        if n < start:
            break
        n += stop - start
    return n


def step_of(n: int, skipped: Iterable[Sequence[int]]) -> int | None:
    """The step that trains on batch n: the inverse of batch_index; None if the batch is skipped."""
    before = 0
    for start, stop in normalise(skipped):
        if start <= n < stop:
            return None
        before += max(0, min(stop, n) - start)
    return n - before


def rows_trained(step: int, sizes: BatchSizes, skipped: Iterable[Sequence[int]]) -> int:
    """Rows of the batches of the first `step` steps."""
    n = batch_index(step - 1, skipped) + 1 if step else 0
    return sizes.begin(n) - sum(
        sizes.begin(stop) - sizes.begin(start) for start, stop in normalise(skipped) if start < n
    )


def merge_skips(recorded: Iterable[Sequence[int]], configured: Iterable[Sequence[int]], at_step: int) -> Ranges:
    """The recorded and the configured ranges as one list, sorted and disjoint, for a run that goes on at `at_step`.

    What is recorded stays. Raises BadInput if a configured range would change which batches earlier steps trained on.
    """
    check_skips(configured)
    reached = batch_index(at_step, recorded)
    for start, stop in without(normalise(configured), normalise(recorded)):
        if start < reached:
            raise BadInput(
                f"data.skip_batches skips batches {start} to {stop}, but the run has reached batch {reached} "
                f"(step {at_step}): what is done cannot be skipped; begin at {reached} or later, or go back to an "
                "earlier checkpoint"
            )
    return normalise([*recorded, *configured])


def normalise(ranges: Iterable[Sequence[int]]) -> Ranges:
    """The same batches as sorted ranges that neither overlap nor touch."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted((int(start), int(stop)) for start, stop in ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def without(ranges: Ranges, removed: Ranges) -> Ranges:
    """The parts of `ranges` that lie outside `removed`; both normalised."""
    for gap_start, gap_stop in removed:
        cut = []
        for start, stop in ranges:
            cut += [(start, min(stop, gap_start)), (max(start, gap_stop), stop)]
        ranges = tuple((start, stop) for start, stop in cut if start < stop)
    return ranges
