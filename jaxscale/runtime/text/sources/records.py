"""Reads records of evaluation files (JSON Lines, Parquet, Arrow) and lines of text files, with names for messages."""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.blocks import read_blocks
from jaxscale.runtime.text.sources.columns import arrow_batches
from jaxscale.runtime.text.sources.files import unpacked_name
from jaxscale.runtime.text.sources.jsonl import JSON_LINES, skip_or_raise
from jaxscale.runtime.text.sources.jsonl import json_records as read_values
from jaxscale.runtime.text.sources.part import TRAILING, Damaged
from jaxscale.runtime.text.sources.read import handle_damage
from jaxscale.runtime.text.sources.text import numbered_lines
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import check_depth

ROWS_AT_ONCE = 1024
BATCH_BYTES = 256 << 20  # bytes of table rows that are decoded together, if all rows have the longest text
LONGEST_LINE = 8 << 20  # bytes
MOST_TEXT = 128 << 20  # bytes of an uncompressed file, because evaluation items are in memory
MOST_RECORDS = 1_000_000
ENDINGS = (*JSON_LINES, ".parquet", ".arrow")
Damage = Literal["stop", "skip"]
Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListReadConfig(ReadConfig):
    """Settings for reading files in which no record may be skipped."""

    may_skip: ClassVar[bool] = False


def kind_of(path: Path | str) -> str:
    """Returns the lower-case suffix of a file name, without .gz or .zst."""
    return os.path.splitext(unpacked_name(str(path)))[1]


def read_records(
    path: Path, damaged: Damage | None = None, skipped: Counter | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields (FILE:LINE or FILE:ROW, value) for each record of a file. Lines and rows are counted from 1.

    damaged: 'skip' counts unreadable records in `skipped`; None is like 'stop', but messages do not name the setting.
    Raises: BadInput that names the file and the line that is not JSON, or the exceeded limit.
    """
    kind, skipped = kind_of(path), Counter() if skipped is None else skipped
    assert kind in ENDINGS, path
    if kind in JSON_LINES:
        found = ((f"{path.name}:{line}", value) for line, value in json_records(str(path), damaged, skipped, MOST_TEXT))
    else:
        found = yield_readable(table_records(path), path, list_config(damaged), skipped)
    total = 0
    for number, (name, value) in enumerate(found, 1):
        total += text_size(value)
        if number > MOST_RECORDS:
            raise too_large(path, f"has more than {MOST_RECORDS:,} records")
        if total > MOST_TEXT:
            raise too_large(path, f"has more than {MOST_TEXT:,} characters")
        yield name, value


def too_large(path: Path | str, what: str) -> BadInput:
    """Returns the error for a file that exceeds a limit."""
    return BadInput(f"{path} {what}; use a part of the file")


def text_size(value: Any) -> int:
    """Returns the number of characters in all strings of a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + text_size(part) for key, part in value.items())
    return sum(map(text_size, value)) if isinstance(value, (list, tuple)) else 0


def list_config(damaged: Damage | None = None) -> ReadConfig:
    """Returns the settings for reading evaluation files and lists."""
    cls = ListReadConfig if damaged is None else ReadConfig
    return cls(damaged=damaged or "stop", max_line_bytes=LONGEST_LINE)


def yield_readable(found: Iterator[Found], path: Path | str, cfg: ReadConfig, skipped: Counter) -> Iterator[Found]:
    """Yields the records of a file, with errors handled by handle_damage()."""
    with handle_damage(str(path), cfg, skipped):
        yield from found


def check_bounds(path: Path | str, cfg: ReadConfig, skipped: Counter, total: int, max_bytes: int | None) -> None:
    """Raises BadInput if a file exceeds max_bytes or, unless damaged='skip', has long lines or trailing bytes."""
    if max_bytes is not None and total > max_bytes:
        raise too_large(path, f"has more than {max_bytes:,} bytes")
    if cfg.damaged == "stop" and skipped["longer than max_line_bytes"]:
        raise too_large(path, f"has a line of more than {LONGEST_LINE:,} bytes")
    if cfg.damaged == "stop" and skipped[TRAILING]:
        raise BadInput(f"{path} has other bytes after the compressed data; download it again, or decompress it")


