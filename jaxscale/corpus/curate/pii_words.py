"""What the words around a row of digits say of it: that it is a telephone number, or that it is something else.

Words are looked up in sets: a pattern of a hundred alternatives would be tried anew at every character.
"""

import re

CLOSE_CHARS = 13  # "Phone (private): 467 3395": how far the word that names a number may stand from it
NEAR_CHARS = 14  # "call 33 93 31": how far a verb may stand from a number of six digits

# In the languages that much of the web is written in.
CALLED = frozenset(
    "tel telephone phone phones cellphone telefon téléphone telefono teléfono telefone telefoon puhelin tlf tfn tél "
    "mobile mobil mob móvil movil cell cellular celular cellulare handy gsm portable fax telefax whatsapp viber "
    "landline hotline helpline switchboard voicemail pager rufnummer телефон тел هاتف फोन".split()
)
MARKS = ("电话", "電話", "手机", "전화", "☎", "📞", "📱", "✆")  # not parted from other words by spaces
ASKED = frozenset(
    "call calls calling called dial dialling dialing ring reach text txt texting sms contact anrufen appelez appeler "
    "llame llamar chiama chiamare ligue ligar bel".split()
)
ASKED_PHRASES = (
    "answering at",
    "answering on",
    "message on",
    "message to",
    "messages on",
    "messages to",
    "messages at",
)
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
MEASURE = re.compile(
    r" ?(?:%|°|dollars?|euros?|pounds?|usd|eur|people|persons?|years?|days?|hours?|min(?:ute)?s?|miles?|km|kg|m|cm|mm|"
    r"ft|feet|inch(?:es)?|tons?|tonnes?|members?|users?|votes?|points?|copies|units|times|square|cubic|million|billion|"
    r"bytes?|[kmg]b|[ap]\.?m)\b",
    re.IGNORECASE,
)


def is_measured(after: str) -> bool:
    """Whether what follows a number says what it counts: "1 500 000 people"."""
    return MEASURE.match(after) is not None


def is_otherwise(before: str) -> bool:
    """Whether what stands before a number says that it is none to call: "ISBN ", "order no. ", "$ "."""
    before = before.lower()
    if before.rstrip()[-1:] in CURRENCY and before.rstrip():
        return True
    for text in (before, NUMBER_WORD.sub("", before)):
        words = WORD.findall(text)
        if words and words[-1] in OTHERWISE and BETWEEN.match(text, text.rindex(words[-1]) + len(words[-1])):
            return True
    return False


def is_named(before: str, after: str) -> bool:
    """Whether a word right beside a number names it: "Tel.: ", "\\n ... fax"."""
    if AFTER.match(after):
        return True
    lowered = before.lower()
    for match in WORD.finditer(lowered, max(0, len(lowered) - CLOSE_CHARS - 16)):
        rest = lowered[match.end() :]
        if match[0] in CALLED and len(rest) <= CLOSE_CHARS and is_clear(rest):
            return True
    mark = max((before.rfind(mark) + len(mark) for mark in MARKS if mark in before), default=-1)
    return mark >= 0 and len(before) - mark <= CLOSE_CHARS and is_clear(before[mark:])


def is_clear(between: str) -> bool:
    """Whether neither another number nor a second line stands between a name and its number."""
    return between.count("\n") < 2 and not any(char.isdigit() for char in between)


def is_asked(before: str) -> bool:
    """Whether what stands before a number names it or asks to call it, somewhere."""
    words = WORD.findall(before.lower())
    if not CALLED.isdisjoint(words) or not ASKED.isdisjoint(words) or any(mark in before for mark in MARKS):
        return True
    return any(phrase in " ".join(words) for phrase in ASKED_PHRASES)
