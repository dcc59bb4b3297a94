"""Records of evaluation files (JSON Lines, Parquet, Arrow, text), each with a name for messages."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import parse_json
from jaxscale.text.sources.columns import arrow_batches

ROWS_AT_ONCE = 1024
BATCH_BYTES = 256 << 20  # of rows of a table that are unpacked at once, where each holds the longest text of all
LONGEST_LINE = 8 << 20  # characters
MOST_TEXT = 128 << 20  # characters of a file, unpacked: the items of an evaluation are held in memory
MOST_RECORDS = 1_000_000
MOST_LINES = 4_000_000
ENDINGS = (".jsonl", ".parquet", ".arrow")
UNREADABLE = (OSError, EOFError, UnicodeDecodeError, zlib.error)  # a torn gzip is an EOFError


def kind_of(path: Path) -> str:
    """The last ending of a file's name, what says how it is packed left out."""
    return next((suffix for suffix in reversed(path.suffixes) if suffix != ".gz"), "")


def read_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (FILE:LINE or FILE:ROW counted from 1, the value) of a .jsonl (also .gz), .parquet or .arrow file.

    Raises BadInput naming the file, the line where it is not JSON, and the bound that it is beyond; UNREADABLE as they
    come.
    """
    readers = {".jsonl": json_records, ".parquet": parquet_records, ".arrow": arrow_records}
    assert kind_of(path) in readers, path
    total = 0
    for number, (name, value) in enumerate(readers[kind_of(path)](path), 1):
        total += text_size(value)
        if number > MOST_RECORDS:
            raise too_much(path, f"has more than {MOST_RECORDS:,} records")
        if total > MOST_TEXT:
            raise too_much(path, f"holds more than {MOST_TEXT:,} characters")
        yield name, value


def too_much(path: Path, what: str) -> BadInput:
    """The error for a file of which no more is read."""
    return BadInput(f"evaluation file {path} {what}; take a part of it")


def text_size(value: Any) -> int:
    """Characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + text_size(part) for key, part in value.items())
    return sum(map(text_size, value)) if isinstance(value, (list, tuple)) else 0


def text_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (FILE:LINE, the line without its end)."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        number = total = 0
        while line := file.readline(LONGEST_LINE + 1):
            number, total = number + 1, total + len(line)
            if len(line) > LONGEST_LINE:
                raise too_much(path, f"line {number} has more than {LONGEST_LINE:,} characters")
            if number > MOST_LINES:
                raise too_much(path, f"has more than {MOST_LINES:,} lines")
            if total > MOST_TEXT:
                raise too_much(path, f"unpacks to more than {MOST_TEXT:,} characters")
            yield f"{path.name}:{number}", line.rstrip("\n")


def json_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the values of the lines that are not blank."""
    for name, line in text_lines(path):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except BadInput as error:
            raise BadInput(f"evaluation item {path.parent / name} is not JSON: {error}") from None
        yield name, value


def parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the rows of a Parquet file."""
    import pyarrow
    from pyarrow import parquet

    def batches(file: Any) -> Iterator[Any]:
        for group in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(group).total_byte_size
            if size > MOST_TEXT:
                raise too_much(path, f"has a row group of {size:,} bytes, and at most {MOST_TEXT:,} are unpacked")
            at_once = rows_at_once(size)  # a text may be there once, and stand for all rows
            yield from file.iter_batches(at_once, row_groups=[group], use_threads=False)

    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:  # without threads: see lineage.py
            yield from rows(path, batches(file))
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"evaluation file {path} is not whole Parquet: {error}") from None


def arrow_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the rows of an Arrow file or stream (Hugging Face datasets write streams)."""
    import pyarrow

    try:
        with pyarrow.OSFile(str(path)) as source:
            yield from rows(path, arrow_batches(source)[1])
    except pyarrow.ArrowInvalid as error:
        raise BadInput(f"evaluation file {path} is not whole Arrow: {error}") from None


def rows(path: Path, batches: Any) -> Iterator[tuple[str, Any]]:
    """Yields the rows of Arrow record batches."""
    number = 0
    for batch in batches:
        if batch.nbytes > MOST_TEXT:
            raise too_much(path, f"has a batch of {batch.nbytes:,} bytes, and at most {MOST_TEXT:,} are unpacked")
        at_once = rows_at_once(batch.nbytes)
        for first in range(0, batch.num_rows, at_once):
            for value in batch.slice(first, at_once).to_pylist():
                number += 1
                yield f"{path.name}:{number}", value


def rows_at_once(size: int) -> int:
    """Rows to decode together, if each may hold a text of `size` bytes."""
    return min(ROWS_AT_ONCE, max(1, BATCH_BYTES // max(size, 1)))
