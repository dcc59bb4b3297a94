"""Finds and redacts personal data: e-mail and IP addresses, phone, card and account numbers, national ids.

Rules and checksums only. Names, dates and addresses of people are not looked for: a medical text is not de-identified
by this. One pass over the text finds where digits stand close together; the rules look only there.
"""

import bisect
import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from jaxscale.corpus.curate.pii_national import NATIONAL_IDS, find_national_ids
from jaxscale.corpus.curate.pii_network import find_emails, find_ips
from jaxscale.corpus.curate.pii_numbers import find_cards, find_ibans
from jaxscale.corpus.curate.pii_phone import find_phones
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput
from jaxscale.text.document import Document, Outcome, Stage, each

Action = Literal["redact", "drop", "off"]
KINDS = ("email", "ip", "iban", "card", "national_id", "phone")  # where two kinds overlap, the earlier one has it
GAPS = " .()/\u00a0\u2009\u202f\u2010\u2011\u2012\u2013-"
PLAIN = str.maketrans(dict.fromkeys("\u00a0\u2009\u202f", " ") | dict.fromkeys("\u2010\u2011\u2012\u2013", "-"))
# Every number of six digits or more stands in one of these. The look ahead makes a year or a price cheap to pass by.
ROW = re.compile(rf"[0-9](?=[0-9A-Z{GAPS}]{{5}})(?:[{GAPS}]{{0,3}}[0-9A-Z]){{5,}}+")
DIGITS, FEWEST = "0123456789", 6
LEAD = 8  # of what belongs to a number may stand before its first digit: the letters of a codice fiscale, "(+"
BEFORE, AFTER = 48, 32  # what of its surroundings the rules may look at
ROUNDS = 4  # a placeholder may bring a number nearer to the word that gives it away: look again, but not for ever


@dataclasses.dataclass(frozen=True, kw_only=True)
class PIIConfig:
    """What happens to each kind of personal data: replaced by a placeholder, its document dropped, or left alone."""

    email: Action = setting("redact", "e-mail addresses")
    ip: Action = setting("redact", "IPv4 and IPv6 addresses")
    iban: Action = setting("redact", "bank accounts: IBANs with right length and check digits")
    card: Action = setting("redact", "payment cards: an issuer's beginning and length, Luhn's check digit")
    national_id: Action = setting("redact", "national identity numbers of the countries named")
    phone: Action = setting("redact", "telephone numbers, by their shape or beside a word that calls them so")
    public_ips_only: bool = setting(True, "leave private, local and documentation addresses such as 192.168.0.1 alone")
    countries: tuple[str, ...] = setting(
        tuple(NATIONAL_IDS),
        "national_id: us SSN, gb NINO, es DNI and NIE, de Steuer-ID, fr NIR, it codice fiscale, in Aadhaar",
    )
    email_placeholder: str = setting("<EMAIL>", "stands for an e-mail address")
    ip_placeholder: str = setting("<IP>", "stands for an IP address")
    iban_placeholder: str = setting("<IBAN>", "stands for an IBAN")
    card_placeholder: str = setting("<CARD>", "stands for a card number")
    national_id_placeholder: str = setting("<ID>", "stands for a national identity number")
    phone_placeholder: str = setting("<PHONE>", "stands for a telephone number")

    def __post_init__(self):
        if unknown := sorted(set(self.countries) - set(NATIONAL_IDS)):
            raise BadInput(f"countries={self.countries}: no rule for {unknown}; there are {', '.join(NATIONAL_IDS)}")
        for kind in KINDS:
            placeholder = getattr(self, f"{kind}_placeholder")
            found = [(span.kind, placeholder[span.start : span.end]) for span in find_pii(placeholder, self.countries)]
            if found not in ([], [(kind, placeholder)]):  # nothing, or itself as a whole, which is then left alone
                raise BadInput(
                    f"{kind}_placeholder={placeholder!r} holds personal data itself, {found}; "
                    f"use a word in brackets, or one {kind} and nothing else"
                )


class Span(NamedTuple):
    """Where something personal stands in a text."""

    start: int
    end: int
    kind: str


