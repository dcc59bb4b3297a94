"""Finds numbers with check digits: payment cards, IBANs and national identity numbers.

Check digits are computed by python-stdnum. If the evidence is weak (digits without separators, one check digit), a word
such as "SSN" or "Aadhaar" must precede the number.
"""

import functools
import importlib
import re
import string
from collections.abc import Callable, Container, Iterable, Iterator
from typing import NamedTuple

from jaxscale.runtime.text.sources.part import importing

# Digit groups as printed on cards: 4-4-4-4 and its longer and shorter variants, 4-6-5 and 4-6-4; or no gap.
CARD = re.compile(
    r"(?<![\w.+-])(?:[0-6][0-9]{11,18}|[0-6][0-9]{3}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{1,4}(?:\1[0-9]{1,3})?"
    r"|3[0-9]{3}([ -])[0-9]{6}\2[0-9]{4,5})(?![\w]|[.-][0-9])"
)

# (first prefix, last prefix, lengths). ISO/IEC 7812 ranges as published by the networks; see
# https://en.wikipedia.org/wiki/Payment_card_number#Issuer_identification_number_(IIN)
ISSUERS = (
    ("4", "4", (13, 16, 19)),  # Visa
    ("51", "55", (16,)), ("2221", "2720", (16,)),  # Mastercard
    ("34", "34", (15,)), ("37", "37", (15,)),  # American Express
    ("6011", "6011", range(16, 20)), ("644", "649", range(16, 20)), ("65", "65", range(16, 20)),  # Discover
    ("300", "305", range(14, 20)), ("3095", "3095", range(14, 20)),  # Diners Club
    ("36", "36", range(14, 20)), ("38", "39", range(14, 20)),
    ("35", "35", range(16, 20)),  # JCB: 3528 to 3589; the wider range occurs in generated data
    ("1800", "1800", (15,)), ("2131", "2131", (15,)),
    ("62", "62", range(16, 20)), ("81", "81", range(16, 20)),  # UnionPay
    ("5018", "5018", range(12, 20)), ("5020", "5020", range(12, 20)), ("5038", "5038", range(12, 20)),  # Maestro
    ("5893", "5893", range(12, 20)), ("6304", "6304", range(12, 20)), ("6759", "6759", range(12, 20)),
    ("6761", "6763", range(12, 20)),
    ("2200", "2204", range(16, 20)),  # Mir
)  # fmt: skip
# Common prefixes or short lengths, for which one Luhn digit is weak evidence: a word such as "card" must come first.
LOOSE_ISSUERS = (("50", "50", range(12, 20)), ("56", "58", range(12, 20)), ("0604", "0604", range(12, 20)),
                 ("60", "69", range(12, 20)))  # Maestro, RuPay  # fmt: skip
SAID_CARD = re.compile(r"\b(?:cards?|credit|debit|visa|master ?card|maestro|amex|cc|ccn|pan)\b", re.IGNORECASE)
CONTEXT_CHARS = 40  # characters before a number that are searched for such a word

# Start of an IBAN, and all characters that may belong to it (15 to 33, ISO 13616), with or without gaps.
IBAN = re.compile(r"(?<![0-9A-Za-z])[A-Z]{2}[0-9]{2}(?=((?:[ -]?[0-9A-Z]){11,29}))", re.IGNORECASE | re.ASCII)
IBAN_VALUES = str.maketrans(dict(zip(string.ascii_uppercase, map(str, range(10, 36)))))
WORD_END = re.compile(r"(?<=[0-9A-Za-z])(?![0-9A-Za-z])")


@functools.cache
def checker(name: str) -> Callable[..., bool]:
    """Returns the function stdnum.NAME.is_valid. Raises BadInput if python-stdnum is not installed."""
    with importing("finding numbers with check digits (the stage pii)", "python-stdnum"):
        return importlib.import_module(f"stdnum.{name}").is_valid


def issued(digits: str, issuers: Iterable[tuple[str, str, Container[int]]] = ISSUERS) -> bool:
    """Returns True if a card network issues numbers with this prefix and length."""
    return any(len(digits) in lengths and first <= digits[: len(first)] <= last for first, last, lengths in issuers)


def find_cards(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each payment card number that begins in text[start:end]."""
    for match in CARD.finditer(text, start):
        if match.start() >= end:
            return
        digits = re.sub(r"\D", "", match[0])
        if not checker("luhn")(digits) or len(set(digits)) < 2:
            continue
        named = SAID_CARD.search(text[max(0, match.start() - CONTEXT_CHARS) : match.start()])
        if issued(digits) or named and issued(digits, LOOSE_ISSUERS):
            yield match.span()


def find_ibans(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each IBAN that begins in text[start:end], with or without spaces or hyphens."""
    for match in IBAN.finditer(text, start):
        if match.start() >= end:
            return
        for stop in WORD_END.finditer(text, match.start() + 15):
            if stop.end() > match.end(1):
                break
            iban = re.sub(r"[ -]", "", text[match.start() : stop.end()]).upper()
            if is_iban(iban):
                yield match.start(), stop.end()
                break


@functools.lru_cache(1024)  # texts often repeat a number
def is_iban(iban: str) -> bool:
    """Returns True for an IBAN with valid check digits and the length and structure of its country."""
    # MOD 97-10 (ISO 7064) first, since the library is ten times slower; its lists of banks are incomplete
    right = int((iban[4:] + iban[:4]).translate(IBAN_VALUES)) % 97 == 1
    return right and checker("iban")(iban, check_country=False)


class NationalId(NamedTuple):
    """Format and validity check of one country's number."""

    digits: int  # minimum number of digits; shorter sequences are skipped
    form: re.Pattern
    proof: Callable[[str], bool]  # validity check, on the number without spaces, hyphens and full stops
    bare: re.Pattern | None = None  # less distinctive form that requires `context`
    context: re.Pattern | None = None  # words that must precede the bare form


def word(pattern: str) -> re.Pattern:
    return re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)


