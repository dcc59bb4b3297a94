"""Records of evaluation files (JSON lines, Parquet, Arrow) and lines of lists, each with a name for messages."""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import check_depth
from jaxscale.text.config import ReadConfig
from jaxscale.text.sources.blocks import read_blocks
from jaxscale.text.sources.columns import arrow_batches
from jaxscale.text.sources.files import unpacked_name
from jaxscale.text.sources.jsonl import JSON_LINES, refuse
from jaxscale.text.sources.jsonl import json_records as read_values
from jaxscale.text.sources.left_out import TRAILING
from jaxscale.text.sources.part import Damaged
from jaxscale.text.sources.read import readable
from jaxscale.text.sources.text import numbered_lines

ROWS_AT_ONCE = 1024
BATCH_BYTES = 256 << 20  # of rows of a table that are unpacked at once, where each holds the longest text of all
LONGEST_LINE = 8 << 20  # bytes
MOST_TEXT = 128 << 20  # bytes of a file, unpacked: the items of an evaluation are held in memory
MOST_RECORDS = 1_000_000
ENDINGS = (*JSON_LINES, ".parquet", ".arrow")
Damage = Literal["stop", "skip"]
Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListReadConfig(ReadConfig):
    """Reading of a file of which nothing may be left out."""

    may_skip: ClassVar[bool] = False


def kind_of(path: Path | str) -> str:
    """The ending of a file's name in small letters, without that of its packing."""
    return os.path.splitext(unpacked_name(str(path)))[1]


def read_records(
    path: Path, damaged: Damage | None = None, skipped: Counter | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields (FILE:LINE or FILE:ROW counted from 1, the value) of each record of a file.

    Args: damaged: 'skip' counts in `skipped` what cannot be read; None: as 'stop', with no such setting to name.
    Raises: BadInput naming the file, the line where it is not JSON, and the bound that it is beyond.
    """
    kind, skipped = kind_of(path), Counter() if skipped is None else skipped
    assert kind in ENDINGS, path
    if kind in JSON_LINES:
        found = ((f"{path.name}:{line}", value) for line, value in json_records(str(path), damaged, skipped, MOST_TEXT))
    else:
        table = parquet_records(path) if kind == ".parquet" else arrow_records(path)
        found = guarded(table, path, list_reading(damaged), skipped)
    total = 0
    for number, (name, value) in enumerate(found, 1):
        total += text_size(value)
        if number > MOST_RECORDS:
            raise too_much(path, f"has more than {MOST_RECORDS:,} records")
        if total > MOST_TEXT:
            raise too_much(path, f"holds more than {MOST_TEXT:,} characters")
        yield name, value


def too_much(path: Path | str, what: str) -> BadInput:
    """The error for a file of which no more is read."""
    return BadInput(f"{path} {what}; take a part of it")


def text_size(value: Any) -> int:
    """Characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + text_size(part) for key, part in value.items())
    return sum(map(text_size, value)) if isinstance(value, (list, tuple)) else 0


def list_reading(damaged: Damage | None = None) -> ReadConfig:
    """The settings by which evaluation files and lists are read."""
    cls = ListReadConfig if damaged is None else ReadConfig
    return cls(damaged=damaged or "stop", max_line_bytes=LONGEST_LINE)


def guarded(found: Iterator[Found], path: Path | str, cfg: ReadConfig, skipped: Counter) -> Iterator[Found]:
    """Yields what a file holds; see `readable`."""
    with readable(str(path), cfg, skipped):
        yield from found


def check_bounds(path: Path | str, cfg: ReadConfig, skipped: Counter, total: int, most: int | None) -> None:
    """Raises BadInput for a file of more than `most` bytes, or, where nothing may be left out, with too long a line."""
    if most is not None and total > most:
        raise too_much(path, f"holds more than {most:,} bytes")
    if cfg.damaged == "stop" and skipped["longer than max_line_bytes"]:
        raise too_much(path, f"has a line of more than {LONGEST_LINE:,} bytes")
    if cfg.damaged == "stop" and skipped[TRAILING]:
        raise BadInput(f"{path} has other bytes after the packed data; unpack it, or fetch it again")


def text_lines(path: str, most: int | None = None) -> Iterator[tuple[int, str]]:
    """Yields (number from 1, line without its end) of a file of text, also packed.

    most: bytes of the whole file. Raises BadInput naming the file, the line that is not UTF-8, and the bound that it is
    beyond.
    """
    cfg, skipped, total = list_reading(), Counter(), 0
    lines = numbered_lines(read_blocks(path, cfg, skipped), cfg, skipped, 0)
    for _, number, line in guarded(lines, path, cfg, skipped):
        total += len(line)
        check_bounds(path, cfg, skipped, total, most)
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"{path} line {number} is not UTF-8 ({error.reason}); write it again") from None
        yield number, text
    check_bounds(path, cfg, skipped, total, most)


def json_records(
    path: str, damaged: Damage | None = None, skipped: Counter | None = None, most: int | None = None
) -> Iterator[tuple[int, Any]]:
    """Yields (number from 1, value) of the lines that are not blank. Args and errors as of read_records, text_lines."""
    cfg, skipped, total = list_reading(damaged), Counter() if skipped is None else skipped, 0
    for _, number, line, value, _ in guarded(read_values(path, cfg, skipped), path, cfg, skipped):
        total += len(line)
        check_bounds(path, cfg, skipped, total, most)
        if isinstance(value, bytes):
            refuse(f"{path} line {number} is not UTF-8", cfg, skipped, "invalid UTF-8", len(line))
            continue
        try:
            check_depth(value)
        except BadInput as error:
            refuse(f"{path} line {number} is not JSON: {error}", cfg, skipped, "not JSON", len(line))
            continue
        yield number, value
    check_bounds(path, cfg, skipped, total, most)


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
        raise Damaged(f"{path} is not whole Parquet: {error}") from None


def arrow_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the rows of an Arrow file or stream (Hugging Face datasets write streams)."""
    import pyarrow

    try:
        with pyarrow.OSFile(str(path)) as source:
            yield from rows(path, arrow_batches(source)[1])
    except pyarrow.ArrowInvalid as error:
        raise Damaged(f"{path} is not whole Arrow: {error}") from None


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
