"""Reads documents from whole files or parts of files, in all supported formats."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.document import Document
from jaxscale.runtime.text.sources.blocks import check_unpacked, cut_parts, is_packed, next_line, packed_problem
from jaxscale.runtime.text.sources.columns import is_table, parquet_parts, read_table
from jaxscale.runtime.text.sources.data_sets import array_record_parts, is_array_record, read_array_record, read_seqio
from jaxscale.runtime.text.sources.decode import decode_text
from jaxscale.runtime.text.sources.files import SourceFile, unpacked_name
from jaxscale.runtime.text.sources.jsonl import JSON_LINES, format_line, read_json_lines
from jaxscale.runtime.text.sources.part import BROKEN, WHOLE, Damaged, Part, Records, count_skipped, read_error
from jaxscale.runtime.text.sources.text import read_text, text_parts
from jaxscale.runtime.text.sources.warc import read_page, read_warc
from jaxscale.system.exits import BadInput


class FormatReader(NamedTuple):
    """Functions that read files of a format."""

    unit: str  # name of a record in messages; '' for plain text, with byte offsets as locations
    read: Callable[[str, ReadConfig, Counter, Part], Records]
    cut: Callable[[str, ReadConfig, int], list[Part]] | None = None  # (path, settings, bytes per part) -> parts


def format_reader(path: str) -> FormatReader:
    """Returns the reader for a file, selected by the file name."""
    name = unpacked_name(path)
    if path.startswith("seqio://"):
        return FormatReader("example", read_seqio)
    if is_table(path):
        return FormatReader("row", read_table, parquet_parts if name.endswith(".parquet") else None)
    if is_array_record(name):
        return FormatReader("record", read_array_record, array_record_parts)
    if name.endswith(JSON_LINES):
        return FormatReader("line", read_json_lines, lambda path, cfg, size: cut_parts(path, size, next_line))
    if name.endswith((".warc", ".wet")):
        return FormatReader("record at byte", read_warc)
    if name.endswith((".html", ".htm", ".xhtml")):
        return FormatReader("page", read_page)
    return FormatReader("", read_text, text_parts)


@contextlib.contextmanager
def handle_damage(path: str, cfg: ReadConfig, skipped: Counter) -> Iterator[None]:
    """Handles read errors as set by data.damaged: counts the damage or raises BadInput."""
    try:
        yield
    except Damaged as error:
        if cfg.damaged == "stop":
            raise BadInput(str(error)) from None
        skipped[BROKEN] += 1
    except BadInput as error:
        if cfg.damaged == "stop" and is_packed(path) and (cause := packed_problem(path, cfg)):
            raise BadInput(cause) from None  # corrupt bytes may be decompressed before the error is detected
        raise error
    except OSError as error:
        raise read_error(path, error) from None


def read_file(file: SourceFile, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Iterator[Document]:
    """Yields the documents of a file or of a part of it, in order, and counts skipped documents.

    skipped: receives {reason: count}, including counts of repairs (see decode.is_repair).
    Raises: BadInput as set by data.invalid_utf8 and data.damaged, or if the file cannot be read.
    """
    path, name, source = file
    unit, read, _ = format_reader(path)
    max_bytes, licence = cfg.max_document_bytes, cfg.licence
    with handle_damage(path, cfg, skipped):
        for offset, number, content, (id, url, document_licence, language) in read(path, cfg, skipped, part):
            if not content:
                skipped["empty"] += 1
                continue
            if isinstance(content, bytes) or "\0" in content:
                place = lambda start, offset=offset, number=number: format_position(unit, part, offset, number, start)
                content = decode_text(content, cfg, skipped, path, place)
                if content is None:
                    continue
            if 4 * len(content) > max_bytes and len(content.encode()) > max_bytes:
                count_skipped(skipped, "longer than max_document_bytes", len(content.encode()))
                continue
            yield Document(content, source, name, offset, id, url, document_licence or licence, language)


def format_position(unit: str, part: Part, offset: int, number: int, start: int) -> str:
    """Returns the location of a byte, such as 'line 3' or 'row 7', or the byte offset for plain text."""
    if not unit:
        return str(offset + start)
    if unit == "line":
        return format_line(number, part)
    return f"{unit} {number}"


def split_file(file: SourceFile, cfg: ReadConfig, part_bytes: int) -> list[Part]:
    """Splits a file into parts of about part_bytes, between lines, records or row groups.

    Returns [WHOLE] for compressed files and for formats that do not support parts.
    """
    if part_bytes < 1:
        raise BadInput(f"part_bytes={part_bytes} must be 1 or more")
    cut = format_reader(file.path).cut
    with handle_damage(file.path, cfg, Counter()):
        if cut and not is_packed(file.path):
            check_unpacked(file.path, cfg)
        return cut(file.path, cfg, part_bytes) if cut else [WHOLE]
    return [WHOLE]
