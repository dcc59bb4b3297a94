"""Finds and redacts personal data: e-mail and IP addresses, phone, card and account numbers, national ids.

Detection uses only rules and checksums. Names, dates and postal addresses of people are not detected, so it does not
de-identify medical texts. One pass over the text finds sequences of nearby digits; the number rules search only those.
"""

import bisect
import dataclasses
import functools
import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from jaxscale.runtime.text.document import Document, Outcome, Stage, per_document
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate.pii_numbers import NATIONAL_IDS, find_cards, find_ibans, find_national_ids
from jaxscale.tools.corpus.curate.pii_phone import find_phones

Action = Literal["redact", "drop", "off"]
KINDS = {  # kind: name in reports; if spans overlap, the kind that is listed first takes precedence
    "email": "e-mail",
    "ip": "IP address",
    "iban": "IBAN",
    "card": "payment card",
    "national_id": "national id",
    "phone": "phone number",
}
GAPS = " .()/\u00a0\u2009\u202f\u2010\u2011\u2012\u2013-"
PLAIN = str.maketrans(dict.fromkeys("\u00a0\u2009\u202f", " ") | dict.fromkeys("\u2010\u2011\u2012\u2013", "-"))
# Matches every number of six digits or more. The lookahead rejects years and prices quickly.
ROW = re.compile(rf"[0-9](?=[0-9A-Z{GAPS}]{{5}})(?:[{GAPS}]{{0,3}}[0-9A-Z]){{5,}}+")
DIGITS, FEWEST = "0123456789", 6
LEAD = 8  # characters of a number before its first digit: the letters of a codice fiscale, "(+"
BEFORE, AFTER = 48, 32  # characters of context around a number that the rules may use
MAX_ROUNDS = 4  # the search is repeated, since a placeholder can move a number closer to the word that names it

# Local part and domain as in RFC 5321 and 6531, except quoted local parts, which are very rare. Letters of other
# scripts match only in a part without Latin letters, because Chinese text has no space before an address. =/?&#| are
# allowed in a local part, but the text before them is nearly always part of a query: ?mail=me@home.org
AT = re.compile(r"@(?=[^\W_])")
LATIN = "A-Za-z0-9\u00c0-\u024f_.!$%'*+^`{}~-"
LOCAL = re.compile(rf"[{LATIN}]*[=/?&#|]*\Z")
FOREIGN_LOCAL = re.compile(r"[\w.!$%'*+^`{}~-]*[=/?&#|]*\Z")
LOCAL_CHARS = 64  # RFC 5321, section 4.5.3.1.1
DOMAIN = re.compile(
    r"(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.)+(?:xn--[a-z0-9-]{2,59}|[a-z]{2,63}|[^\W\d_a-z]{2,63})", re.IGNORECASE
)
FILE_ENDINGS = frozenset(  # logo@2x.png and main@1a2b.js are file names
    "avif bmp css gif gz htm html ico jpeg jpg js json jsx map mjs mp3 mp4 pdf php png scss svg tar tgz ts tsx ttf txt "
    "webm webp woff xml yaml yml zip".split()
)

IPV4_SIGN = re.compile(r"\.[0-9]{1,3}\.[0-9]")
IPV4 = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?!\.?[\w])")
DIGITS_BEFORE = re.compile(r"[0-9]*\Z")
IPV6_SIGN = re.compile(r":[0-9A-Fa-f]{0,4}:")
IPV6_CHARS = 45  # length of the longest form, which ends in an IPv4 address
IPV6_BEFORE = re.compile(r"[0-9A-Fa-f:]*\Z")
IPV6_AFTER = re.compile(r"[0-9A-Fa-f:]*(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3})?")
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # RFC 4291, section 2.4; excludes a::b as in C++
GOES_ON = re.compile(r"\w|:[\w:]")
VERSION_BEFORE = re.compile(
    r"(?:\bv|\bver\.?|\bversion|\brelease|\bbuild|\bfirmware|§|\bsections?)\s*\Z", re.IGNORECASE
)

