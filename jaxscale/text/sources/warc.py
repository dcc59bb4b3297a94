"""Web pages in WARC files (ISO 28500, WARC/1.1), WET files of extracted text, and single HTML files."""

import zlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from jaxscale.text.config import ReadConfig
from jaxscale.text.sources.blocks import read_blocks
from jaxscale.text.sources.html import page_text
from jaxscale.text.sources.part import REST, WHOLE, Damaged, Part, Records, refetch

MAX_HEADER_BYTES = 1 << 16
HTML = ("text/html", "application/xhtml+xml")
FOUND = ("200", "203", "206")  # answers that hold the page that was asked for


class Record(NamedTuple):
    """A WARC record. The block is None if it was too long to be held."""

    offset: int
    header: dict[str, str]
    block: bytes | None


class Buffered:
    """Bytes out of blocks, as many as are asked for."""

    def __init__(self, blocks: Iterator[bytes]):
        self._blocks, self._held, self.offset = blocks, b"", 0

    def take(self, size: int) -> bytes:
        """The next bytes; fewer only at the end."""
        pieces, missing = [self._held[:size]], size - len(self._held)
        self._held = self._held[size:]
        while missing > 0 and (block := next(self._blocks, None)) is not None:
            pieces.append(block[:missing])
            self._held, missing = block[missing:], missing - len(block)
        taken = b"".join(pieces)
        self.offset += len(taken)
        return taken

    def drop(self, size: int) -> int:
        """How many of the next bytes were there to be passed over."""
        dropped = 0
        while dropped < size and (taken := len(self.take(min(size - dropped, 1 << 20)))):
            dropped += taken
        return dropped

    def head(self) -> bytes | None:
        """The bytes to the next blank line, which belongs to it; None at the end, or if it is too far away."""
        while (end := self._held.find(b"\r\n\r\n")) < 0:
            block = next(self._blocks, None) if len(self._held) < MAX_HEADER_BYTES else None
            if block is None:
                return None
            self._held += block
        return self.take(end + 4)

    def blank(self) -> bool:
        """True if there is nothing more but line ends, which are passed over."""
        while not (rest := self._held.lstrip(b"\r\n")):
            self.offset += len(self._held)
            block = next(self._blocks, None)
            self._held = block or b""
            if block is None:
                return True
        self.offset += len(self._held) - len(rest)
        self._held = rest
        return False