def nino(number: str) -> bool:
    """Returns True for a valid UK National Insurance number (unused letters and pairs: HMRC manual NIM39110)."""
    first, second = number[0], number[1]
    if first in "DFIQUV" or second in "DFIQUVO":
        return False
    return number[:2] not in ("BG", "GB", "NK", "KN", "TN", "NT", "ZZ")


def ssn(number: str) -> bool:
    """Returns True for a valid US social security number (SSA randomization, 2011), except the example 123456789."""
    return number != "123456789" and checker("us.ssn")(number)


def dni(number: str) -> bool:
    """Returns True for a valid Spanish DNI or NIE."""
    return checker("es.nie" if number[0] in "XYZ" else "es.dni")(number)


def aadhaar(number: str) -> bool:
    """Returns True for a valid Indian Aadhaar number. Rejects a sequence of three years, such as 2019 2020 2021."""
    years = all(number[i : i + 2] in ("20", "21") for i in (0, 4, 8))
    return not years and len(set(number)) > 2 and checker("in_.aadhaar")(number)


DIGIT_OR_LETTER = "[0-9LMNPQRSTUV]"  # in a codice fiscale, letters replace digits to resolve collisions
EDGE, AFTER = r"(?<![0-9A-Za-z])(?<![0-9][.-])", r"(?![0-9A-Za-z])(?!-[0-9])"
NATIONAL_IDS = {
    "us": NationalId(
        9, re.compile(rf"{EDGE}[0-9]{{3}}-[0-9]{{2}}-[0-9]{{4}}{AFTER}"), ssn,
        re.compile(rf"{EDGE}[0-9]{{3}}([ .]?)[0-9]{{2}}\1[0-9]{{4}}{AFTER}"), word("ssn|social security|soc\\.? sec"),
    ),
    "gb": NationalId(6, re.compile(rf"{EDGE}[A-Z]{{2}} ?[0-9]{{2}} ?[0-9]{{2}} ?[0-9]{{2}} ?[A-D]{AFTER}"), nino),
    "es": NationalId(7, re.compile(rf"{EDGE}(?:[XYZ]-?[0-9]{{7}}|[0-9]{{8}})-?[A-Z]{AFTER}"), dni),
    "de": NationalId(
        11, re.compile(rf"{EDGE}(?:[0-9]{{11}}|[0-9]{{2}} [0-9]{{3}} [0-9]{{3}} [0-9]{{3}}){AFTER}"),
        lambda number: checker("de.idnr")(number),
    ),
    "fr": NationalId(
        14,
        re.compile(
            rf"{EDGE}[12] ?[0-9]{{2}} ?(?:0[1-9]|1[0-2]|[2-9][0-9]) ?(?:[0-9]{{2}}|2[AB]) ?[0-9]{{3}} ?[0-9]{{3}} ?"
            rf"[0-9]{{2}}{AFTER}"
        ),
        lambda number: checker("fr.nir")(number),
    ),
    "it": NationalId(
        6,
        re.compile(
            rf"{EDGE}[A-Z]{{6}}{DIGIT_OR_LETTER}{{2}}[ABCDEHLMPRST]{DIGIT_OR_LETTER}{{2}}[A-Z]{DIGIT_OR_LETTER}{{3}}"
            rf"[A-Z]{AFTER}"
        ),
        lambda number: checker("it.codicefiscale")(number),
    ),
    "in": NationalId(
        12, re.compile(rf"{EDGE}[0-9]{{4}}([ -])[0-9]{{4}}\1[0-9]{{4}}{AFTER}"), aadhaar,
        re.compile(rf"{EDGE}[0-9]{{12}}{AFTER}"), word("aadhaar|aadhar|uidai|आधार"),
    ),
}  # fmt: skip

LETTERED = frozenset(("gb", "es", "it"))  # numbers with a letter after the first digit
NO_DIGITS = string.ascii_letters + string.punctuation + string.whitespace
LONGEST = 24  # maximum length of any form, with all its spaces


def find_national_ids(text: str, start: int, end: int, countries: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each national ID that begins in text[start:end], even if it ends after `end`."""
    row = text[start:end].lstrip(NO_DIGITS)
    digits, letters = sum(map(row.count, "0123456789")), row != row.lower()
    for country in countries:
        kind = NATIONAL_IDS[country]
        if digits < kind.digits or country in LETTERED and not letters:
            continue
        for form, needs_context in ((kind.form, False), (kind.bare, True)):
            for match in form.finditer(text, start, end + LONGEST) if form else ():
                if match.start() >= end:
                    break
                before = text[max(0, match.start() - CONTEXT_CHARS) : match.start()]
                if needs_context and not (kind.context and kind.context.search(before)):
                    continue
                if kind.proof(re.sub(r"[ .-]", "", match[0])):
                    yield match.span()
