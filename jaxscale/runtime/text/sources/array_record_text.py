"""ArrayRecord files whose records are text, JSON objects or tf.train.Example, as TensorFlow Datasets writes them."""

import contextlib
import importlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.jsonl import MISSING, record_text, reparse, skip_or_raise
from jaxscale.runtime.text.sources.part import (
    NO_METADATA,
    WHOLE,
    Damaged,
    Part,
    Records,
    count_skipped,
    damage_fix,
    importing,
)

OPTIONS = "readahead_buffer_size:4M,max_parallelism:0"


def read_array_record(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of the records of the part by cfg.record_format. Raises as array_records."""
    for number, record, value in array_records(path, cfg, skipped, part):
        if cfg.record_format == "text":
            yield number, number, record, NO_METADATA
        else:
            yield from record_text(value, number, number, record, cfg, skipped, f"{path} record {number}")


def array_records(
    path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE, raw: Sequence[str] = ()
) -> Iterator[tuple[int, bytes, Any]]:
    """Yields (number, record, value by cfg.record_format) of the records [part.begin, part.end).

    raw: features of a tf.train.Example that stay bytes, as the text field, so that invalid UTF-8 is detected. For text
    the value is the record. Raises: BadInput naming file and record for one that is invalid.
    """
    with opened(path, cfg) as reader:
        if part.begin:
            reader.seek(part.begin)
        for number in range(part.begin, min(part.end, reader.num_records())):
            try:
                record = reader.read()
            except (IndexError, RuntimeError, ValueError) as error:
                raise Damaged(f"{path} is broken at record {number:,}: {error}; fetch it again") from None
            if len(record) > cfg.max_line_bytes:
                count_skipped(skipped, "longer than max_line_bytes", len(record))
            else:
                value, place = record, f"{path} record {number}"
                if cfg.record_format == "json":
                    value = reparse(record, cfg, skipped, place)
                elif cfg.record_format == "example":
                    value = example(record, cfg, skipped, place, raw)
                if value is not MISSING:
                    yield number, record, value


def is_array_record(path: str) -> bool:
    """Returns True for an ArrayRecord file name."""
    return ".array_record" in os.path.basename(path) or path.endswith(".arrayrecord")


def load_package() -> Any:
    """Imports the package. Raises BadInput if it is not installed."""
    with importing("reading and writing ArrayRecord files", "array_record"):
        return importlib.import_module("array_record.python.array_record_module")


@contextlib.contextmanager
def opened(path: str, cfg: ReadConfig) -> Iterator[Any]:
    """Opens a file. Raises Damaged if it is not ArrayRecord."""
    package = load_package()
    os.stat(path)  # raises the usual OSError if it is missing
    try:
        reader = package.ArrayRecordReader(path, OPTIONS)
        if not reader.ok():
            reader.close()  # raises the reason
    except (ValueError, RuntimeError, IndexError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise Damaged(f"{path} cannot be read as ArrayRecord: {reason}; {damage_fix(cfg)}") from None
    try:
        yield reader
    finally:
        with contextlib.suppress(RuntimeError):  # raises the same error again
            reader.close()


def array_record_parts(path: str, cfg: ReadConfig, part_bytes: int) -> list[Part]:
    """Splits the records into parts of about part_bytes."""
    with opened(path, cfg) as reader:
        total = reader.num_records()
    step = max(1, total * part_bytes // max(os.path.getsize(path), 1))
    return [Part(begin, min(begin + step, total)) for begin in range(0, total, step)] or [WHOLE]


def example(record: bytes, cfg: ReadConfig, skipped: Counter, place: str, raw: Sequence[str] = ()) -> Any:
    """Returns {name: first value} of the byte features of a tf.train.Example; MISSING if invalid. raw: stay bytes."""
    with importing("reading tf.train.Example", "protobuf"):
        from google.protobuf.message import DecodeError
    found = {}
    try:
        for _, features in length_delimited(record, 1):
            for _, entry in length_delimited(features, 1):
                parts = dict(length_delimited(entry))
                for _, values in length_delimited(parts.get(2, b""), 1):
                    name = parts.get(1, b"").decode("utf-8", "replace")
                    value = next((v for _, v in length_delimited(values, 1)), b"")
                    found[name] = value if name in (cfg.text_field, *raw) else value.decode("utf-8", "replace")
    except DecodeError:
        skip_or_raise(f"{place} is not a tf.train.Example", cfg, skipped, "not tf.train.Example", len(record))
        return MISSING
    return found


def length_delimited(message: bytes, wanted: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields (number, content) of the length-delimited fields of a message. wanted: this number; 0: all."""
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.unknown_fields import UnknownFieldSet

    for field in UnknownFieldSet(Empty.FromString(message)):
        if field.wire_type == 2 and wanted in (0, field.field_number):  # 2: bytes, text, or a message
            yield field.field_number, field.data
