"""Rows of tables with all columns: Parquet, Arrow files and streams, and Hugging Face datasets."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.columns import (
    arrow_batches,
    open_parquet,
    opening,
    parquet_batches,
    small_batches,
    validated,
)
from jaxscale.runtime.text.sources.data_sets import dataset_errors, load_datasets, load_saved, stream_dataset
from jaxscale.runtime.text.sources.files import is_saved_dataset, unpacked_name
from jaxscale.runtime.text.sources.part import WHOLE, Part

DATASET_ROWS = 256  # rows of a Hugging Face dataset per batch


class Table(NamedTuple):
    """An open table."""

    schema: Any  # pyarrow.Schema
    batches: Callable[[list[str]], Iterator[tuple[int, Any]]]  # columns -> (first row, record batch)


def is_table(path: str) -> bool:
    """Returns True for Parquet and Arrow files and Hugging Face datasets."""
    name = unpacked_name(path)
    return name.endswith((".parquet", ".arrow", ".feather")) or path.startswith("hf://") or is_saved_dataset(path)


@contextlib.contextmanager
def open_table(path: str, cfg: ReadConfig, part: Part = WHOLE) -> Iterator[Table]:
    """Opens a file or dataset for which is_table is True. Only Parquet supports parts.

    Raises: Damaged for a broken file, BadInput for a dataset that cannot be read.
    """
    import pyarrow

    name = unpacked_name(path)
    if path.startswith("hf://") or is_saved_dataset(path):
        yield open_dataset(path)
    elif name.endswith(".parquet"):
        with open_parquet(path, cfg) as table:
            yield Table(table.schema_arrow, lambda columns: parquet_batches(table, columns, path, cfg, part))
    else:
        with opening(path, cfg, "Arrow"), pyarrow.memory_map(path) as mapped:
            schema, batches = arrow_batches(mapped)
            yield Table(schema, lambda columns: small_batches(validated(batches, path, cfg)))


def open_dataset(path: str) -> Table:
    """Opens hf://NAME?... or a folder written by save_to_disk, and reads the first rows."""
    datasets = load_datasets(path)
    with dataset_errors(datasets, path):
        found = stream_dataset(datasets, path) if path.startswith("hf://") else load_saved(datasets, path)
        tables = iter(found.with_format("arrow").iter(batch_size=DATASET_ROWS))
        first = next(tables, None)

    def batches(columns: list[str]) -> Iterator[tuple[int, Any]]:
        row, remaining = 0, tables if first is None else itertools.chain([first], tables)
        while True:
            with dataset_errors(datasets, path, f" after row {row:,}"):
                table = next(remaining, None)
            if table is None:
                return
            for batch in table.to_batches():
                yield row, batch
                row += batch.num_rows

    if first is None:
        import pyarrow

        return Table(pyarrow.schema([]), batches)
    return Table(first.schema, batches)


def batch_records(batch: Any) -> Iterator[dict[str, Any]]:
    """Yields each row as in JSON Lines, without null fields.

    Arrow gives all structs of a column the same fields; those that a record lacks are null. In a row with invalid
    UTF-8, all strings are bytes.
    """
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        rows = [row for i in range(batch.num_rows) for row in row_records(batch.slice(i, 1))]
    return map(without_nulls, rows)


def row_records(row: Any) -> list[dict[str, Any]]:
    """Returns the record of a batch of one row, with strings as bytes if one of them is not UTF-8."""
    import pyarrow

    try:
        return row.to_pylist()
    except UnicodeDecodeError:
        return row.cast(pyarrow.schema([field.with_type(as_binary(field.type)) for field in row.schema])).to_pylist()


def as_binary(kind: Any) -> Any:
    """Replaces text by binary in an Arrow type, including lists and structs."""
    import pyarrow
    from pyarrow import types

    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return pyarrow.large_binary()
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(as_binary(field.type)) for field in kind])
    if types.is_large_list(kind):
        return pyarrow.large_list(kind.value_field.with_type(as_binary(kind.value_type)))
    if types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(as_binary(kind.value_type)))
    return kind


def without_nulls(value: Any) -> Any:
    """The value without the fields of its objects that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
