"""The lineage of a shard: the origin of each document, as a Parquet file next to the tokens.

file      dictionary<string>  file name, relative to the fixed part of the source's glob
offset    int64               start in the unpacked file: byte offset, or row or record number
id        string              the document's id in the file, or empty; likewise url, licence and language
score.X   float32             one column for each score of a preparation stage; null if a document has none
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxscale.runtime.data.header import FIX
from jaxscale.system.exits import BadInput

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

    from jaxscale.runtime.text.document import Document

TEXTS = ("id", "url", "licence", "language")
COLUMNS = ("file", "offset", *TEXTS)
ROW_GROUP = 1 << 13  # rows that are read together, about 600 kB; the documents of a step are in as many groups


def escape_non_utf8(name: str) -> str:
    """Escapes bytes of the name that are not UTF-8, as on_one_line does."""
    return name.encode(errors="backslashreplace").decode()


def lineage_table(documents: Sequence["Document"]) -> "pyarrow.Table":
    """Returns the lineage of the documents, in order."""
    import pyarrow

    files = [escape_non_utf8(doc.file) for doc in documents]
    columns: dict[str, Any] = {"file": pyarrow.array(files, pyarrow.string())}
    columns["offset"] = pyarrow.array([doc.offset for doc in documents], pyarrow.int64())
    for name in TEXTS:
        columns[name] = pyarrow.array([getattr(doc, name) for doc in documents], pyarrow.string())
    scores = [dict(doc.scores) for doc in documents]
    for name in sorted(set().union(*scores)):
        columns[f"score.{name}"] = pyarrow.array([score.get(name) for score in scores], pyarrow.float32())
    return canonical(pyarrow.table(columns))


def join_lineages(tables: Sequence["pyarrow.Table"]) -> "pyarrow.Table":
    """Concatenates at least one table."""
    import pyarrow

    return pyarrow.concat_tables(tables, promote_options="default").unify_dictionaries()


def canonical(table: "pyarrow.Table") -> "pyarrow.Table":
    """Returns the rows with columns in canonical order, type and chunking, so that equal rows give equal bytes.

    Raises: BadInput for a column that is missing or has the wrong type.
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
        # re-encoded, so that dictionary indices follow first occurrence
        columns[name] = column.combine_chunks().dictionary_encode() if name == "file" else column.combine_chunks()
    return pyarrow.table(columns)


def lineage_bytes(table: "pyarrow.Table", documents: int) -> bytes:
    """Returns the table as Parquet; equal bytes for equal rows and the same pyarrow. Raises BadInput as canonical."""
    import pyarrow.parquet

    if table.num_rows != documents:
        raise BadInput(f"the lineage has {table.num_rows:,} rows for {documents:,} documents")
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(
        canonical(table), buffer, row_group_size=ROW_GROUP, compression="zstd", compression_level=3
    )
    return buffer.getvalue()


@contextlib.contextmanager
def open_lineage(path: str) -> Iterator["pyarrow.parquet.ParquetFile"]:
    """Opens a lineage, to be read by row group; its hash is not checked. Raises BadInput if it cannot be read.

    Read it with use_threads=False: an Arrow thread that holds Python's bytes at exit aborts the process
    (github.com/apache/arrow/issues/34314).
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path} cannot be read: {error}; {FIX}") from None
