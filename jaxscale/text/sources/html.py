"""Main text of a web page, by resiliparse (Bevendorff et al. 2018) or trafilatura (Barbaresi 2021)."""

import re
from collections import Counter

from jaxscale.text.config import ReadConfig
from jaxscale.text.sources.part import needs

DECLARED = re.compile(
    rb"""<(?:meta|\?xml)[^>]{0,512}?(?:charset|encoding)\s*=\s*["']?\s*([A-Za-z0-9_:.-]{1,40})""", re.I
)
TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9-]*+)([^<>]*+)>")  # possessive: a page must not cost its length squared
NEVER_NESTED = set(  # elements without an end, or whose end may be left out
    "area base br col embed hr img input link meta param source track wbr p li dt dd option optgroup tr td th thead "
    "tbody tfoot colgroup html body rp rt".split()
)
MAX_DEPTH = 1000  # browsers go to about 512
DECLARED_WITHIN = 4096  # bytes; the standard of HTML says 1024, and many pages are late
MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))


def page_text(page: bytes, charset: str, cfg: ReadConfig, skipped: Counter) -> str | None:
    """The text of a page, None if its bytes are no text, which is counted.

    charset: what the HTTP header says, or ''. It counts for more than what the page says of itself, as in the standard
    of HTML (https://html.spec.whatwg.org/multipage/parsing.html#determining-the-character-encoding); where neither
    says, it is guessed.
    """
    html = page_string(page, charset)
    if html.count("\ufffd") > 0.01 * len(html) or "\0" in html[:1024]:
        skipped["page that is no text"] += 1
        return None
    if too_deep(html):
        skipped["page nested too deeply"] += 1
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
        return trafilatura.extract(html, include_comments=False, favor_precision=True) or ""
    with needs("reading web pages", "resiliparse"):
        from resiliparse.extract.html2text import extract_plain_text
    return extract_plain_text(
        html, main_content=True, preserve_formatting=True, alt_texts=False, links=False, comments=False
    )
