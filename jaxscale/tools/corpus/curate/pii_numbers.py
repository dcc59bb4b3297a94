"""Numbers with check digits: payment cards, IBANs and national identity numbers, each country's by its format.

Where the proof is weak (a bare row of digits, one check digit), a word such as "SSN" or "Aadhaar" must stand nearby.
"""

import re
import string
from collections.abc import Callable, Container, Iterable, Iterator
from typing import NamedTuple

# Groups as cards are printed: 4-4-4-4 and its longer and shorter variants, 4-6-5 and 4-6-4; or no gap at all.
CARD = re.compile(
    r"(?<![\w.+-])(?:[0-6][0-9]{11,18}|[0-6][0-9]{3}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{1,4}(?:\1[0-9]{1,3})?"
    r"|3[0-9]{3}([ -])[0-9]{6}\2[0-9]{4,5})(?![\w]|[.-][0-9])"
)

# (first number, last number, lengths). ISO/IEC 7812 ranges as the networks publish them; see
# https://en.wikipedia.org/wiki/Payment_card_number#Issuer_identification_number_(IIN)
ISSUERS = (
    ("4", "4", (13, 16, 19)),  # Visa
    ("51", "55", (16,)), ("2221", "2720", (16,)),  # Mastercard
    ("34", "34", (15,)), ("37", "37", (15,)),  # American Express
    ("6011", "6011", range(16, 20)), ("644", "649", range(16, 20)), ("65", "65", range(16, 20)),  # Discover
    ("300", "305", range(14, 20)), ("3095", "3095", range(14, 20)),  # Diners Club
    ("36", "36", range(14, 20)), ("38", "39", range(14, 20)),
    ("35", "35", range(16, 20)),  # JCB: 3528 to 3589, and the wider range found in generated data
    ("1800", "1800", (15,)), ("2131", "2131", (15,)),
    ("62", "62", range(16, 20)), ("81", "81", range(16, 20)),  # UnionPay
    ("5018", "5018", range(12, 20)), ("5020", "5020", range(12, 20)), ("5038", "5038", range(12, 20)),  # Maestro
    ("5893", "5893", range(12, 20)), ("6304", "6304", range(12, 20)), ("6759", "6759", range(12, 20)),
    ("6761", "6763", range(12, 20)),
    ("2200", "2204", range(16, 20)),  # Mir
)  # fmt: skip
# Beginnings so common, or lengths so short, that Luhn's one digit proves little: a word must say that it is a card.
LOOSE_ISSUERS = (("50", "50", range(12, 20)), ("56", "58", range(12, 20)), ("0604", "0604", range(12, 20)),
                 ("60", "69", range(12, 20)))  # Maestro, RuPay  # fmt: skip
SAID_CARD = re.compile(r"\b(?:cards?|credit|debit|visa|master ?card|maestro|amex|cc|ccn|pan)\b", re.IGNORECASE)
CONTEXT_CHARS = 40  # characters before a number in which a word may explain it

# Total length of a country's IBAN: SWIFT's IBAN registry (ISO 13616), release 99.
IBAN_CHARS = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BI": 27, "BR": 29,
    "BY": 28, "CH": 21, "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DJ": 27, "DK": 18, "DO": 28, "EE": 20, "EG": 29,
    "ES": 24, "FI": 18, "FK": 18, "FO": 18, "FR": 27, "GB": 22, "GE": 22, "GI": 23, "GL": 18, "GR": 27, "GT": 28,
    "HN": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26, "IT": 27, "JO": 30, "KW": 30, "KZ": 20,
    "LB": 28, "LC": 32, "LI": 21, "LT": 20, "LU": 20, "LV": 21, "LY": 25, "MC": 27, "MD": 24, "ME": 22, "MK": 19,
    "MN": 20, "MR": 27, "MT": 31, "MU": 30, "NI": 28, "NL": 18, "NO": 15, "OM": 23, "PK": 24, "PL": 28, "PS": 29,
    "PT": 25, "QA": 29, "RO": 24, "RS": 22, "RU": 33, "SA": 24, "SC": 31, "SD": 18, "SE": 24, "SI": 19, "SK": 24,
    "SM": 27, "SO": 23, "ST": 25, "SV": 28, "TL": 23, "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20,
    "YE": 30,
}  # fmt: skip
IBAN_START = re.compile(r"(?<![0-9A-Za-z])[A-Z]{2}[0-9]{2}(?=[ -]?[0-9A-Z])", re.IGNORECASE)


