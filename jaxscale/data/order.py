"""Which rows make up batch n: a pure function of the seed and n, and the list of batches never trained on."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxscale.data.batch import Batch, stack_rows

Ranges = tuple[tuple[int, int], ...]


def shuffled_rows(rows: Any, seed: int) -> Any:
    """An endless grain.MapDataset over `rows`: each epoch is another permutation of all rows, by a cipher of the index.

    Grain gives epoch k the seed + k, so that neighbouring seeds would share their epochs; a hash spaces them out.
    """
    import grain  # takes 0.8 s, and a run that only looks at its settings has no use for it

    spaced = int.from_bytes(hashlib.blake2b(f"row order {seed}".encode(), digest_size=4).digest(), "little")
    return grain.MapDataset.source(rows).shuffle(seed=spaced).repeat()


class Batches:
    """Batches by number. Any host may read any rows of any batch, in any order, and nothing has to be remembered."""

    def __init__(self, dataset: Any, rows_per_batch: int):
        """dataset: [row index] -> Batch of [T], without end. rows_per_batch: of the whole batch, over all hosts."""
        self.dataset, self.rows_per_batch = dataset, rows_per_batch

    def rows(self, n: int, row_indices: Sequence[int] | slice) -> Batch:
        """The given rows, numbered from 0 within batch n, in the order given: fields of [len(row_indices), T]."""
        if isinstance(row_indices, slice):
            row_indices = range(*row_indices.indices(self.rows_per_batch))
        if outside := [row for row in row_indices if not 0 <= row < self.rows_per_batch]:
            raise ValueError(f"rows {outside} are not among the {self.rows_per_batch} rows of a batch")
        first = int(n) * self.rows_per_batch
        return stack_rows([self.dataset[first + int(row)] for row in row_indices])

    def batch(self, n: int) -> Batch:
        """The whole batch n: fields of [rows_per_batch, T]."""
        return self.rows(n, range(self.rows_per_batch))


def batch_index(step: int, skipped: Iterable[Sequence[int]]) -> int:
    """The number of the batch that step `step` trains on: the step-th one outside the skipped ranges [from, to)."""
    n = int(step)
    for start, stop in normalise(skipped):
        if n < start:
            break
        n += stop - start
    return n


def merge_skips(recorded: Iterable[Sequence[int]], configured: Iterable[Sequence[int]], at_step: int) -> Ranges:
    """The recorded and the configured ranges as one list, sorted and disjoint, for a run that goes on at `at_step`.

    What is recorded stays. Raises ValueError if a configured range would change which batches earlier steps trained on.
    """
    check_skips(configured)
    reached = batch_index(at_step, recorded)
    for start, stop in without(normalise(configured), normalise(recorded)):
        if start < reached:
            raise ValueError(
                f"data.skip_batches skips batches {start} to {stop}, but the run has reached batch {reached} "
                f"(step {at_step}): what is done cannot be skipped; begin at {reached} or later, or go back to an "
                "earlier checkpoint"
            )
    return normalise([*recorded, *configured])


def check_skips(ranges: Iterable[Sequence[int]]) -> None:
    """Raises ValueError unless every range is [from, to) with 0 <= from < to."""
    for start, stop in ranges:
        if not 0 <= start < stop:
            raise ValueError(f"skip_batches has ({start}, {stop}); a range is (from, to) with 0 <= from < to")


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


def document_order(num_documents: int, seed: int) -> np.ndarray:
    """int64[num_documents]: a permutation that depends on the seed and the count alone, whatever the numpy version.

    numpy promises the raw output of Philox for good, but not the method of Generator.permutation.
    """
    key = int.from_bytes(hashlib.blake2b(f"document order {seed}".encode(), digest_size=16).digest(), "little")
    return np.argsort(np.random.Philox(key=key).random_raw(num_documents), kind="stable")
