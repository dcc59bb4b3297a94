"""Telephone numbers: what is written like one, and what is called one.

A row of digits is a telephone number by its shape alone if it is written internationally (+ and an assigned country
code), as in North America (area code and exchange that exist) or with a trunk 0 and in three groups or more. Any other
row is one only beside a word that says so ("tel.", "call me on", "... fax"), and never if it reads as a date, a range
of years, a price, a version or an ISBN.
"""

import re
from collections.abc import Iterator

from jaxscale.corpus.curate.pii_words import NEAR_CHARS, is_asked, is_measured, is_named, is_otherwise

BEFORE_CHARS, AFTER_CHARS = 40, 16  # how much of what stands around a number is read

# ITU-T E.164, list of assigned country codes (2016, with later changes). 1 and 7 stand for many countries.
COUNTRY_CODES = frozenset(
    "1 7 20 27 30 31 32 33 34 36 39 40 41 43 44 45 46 47 48 49 51 52 53 54 55 56 57 58 60 61 62 63 64 65 66 81 82 "
    "84 86 90 91 92 93 94 95 98 211 212 213 216 218 220 221 222 223 224 225 226 227 228 229 230 231 232 233 234 235 "
    "236 237 238 239 240 241 242 243 244 245 246 247 248 249 250 251 252 253 254 255 256 257 258 260 261 262 263 "
    "264 265 266 267 268 269 290 291 297 298 299 350 351 352 353 354 355 356 357 358 359 370 371 372 373 374 375 "
    "376 377 378 379 380 381 382 383 385 386 387 389 420 421 423 500 501 502 503 504 505 506 507 508 509 590 591 "
    "592 593 594 595 596 597 598 599 670 672 673 674 675 676 677 678 679 680 681 682 683 685 686 687 688 689 690 "
    "691 692 800 808 850 852 853 855 856 870 878 880 881 882 883 886 888 960 961 962 963 964 965 966 967 968 970 "
    "971 972 973 974 975 976 977 979 992 993 994 995 996 998".split()
)

EXTENSION = r"(?: ?(?:x|ext\.?|extension) ?[0-9]{1,6})?"
NUMBER = re.compile(  # any row of groups, as whole as it is written
    rf"(?<![\w/$£€¥₹%#=@^*~])(?<![0-9][.,:+-])(?P<plus>\+|\(\+(?=[0-9]{{1,4}}\)))?"
    rf"(?P<body>(?:\((?=[0-9 ]{{1,6}}\)))?[0-9](?:[ .()/-]{{0,3}}[0-9]){{5,40}})(?P<ext>{EXTENSION})"
    r"(?![\w@%€£$°]|[.,/:][0-9]|-[0-9])"
)
INSIDE = re.compile(  # in a row of several numbers, those whose beginning is plain: +44 ..., 0.. .., 212-555-0123
    rf"(?<![\w/])(?<![0-9][.,-])(?P<plus>\+|\(\+)?(?P<body>0[1-9][0-9]{{0,3}}(?:[ .-][0-9]{{2,4}}){{2,4}}"
    rf"|(?:1[ .-])?\(?[2-9][0-9]{{2}}\)?[ .-]{{0,2}}[2-9][0-9]{{2}}[.-][0-9]{{4}})(?P<ext>{EXTENSION})"
    r"(?![\w@%]|[.,/:-][0-9])"
)
DATE = re.compile(
    r"[0-9]{1,2}([./-])[0-9]{1,2}\1[0-9]{2}|[0-9]{1,2}([./ -])[0-9]{1,2}\2(?:1[5-9]|20)[0-9]{2}"
    r"|(?:1[5-9]|20)[0-9]{2}([./ -])[0-9]{1,2}\3[0-9]{1,2}"
)
YEARS = re.compile(r"(?:1[5-9]|20)[0-9]{2}(?:[ /-]{1,3}(?:1[5-9]|20)[0-9]{2})+")
DOTTED = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}")  # an IP address or a version
ISBN = re.compile(r"97[89]([ -]?)[0-9](?:[ -]?[0-9]){8}\1[0-9]")


