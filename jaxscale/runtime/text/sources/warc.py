"""Reads web pages in WARC files (ISO 28500, WARC/1.1), WET files of extracted text, and single HTML files.

resiliparse (Bevendorff et al. 2018) or trafilatura (Barbaresi 2021) extracts the main text of a page.
"""

import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jaxscale.runtime.text.config import ReadConfig
from jaxscale.runtime.text.sources.blocks import as_file, read_blocks
from jaxscale.runtime.text.sources.part import (
    FIXES,
    NO_METADATA,
    SKIP_REMAINDER,
    WHOLE,
    Damaged,
    Part,
    Records,
    count_skipped,
    damage_fix,
    importing,
)

MAX_HEADER_BYTES = 1 << 16
HTML = ("text/html", "application/xhtml+xml")
OK_STATUS = ("200", "203", "206")  # status codes of responses with the requested page
OTHERS = ("warcinfo", "request", "metadata", "revisit", "continuation")
DECLARED = re.compile(
    rb"""<(?:meta|\?xml)[^>]{0,512}?(?:charset|encoding)\s*=\s*["']?\s*([A-Za-z0-9_:.-]{1,40})""", re.I
)
TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9-]*+)([^<>]*+)>")  # possessive, to avoid quadratic time
NEVER_NESTED = set(  # elements without an end tag, or with an optional one
    "area base br col embed hr img input link meta param source track wbr p li dt dd option optgroup tr td th thead "
    "tbody tfoot colgroup html body rp rt".split()
)
MODES = {"fast": "fast", "precision": "favor_precision", "recall": "favor_recall"}  # arguments of trafilatura
MAX_DEPTH = 1000  # largest nesting of elements; the limit of browsers is about 512
DECLARED_WITHIN = 4096  # bytes to search for a declared encoding; the HTML standard has 1024, which many pages exceed
MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))