def read_warc(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each page or text in a WARC file; id is the record's, url the page's.

    Records that hold no page (requests, pictures, answers such as 404) are counted in `skipped`.
    """
    for record in warc_records(path, cfg):
        kind = record.header.get("warc-type", "")
        url = record.header.get("warc-target-uri", "").strip("<>")
        id = record.header.get("warc-record-id", "").strip("<>")
        if kind not in ("response", "resource", "conversion"):
            skipped["WARC: no page but a " + (kind if kind in OTHERS else "record of an unknown kind")] += 1
        elif record.block is None:
            skipped["longer than max_line_bytes"] += 1
        elif kind == "conversion":
            yield record.offset, record.offset, record.block.strip(b"\r\n"), id, url, ""
        else:
            mime = record.header.get("content-type", "")
            found = http_body(record.block, cfg) if kind == "response" else ("", mime, record.block)
            if not isinstance(found, str) and not found[1].lower().startswith(HTML):
                found = "WARC: not HTML"
            if isinstance(found, str):
                skipped[found] += 1
                continue
            text = page_text(found[2], charset_of(found[1]), cfg, skipped)
            if text is not None:
                yield record.offset, record.offset, text, id, url, ""


OTHERS = ("warcinfo", "request", "metadata", "revisit", "continuation")


def warc_records(path: str, cfg: ReadConfig) -> Iterator[Record]:
    """Yields the records. Raises Damaged naming the file and the byte where one is cut short or is none."""
    stream = Buffered(read_blocks(path, cfg))
    way_out = refetch(cfg, REST)
    while not stream.blank():
        offset = stream.offset
        head = stream.head()
        if head is None or not head.startswith(b"WARC/"):
            raise Damaged(f"{path} has no WARC record at byte {offset:,}, unpacked; {way_out}")
        header = fields_of(head)
        length = header.get("content-length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 19):
            raise Damaged(
                f"{path}: the WARC record at byte {offset:,}, unpacked, has no good Content-Length; {way_out}"
            )
        size = int(length)
        block = stream.take(size) if size <= cfg.max_line_bytes else None
        if (stream.drop(size) if block is None else len(block)) < size:
            raise Damaged(f"{path} is cut short in the WARC record at byte {offset:,}, unpacked; {way_out}")
        yield Record(offset, header, block)


def fields_of(head: bytes) -> dict[str, str]:
    """The fields of a header in small letters, the first of each name; a line that begins with a space goes on."""
    found: dict[str, str] = {}
    lines = head.decode("utf-8", "replace").replace("\r\n ", " ").replace("\r\n\t", " ").split("\r\n")
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip().lower(), value.strip())
    return found


def http_body(block: bytes, cfg: ReadConfig) -> tuple[str, str, bytes] | str:
    """(status, content type, body without transfer and content encoding) of an HTTP answer, or why there is none."""
    head, blank, body = block.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/") or len(head) > MAX_HEADER_BYTES:
        return "WARC: not HTTP"
    fields, status = fields_of(head), head.split(maxsplit=2)[1:2]
    if not status or status[0].decode("ascii", "replace") not in FOUND:
        return "WARC: no page but another answer"
    if "chunked" in fields.get("transfer-encoding", "").lower():
        body = unchunked(body)
    encoding = fields.get("content-encoding", "").lower().strip()
    if encoding in ("gzip", "x-gzip", "deflate"):
        unpacked = unpacked_body(body, cfg.max_line_bytes)
        if unpacked is None:
            return "longer than max_line_bytes"
        body = unpacked
    elif encoding not in ("", "identity", "none") and not body.lstrip()[:1] == b"<":
        return "WARC: packed in an unknown way"
    return status[0].decode(), fields.get("content-type", ""), body


def unchunked(body: bytes) -> bytes:
    """The body without the sizes of its chunks (RFC 9112, 7.1); as it is if it has none: some crawlers undo it."""
    pieces, place = [], 0
    while True:
        end = body.find(b"\r\n", place, place + 64)
        digits = body[place:end].split(b";")[0].strip() if end >= 0 else b""
        if not digits or len(digits) > 8 or digits.strip(b"0123456789abcdefABCDEF"):
            return b"".join(pieces) if pieces else body
        size = int(digits, 16)
        if not size:
            return b"".join(pieces)
        pieces.append(body[end + 2 : end + 2 + size])
        place = end + 2 + size + 2


def unpacked_body(body: bytes, limit: int) -> bytes | None:
    """The body of gzip or deflate; as it is if it is neither, since some crawlers unpack it; None if it is too long."""
    for window in (zlib.MAX_WBITS | 32, -zlib.MAX_WBITS):
        try:
            unpacked = zlib.decompressobj(window).decompress(body, limit + 1)
        except zlib.error:
            continue
        return unpacked if len(unpacked) <= limit else None
    return body


def charset_of(content_type: str) -> str:
    """The charset that a Content-Type names, or ''."""
    for word in content_type.split(";")[1:]:
        name, _, value = word.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip("\"'")
    return ""


def read_page(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of the one page that a file is."""
    page = Buffered(read_blocks(path, cfg)).take(cfg.max_line_bytes + 1)
    if len(page) > cfg.max_line_bytes:
        skipped["longer than max_line_bytes"] += 1
    elif not page.strip():
        yield 0, 1, b"", "", "", ""
    elif (text := page_text(page, "", cfg, skipped)) is not None:
        yield 0, 1, text, "", "", ""