def find_pii(
    text: str,
    countries: Sequence[str] = tuple(NATIONAL_IDS),
    kinds: Iterable[str] = KINDS,
    public_ips_only: bool = True,
) -> list[Span]:
    """Everything personal in the text, in order, without overlaps."""
    kinds = frozenset(kinds)
    found = []
    if "email" in kinds and "@" in text:
        found += [Span(*span, "email") for span in find_emails(text)]
    if "ip" in kinds:
        found += [Span(*span, "ip") for span in find_ips(text, public_ips_only)]
    ids = functools.partial(find_national_ids, countries=tuple(countries))
    finders = (
        ("iban", 8, find_ibans),
        ("card", 12, find_cards),
        ("national_id", FEWEST, ids),
        ("phone", FEWEST, find_phones),
    )
    if wanted := [finder for finder in finders if finder[0] in kinds]:
        found += rows(text, wanted)
    return without_overlaps(found)


def rows(text: str, finders: Sequence[tuple[str, int, Callable]]) -> Iterator[Span]:
    """Yields what the finders, each (kind, fewest digits, function), see in and just before each row."""
    floor = 0
    for row in ROW.finditer(text):
        digits = sum(map(row[0].count, DIGITS))
        if digits < FEWEST:  # "2011 - 12 NCAA", the most common row by far
            continue
        base = max(0, row.start() - BEFORE)
        window = text[base : row.end() + AFTER].translate(PLAIN)
        start, end = max(floor, row.start() - LEAD) - base, row.end() - base
        for kind, fewest, finder in finders:
            if digits >= fewest:
                for begin, finish in finder(window, start=start, end=end):
                    yield Span(base + begin, base + finish, kind)
        floor = row.end()


def without_overlaps(spans: list[Span]) -> list[Span]:
    """Sorted by place; of two that overlap, the one whose kind comes first in KINDS, then the longer one."""
    if len(spans) < 2:
        return spans
    taken: list[Span] = []
    for span in sorted(spans, key=lambda span: (KINDS.index(span.kind), span.start - span.end, span.start)):
        place = bisect.bisect(taken, span)  # those before it begin earlier, and none of them overlaps another
        free_before = place == 0 or taken[place - 1].end <= span.start
        if free_before and (place == len(taken) or span.end <= taken[place].start):
            taken.insert(place, span)
    return taken


def redact(text: str, spans: Sequence[Span], placeholders: dict[str, str]) -> str:
    """The text with each span replaced by its kind's placeholder."""
    parts, place = [], 0
    for span in spans:
        parts += [text[place : span.start], placeholders[span.kind]]
        place = span.end
    return "".join(parts) + text[place:]


def make_pii(cfg: PIIConfig) -> Stage:
    """A stage that redacts personal data, counted by kind, or drops the documents that have it."""
    actions = {kind: getattr(cfg, kind) for kind in KINDS}
    placeholders = {kind: getattr(cfg, f"{kind}_placeholder") for kind in KINDS}
    kinds = [kind for kind in KINDS if actions[kind] != "off"]

    def find(text: str) -> list[Span]:
        spans = find_pii(text, cfg.countries, kinds, cfg.public_ips_only)
        return [span for span in spans if text[span.start : span.end] != placeholders[span.kind]]

    def judge(doc: Document) -> Outcome:
        text, edits = doc.text, Counter()
        for _ in range(ROUNDS):
            spans = find(text)
            if dropped := next((span.kind for span in spans if actions[span.kind] == "drop"), ""):
                return Outcome(None, f"personal data: {NAMES[dropped]}")
            if not spans:
                break
            text = redact(text, spans, placeholders)
            edits.update(NAMES[span.kind] for span in spans)
        if not edits:
            return Outcome(doc)
        return Outcome(dataclasses.replace(doc, text=text), edits=tuple(sorted(edits.items())))

    return each(judge)


NAMES = {
    "email": "e-mail",
    "ip": "IP address",
    "iban": "IBAN",
    "card": "payment card",
    "national_id": "national id",
    "phone": "phone number",
}