ADDRESS_BEFORE = re.compile(r"\b(?:ip|ips|ipv4|address|addr|server|host|dns|ping|proxy|from)\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PIIConfig:
    """Action for each kind of personal data: replace with a placeholder, drop the document, or ignore."""

    email: Action = setting("redact", "e-mail addresses")
    ip: Action = setting("redact", "IPv4 and IPv6 addresses")
    iban: Action = setting("redact", "IBANs with valid length and check digits")
    card: Action = setting("redact", "payment card numbers with valid prefix, length and Luhn check digit")
    national_id: Action = setting("redact", "national identity numbers of `countries`")
    phone: Action = setting("redact", "telephone numbers, by format or next to a word such as phone")
    public_ips_only: bool = setting(True, "keep private, local and documentation addresses such as 192.168.0.1")
    countries: tuple[str, ...] = setting(
        tuple(NATIONAL_IDS),
        "national_id: us SSN, gb NINO, es DNI and NIE, de Steuer-ID, fr NIR, it codice fiscale, in Aadhaar",
    )
    email_placeholder: str = setting("<EMAIL>", "replaces e-mail addresses")
    ip_placeholder: str = setting("<IP>", "replaces IP addresses")
    iban_placeholder: str = setting("<IBAN>", "replaces IBANs")
    card_placeholder: str = setting("<CARD>", "replaces card numbers")
    national_id_placeholder: str = setting("<ID>", "replaces national identity numbers")
    phone_placeholder: str = setting("<PHONE>", "replaces telephone numbers")

    def __post_init__(self):
        if unknown := sorted(set(self.countries) - set(NATIONAL_IDS)):
            raise BadInput(f"countries={self.countries}: unsupported {unknown}; supported: {', '.join(NATIONAL_IDS)}")
        for kind in KINDS:
            placeholder = getattr(self, f"{kind}_placeholder")
            found = [(span.kind, placeholder[span.start : span.end]) for span in find_pii(placeholder, self.countries)]
            if found not in ([], [(kind, placeholder)]):  # an exact match of the placeholder is skipped on redaction
                raise BadInput(
                    f"{kind}_placeholder={placeholder!r} contains personal data: {found}; "
                    f"use a word in brackets, or one {kind} and no other text"
                )


class PiiSpan(NamedTuple):
    """Position and kind of personal data in a text."""

    start: int
    end: int
    kind: str


def find_pii(
    text: str,
    countries: Sequence[str] = tuple(NATIONAL_IDS),
    kinds: Iterable[str] = KINDS,
    public_ips_only: bool = True,
) -> list[PiiSpan]:
    """Returns all personal data in the text, sorted by position, without overlaps."""
    kinds = frozenset(kinds)
    found = []
    if "email" in kinds and "@" in text:
        found += [PiiSpan(*span, "email") for span in find_emails(text)]
    if "ip" in kinds:
        found += [PiiSpan(*span, "ip") for span in find_ips(text, public_ips_only)]
    ids = functools.partial(find_national_ids, countries=tuple(countries))
    finders = (  # (kind, fewest digits, function)
        ("iban", 8, find_ibans), ("card", 12, find_cards), ("national_id", FEWEST, ids), ("phone", FEWEST, find_phones),
    )  # fmt: skip
    floor, finders = 0, [finder for finder in finders if finder[0] in kinds]
    for row in ROW.finditer(text) if finders else ():
        digits = sum(map(row[0].count, DIGITS))
        if digits < FEWEST:  # such as "2011 - 12 NCAA", by far the most common match
            continue
        base = max(0, row.start() - BEFORE)
        window = text[base : row.end() + AFTER].translate(PLAIN)
        start, end = max(floor, row.start() - LEAD) - base, row.end() - base
        for kind, fewest, finder in finders:
            if digits >= fewest:
                found += [PiiSpan(base + begin, base + finish, kind) for begin, finish in finder(window, start, end)]
        floor = row.end()
    return resolve_overlaps(found)


def resolve_overlaps(spans: list[PiiSpan]) -> list[PiiSpan]:
    """Returns spans without overlaps, sorted by position. Prefers kinds in the order of KINDS, then long spans."""
    if len(spans) < 2:
        return spans
    selected: list[PiiSpan] = []
    order = list(KINDS)
    for span in sorted(spans, key=lambda span: (order.index(span.kind), span.start - span.end, span.start)):
        place = bisect.bisect(selected, span)  # earlier spans start before it and do not overlap each other
        free_before = place == 0 or selected[place - 1].end <= span.start
        if free_before and (place == len(selected) or span.end <= selected[place].start):
            selected.insert(place, span)
    return selected


def redact(text: str, spans: Sequence[PiiSpan], placeholders: dict[str, str]) -> str:
    """Returns the text with each span replaced by its kind's placeholder."""
    parts, place = [], 0
    for span in spans:
        parts += [text[place : span.start], placeholders[span.kind]]
        place = span.end
    return "".join(parts) + text[place:]


def make_pii(cfg: PIIConfig) -> Stage:
    """Returns a stage that redacts personal data and counts it by kind, or drops documents that contain it."""
    actions = {kind: getattr(cfg, kind) for kind in KINDS}
    placeholders = {kind: getattr(cfg, f"{kind}_placeholder") for kind in KINDS}
    kinds = [kind for kind in KINDS if actions[kind] != "off"]

    def judge(doc: Document) -> Outcome:
        text, edits = doc.text, Counter()
        for _ in range(MAX_ROUNDS):
            spans = find_pii(text, cfg.countries, kinds, cfg.public_ips_only)
            spans = [span for span in spans if text[span.start : span.end] != placeholders[span.kind]]
            if dropped := next((span.kind for span in spans if actions[span.kind] == "drop"), ""):
                return Outcome(None, f"personal data: {KINDS[dropped]}")
            if not spans:
                break
            text = redact(text, spans, placeholders)
            edits.update(KINDS[span.kind] for span in spans)
        return Outcome(doc.edited(text), edits=tuple(sorted(edits.items()))) if edits else Outcome(doc)

    return per_document(judge)


def always(match: re.Match[str] | None) -> re.Match[str]:
    """Returns `match` and asserts that it is not None. Use it for patterns that also match the empty string."""
    assert match is not None
    return match


def find_emails(text: str) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each e-mail address."""
    floor = 0
    for sign in AT.finditer(text):
        at = sign.start()
        domain = DOMAIN.match(text, at + 1)
        if domain and domain[0].rpartition(".")[2].lower() not in FILE_ENDINGS:
            head = text[max(floor, at - LOCAL_CHARS) : at]
            local = always(LOCAL.search(head))[0] or always(FOREIGN_LOCAL.search(head))[0]
            name = local.lstrip(".!$%'*+^`{}~-") or local  # 'me@home.org', *me@home.org*
            if name:
                yield at - len(name), domain.end()
                floor = domain.end()


def find_ips(text: str, public_only: bool) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each IPv4 and IPv6 address. Numbers after "version" and similar words are skipped."""
    for sign in IPV4_SIGN.finditer(text):
        start = sign.start() - len(always(DIGITS_BEFORE.search(text[max(0, sign.start() - 3) : sign.start()]))[0])
        match = IPV4.match(text, start)
        if match and is_address(match[0], public_only) and not is_version(text, match):
            yield match.span()
    floor = 0
    for sign in IPV6_SIGN.finditer(text):
        if sign.start() < floor:
            continue
        begin = max(floor, sign.start() - IPV6_CHARS)
        start = sign.start() - len(always(IPV6_BEFORE.search(text[begin : sign.start()]))[0])
        end = always(IPV6_AFTER.match(text, start)).end()
        floor = end
        while end > start and text[end - 1] == ":" and text[end - 2 : end] != "::":
            end -= 1  # "fe80::1: unreachable"
        clear = not (start and (text[start - 1].isalnum() or text[start - 1] in "_:.")) and not GOES_ON.match(text, end)
        if clear and 2 < end - start <= IPV6_CHARS and is_address(text[start:end], public_only):
            yield start, end


def is_version(text: str, match: re.Match) -> bool:
    """Returns True if four dotted numbers are a version or section number.

    True after a word such as "version", and for four single digits unless the text around them indicates an address.
    """
    before = text[max(0, match.start() - 32) : match.start()]
    if VERSION_BEFORE.search(before):
        return True
    host = text.startswith((":", "/"), match.end()) or before.endswith(("@", "://")) or ADDRESS_BEFORE.search(before)
    return len(match[0]) == 7 and not host


def is_address(written: str, public_only: bool) -> bool:
    """Returns True if the text is an IP address. public_only: exclude private, local and documentation addresses."""
    try:
        address = ipaddress.ip_address(written)
    except ValueError:  # such as 300.1.2.3, 01.2.3.4 or a time of day
        return False
    unicast = address.version == 4 or address in GLOBAL_UNICAST
    return not public_only or unicast and address.is_global and not address.is_multicast  # by IANA's registries
