"""Reads Parquet files, Arrow files and streams, and Hugging Face datasets in bounded memory."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.blocks import RATIO_FLOOR
from jaxscale.runtime.text.sources.data_sets import dataset_tables
from jaxscale.runtime.text.sources.files import is_saved_dataset, unpacked_name
from jaxscale.runtime.text.sources.part import SKIP_REMAINDER, WHOLE, Damaged, Part, Records, damage_fix
from jaxscale.system.exits import BadInput

BATCH_BYTES = 8 << 20
BATCH_ROWS = 1024
NUMBER_TYPES = {"INT32": 4, "INT64": 8}  # bytes per value of Parquet types
NUMBER_BYTES = 5  # largest number of bytes of a dictionary index


def parquet_batches(
    table: Any, columns: list[str], path: str, cfg: ReadConfig, part: Part = WHOLE
) -> Iterator[tuple[int, Any]]:
    """Yields (first row, record batch) for the given columns and the row groups of the part. Raises Damaged."""
    meta = table.metadata
    row = sum(meta.row_group(group).num_rows for group in range(part.begin))
    for group in range(part.begin, min(part.end, meta.num_row_groups)):
        size = text_bytes(table, group, path, cfg, columns)
        rows = max(1, meta.row_group(group).num_rows)
        at_once = min(BATCH_ROWS, max(1, BATCH_BYTES * rows // max(size, 1)))
        batches = table.iter_batches(at_once, row_groups=[group], columns=columns, use_threads=False)
        for batch in validated(batches, path, cfg):
            yield row, batch
            row += batch.num_rows


def open_parquet(path: str, cfg: ReadConfig) -> Any:
    """Opens a Parquet file. Limits memory use: does not decode a dictionary-encoded text column."""
    import pyarrow
    import pyarrow.parquet

    with opening(path, cfg, "Parquet"):
        options: dict[str, Any] = dict(pre_buffer=False, buffer_size=1 << 20)
        table = pyarrow.parquet.ParquetFile(path, **options)
        groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
        columns = column_indices(table, [cfg.text_field])[:1]
        if any(is_dictionary_encoded(group.column(column)) for column in columns for group in groups):
            table.close()
            table = pyarrow.parquet.ParquetFile(path, **options, read_dictionary=[cfg.text_field])
        return table


def is_dictionary_encoded(chunk: Any) -> bool:
    """Returns True if a column chunk stores its values as dictionary indices."""
    if not chunk.has_dictionary_page or chunk.dictionary_page_offset is None:
        return False
    numbers = chunk.total_compressed_size - (chunk.data_page_offset - chunk.dictionary_page_offset)
    return numbers <= NUMBER_BYTES * chunk.num_values + 1024


@contextlib.contextmanager
def opening(path: str, cfg: ReadConfig, kind: str) -> Iterator[None]:
    """Converts errors while opening a file to Damaged. kind: name of the format, for the message."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        raise Damaged(f"{path} cannot be read as {kind}: {first_line(error)}; {damage_fix(cfg)}") from None


def column_indices(table: Any, fields: Iterable[str]) -> list[int]:
    """Returns the indices of the Parquet columns that belong to the given fields, including nested fields."""
    schema = table.metadata.schema
    inside = tuple(f"{field}." for field in fields)
    paths = [f"{schema.column(i).path}." for i in range(len(schema))]
    return [i for i, path in enumerate(paths) if path.startswith(inside)]


def text_bytes(table: Any, group: int, path: str, cfg: ReadConfig, fields: Iterable[str]) -> int:
    """Returns the uncompressed bytes of the fields in a row group. Raises Damaged if the limits are exceeded."""
    chunks = [table.metadata.row_group(group).column(i) for i in column_indices(table, fields)]
    if not chunks:
        return table.metadata.row_group(group).total_byte_size
    # with run-length encoding, numbers take much less space in a file than in memory
    number_bytes = lambda chunk: chunk.num_values * NUMBER_TYPES.get(chunk.physical_type, 0)
    size = sum(max(chunk.total_uncompressed_size, number_bytes(chunk)) for chunk in chunks)
    packed = max(sum(chunk.total_compressed_size for chunk in chunks), 1)
    if size > max(RATIO_FLOOR, cfg.max_unpacked_ratio * packed) or size > cfg.max_unpacked_bytes:
        raise Damaged(
            f"{path} exceeds {cfg.where}max_unpacked_ratio or {cfg.where}max_unpacked_bytes: {packed:,} bytes of its "
            f"row group {group} decompress to {size:,}; remove it, or raise the limits if you trust the file"
        )
    return size


