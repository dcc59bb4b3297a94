"""Web pages in WARC files (ISO 28500, WARC/1.1), WET files of extracted text, and single HTML files.

The main text of a page is found by resiliparse (Bevendorff et al. 2018) or trafilatura (Barbaresi 2021).
"""

import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxscale.text.config import ReadConfig
from jaxscale.text.sources.blocks import buffered, read_blocks
from jaxscale.text.sources.left_out import WAYS_OUT, lose
from jaxscale.text.sources.part import NO_WORDS, REST, WHOLE, Damaged, Part, Records, needs, refetch

MAX_HEADER_BYTES = 1 << 16
HTML = ("text/html", "application/xhtml+xml")
FOUND = ("200", "203", "206")  # answers that hold the page that was asked for
OTHERS = ("warcinfo", "request", "metadata", "revisit", "continuation")
DECLARED = re.compile(
    rb"""<(?:meta|\?xml)[^>]{0,512}?(?:charset|encoding)\s*=\s*["']?\s*([A-Za-z0-9_:.-]{1,40})""", re.I
)
TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9-]*+)([^<>]*+)>")  # possessive: a page must not cost its length squared
NEVER_NESTED = set(  # elements without an end, or whose end may be left out
    "area base br col embed hr img input link meta param source track wbr p li dt dd option optgroup tr td th thead "
    "tbody tfoot colgroup html body rp rt".split()
)
MODES = {"fast": "fast", "precision": "favor_precision", "recall": "favor_recall"}  # arguments of trafilatura
MAX_DEPTH = 1000  # browsers go to about 512
DECLARED_WITHIN = 4096  # bytes; the standard of HTML says 1024, and many pages are late
MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))


class Record(NamedTuple):
    """A WARC record. The block is None if it was too long to be held."""

    offset: int
    header: dict[str, str]
    block: bytes | None


