"""Recognizes telephone numbers by their format or by nearby words.

The format is sufficient for international numbers (+ and an assigned country code), for North American numbers (valid
area code and exchange) and for numbers with a trunk 0 in at least three groups. Any other digits are a telephone number
only near a word such as "tel.", "call me on" or "fax". Dates, ranges of years, prices, versions and ISBNs never match.
"""

import re
from collections.abc import Iterator

BEFORE_CHARS, AFTER_CHARS = 40, 16  # context before and after a number

# ITU-T E.164, list of assigned country codes (2016, with later changes). 1 and 7 are shared by several countries.
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
NUMBER = re.compile(  # the longest sequence of digit groups
    rf"(?<![\w/$£€¥₹%#=@^*~])(?<![0-9][.,:+-])(?P<plus>\+|\(\+(?=[0-9]{{1,4}}\)))?"
    rf"(?P<body>(?:\((?=[0-9 ]{{1,6}}\)))?[0-9](?:[ .()/-]{{0,3}}[0-9]){{5,40}})(?P<ext>{EXTENSION})"
    r"(?![\w@%€£$°]|[.,/:][0-9]|-[0-9])"
)
INSIDE = re.compile(  # numbers within such a sequence that have a distinct start: +44 ..., 0.. .., 212-555-0123
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
# Words are looked up in sets, which is faster than a regular expression with a hundred alternatives.
CLOSE_CHARS = 13  # maximum distance of a naming word, as in "Phone (private): 467 3395"
NEAR_CHARS = 14  # maximum distance of a verb from a number of six digits, as in "call 33 93 31"

# Names in the most common languages of the web.
NAME_WORDS = frozenset(
    "tel telephone phone phones cellphone telefon téléphone telefono teléfono telefone telefoon puhelin tlf tfn tél "
    "mobile mobil mob móvil movil cell cellular celular cellulare handy gsm portable fax telefax whatsapp viber "
    "landline hotline helpline switchboard voicemail pager rufnummer телефон тел هاتف फोन".split()
)
MARKS = ("电话", "電話", "手机", "전화", "☎", "📞", "📱", "✆")  # matched anywhere, since no spaces surround them
REQUEST_WORDS = frozenset(
    "call calls calling called dial dialling dialing ring reach text txt texting sms contact anrufen appelez appeler "
    "llame llamar chiama chiamare ligue ligar bel".split()
)
REQUEST_PHRASES = (
    "answering at", "answering on", "message on", "message to", "messages on", "messages to", "messages at",
)  # fmt: skip
OTHERWISE = frozenset(
    "isbn issn doi v ver version release build p pp page pages vol no order invoice serial patent model part account "
    "acc acct card zip postcode ref case id code usd eur gbp rs inr".split()
)
CURRENCY = frozenset("$£€¥₹")
WORD = re.compile(r"[^\W\d_]+")
NUMBER_WORD = re.compile(r"[ :#]*(?:number|no\.?|is)[ :#]*\Z")  # "order number: 467 3395"
BETWEEN = re.compile(r"(?:-1[03])?[.)]?[ :#]*\Z")  # "ISBN-13: ", "p. ", "case #"
AFTER = re.compile(
    r"[\s,;\\(-]{1,4}(?:tel|phone|telephone|mobile|mob|cell|fax|office|home|work|desk|direct|landline|handy)(?!\w)",
    re.IGNORECASE,
)
MEASURE = re.compile(  # a unit or counted noun after the number: "1 500 000 people"
    r" ?(?:%|°|dollars?|euros?|pounds?|usd|eur|people|persons?|years?|days?|hours?|min(?:ute)?s?|miles?|km|kg|m|cm|mm|"
    r"ft|feet|inch(?:es)?|tons?|tonnes?|members?|users?|votes?|points?|copies|units|times|square|cubic|million|billion|"
    r"bytes?|[kmg]b|[ap]\.?m)\b",
    re.IGNORECASE,
)


def is_number(groups: list[str], gaps: list[str], *, plus: bool, brackets: bool, extension: bool) -> bool:
    """Returns True if the format of the digit groups and separators is sufficient to identify a telephone number."""
    digits = "".join(groups)
    if plus or digits.startswith("00"):
        national = digits if plus else digits[2:]
        has_code = any(national[:n] in COUNTRY_CODES for n in (1, 2, 3))
        enough = len(national) >= 8 if plus else len(national) >= 10 and len(groups) > 1
        return has_code and enough and len(national) <= 15
    short = groups[1:] if groups[0] == "1" else groups
    if [len(group) for group in short] == [3, 3, 4]:
        is_nanp = short[0][0] >= "2" and short[0][1] != "9" and short[1][0] >= "2"  # NANPA: N[0-8]X-NXX-XXXX
        is_formatted = brackets or extension or set(gaps) <= {"-", "."}
        if is_nanp and is_formatted and (short is groups or digits[0] == "1"):
            return True
        return extension or brackets and is_nanp
    trunk = groups[0][0] == "0" and digits[1] != "0"
    if trunk and 9 <= len(digits) <= 12 and (len(groups) == 1 or 2 <= len(groups[0]) <= 5):
        if len(groups) == 1:
            return len(digits) == 11  # as in Britain and Germany; ISBNs have 10 digits, article numbers 8, 12 or 13
        return brackets or len(groups) >= 3 and len(set(gaps)) == 1
    if brackets and 2 <= len(groups[0]) <= 3 and len(groups) == 3 and gaps[-1] == "-":
        return 10 <= len(digits) <= 11 and len(groups[1]) >= 4  # (11) 4706-6184
    return False


def is_phone(text: str, match: re.Match) -> bool:
    """Returns True if a match of NUMBER or INSIDE is a telephone number by its format and the surrounding words."""
    body, plus, extension = match["body"], bool(match["plus"]), bool(match["ext"])
    groups, gaps = re.findall(r"[0-9]+", body), re.findall(r"[^0-9]+", body.lstrip("("))
    digits = "".join(groups)
    if not 6 <= len(digits) <= 15 or len(set(digits)) < 2:
        return False
    start, end = match.span()
    before, after = text[max(0, start - BEFORE_CHARS) : start], text[end : end + AFTER_CHARS]
    brackets = "(" in body
    odd = "/" in body and digits[0] != "0" or ". " in body or "(" in body[6:] or body.count("(") > body.count(")")
    if odd or len(groups) == 2 and gaps == ["."]:  # a fraction, the end of a sentence, or a decimal number
        return False
    if not plus and (any(form.fullmatch(body) for form in (DATE, YEARS, DOTTED, ISBN)) or is_other_number(before)):
        return False
    if is_number(groups, gaps, plus=plus, brackets=brackets, extension=extension):
        return True
    few = len(digits) == 6  # often a price or a code
    if plus or few and len(groups) == 1 or max(map(len, gaps), default=0) > 3 or MEASURE.match(after):
        return False
    if len(groups) > 1 and (len(groups[0]) < 2 or len(groups) == 2 and len(groups[1]) < 3):
        return False  # "text WIN to 80086 18+", "claim 2 88600"
    if is_named(before, after):
        return True
    alike = len({gap.strip("() ") for gap in gaps[brackets:]}) < 2
    return alike and is_requested(before[-NEAR_CHARS:] if few else before)


def find_phones(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields (start, end) of each telephone number that begins in text[start:end], even if it ends after `end`."""
    for match in NUMBER.finditer(text, start):
        if match.start() >= end:
            return
        if is_phone(text, match):
            yield match.span()
        else:
            for inside in INSIDE.finditer(text, match.start(), match.end()):
                if inside.span() != match.span() and is_phone(text, inside):
                    yield inside.span()


def is_other_number(before: str) -> bool:
    """Returns True if the text before a number shows that it is not a phone number: "ISBN ", "order no. ", "$ "."""
    before = before.lower()
    if before.rstrip()[-1:] in CURRENCY and before.rstrip():
        return True
    for text in (before, NUMBER_WORD.sub("", before)):
        words = WORD.findall(text)
        if words and words[-1] in OTHERWISE and BETWEEN.match(text, text.rindex(words[-1]) + len(words[-1])):
            return True
    return False


def is_named(before: str, after: str) -> bool:
    """Returns True if a word close to a number identifies it as a phone number: "Tel.: ", "... fax"."""
    if AFTER.match(after):
        return True
    lowered = before.lower()
    for match in WORD.finditer(lowered, max(0, len(lowered) - CLOSE_CHARS - 16)):
        between = lowered[match.end() :]
        if match[0] in NAME_WORDS and len(between) <= CLOSE_CHARS and is_clear(between):
            return True
    mark = max((before.rfind(mark) + len(mark) for mark in MARKS if mark in before), default=-1)
    return mark >= 0 and len(before) - mark <= CLOSE_CHARS and is_clear(before[mark:])


def is_clear(between: str) -> bool:
    """Returns True if the text between a word such as "phone" and a number has no digits and at most one newline."""
    return between.count("\n") < 2 and not any(char.isdigit() for char in between)


def is_requested(before: str) -> bool:
    """Returns True if a word such as "phone", or a request to call, occurs anywhere in the text before a number."""
    words = WORD.findall(before.lower())
    if not NAME_WORDS.isdisjoint(words) or not REQUEST_WORDS.isdisjoint(words) or any(mark in before for mark in MARKS):
        return True
    return any(phrase in " ".join(words) for phrase in REQUEST_PHRASES)
