"""Records of evaluation files: the lines of JSON or the rows of a table, each with its name for messages."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxscale.exits import BadInput
from jaxscale.foreign import parse_json

ROWS_AT_ONCE = 1024
ENDINGS = (".jsonl", ".parquet", ".arrow")


def kind_of(path: Path) -> str:
    """The last ending of a file's name, what says how it is packed left out."""
    return next((suffix for suffix in reversed(path.suffixes) if suffix != ".gz"), "")


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (FILE:LINE or FILE:ROW counted from 1, the value) of a .jsonl (also .gz), .parquet or .arrow file.

    Raises BadInput naming the file, and the line where it is not JSON; OSError, EOFError (a torn gzip) and
    UnicodeDecodeError as they come.
    """
    readers = {".jsonl": json_records, ".parquet": parquet_records, ".arrow": arrow_records}
    return readers[kind_of(path)](path)


def text_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (FILE:LINE, the line without its end)."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            yield f"{path.name}:{number}", line.rstrip("\n")


def json_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the values of the lines that are not blank."""
    for name, line in text_lines(path):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            raise BadInput(f"evaluation item {path.parent / name} is not JSON: {error}") from None
        yield name, value


def parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:  # without threads: see lineage.py
            yield from rows(path, file.iter_batches(ROWS_AT_ONCE, use_threads=False))
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"evaluation file {path} is not whole Parquet: {error}") from None


def arrow_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the rows of an Arrow file or stream (Hugging Face datasets write streams)."""
    import pyarrow
    from pyarrow import ipc

    try:
        with pyarrow.OSFile(str(path)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            if is_file:
                file = ipc.open_file(source)
                batches = map(file.get_batch, range(file.num_record_batches))
            else:
                batches = ipc.open_stream(source)
            yield from rows(path, batches)
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"evaluation file {path} is not whole Arrow: {error}") from None


def rows(path: Path, batches: Any) -> Iterator[tuple[str, Any]]:
    """Yields the rows of Arrow record batches."""
    number = 0
    for batch in batches:
        for value in batch.to_pylist():
            number += 1
            yield f"{path.name}:{number}", value
