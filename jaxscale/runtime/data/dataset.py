"""Wraps batches as a grain.MapDataset, and imports and checks the functions of data.transforms."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import grain  # not imported in a thread, because the import temporarily replaces builtins.__import__ (etils.epy)
import numpy as np

from jaxscale.core.batch import Batch, EncoderInput, ReadRows
from jaxscale.runtime.data.order import Transform
from jaxscale.runtime.data.stacking import map_fields
from jaxscale.system.exits import BadInput

CHECKED_ROWS = 2  # number of rows of the first batch on which each transform is tested


@dataclasses.dataclass(frozen=True)
class BatchSource:
    """grain.sources.RandomAccessDataSource with the elements element(0), element(1), ..."""

    element: Callable[[int], Any]
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.element(int(index))


def read_batch(read: ReadRows, rows: Sequence[int], transforms: Sequence[Transform], n: int) -> Batch:
    """Reads rows of batch n and applies the transforms."""
    batch = read(n, rows)
    for transform in transforms:
        try:
            batch = transform(batch, n, rows)
        except Exception:
            raise
        except BaseException as error:  # SystemExit, for example, would silently end Grain's thread
            raise RuntimeError(f"a transform of data.transforms raised {type(error).__name__}: {error}") from error
    return batch


def map_dataset(element: Callable[[int], Any], length: int) -> grain.MapDataset:
    """Returns a dataset of element(0), element(1), ... Avoids .map(), which adds 15 to 20 microseconds per element."""
    return grain.MapDataset.source(BatchSource(element, length))


def read_ahead(dataset: grain.MapDataset, depth: int) -> grain.DatasetIterator:
    """Returns an iterator that prefetches `depth` elements, starting immediately. The caller must close the iterator.

    Uses one daemon thread. Several threads are slower with memory-mapped files. The threads of Grain's ReadOptions are
    not daemons, so a blocked read would prevent the process from exiting.
    """
    in_order = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    iterator = iter(grain.experimental.ThreadPrefetchIterDataset(in_order, prefetch_buffer_size=depth))
    iterator.start_prefetch()
    return iterator


def open_transform(name: str) -> Transform:
    """Imports and returns the function MODULE:FUNCTION. Raises BadInput if the import fails."""
    module, _, attribute = name.partition(":")
    try:
        found: Transform | None = getattr(importlib.import_module(module), attribute, None)
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        raise BadInput(f"data.transforms: {module} cannot be imported ({type(error).__name__}: {error})") from error
    if not callable(found):
        raise BadInput(f"data.transforms: {module} has no function {attribute}; use MODULE:FUNCTION")
    return found


def check_transforms(transforms: Sequence[Transform], names: Sequence[str], batch: Batch, n: int) -> None:
    """Raises BadInput if a transform fails, changes the structure of batch n, or makes a row depend on other rows."""
    rows = list(range(min(CHECKED_ROWS, len(batch.tokens))))
    before = copy_rows(batch, rows)
    for transform, name in zip(transforms, names, strict=True):
        try:
            after, alone = (transform(copy_rows(before, some), n, some) for some in (rows, rows[-1:]))
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise BadInput(f"data.transforms: {name} fails on batch {n}: {type(error).__name__}: {error}") from error
        if problem := structure_change(before, after):
            raise BadInput(f"data.transforms: {name} {problem}; a transform must keep fields, shapes and dtypes")
        last = named_arrays(copy_rows(after, rows[-1:]))
        if not all(map(np.array_equal, last.values(), named_arrays(alone).values())):
            raise BadInput(
                f"data.transforms: {name} returns different values for row {rows[-1]} when called with only that row; "
                "compute each row only from that row, its index in the batch, and the batch index n"
            )
        before = after


def structure_change(before: Batch, after: Any) -> str:
    """Returns a description of changed fields, shapes or dtypes, or '' if there are none."""
    if not isinstance(after, Batch):
        return f"returns {type(after).__name__}, not a Batch"
    old, new = named_arrays(before), named_arrays(after)
    if old.keys() != new.keys():
        return f"changes the fields {', '.join(sorted(old))} to {', '.join(sorted(new))}"
    kind = lambda array: f"{getattr(array, 'dtype', type(array).__name__)}{list(np.shape(array))}"  # 'int32[2, 512]'
    kinds = {name: (kind(old[name]), kind(new[name])) for name in old}
    changed = [f"{name} from {was} to {now}" for name, (was, now) in kinds.items() if was != now]
    return f"changes {', '.join(changed)}" if changed else ""


def named_arrays(batch: Batch) -> dict[str, Any]:
    """Returns {field name: array} for a batch. Fields of the encoder input have names such as 'encoder.tokens'."""
    found = {}
    for name, value in batch._asdict().items():
        if isinstance(value, EncoderInput):
            found |= {f"{name}.{inner}": array for inner, array in value._asdict().items()}
        elif value is not None:
            found[name] = value
    return found


def copy_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Returns a batch with copies of the given rows."""
    return map_fields(lambda field: np.asarray(field)[rows], batch)
