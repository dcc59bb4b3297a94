"""Text columns of Parquet and Arrow files, a bounded number of rows in memory at a time."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from jaxscale.system.exits import BadInput
from jaxscale.text.config import ReadConfig
from jaxscale.text.sources.part import REST, WHOLE, Damaged, Part, Records, refetch
from jaxscale.text.sources.unpack import RATIO_FLOOR

BATCH_BYTES = 8 << 20
BATCH_ROWS = 1024
NUMBER_TYPES = {"INT32": 4, "INT64": 8}  # bytes of a value, by its type in Parquet
NUMBER_BYTES = 5  # that a row takes at most where it is only a number


def read_parquet(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each row as bytes, of the row groups of the part.

    Raises: BadInput naming the file if it is not Parquet, is truncated, or lacks the text column or has no text in it.
    """
    with opened(path, cfg) as table:
        names = wanted(table.schema_arrow, path, cfg)
        for row, batch in parquet_batches(table, [name for name in names if name], path, cfg, part):
            yield from batch_rows(batch, names, row, path)


def parquet_batches(
    table: Any, columns: list[str], path: str, cfg: ReadConfig, part: Part = WHOLE
) -> Iterator[tuple[int, Any]]:
    """Yields (number of its first row, record batch) of these columns, for the row groups of the part.

    Raises: Damaged as text_bytes and sound do.
    """
    meta = table.metadata
    row = sum(meta.row_group(group).num_rows for group in range(part.begin))
    for group in range(part.begin, min(part.end, meta.num_row_groups)):
        size = text_bytes(table, group, path, cfg, columns)
        rows = max(1, meta.row_group(group).num_rows)
        batches = table.iter_batches(
            batch_size=min(BATCH_ROWS, max(1, BATCH_BYTES * rows // max(size, 1))),
            row_groups=[group],
            columns=columns,
            use_threads=False,
        )
        for batch in sound(batches, path, cfg):
            yield row, batch
            row += batch.num_rows


def opened(path: str, cfg: ReadConfig) -> Any:
    """The open Parquet file; where texts repeat, each is held once, so that few bytes cannot swell to many."""
    import pyarrow
    import pyarrow.parquet

    with whole(path, cfg, "Parquet"):
        table = pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        if (columns := leaves(table, [cfg.text_field])) and repeats(table.metadata, columns[0]):
            table.close()
            table = pyarrow.parquet.ParquetFile(
                path, pre_buffer=False, buffer_size=1 << 20, read_dictionary=[cfg.text_field]
            )
        return table


@contextlib.contextmanager
def whole(path: str, cfg: ReadConfig, kind: str) -> Iterator[None]:
    """Around the opening of a file. Raises Damaged for one that is not of this kind, or cut short."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        raise Damaged(f"{path} cannot be read as {kind}: {first_line(error)}; {refetch(cfg)}") from None


def repeats(meta: Any, column: int) -> bool:
    """True if some row group holds nothing but numbers of texts, and the texts once, in a dictionary."""
    for group in range(meta.num_row_groups):
        chunk = meta.row_group(group).column(column)
        if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
            numbers = chunk.total_compressed_size - (chunk.data_page_offset - chunk.dictionary_page_offset)
            if numbers <= NUMBER_BYTES * chunk.num_values + 1024:
                return True
    return False


def leaves(table: Any, fields: Iterable[str]) -> list[int]:
    """The places in the row groups of the columns of these fields, those inside lists and structs among them."""
    schema = table.metadata.schema
    inside = tuple(f"{field}." for field in fields)
    paths = [f"{schema.column(i).path}." for i in range(len(schema))]
    return [i for i, path in enumerate(paths) if path.startswith(inside)]


def text_bytes(table: Any, group: int, path: str, cfg: ReadConfig, fields: Iterable[str]) -> int:
    """Bytes of some fields of a row group, unpacked. Raises Damaged if they are more than cfg allows."""
    chunks = [table.metadata.row_group(group).column(i) for i in leaves(table, fields)]
    if not chunks:
        return table.metadata.row_group(group).total_byte_size
    size, packed = sum(map(unpacked_bytes, chunks)), max(sum(chunk.total_compressed_size for chunk in chunks), 1)
    if size > max(RATIO_FLOOR, cfg.max_unpacked_ratio * packed) or size > cfg.max_unpacked_bytes:
        raise Damaged(
            f"{path} is refused: {packed:,} bytes of its row group {group} unpack to {size:,}, more than "
            f"{cfg.where}max_unpacked_ratio or {cfg.where}max_unpacked_bytes allow; take it out, or raise them"
        )
    return size


def unpacked_bytes(chunk: Any) -> int:
    """Bytes of a column chunk in memory. Parquet stores a run of equal numbers as one number and its length."""
    return max(chunk.total_uncompressed_size, chunk.num_values * NUMBER_TYPES.get(chunk.physical_type, 0))


def read_arrow(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each row of an Arrow file or stream, as read_parquet does."""
    import pyarrow

    with whole(path, cfg, "Arrow"), pyarrow.memory_map(path) as mapped:
        schema, batches = arrow_batches(mapped)
        names, row = wanted(schema, path, cfg), 0
        for batch in sound(batches, path, cfg):
            for first in range(0, batch.num_rows, BATCH_ROWS):
                yield from batch_rows(batch.slice(first, BATCH_ROWS), names, row + first, path)
            row += batch.num_rows


def arrow_batches(source: Any) -> tuple[Any, Iterator[Any]]:
    """(schema, record batches) of an open Arrow file or stream; Hugging Face datasets write streams."""
    import pyarrow

    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if not is_file:
        stream = pyarrow.ipc.open_stream(source)
        return stream.schema, iter(stream)
    file = pyarrow.ipc.open_file(source)
    return file.schema, map(file.get_batch, range(file.num_record_batches))


def sound(batches: Iterator[Any], path: str, cfg: ReadConfig) -> Iterator[Any]:
    """The batches. Raises Damaged naming the file where they break off."""
    import pyarrow

    rows = 0
    while True:
        try:
            batch = next(batches, None)
            if batch is not None:
                batch.validate()
        except (pyarrow.ArrowException, OSError) as error:
            raise Damaged(
                f"{path} is broken after row {rows:,} or a little more ({first_line(error)}); {refetch(cfg, REST)}"
            ) from None
        if batch is None:
            return
        yield batch
        rows += batch.num_rows


def first_line(error: Exception) -> str:
    """The beginning of a message."""
    return str(error).partition("\n")[0][:200]


def wanted(schema: Any, path: str, cfg: ReadConfig) -> tuple[str, ...]:
    """The columns of the text and of its words, '' for one that is not there. Raises BadInput without text."""
    names = [name if name and type_of(schema, name) is not None else "" for name in (cfg.text_field, *cfg.word_fields)]
    if not names[0]:
        raise BadInput(f"{path} has no column {cfg.text_field!r} but {', '.join(schema.names)}; set {cfg.set_field}")
    return tuple(names)


def type_of(schema: Any, name: str) -> Any:
    """The Arrow type of a column, None if there is no such column; a.b is the field b of the column a."""
    with contextlib.suppress(KeyError, ValueError, IndexError, AttributeError, TypeError):
        head, *rest = [name] if name in schema.names else name.split(".")
        kind = schema.field(head).type
        for inner in rest:
            kind = kind.field(inner).type
        return kind
    return None


def batch_rows(batch: Any, names: tuple[str, ...], row: int, path: str) -> Records:
    """Yields the rows of a batch, the text as bytes, so that bad UTF-8 is ours to judge."""
    texts = as_bytes(column_of(batch, names[0]), path, names[0])
    nothing = [""] * batch.num_rows
    words = zip(*(as_words(column_of(batch, name)) if name else nothing for name in names[1:]))
    for number, text, own in zip(range(row, row + batch.num_rows), texts, words):
        yield number, number, text or b"", own


def column_of(batch: Any, name: str) -> Any:
    """A column, or a field of one."""
    import pyarrow.compute

    if name in batch.schema.names:
        return batch.column(name)
    head, *rest = name.split(".")
    field = pyarrow.compute.StructFieldOptions(rest)
    return pyarrow.compute.call_function("struct_field", [batch.column(head)], field)


def as_bytes(column: Any, path: str, name: str) -> Iterator[bytes | None]:
    """Yields the values of a column of text. Raises BadInput if it is none."""
    import pyarrow

    if isinstance(column, pyarrow.DictionaryArray):
        known = list(as_bytes(column.dictionary, path, name))
        return (None if i is None else known[i] for i in column.indices.to_pylist())
    try:
        values = column.cast(pyarrow.large_binary())
    except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid):
        raise BadInput(f"{path}: column {name!r} is {column.type}, not text") from None
    values.validate(full=True)  # the offsets came out of a file
    return iter(values.to_pylist())


def as_words(column: Any) -> list[str]:
    """The values of a column as text, '' for null; what is not UTF-8 in it is replaced."""
    import pyarrow

    if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
        values = column.cast(pyarrow.large_binary())
        values.validate(full=True)
        return [(value or b"").decode("utf-8", "replace") for value in values.to_pylist()]
    return ["" if value is None else str(value) for value in column.to_pylist()]


def parquet_parts(path: str, cfg: ReadConfig, part_bytes: int) -> list[Part]:
    """The row groups in parts of about part_bytes of text."""
    with opened(path, cfg) as table:
        parts, begin, held = [], 0, 0
        for group in range(table.metadata.num_row_groups):
            held += text_bytes(table, group, path, cfg, [cfg.text_field])
            if held >= part_bytes:
                parts, begin, held = [*parts, Part(begin, group + 1)], group + 1, 0
        return [*parts, Part(begin, table.metadata.num_row_groups)] if held or not parts else parts