def read_warc(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text, id and URL of each page or text record in a WARC file, and counts other records."""
    for offset, header, block in warc_records(path, cfg, skipped, part):
        kind = header.get("warc-type", "")
        url = header.get("warc-target-uri", "").strip("<>")
        id = header.get("warc-record-id", "").strip("<>")
        if kind not in ("response", "resource", "conversion"):
            skipped["WARC: no page but a " + (kind if kind in OTHERS else "record of an unknown kind")] += 1
        elif block is None:
            count_skipped(skipped, "longer than max_line_bytes", int(header["content-length"]))
        elif kind == "conversion":
            yield offset, offset, block.strip(b"\r\n"), (id, url, "", "")
        else:
            mime = header.get("content-type", "")
            found = http_body(block, cfg) if kind == "response" else (mime, block)
            if not isinstance(found, str) and not found[0].lower().startswith(HTML):
                found = "WARC: not HTML"
            if isinstance(found, str):
                count_skipped(skipped, found, len(block)) if found in FIXES else skipped.update([found])
                continue
            text = page_text(found[1], charset_of(found[0]), cfg, skipped)
            if text is not None:
                yield offset, offset, text, (id, url, "", "")


def warc_records(
    path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE
) -> Iterator[tuple[int, dict[str, str], bytes | None]]:
    """Yields (offset, header, block) for each record. A block longer than max_line_bytes is None.

    Raises Damaged, with the file and the byte offset, for a truncated or invalid record.
    """
    stream = as_file(read_blocks(path, cfg, skipped, part))
    fix = damage_fix(cfg, SKIP_REMAINDER)
    while True:
        offset, head = read_head(stream)
        if not head:
            return
        if not head.startswith(b"WARC/") or not head.endswith(b"\r\n\r\n"):
            raise Damaged(f"{path} has no WARC record at uncompressed byte {offset:,}; {fix}")
        header = parse_header(head)
        length = header.get("content-length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 19):
            raise Damaged(
                f"{path}: the WARC record at uncompressed byte {offset:,} has an invalid Content-Length; {fix}"
            )
        size = int(length)
        block = stream.read(size) if size <= cfg.max_line_bytes else None
        num_read = 0 if block is None else len(block)
        while block is None and num_read < size and (skipped_part := stream.read(min(size - num_read, 1 << 20))):
            num_read += len(skipped_part)
        if num_read < size:
            raise Damaged(f"{path} is truncated in the WARC record at uncompressed byte {offset:,}; {fix}")
        yield offset, header, block


def read_head(stream: io.BufferedReader) -> tuple[int, bytes]:
    """Returns (offset, header) of the next record, including the blank line. At the end, the header is b"".

    The blank line is missing if the stream ends early, or if the header is longer than MAX_HEADER_BYTES.
    """
    offset, head = stream.tell(), b""
    while len(head) < MAX_HEADER_BYTES and (line := stream.readline(MAX_HEADER_BYTES)):
        if not head:
            stripped = line.lstrip(b"\r\n")
            offset, line = offset + len(line) - len(stripped), stripped
        head += line
        if head.endswith(b"\r\n\r\n"):
            break
    return offset, head


def parse_header(head: bytes) -> dict[str, str]:
    """Returns {lower-case name: first value} of header fields. A line that begins with a space continues a field."""
    found: dict[str, str] = {}
    lines = head.decode("utf-8", "replace").replace("\r\n ", " ").replace("\r\n\t", " ").split("\r\n")
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip().lower(), value.strip())
    return found


def http_body(block: bytes, cfg: ReadConfig) -> tuple[str, bytes] | str:
    """Returns (content type, decoded body) of an HTTP response, or the reason for skipping the page."""
    head, blank, body = block.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/") or len(head) > MAX_HEADER_BYTES:
        return "WARC: not HTTP"
    fields, status = parse_header(head), head.split(maxsplit=2)[1:2]
    if not status or status[0].decode("ascii", "replace") not in OK_STATUS:
        return "WARC: no page but another answer"
    if "chunked" in fields.get("transfer-encoding", "").lower():
        body = decode_chunked(body)
    encoding = fields.get("content-encoding", "").lower().strip()
    if encoding in ("gzip", "x-gzip", "deflate"):
        unpacked = unpack_body(body, cfg.max_line_bytes)
        if unpacked is None:
            return "longer than max_line_bytes"
        body = unpacked
    elif encoding not in ("", "identity", "none") and not body.lstrip()[:1] == b"<":
        return "WARC: packed in an unknown way"
    return fields.get("content-type", ""), body


def decode_chunked(body: bytes) -> bytes:
    """Decodes a chunked body (RFC 9112, 7.1). If the crawler has already decoded it, returns it unchanged."""
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


def unpack_body(body: bytes, limit: int) -> bytes | None:
    """Decompresses a gzip or deflate body, or returns None if the result exceeds `limit` bytes."""
    for window in (zlib.MAX_WBITS | 32, -zlib.MAX_WBITS):
        try:
            unpacked = zlib.decompressobj(window).decompress(body, limit + 1)
        except zlib.error:
            continue
        return unpacked if len(unpacked) <= limit else None
    return body


def charset_of(content_type: str) -> str:
    """Returns the charset in a Content-Type header, or ''."""
    for word in content_type.split(";")[1:]:
        name, _, value = word.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip("\"'")
    return ""


def read_page(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of an HTML file."""
    page = as_file(read_blocks(path, cfg, skipped)).read(cfg.max_line_bytes + 1)
    if len(page) > cfg.max_line_bytes:
        count_skipped(skipped, "longer than max_line_bytes", os.path.getsize(path))
    elif not page.strip():
        yield 0, 1, b"", NO_METADATA
    elif (text := page_text(page, "", cfg, skipped)) is not None:
        yield 0, 1, text, NO_METADATA


def page_text(page: bytes, charset: str, cfg: ReadConfig, skipped: Counter) -> str | None:
    """Returns the text of a page. A page that is not text or is nested too deeply is counted and returned as None.

    `charset` is the charset in the HTTP header, or ''. It takes precedence over a declaration in the page, as in the
    HTML standard (https://html.spec.whatwg.org/multipage/parsing.html#determining-the-character-encoding).
    """
    html = page_string(page, charset)
    if html.count("\ufffd") > 0.01 * len(html) or "\0" in html[:1024]:
        count_skipped(skipped, "page that is no text", len(page))
        return None
    if too_deep(html):
        count_skipped(skipped, "page nested too deeply", len(page))
        return None
    return extract(html, cfg)


def too_deep(html: str) -> bool:
    """Returns True if elements are nested deeper than MAX_DEPTH. Extraction takes quadratic time in the depth."""
    if html.count("<") < MAX_DEPTH:
        return False
    depth = 0
    for end, name, remaining in TAG.findall(html):
        if not remaining.endswith("/") and name.lower() not in NEVER_NESTED:
            depth = max(depth - 1, 0) if end else depth + 1
            if depth > MAX_DEPTH:
                return True
    return False


def page_string(page: bytes, charset: str) -> str:
    """Decodes a page. Reads the encoding from the byte order mark, `charset` or the page, or else detects it."""
    with importing("reading web pages", "resiliparse"):
        from resiliparse.parse import encoding as encodings
    for mark, name in MARKS:
        if page.startswith(mark):
            return page[len(mark) :].decode(name, "replace")
    declared = DECLARED.search(page[:DECLARED_WITHIN])
    for name in (charset, declared[1].decode("ascii") if declared else ""):
        encoding = encodings.map_encoding_to_html5(name, fallback_utf8=False) if name else None
        if encoding and encoding.startswith("utf-16") and declared and name != charset:
            encoding = "utf-8"  # a page in UTF-16 could not have a declaration in ASCII
        if encoding:
            break
    else:
        try:
            page.decode("utf-8")
            encoding = "utf-8"
        except UnicodeDecodeError:
            encoding = encodings.detect_encoding(page)
    return encodings.bytes_to_str(page, encoding or "utf-8", errors="replace")


def extract(html: str, cfg: ReadConfig) -> str:
    """Returns the text of the main content of a page, or ''."""
    if cfg.html_text == "trafilatura":
        with importing(f"{cfg.where}html_text='trafilatura'", "trafilatura with lxml_html_clean"):
            import trafilatura
        mode: dict[str, Any] = {} if cfg.html_mode == "default" else {MODES[cfg.html_mode]: True}
        return trafilatura.extract(html, include_comments=False, **mode) or ""
    with importing("reading web pages", "resiliparse"):
        from resiliparse.extract.html2text import extract_plain_text
    return extract_plain_text(
        html, main_content=True, preserve_formatting=True, alt_texts=False, links=False, comments=False
    )