def text_lines(path: str, max_bytes: int | None = None) -> Iterator[tuple[int, str]]:
    """Yields (number from 1, line without line end) of a text file, which may be compressed. Raises BadInput."""
    cfg, skipped, total = list_config(), Counter(), 0
    lines = numbered_lines(read_blocks(path, cfg, skipped), cfg, skipped, 0)
    for _, number, line in yield_readable(lines, path, cfg, skipped):
        total += len(line)
        check_bounds(path, cfg, skipped, total, max_bytes)
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"{path} line {number} is not UTF-8 ({error.reason}); save it as UTF-8") from None
        yield number, text
    check_bounds(path, cfg, skipped, total, max_bytes)


def json_records(
    path: str, damaged: Damage | None = None, skipped: Counter | None = None, max_bytes: int | None = None
) -> Iterator[tuple[int, Any]]:
    """Yields (number from 1, value) for each nonblank line of JSON. Arguments and errors: see read_records()."""
    cfg, skipped, total = list_config(damaged), Counter() if skipped is None else skipped, 0
    for _, number, line, value, _ in yield_readable(read_values(path, cfg, skipped), path, cfg, skipped):
        total += len(line)
        check_bounds(path, cfg, skipped, total, max_bytes)
        if isinstance(value, bytes):
            skip_or_raise(f"{path} line {number} is not UTF-8", cfg, skipped, "invalid UTF-8", len(line))
            continue
        try:
            check_depth(value)
        except BadInput as error:
            skip_or_raise(f"{path} line {number} is not JSON: {error}", cfg, skipped, "not JSON", len(line))
            continue
        yield number, value
    check_bounds(path, cfg, skipped, total, max_bytes)


def table_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (FILE:ROW, row) for a Parquet file, or an Arrow file or stream (used by Hugging Face datasets)."""
    import pyarrow
    from pyarrow import parquet

    is_parquet = kind_of(path) == ".parquet"

    def parquet_batches(file: Any) -> Iterator[Any]:
        for group in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(group).total_byte_size
            if size > MOST_TEXT:
                raise too_large(path, f"has a row group of {size:,} uncompressed bytes; the limit is {MOST_TEXT:,}")
            at_once = rows_at_once(size)  # dictionary encoding may repeat one long text in all rows
            yield from file.iter_batches(at_once, row_groups=[group], use_threads=False)

    try:
        if is_parquet:
            with parquet.ParquetFile(path, pre_buffer=False) as file:  # without threads, which are unsafe at exit
                yield from rows(path, parquet_batches(file))
        else:
            with pyarrow.OSFile(str(path)) as source:
                yield from rows(path, arrow_batches(source)[1])
    except pyarrow.ArrowInvalid as error:
        raise Damaged(f"{path} is not valid {'Parquet' if is_parquet else 'Arrow'}: {error}") from None


def rows(path: Path, batches: Any) -> Iterator[tuple[str, Any]]:
    """Yields (FILE:ROW, row) for Arrow record batches. Raises BadInput for batches that are too large."""
    number = 0
    for batch in batches:
        if batch.nbytes > MOST_TEXT:
            raise too_large(path, f"has a batch of {batch.nbytes:,} bytes; the limit is {MOST_TEXT:,}")
        at_once = rows_at_once(batch.nbytes)
        for first in range(0, batch.num_rows, at_once):
            for value in batch.slice(first, at_once).to_pylist():
                number += 1
                yield f"{path.name}:{number}", value


def rows_at_once(size: int) -> int:
    """Returns how many rows to decode together if each row may have a text of `size` bytes."""
    return min(ROWS_AT_ONCE, max(1, BATCH_BYTES // max(size, 1)))