def luhn(digits: str) -> bool:
    """True if the last digit is the check digit of the others (ISO/IEC 7812-1, annex B)."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def issued(digits: str, issuers: Iterable[tuple[str, str, Container[int]]] = ISSUERS) -> bool:
    """True if a card network has numbers of this prefix and length."""
    return any(len(digits) in lengths and first <= digits[: len(first)] <= last for first, last, lengths in issuers)


def find_cards(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each payment card number that begins in text[start:end]."""
    for match in CARD.finditer(text, start):
        if match.start() >= end:
            return
        digits = re.sub(r"\D", "", match[0])
        if not luhn(digits) or len(set(digits)) < 2:
            continue
        said = SAID_CARD.search(text[max(0, match.start() - CONTEXT_CHARS) : match.start()])
        if issued(digits) or said and issued(digits, LOOSE_ISSUERS):
            yield match.span()


def find_ibans(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each IBAN that begins in text[start:end], written in one piece or in groups."""
    for match in IBAN_START.finditer(text, start):
        if match.start() >= end:
            return
        chars = IBAN_CHARS.get(match[0][:2].upper())
        if chars is None:
            continue
        pattern = rf"[A-Za-z]{{2}}[0-9]{{2}}(?:[ -]?[0-9A-Za-z]){{{chars - 4}}}(?![0-9A-Za-z])"
        whole = re.compile(pattern).match(text, match.start())  # re keeps what it compiled
        iban = re.sub(r"[ -]", "", whole[0]).upper() if whole else ""
        if whole and int("".join(str(int(char, 36)) for char in iban[4:] + iban[:4])) % 97 == 1:  # ISO 7064, MOD 97-10
            yield whole.span()


class NationalId(NamedTuple):
    """Format and check digit of one country's number."""

    digits: int  # minimum; shorter rows are skipped
    form: re.Pattern
    proof: Callable[[str], bool]  # of the number without spaces, hyphens and full stops
    bare: re.Pattern | None = None  # a weaker form that requires `context`
    context: re.Pattern | None = None


def word(pattern: str) -> re.Pattern:
    return re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE)


def ssn(number: str) -> bool:
    """US social security number: no area 000, 666 or 9xx, no group 00, no serial 0000 (SSA, "randomization", 2011).

    Three numbers that were published in advertisements are also excluded.
    """
    area, group, serial = number[:3], number[3:5], number[5:]
    if number in ("078051120", "219099999", "123456789"):
        return False
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


def nino(number: str) -> bool:
    """UK National Insurance number: HMRC manual NIM39110 (letters and pairs that are never given out)."""
    first, second = number[0], number[1]
    if first in "DFIQUV" or second in "DFIQUVO":
        return False
    return number[:2] not in ("BG", "GB", "NK", "KN", "TN", "NT", "ZZ")


def dni(number: str) -> bool:
    """Spanish DNI and NIE: the letter is the number modulo 23 (Ministerio del Interior)."""
    digits = str("XYZ".index(number[0])) + number[1:-1] if number[0] in "XYZ" else number[:-1]
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(digits) % 23] == number[-1]


def steuer_id(number: str) -> bool:
    """German tax number: ISO 7064 MOD 11,10, and of the first ten digits one comes two or three times, no other twice.

    Source: Bundeszentralamt fuer Steuern, section 139b AO, "Steueridentifikationsnummer".
    """
    counts = sorted(number[:10].count(digit) for digit in set(number[:10]))
    if number[0] == "0" or counts[-1] not in (2, 3) or counts[:-1] != [1] * (len(counts) - 1):
        return False
    product = 10
    for digit in number[:10]:
        product = ((int(digit) + product - 1) % 10 + 1) * 2 % 11
    return (11 - product) % 10 == int(number[10])


def nir(number: str) -> bool:
    """French social security number: key = 97 - number mod 97, Corsica's 2A and 2B read as 19 and 18 (INSEE)."""
    return 97 - int(number[:13].replace("2A", "19").replace("2B", "18")) % 97 == int(number[13:])


ODD = dict(zip("0123456789", (1, 0, 5, 7, 9, 13, 15, 17, 19, 21))) | dict(
    zip(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        (1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23),
    )
)


