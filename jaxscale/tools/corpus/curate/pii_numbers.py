"""Payment cards (Luhn check digit, issuer ranges) and IBANs (mod 97)."""

import re
from collections.abc import Container, Iterable, Iterator

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
CONTEXT_CHARS = 40

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


def mod_97(iban: str) -> bool:
    """True if the two check digits of an upper-case IBAN are right (ISO 7064, MOD 97-10)."""
    return int("".join(str(int(char, 36)) for char in iban[4:] + iban[:4])) % 97 == 1


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
        if whole and mod_97(re.sub(r"[ -]", "", whole[0]).upper()):
            yield whole.span()