def read_warc(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Records:
    """Yields the text of each page or text in a WARC file; id is the record's, url the page's.

    Records that hold no page (requests, pictures, answers such as 404) are counted in `skipped`.
    """
    for record in warc_records(path, cfg, skipped, part):
        kind = record.header.get("warc-type", "")
        url = record.header.get("warc-target-uri", "").strip("<>")
        id = record.header.get("warc-record-id", "").strip("<>")
        if kind not in ("response", "resource", "conversion"):
            skipped["WARC: no page but a " + (kind if kind in OTHERS else "record of an unknown kind")] += 1
        elif record.block is None:
            lose(skipped, "longer than max_line_bytes", int(record.header["content-length"]))
        elif kind == "conversion":
            yield record.offset, record.offset, record.block.strip(b"\r\n"), (id, url, "", "")
        else:
            mime = record.header.get("content-type", "")
            found = http_body(record.block, cfg) if kind == "response" else ("", mime, record.block)
            if not isinstance(found, str) and not found[1].lower().startswith(HTML):
                found = "WARC: not HTML"
            if isinstance(found, str):
                lose(skipped, found, len(record.block)) if found in WAYS_OUT else skipped.update([found])
                continue
            text = page_text(found[2], charset_of(found[1]), cfg, skipped)
            if text is not None:
                yield record.offset, record.offset, text, (id, url, "", "")


def warc_records(path: str, cfg: ReadConfig, skipped: Counter, part: Part = WHOLE) -> Iterator[Record]:
    """Yields the records. Raises Damaged naming the file and the byte where one is cut short or is none."""
    stream = buffered(read_blocks(path, cfg, skipped, part))
    way_out = refetch(cfg, REST)
    while not at_end(stream):
        offset = stream.tell()
        head = read_head(stream)
        if head is None or not head.startswith(b"WARC/"):
            raise Damaged(f"{path} has no WARC record at byte {offset:,}, unpacked; {way_out}")
        header = fields_of(head)
        length = header.get("content-length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 19):
            raise Damaged(
                f"{path}: the WARC record at byte {offset:,}, unpacked, has no good Content-Length; {way_out}"
            )
        size = int(length)
        block = stream.read(size) if size <= cfg.max_line_bytes else None
        if (pass_over(stream, size) if block is None else len(block)) < size:
            raise Damaged(f"{path} is cut short in the WARC record at byte {offset:,}, unpacked; {way_out}")
        yield Record(offset, header, block)


def at_end(stream: io.BufferedReader) -> bool:
    """True if there is nothing more but line ends, which are passed over."""
    while held := stream.peek():
        rest = held.lstrip(b"\r\n")
        stream.read(len(held) - len(rest))
        if rest:
            return False
    return True


def read_head(stream: io.BufferedReader) -> bytes | None:
    """The bytes to the next blank line, which belongs to it; None at the end, or if it is too far away."""
    head = b""
    while len(head) < MAX_HEADER_BYTES and (line := stream.readline(MAX_HEADER_BYTES)):
        head += line
        if head.endswith(b"\r\n\r\n"):
            return head
    return None


def pass_over(stream: io.BufferedReader, size: int) -> int:
    """How many of the next bytes were there to be passed over."""
    passed = 0
    while passed < size and (taken := len(stream.read(min(size - passed, 1 << 20)))):
        passed += taken
    return passed


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
    page = buffered(read_blocks(path, cfg, skipped)).read(cfg.max_line_bytes + 1)
    if len(page) > cfg.max_line_bytes:
        lose(skipped, "longer than max_line_bytes", os.path.getsize(path))
    elif not page.strip():
        yield 0, 1, b"", NO_WORDS
    elif (text := page_text(page, "", cfg, skipped)) is not None:
        yield 0, 1, text, NO_WORDS


def page_text(page: bytes, charset: str, cfg: ReadConfig, skipped: Counter) -> str | None:
    """The text of a page, None if its bytes are no text, which is counted.

    charset: what the HTTP header says, or ''. It counts for more than what the page says of itself, as in the standard
    of HTML (https://html.spec.whatwg.org/multipage/parsing.html#determining-the-character-encoding); where neither
    says, it is guessed.
    """
    html = page_string(page, charset)
    if html.count("\ufffd") > 0.01 * len(html) or "\0" in html[:1024]:
        lose(skipped, "page that is no text", len(page))
        return None
    if too_deep(html):
        lose(skipped, "page nested too deeply", len(page))
        return None
    return extract(html, cfg)


def too_deep(html: str) -> bool:
    """True if elements lie in each other more than MAX_DEPTH deep: the time of the extractors grows with its square."""
    if html.count("<") < MAX_DEPTH:
        return False
    depth = 0
    for end, name, rest in TAG.findall(html):
        if not rest.endswith("/") and name.lower() not in NEVER_NESTED:
            depth = max(depth - 1, 0) if end else depth + 1
            if depth > MAX_DEPTH:
                return True
    return False


def page_string(page: bytes, charset: str) -> str:
    """The page decoded: by its byte order mark, else by `charset`, else by what it declares, else by a guess."""
    with needs("reading web pages", "resiliparse"):
        from resiliparse.parse import encoding as encodings
    for mark, name in MARKS:
        if page.startswith(mark):
            return page[len(mark) :].decode(name, "replace")
    declared = DECLARED.search(page[:DECLARED_WITHIN])
    for name in (charset, declared[1].decode("ascii") if declared else ""):
        encoding = encodings.map_encoding_to_html5(name, fallback_utf8=False) if name else None
        if encoding and encoding.startswith("utf-16") and declared and name != charset:
            encoding = "utf-8"  # a page that can say so in ASCII is not UTF-16
        if encoding:
            break
    else:
        encoding = "utf-8" if is_utf8(page) else encodings.detect_encoding(page)
    return encodings.bytes_to_str(page, encoding or "utf-8", errors="replace")


def is_utf8(page: bytes) -> bool:
    """True if the bytes are UTF-8."""
    try:
        page.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def extract(html: str, cfg: ReadConfig) -> str:
    """The text of the main content, '' if there is none."""
    if cfg.html_text == "trafilatura":
        with needs(f"{cfg.where}html_text='trafilatura'", "trafilatura with lxml_html_clean"):
            import trafilatura
        mode: dict[str, Any] = {} if cfg.html_mode == "default" else {MODES[cfg.html_mode]: True}
        return trafilatura.extract(html, include_comments=False, **mode) or ""
    with needs("reading web pages", "resiliparse"):
        from resiliparse.extract.html2text import extract_plain_text
    return extract_plain_text(
        html, main_content=True, preserve_formatting=True, alt_texts=False, links=False, comments=False
    )
