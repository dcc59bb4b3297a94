"""Where each document of a shard came from: one row per document, as Parquet beside its tokens.

file      dictionary<string>  its file, relative to where the source's glob begins
offset    int64               where it begins in that file, unpacked: a byte, or the number of its row or record
id        string              the file's own name for it, or empty; so too url, licence and language
score.X   float32             one column for each score that a stage has added; null where a document has none
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxscale.data.header import WAY_OUT
from jaxscale.system.exits import BadInput

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

    from jaxscale.text.document import Document

TEXTS = ("id", "url", "licence", "language")
COLUMNS = ("file", "offset", *TEXTS)
ROW_GROUP = 1 << 13  # rows that are read together: some 600 kB; a step's documents lie in as many groups


def in_utf8(name: str) -> str:
    """The name, with a byte of it that is not UTF-8 written as on_one_line shows it."""
    return name.encode(errors="backslashreplace").decode()


def lineage_table(documents: Sequence["Document"]) -> "pyarrow.Table":
    """The lineage of the documents, in order."""
    import pyarrow

    columns: dict[str, Any] = {"file": pyarrow.array([in_utf8(doc.file) for doc in documents], pyarrow.string())}
    columns["offset"] = pyarrow.array([doc.offset for doc in documents], pyarrow.int64())
    for name in TEXTS:
        columns[name] = pyarrow.array([getattr(doc, name) for doc in documents], pyarrow.string())
    scores = [dict(doc.scores) for doc in documents]
    for name in sorted(set().union(*scores)):
        columns[f"score.{name}"] = pyarrow.array([score.get(name) for score in scores], pyarrow.float32())
    return canonical(pyarrow.table(columns))


def join_lineages(tables: Sequence["pyarrow.Table"]) -> "pyarrow.Table":
    """The rows of at least one table, in order."""
    import pyarrow

    return pyarrow.concat_tables(tables, promote_options="default").unify_dictionaries()


def canonical(table: "pyarrow.Table") -> "pyarrow.Table":
    """The same rows with columns in our order and of our types, in one piece each: equal rows give equal bytes.

    Raises: BadInput for a column that is missing or not of its type.
    """
    import pyarrow

    names = table.column_names
    if missing := [name for name in COLUMNS if name not in names]:
        raise BadInput(f"the lineage lacks the columns {missing}; it has {names}")
    if len(set(names)) != len(names):
        raise BadInput(f"the lineage has a column twice: {names}")
    kinds = {"file": pyarrow.string(), "offset": pyarrow.int64(), **dict.fromkeys(TEXTS, pyarrow.string())}
    columns = {}
    for name in [*COLUMNS, *sorted(set(names) - set(COLUMNS))]:
        kind = kinds.get(name, pyarrow.float32())
        try:
            column = table[name].cast(kind)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
            raise BadInput(f"the lineage's column {name!r} is {table[name].type} and no {kind}: {error}") from None
        # a dictionary numbered by first appearance, however the caller numbered his
        columns[name] = column.combine_chunks().dictionary_encode() if name == "file" else column.combine_chunks()
    return pyarrow.table(columns)


def lineage_bytes(table: "pyarrow.Table", documents: int) -> bytes:
    """The table as Parquet; the same bytes for the same rows and release of pyarrow.

    Raises: BadInput if it does not have one row for each of `documents`, or a column is not as the head of this file
    says.
    """
    import pyarrow.parquet

    if table.num_rows != documents:
        raise BadInput(f"the lineage has {table.num_rows:,} rows for {documents:,} documents")
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(
        canonical(table), buffer, row_group_size=ROW_GROUP, compression="zstd", compression_level=3
    )
    return buffer.getvalue()


def parse_lineage(content: bytes, columns: Sequence[str] | None = None) -> "pyarrow.Table":
    """The table out of `lineage_bytes`, or some of its columns. Raises BadInput if it cannot be read."""
    import pyarrow.parquet

    try:
        # Read by this thread. One of Arrow's that still holds the bytes, which are Python's, while Python ends aborts
        # the process (github.com/apache/arrow/issues/34314); read_table has such threads in any case.
        with pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content), pre_buffer=False) as file:
            return file.read(columns=columns, use_threads=False)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise BadInput(f"it is no Parquet file: {error}") from None


@contextlib.contextmanager
def open_lineage(path: str) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """The file of a lineage, to be read a group of rows at a time; its sum is not looked at.

    Raises: BadInput naming the file if it cannot be read.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path} cannot be read: {error}; {WAY_OUT}") from None