def country_code(digits: str) -> str:
    """The assigned country code that the digits begin with, or ''. No code is the beginning of another."""
    return next((digits[:n] for n in (1, 2, 3) if digits[:n] in COUNTRY_CODES), "")


def is_number(groups: list[str], gaps: list[str], *, plus: bool, brackets: bool, extension: bool) -> bool:
    """Whether groups of digits, with these gaps between, are a telephone number by their shape alone."""
    digits = "".join(groups)
    if plus or digits.startswith("00"):
        national = digits if plus else digits[2:]
        code = country_code(national)
        enough = len(national) >= 8 if plus else len(national) >= 10 and len(groups) > 1
        return bool(code) and enough and len(national) <= 15
    short = groups[1:] if groups[0] == "1" else groups
    if [len(group) for group in short] == [3, 3, 4]:
        real = short[0][0] >= "2" and short[0][1] != "9" and short[1][0] >= "2"  # NANPA: N[0-8]X-NXX-XXXX
        drawn = brackets or extension or set(gaps) <= {"-", "."}
        if real and drawn and (short is groups or digits[0] == "1"):
            return True
        return extension or brackets and real
    if (
        groups[0][0] == "0"
        and digits[1] != "0"
        and 9 <= len(digits) <= 12
        and (len(groups) == 1 or 2 <= len(groups[0]) <= 5)
    ):
        if len(groups) == 1:
            return (
                len(digits) == 11
            )  # as Britain and Germany write it; ISBNs have 10 digits, article numbers 8, 12 or 13
        return brackets or len(groups) >= 3 and len(set(gaps)) == 1
    if brackets and 2 <= len(groups[0]) <= 3 and len(groups) == 3 and gaps[-1] == "-":
        return 10 <= len(digits) <= 11 and len(groups[1]) >= 4  # (11) 4706-6184
    return False


def judge(text: str, match: re.Match) -> bool:
    """Whether a candidate is a telephone number, by its shape and by what stands around it."""
    body, plus, extension = match["body"], bool(match["plus"]), bool(match["ext"])
    groups, gaps = re.findall(r"[0-9]+", body), re.findall(r"[^0-9]+", body.lstrip("("))
    digits = "".join(groups)
    if not 6 <= len(digits) <= 15 or len(set(digits)) < 2:
        return False
    start, end = match.span()
    before, after = text[max(0, start - BEFORE_CHARS) : start], text[end : end + AFTER_CHARS]
    brackets = "(" in body
    odd = "/" in body and digits[0] != "0" or ". " in body or "(" in body[6:] or body.count("(") > body.count(")")
    if odd or len(groups) == 2 and gaps == ["."]:  # a quotient, the end of a sentence, a decimal fraction
        return False
    if not plus and (any(form.fullmatch(body) for form in (DATE, YEARS, DOTTED, ISBN)) or is_otherwise(before)):
        return False
    if is_number(groups, gaps, plus=plus, brackets=brackets, extension=extension):
        return True
    few = len(digits) == 6  # as often a price or a code
    if plus or few and len(groups) == 1 or max(map(len, gaps), default=0) > 3 or is_measured(after):
        return False
    if len(groups) > 1 and (len(groups[0]) < 2 or len(groups) == 2 and len(groups[1]) < 3):
        return False  # "text WIN to 80086 18+", "claim 2 88600"
    if is_named(before, after):
        return True
    alike = len({gap.strip("() ") for gap in gaps[brackets:]}) < 2
    return alike and is_asked(before[-NEAR_CHARS:] if few else before)


def find_phones(text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each telephone number that begins in text[start:end]; text should reach a bit further."""
    for match in NUMBER.finditer(text, start):
        if end is not None and match.start() >= end:
            return
        if judge(text, match):
            yield match.span()
        else:
            for inside in INSIDE.finditer(text, match.start(), match.end()):
                if inside.span() != match.span() and judge(text, inside):
                    yield inside.span()
