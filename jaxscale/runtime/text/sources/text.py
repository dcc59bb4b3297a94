"""Reads plain text files, in which a document is a file, a line or a paragraph."""

from collections import Counter
from collections.abc import Iterator

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.blocks import BYTE_ORDER_MARK, cut_parts, next_line, read_blocks, read_lines
from jaxscale.runtime.text.sources.part import NO_METADATA, WHOLE, Part, Records, count_skipped

# Longer files are split into documents of this size at line ends, to bound memory and to allow a validation split of a
# single file. This adds an end token per MiB.
DOCUMENT_BYTES = 1 << 20
CHARACTER_BYTES = 4  # length of the longest UTF-8 sequence


def read_text(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the documents of a plain text file, as set by cfg.text_documents."""
    blocks = read_blocks(path, cfg, skipped, part)
    if cfg.text_documents == "file":
        yield from cut_text(blocks, part.begin)
        return
    lines = numbered_lines(blocks, cfg, skipped, part.begin)
    for offset, number, content in lines if cfg.text_documents == "line" else paragraphs(lines, cfg, skipped):
        yield offset, number, content, NO_METADATA


def cut_text(blocks: Iterator[bytes], offset: int = 0) -> Records:
    """Yields documents of about DOCUMENT_BYTES that end at a line end. An empty file has one empty document."""
    pieces, size, number, more = [], 0, 1, True
    enough = 2 * DOCUMENT_BYTES + CHARACTER_BYTES  # enough bytes to determine the end of the next document
    while more:
        if (block := next(blocks, None)) is not None:
            pieces.append(block)
            size += len(block)
            if size <= 2 * enough:
                continue
        more, buffer, start = block is not None, b"".join(pieces), 0
        while len(buffer) - start > (enough if more else 0):
            stop = start + DOCUMENT_BYTES
            stop = min(stop + line_remainder(buffer[stop : stop + DOCUMENT_BYTES + CHARACTER_BYTES]), len(buffer))
            yield offset + start, number, buffer[start:stop], NO_METADATA
            start, number = stop, number + 1
        offset, pieces, size = offset + start, [buffer[start:]], len(buffer) - start
    if offset == 0 and number == 1:
        yield 0, 1, b"", NO_METADATA


def line_remainder(after: bytes) -> int:
    """Returns how many bytes of `after` belong to the document: to the line end, or DOCUMENT_BYTES without one."""
    if end := after.find(b"\n", 0, DOCUMENT_BYTES) + 1:
        return end
    end = min(len(after), DOCUMENT_BYTES)
    while end < len(after) and after[end] & 0xC0 == 0x80:
        end += 1
    return end


def numbered_lines(
    blocks: Iterator[bytes], cfg: ReadConfig, skipped: Counter, offset: int
) -> Iterator[tuple[int, int, bytes]]:
    """Yields (offset, number, line) for all lines, even blank ones, without line ends and byte order mark."""
    for place, number, line in read_lines(blocks, cfg.max_line_bytes, skipped, offset):
        content = line.removesuffix(b"\r")
        if place == 0:
            content = content.removeprefix(BYTE_ORDER_MARK)
        yield place, number, b"" if content.isspace() else content


def paragraphs(
    lines: Iterator[tuple[int, int, bytes]], cfg: ReadConfig, skipped: Counter
) -> Iterator[tuple[int, int, bytes]]:
    """Yields (offset, number, text) for each run of nonblank lines. Skips and counts runs that are too long."""
    lines_of_paragraph: list[bytes] = []
    size = offset = number = 0
    for place, count, line in lines:
        if not line and size:
            if lines_of_paragraph:
                yield offset, number, b"\n".join(lines_of_paragraph)
            lines_of_paragraph, size = [], 0
        if not line:
            continue
        if not size:
            offset, number = place, count
        size += len(line) + 1
        if size - 1 <= cfg.max_document_bytes:
            lines_of_paragraph.append(line)
        elif lines_of_paragraph or size == len(line) + 1:
            lines_of_paragraph = []
            count_skipped(skipped, "longer than max_document_bytes", size - 1)
    if lines_of_paragraph:
        yield offset, number, b"\n".join(lines_of_paragraph)


def text_parts(path: str, cfg: ReadConfig, part_bytes: int) -> list[Part]:
    """Splits a file into parts of about part_bytes, at the starts of documents."""
    find = {"file": next_document, "line": next_line, "paragraph": next_paragraph}[cfg.text_documents]
    return cut_parts(path, part_bytes, find)


def next_document(path: str, place: int, size: int, begin: int) -> int:
    """Returns the offset of the first document at or after `place`. begin: offset of an earlier document."""
    with open(path, "rb") as file:
        while begin < min(place, size):
            after = b""
            for num_bytes in (1 << 14, DOCUMENT_BYTES + CHARACTER_BYTES):
                file.seek(begin + DOCUMENT_BYTES)
                after = file.read(min(num_bytes, DOCUMENT_BYTES + CHARACTER_BYTES))
                if b"\n" in after[:DOCUMENT_BYTES]:
                    break
            begin += DOCUMENT_BYTES + line_remainder(after)
    return min(begin, size)


def next_paragraph(path: str, place: int, size: int, begin: int = 0) -> int:
    """Returns the offset of the first line at or after `place` that follows a blank line."""
    place = next_line(path, place, size)
    with open(path, "rb") as file:
        file.seek(place)
        at_line_start = True
        while piece := file.readline(1 << 16):
            place += len(piece)
            if at_line_start and piece.endswith(b"\n") and not piece.strip():
                return place
            at_line_start = piece.endswith(b"\n")
    return size