def small_batches(batches: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    """Splits record batches; yields (first row, record batch of at most BATCH_ROWS rows)."""
    row = 0
    for batch in batches:
        for first in range(0, batch.num_rows, BATCH_ROWS):
            yield row + first, batch.slice(first, BATCH_ROWS)
        row += batch.num_rows


def arrow_batches(source: Any) -> tuple[Any, Iterator[Any]]:
    """Returns (schema, record batches) of an Arrow file, or of an Arrow stream as in Hugging Face datasets."""
    import pyarrow

    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if not is_file:
        stream = pyarrow.ipc.open_stream(source)
        return stream.schema, iter(stream)
    file = pyarrow.ipc.open_file(source)
    return file.schema, map(file.get_batch, range(file.num_record_batches))


def validated(batches: Iterator[Any], path: str, cfg: ReadConfig) -> Iterator[Any]:
    """Validates and yields the batches. Raises Damaged naming the file and row."""
    import pyarrow

    rows = 0
    while True:
        try:
            batch = next(batches, None)
            if batch is not None:
                batch.validate()
        except (pyarrow.ArrowException, OSError) as error:
            raise Damaged(
                f"{path} is corrupt shortly after row {rows:,} ({first_line(error)}); {damage_fix(cfg, SKIP_REMAINDER)}"
            ) from None
        if batch is None:
            return
        yield batch
        rows += batch.num_rows


def first_line(error: Exception) -> str:
    """Returns the first line of an error message, truncated to 200 characters."""
    return str(error).partition("\n")[0][:200]


def select_columns(schema: Any, path: str, cfg: ReadConfig) -> tuple[str, ...]:
    """Returns the names of the text and metadata columns, '' if missing. Raises BadInput without a text column."""
    fields = (cfg.text_field, *cfg.metadata_fields)
    names = [name if name and type_of(schema, name) is not None else "" for name in fields]
    if not names[0]:
        raise BadInput(
            f"{path} has no column {cfg.text_field!r}; its columns are {', '.join(schema.names)}; set {cfg.set_field}"
        )
    return tuple(names)


def type_of(schema: Any, name: str) -> Any:
    """Returns the Arrow type of a column, or None. The name a.b refers to field b of column a."""
    with contextlib.suppress(KeyError, ValueError, IndexError, AttributeError, TypeError):
        head, *tail = [name] if name in schema.names else name.split(".")
        kind = schema.field(head).type
        for inner in tail:
            kind = kind.field(inner).type
        return kind
    return None


def batch_rows(batch: Any, names: tuple[str, ...], row: int, path: str) -> Records:
    """Yields the rows of a batch with text as bytes, to which data.invalid_utf8 is applied later."""
    texts = as_bytes(column_of(batch, names[0]), path, names[0])
    empty = [""] * batch.num_rows
    columns = zip(*(column_strings(column_of(batch, name)) if name else empty for name in names[1:]))
    for number, text, metadata in zip(range(row, row + batch.num_rows), texts, columns):
        yield number, number, text or b"", metadata


def column_of(batch: Any, name: str) -> Any:
    """Returns a column, or a field of a struct column."""
    import pyarrow.compute

    if name in batch.schema.names:
        return batch.column(name)
    head, *tail = name.split(".")
    field = pyarrow.compute.StructFieldOptions(tail)
    return pyarrow.compute.call_function("struct_field", [batch.column(head)], field)


def as_bytes(column: Any, path: str, name: str) -> Iterator[bytes | None]:
    """Yields the values of a text column. Raises BadInput for other types."""
    import pyarrow

    if isinstance(column, pyarrow.DictionaryArray):
        known = list(as_bytes(column.dictionary, path, name))
        return (None if i is None else known[i] for i in column.indices.to_pylist())
    try:
        values = column.cast(pyarrow.large_binary())
    except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid):
        raise BadInput(f"{path}: column {name!r} has type {column.type}; it must be text") from None
    values.validate(full=True)  # offsets in the file may be invalid
    return iter(values.to_pylist())