def codice_fiscale(number: str) -> bool:
    """Italian tax code: the last letter is a sum over odd and even places (D.M. 23 December 1976)."""
    odd = sum(ODD[char] for char in number[0:15:2])
    even = sum(int(char) if char.isdigit() else ord(char) - 65 for char in number[1:15:2])
    return chr(65 + (odd + even) % 26) == number[15]


D5 = tuple(  # the dihedral group of order 10: a * b
    tuple((a + b) % 5 + 5 * (b > 4) if a < 5 else (a - b) % 5 + 5 * (b < 5) for b in range(10)) for a in range(10)
)
PERMUTATION = (1, 5, 7, 6, 2, 8, 3, 0, 9, 4)


def verhoeff(digits: str) -> bool:
    """True if the last digit is Verhoeff's check digit of the others ("Error Detecting Decimal Codes", 1969)."""
    check = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit)
        for _ in range(place % 8):
            value = PERMUTATION[value]
        check = D5[check][value]
    return check == 0


def aadhaar(number: str) -> bool:
    """Indian Aadhaar: 12 digits, the first 2 to 9, Verhoeff (UIDAI). Three consecutive years do not match."""
    years = all(number[i : i + 2] in ("20", "21") for i in (0, 4, 8))
    return number[0] in "23456789" and not years and len(set(number)) > 2 and verhoeff(number)


DIGIT_OR_LETTER = "[0-9LMNPQRSTUV]"  # letters replace digits in a codice fiscale that would not be unique
EDGE, AFTER = r"(?<![0-9A-Za-z])(?<![0-9][.-])", r"(?![0-9A-Za-z])(?!-[0-9])"
NATIONAL_IDS = {
    "us": NationalId(
        9, re.compile(rf"{EDGE}[0-9]{{3}}-[0-9]{{2}}-[0-9]{{4}}{AFTER}"), ssn,
        re.compile(rf"{EDGE}[0-9]{{3}}([ .]?)[0-9]{{2}}\1[0-9]{{4}}{AFTER}"), word("ssn|social security|soc\\.? sec"),
    ),
    "gb": NationalId(6, re.compile(rf"{EDGE}[A-Z]{{2}} ?[0-9]{{2}} ?[0-9]{{2}} ?[0-9]{{2}} ?[A-D]{AFTER}"), nino),
    "es": NationalId(7, re.compile(rf"{EDGE}(?:[XYZ]-?[0-9]{{7}}|[0-9]{{8}})-?[A-Z]{AFTER}"), dni),
    "de": NationalId(
        11, re.compile(rf"{EDGE}(?:[0-9]{{11}}|[0-9]{{2}} [0-9]{{3}} [0-9]{{3}} [0-9]{{3}}){AFTER}"), steuer_id
    ),
    "fr": NationalId(
        14,
        re.compile(
            rf"{EDGE}[12] ?[0-9]{{2}} ?(?:0[1-9]|1[0-2]|[2-9][0-9]) ?(?:[0-9]{{2}}|2[AB]) ?[0-9]{{3}} ?[0-9]{{3}} ?"
            rf"[0-9]{{2}}{AFTER}"
        ),
        nir,
    ),
    "it": NationalId(
        6,
        re.compile(
            rf"{EDGE}[A-Z]{{6}}{DIGIT_OR_LETTER}{{2}}[ABCDEHLMPRST]{DIGIT_OR_LETTER}{{2}}[A-Z]{DIGIT_OR_LETTER}{{3}}"
            rf"[A-Z]{AFTER}"
        ),
        codice_fiscale,
    ),
    "in": NationalId(
        12, re.compile(rf"{EDGE}[0-9]{{4}}([ -])[0-9]{{4}}\1[0-9]{{4}}{AFTER}"), aadhaar,
        re.compile(rf"{EDGE}[0-9]{{12}}{AFTER}"), word("aadhaar|aadhar|uidai|आधार"),
    ),
}  # fmt: skip

LETTERED = frozenset(("gb", "es", "it"))  # a letter comes after the first digit
NO_DIGITS = string.ascii_letters + string.punctuation + string.whitespace
LONGEST = 24  # of the forms, with all their spaces


def find_national_ids(text: str, start: int, end: int, countries: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each national number that begins in text[start:end]; text should reach a bit further."""
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
