"""Batches by number as a grain.MapDataset, for the feed and for users' pipelines; the functions of data.transforms."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import grain  # never in a thread: while it is imported, it replaces builtins.__import__ for all of them (etils.epy)
import numpy as np

from jaxscale.data.batch import Batch, ReadRows
from jaxscale.data.order import Transform
from jaxscale.system.exits import BadInput

CHECKED_ROWS = 2  # rows of the first batch that each transform is tried on


@dataclasses.dataclass(frozen=True)
class BatchSource:
    """A grain.sources.RandomAccessDataSource whose element i is element(i)."""

    element: Callable[[int], Any]
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.element(int(index))


def read_batch(read: ReadRows, rows: Sequence[int], transforms: Sequence[Transform], n: int) -> Batch:
    """These rows of batch n after the transforms."""
    batch = read(n, rows)
    for transform in transforms:
        try:
            batch = transform(batch, n, rows)
        except Exception:
            raise
        except BaseException as error:  # such as SystemExit: Grain's thread would end without a word
            raise RuntimeError(f"a transform of data.transforms ended with {type(error).__name__}: {error}") from error
    return batch


def map_dataset(element: Callable[[int], Any], length: int) -> grain.MapDataset:
    """Elements 0 to length - 1, read by random access.

    All the work is in its source: each map above it would cost 15 to 20 microseconds of Grain's bookkeeping an element.
    """
    return grain.MapDataset.source(BatchSource(element, length))


def read_ahead(dataset: grain.MapDataset, depth: int) -> grain.DatasetIterator:
    """The elements in order, `depth` of them ahead of who asks; reading begins at once. To be closed.

    One thread reads: over memory-mapped files more are slower. It is a daemon, unlike those of Grain's
    ReadOptions(num_threads=1), for which the end of the process waits, however long a read is stuck.
    """
    in_order = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    iterator = iter(grain.experimental.ThreadPrefetchIterDataset(in_order, prefetch_buffer_size=depth))
    iterator.start_prefetch()
    return iterator


def open_transform(name: str) -> Transform:
    """The function MODULE:FUNCTION. Raises BadInput if it cannot be imported."""
    module, _, attribute = name.partition(":")
    try:
        found: Transform | None = getattr(importlib.import_module(module), attribute, None)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        raise BadInput(f"data.transforms: {module} cannot be imported ({type(error).__name__}: {error})") from error
    if not callable(found):
        raise BadInput(f"data.transforms: {module} has no function {attribute}")
    return found


def check_transforms(transforms: Sequence[Transform], names: Sequence[str], batch: Batch, n: int) -> None:
    """Tries each transform on the first rows of batch n.

    Raises BadInput naming the one that fails, changes which fields there are, a shape or a dtype, or gives a row other
    values when it gets it alone: a process reads only the rows of its own devices.
    """
    rows = list(range(min(CHECKED_ROWS, len(batch.tokens))))
    before = take(batch, rows)
    for transform, name in zip(transforms, names, strict=True):
        try:
            after, alone = transform(take(before, rows), n, rows), transform(take(before, rows[-1:]), n, rows[-1:])
        except (Exception, SystemExit) as error:  # theirs: it may be anything
            raise BadInput(f"data.transforms: {name} fails on batch {n}: {type(error).__name__}: {error}") from error
        if problem := difference(before, after):
            raise BadInput(f"data.transforms: {name} {problem}; a transform keeps fields, shapes and dtypes")
        if not all(map(np.array_equal, leaves(take(after, rows[-1:])).values(), leaves(alone).values())):
            raise BadInput(
                f"data.transforms: {name} gives row {rows[-1]} other values when it gets it alone; "
                "make each row from itself, n and its number"
            )
        before = after


def difference(before: Batch, after: Any) -> str:
    """What a transform changed that it must keep, in words; '' if nothing."""
    if not isinstance(after, Batch):
        return f"returns {type(after).__name__} and not a Batch"
    old, new = leaves(before), leaves(after)
    if old.keys() != new.keys():
        return f"changes the fields {', '.join(sorted(old))} to {', '.join(sorted(new))}"
    kinds = {name: (kind(old[name]), kind(new[name])) for name in old}
    changed = [f"{name} from {was} to {now}" for name, (was, now) in kinds.items() if was != now]
    return f"changes {', '.join(changed)}" if changed else ""


def kind(array: Any) -> str:
    """'int32[2, 512]'."""
    return f"{getattr(array, 'dtype', type(array).__name__)}{list(np.shape(array))}"


def leaves(batch: Any, prefix: str = "") -> dict[str, Any]:
    """{name of the field: array} of all arrays of a batch, the encoder's as 'encoder.tokens'."""
    found = {}
    for name, value in batch._asdict().items():
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            found |= leaves(value, f"{prefix}{name}.")
        elif value is not None:
            found[f"{prefix}{name}"] = value
    return found


def take(batch: Any, rows: Sequence[int]) -> Any:
    """Copies of some rows of a batch."""
    picked = [
        None if field is None else take(field, rows) if isinstance(field, tuple) else np.asarray(field)[rows]
        for field in batch
    ]
    return type(batch)(*picked)