def column_strings(column: Any) -> list[str]:
    """Returns the values of a column as text, with '' for null. Invalid UTF-8 is replaced."""
    import pyarrow

    if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
        return [(value or b"").decode("utf-8", "replace") for value in as_bytes(column, "", "")]
    return ["" if value is None else str(value) for value in column.to_pylist()]


def parquet_parts(path: str, cfg: ReadConfig, part_bytes: int) -> list[Part]:
    """Splits the row groups of a file into parts with about part_bytes of text."""
    with open_parquet(path, cfg) as table:
        parts, begin, num_bytes = [], 0, 0
        for group in range(table.metadata.num_row_groups):
            num_bytes += text_bytes(table, group, path, cfg, [cfg.text_field])
            if num_bytes >= part_bytes:
                parts, begin, num_bytes = [*parts, Part(begin, group + 1)], group + 1, 0
        return [*parts, Part(begin, table.metadata.num_row_groups)] if num_bytes or not parts else parts


class Table(NamedTuple):
    """An open table."""

    schema: Any  # pyarrow.Schema
    batches: Callable[[list[str]], Iterator[tuple[int, Any]]]  # columns -> (first row, record batch)


def is_table(path: str) -> bool:
    """Returns True for Parquet files, Arrow files and Hugging Face datasets."""
    name = unpacked_name(path)
    return name.endswith((".parquet", ".arrow", ".feather")) or path.startswith("hf://") or is_saved_dataset(path)


@contextlib.contextmanager
def open_table(path: str, cfg: ReadConfig, part: Part = WHOLE) -> Iterator[Table]:
    """Opens a file or dataset for which is_table(path) is True. Only Parquet supports parts. Raises BadInput."""
    import pyarrow

    if path.startswith("hf://") or is_saved_dataset(path):
        tables = dataset_tables(path)
        first = next(tables, pyarrow.table({}))
        batches = (batch for table in itertools.chain([first], tables) for batch in table.to_batches())
        yield Table(first.schema, lambda _: small_batches(batches))
    elif unpacked_name(path).endswith(".parquet"):
        with open_parquet(path, cfg) as table:
            yield Table(table.schema_arrow, lambda columns: parquet_batches(table, columns, path, cfg, part))
    else:
        with opening(path, cfg, "Arrow"), pyarrow.memory_map(path) as mapped:
            schema, batches = arrow_batches(mapped)
            yield Table(schema, lambda columns: small_batches(validated(batches, path, cfg)))


def read_table(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each row of a table as bytes. Raises BadInput without a text column."""
    with open_table(path, cfg, part) as table:
        if not table.schema.names and (path.startswith("hf://") or is_saved_dataset(path)):  # an empty dataset
            return
        names = select_columns(table.schema, path, cfg)
        for row, batch in table.batches([name for name in names if name]):
            yield from batch_rows(batch, names, row, path)


def batch_records(batch: Any) -> Iterator[dict[str, Any]]:
    """Yields each row as a dict without null fields. If a row has invalid UTF-8, all its strings are bytes."""
    import pyarrow

    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows > 1:
            rows = [row for i in range(batch.num_rows) for row in batch_records(batch.slice(i, 1))]
        else:
            fields = [field.with_type(as_binary(field.type)) for field in batch.schema]
            rows = batch.cast(pyarrow.schema(fields)).to_pylist()
    return map(without_nulls, rows)


def as_binary(kind: Any) -> Any:
    """Replaces text types with binary types in an Arrow type, including in lists and structs."""
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
    """Removes null fields from all objects in a value."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value
