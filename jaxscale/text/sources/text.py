"""Plain text files: a document is a file, a line or a paragraph."""

from collections import Counter
from collections.abc import Iterator

from jaxscale.text.config import ReadConfig
from jaxscale.text.sources.blocks import BYTE_ORDER_MARK, cut_parts, next_line, read_blocks, read_lines
from jaxscale.text.sources.left_out import lose
from jaxscale.text.sources.part import NO_WORDS, WHOLE, Part, Records

# A longer text file is cut into documents of this size, each at a line end, so that memory stays bounded and a single
# file can be divided into training and validation. The model sees an end of document there, once in a million bytes.
DOCUMENT_BYTES = 1 << 20
CHARACTER_BYTES = 4  # the longest that UTF-8 has


def read_text(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the documents of a plain text file; see cfg.text_documents."""
    blocks = read_blocks(path, cfg, skipped, part)
    if cfg.text_documents == "file":
        yield from cut_text(blocks, part.begin)
        return
    lines = numbered_lines(blocks, cfg, skipped, part.begin)
    for offset, number, content in lines if cfg.text_documents == "line" else paragraphs(lines, cfg, skipped):
        yield offset, number, content, NO_WORDS


def cut_text(blocks: Iterator[bytes], offset: int = 0) -> Records:
    """Yields the text in documents of DOCUMENT_BYTES, each to the end of its line. No text at all is one empty one."""
    pieces, size, number, more = [], 0, 1, True
    enough = 2 * DOCUMENT_BYTES + CHARACTER_BYTES  # where so much is there, it is known where a document ends
    while more:
        if (block := next(blocks, None)) is not None:
            pieces.append(block)
            size += len(block)
            if size <= 2 * enough:
                continue
        more, held, start = block is not None, b"".join(pieces), 0
        while len(held) - start > (enough if more else 0):
            stop = start + DOCUMENT_BYTES
            stop = min(stop + rest_of_line(held[stop : stop + DOCUMENT_BYTES + CHARACTER_BYTES]), len(held))
            yield offset + start, number, held[start:stop], NO_WORDS
            start, number = stop, number + 1
        offset, pieces, size = offset + start, [held[start:]], len(held) - start
    if offset == 0 and number == 1:
        yield 0, 1, b"", NO_WORDS


def rest_of_line(after: bytes) -> int:
    """How many of the bytes after the first DOCUMENT_BYTES of a document still belong to it.

    Up to the end of the line within reason; a line without end is at least not cut inside a character.
    """
    if end := after.find(b"\n", 0, DOCUMENT_BYTES) + 1:
        return end
    end = min(len(after), DOCUMENT_BYTES)
    while end < len(after) and after[end] & 0xC0 == 0x80:
        end += 1
    return end


def numbered_lines(
    blocks: Iterator[bytes], cfg: ReadConfig, skipped: Counter, offset: int
) -> Iterator[tuple[int, int, bytes]]:
    """Yields (offset, number, line) for each line, blank ones too, without line ends and byte order mark."""
    for place, number, line in read_lines(blocks, cfg.max_line_bytes, skipped, offset):
        content = line.removesuffix(b"\r")
        if place == 0:
            content = content.removeprefix(BYTE_ORDER_MARK)
        yield place, number, b"" if content.isspace() else content


def paragraphs(
    lines: Iterator[tuple[int, int, bytes]], cfg: ReadConfig, skipped: Counter
) -> Iterator[tuple[int, int, bytes]]:
    """Yields each run of lines that are not blank, as one; one that is too long is counted and never held."""
    kept: list[bytes] = []
    size = offset = number = 0
    for place, count, line in lines:
        if not line and size:
            if kept:
                yield offset, number, b"\n".join(kept)
            kept, size = [], 0
        if not line:
            continue
        if not size:
            offset, number = place, count
        size += len(line) + 1
        if size - 1 <= cfg.max_document_bytes:
            kept.append(line)
        elif kept or size == len(line) + 1:
            kept = []
            lose(skipped, "longer than max_document_bytes", size - 1)
    if kept:
        yield offset, number, b"\n".join(kept)


def text_parts(path: str, cfg: ReadConfig, part_bytes: int) -> list[Part]:
    """Parts of about part_bytes, cut where a document begins."""
    find = {"file": next_cut, "line": next_line, "paragraph": next_paragraph}[cfg.text_documents]
    return cut_parts(path, part_bytes, find)


def next_cut(path: str, place: int, size: int, begin: int) -> int:
    """Where the first document begins at `place` or after it, if one begins at `begin`: as cut_text cuts them."""
    with open(path, "rb") as file:
        while begin < min(place, size):
            after = b""
            for wanted in (1 << 14, DOCUMENT_BYTES + CHARACTER_BYTES):
                file.seek(begin + DOCUMENT_BYTES)
                after = file.read(min(wanted, DOCUMENT_BYTES + CHARACTER_BYTES))
                if b"\n" in after[:DOCUMENT_BYTES]:
                    break
            begin += DOCUMENT_BYTES + rest_of_line(after)
    return min(begin, size)


def next_paragraph(path: str, place: int, size: int, begin: int = 0) -> int:
    """Where a line begins, at `place` or after it, before which there is a blank one."""
    place = next_line(path, place, size)
    with open(path, "rb") as file:
        file.seek(place)
        fresh = True
        while piece := file.readline(1 << 16):
            place += len(piece)
            if fresh and piece.endswith(b"\n") and not piece.strip():
                return place
            fresh = piece.endswith(b"\n")
    return size
