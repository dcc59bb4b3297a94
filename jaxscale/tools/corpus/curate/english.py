"""English word segmentation shared by all quality filters: punctuation and contractions are split off.

The rules of Gopher, C4 and FineWeb were published with datatrove, whose English words are spaCy's: "don't" is do + n't,
"state-of-the-art" seven tokens, "(yes)." four. The same split is made here from the rules that spaCy documents
(https://spacy.io/usage/linguistic-features#how-tokenizer-works): cut at white space, take marks off both ends, then cut
inside. words.py makes the same cut for whole documents by arithmetic.
"""

import itertools
import re
from collections.abc import Iterator

MAX_CAREFUL = 1000  # longest piece in characters that the rules below cut; longer ones are not words

LOWER, UPPER = "a-zß-öø-ÿа-яё", "A-ZÀ-ÖØ-ÞА-ЯЁ"
LETTER = r"[^\W\d_]"
MARKS = r"…,:;!?¿؟¡()\[\]{}<>_#*&。？！，、；：～·।،۔؛٪"
QUOTES = "'\"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉⟦⟧"
MONEY = "$£€¥฿₠-₿﷼"
# signs and pictures: the general category So, where running text has them
SIGNS = "¦©®°℀℁℃-℆№℗℞-℣™↕-⇳⌀-⎳⏎-␦⒜-ⓩ─-▶▸-◀◂-◷☀-♮♰-❧➔-➿⠀-⣿⬀-⯾�\U0001f000-\U0001faff"
UNITS = (
    "km²|km³|km|m²|m³|m|dm²|dm³|dm|cm²|cm³|cm|mm²|mm³|mm|ha|µm|nm|yd|in|ft|kg|g|mg|µg|t|lb|oz|m/s|km/h|kmh|mph|hPa|Pa"
    "|mbar|mb|MB|kb|KB|gb|GB|tb|TB|T|G|M|K|%"
)
PREFIX = re.compile(rf"[§%=—–{MARKS}{QUOTES}{SIGNS}]|\+(?![0-9])|\.\.+|(?:US|[AC])?\$|[{MONEY}]")
SUFFIX = re.compile(
    rf"(?:[—–{MARKS}{QUOTES}{SIGNS}]|\.\.+|['’][sS]|(?<=[0-9])(?:\+|(?:US|[AC])?\$|[{MONEY}]|{UNITS})|(?<=°[FfCcKk])\."
    rf"|(?<=[0-9{LOWER}%²\-+|{MARKS}{QUOTES}])\.|(?<=[{UPPER}][{UPPER}])\.)\Z"
)
INFIX = re.compile(
    rf"\.\.+|[…{SIGNS}]|(?<=[0-9])[+\-*^](?=[0-9-])|(?<=[{LOWER}{QUOTES}])\.(?=[{UPPER}{QUOTES}])"
    rf"|(?<={LETTER}),(?={LETTER})|(?<=[^\W_])(?:--|---|——|[-–—~])(?={LETTER})|(?<=[^\W_])[:<>=/](?={LETTER})"
)
ADDRESS = re.compile(  # of a web page, a host or a mailbox: one word, whatever marks are in it
    rf"(?:[\w+\-.]{{2,}}://)?(?:\S+@)?(?:(?:\d{{1,3}}\.){{3}}\d{{1,3}}|(?:[A-Za-z0-9¡-\uffff][A-Za-z0-9¡-\uffff_-]{{0,63}}\.)+"
    rf"[{LOWER}]{{2,63}})(?::\d{{2,5}})?(?:[/?#]\S*)?"
)
COARSE = re.compile(r"\w+|[^\w\s]")
FACES = (
    ":) :-) :)) :-)) :))) :-))) (: (-: =) (= :] :-] [: [-: [= =] :o) (o: :} :-} 8) 8-) (-8 ;) ;-) (; (-; :( :-( :(( "
    ":-(( :((( :-((( ): )-: =( >:( :') :'-) :'( :'-( :/ :-/ =/ =| :| :-| ]= =[ :1 :P :-P :p :-p :O :-O :o :-o :0 :-0 "
    ":() >:o :* :-* :3 :-3 =3 >: :-> :X :-X :x :-x :D :-D ;D ;-D =D ^_^ -_- >.< o_O O_o <3 <33 </3"
)
# short forms that keep their full stop, or another mark inside
WHOLE = (
    "Mt. Ak. Ala. Apr. Ariz. Ark. Aug. Calif. Colo. Conn. Dec. Del. Feb. Fla. Ga. Ia. Id. Ill. Ind. Jan. Jul. Jun. "
    "Kan. Kans. Ky. La. Mar. Mass. Mich. Minn. Miss. N.C. N.D. N.H. N.J. N.M. N.Y. Neb. Nebr. Nev. Nov. Oct. Okla. "
    "Ore. Pa. S.C. Sep. Sept. Tenn. Va. Wash. Wis. a.m. p.m. Adm. Bros. co. Co. Corp. D.C. Dr. e.g. E.g. E.G. Gen. "
    "Gov. i.e. I.e. I.E. Inc. Jr. Ltd. Md. Messrs. Mo. Mont. Mr. Mrs. Ms. Ph.D. Prof. Rep. Rev. Sen. St. vs. v.s. "
    "C++ and/or w/o 's 'S 'd 're 'll 'em 'nuff 'Cause 'cause 'cos 'Cos 'coz 'Coz 'cuz 'Cuz 'bout ma'am Ma'am o'clock "
    "O'clock ol' Ol' doin' Doin' goin' Goin' nothin' Nothin' nuthin' Nuthin' somethin' Somethin' lovin' Lovin' havin' "
    "Havin' '' \\t \\n"
)


def _special_pieces() -> dict[str, tuple[str, ...]]:
    """Pieces that the rules of marks would cut wrongly -> their words: contractions, short forms, faces, hours."""
    joined: list[tuple[str, ...]] = [(piece,) for piece in f"{WHOLE} {FACES}".split()]
    joined += [(f"{letter}.",) for letter in "abcdefghijklmnopqrstuvwxyzäöü"]
    joined += [(str(hour), half) for hour in range(1, 13) for half in ("am", "pm", "a.m.", "p.m.")]
    joined += [("y'", "all"), ("not", "'ve"), ("let", "'s"), ("c'm", "on"), ("how", "'d", "'y")]
    joined += [("can", "not"), ("gon", "na"), ("got", "ta"), ("y", "all")]
    who = "you he she it we they who what when where why how there that this these those".split()
    endings: dict[str, list[str]] = {"i": ["'m", "'m a", "'ve"]}
    for word in who:
        endings[word] = ["'ll", "'ll 've", "'d", "'d 've"]
        if word in ("he", "she", "it") or word in who[6:-2]:
            endings[word].append("'s")
        if word in ("you", "we", "they") or (word in who[6:] and word not in ("that", "this")):
            endings[word] += ["'re", "'ve"]
    endings["i"] += ["'ll", "'ll 've", "'d", "'d 've"]
    negated = "ca could do does did had may might must need ought sha should wo would".split()
    for word in negated:
        endings[word] = ["n't", "n't 've"]
    for word in ("could", "might", "must", "should", "would"):
        endings[word].append("'ve")
    for word in "ai are is was were have has dare".split():
        endings[word] = ["n't"]
    joined += [(word, *ending.split()) for word, several in endings.items() for ending in several]
    pieces: dict[str, tuple[str, ...]] = {}
    for words in joined:
        title = (words[0].title(), *words[1:]) if len(words) > 1 and words[0].isalpha() else words
        for form in (words, title):
            pieces["".join(form)] = form
            if len(form) > 1 and any("'" in part for part in form):  # also without apostrophe: dont, youre
                bare = tuple(part.replace("'", "") for part in form)
                pieces.setdefault("".join(bare), bare)
    for word in ("ill", "its", "hell", "shell", "shed", "were", "well", "whore", "lets", "cmon", "howdy"):
        pieces.pop(word, None)
        pieces.pop(word.title(), None)
    curly = {piece.replace("'", "’"): tuple(w.replace("'", "’") for w in words) for piece, words in pieces.items()}
    return {**curly, **pieces}


SPECIAL = _special_pieces()


def cut(piece: str) -> tuple[str, ...]:
    """The words of a piece of text that has no white space in it, in order; joined they give the piece back."""
    if piece in SPECIAL:
        return SPECIAL[piece]
    if piece.isalpha():
        return (piece,)
    if piece[-1] in ",;!?:" or (piece[-1] == "." and piece[-2:-1].islower()):  # fast path for most other pieces
        if piece[:-1].isalpha():
            return (*SPECIAL.get(piece[:-1], (piece[:-1],)), piece[-1])
    if len(piece) > MAX_CAREFUL:
        return tuple(COARSE.findall(piece))
    return tuple(_cut_marks(piece))


def _cut_marks(piece: str) -> Iterator[str]:
    """Takes marks off both ends until none is left or what remains is special, then cuts inside."""
    tail: list[str] = []
    while piece and piece not in SPECIAL:
        start = match.end() if (match := PREFIX.match(piece)) else 0
        if start and piece[start:] in SPECIAL:
            yield piece[:start]
            piece = piece[start:]
            break
        size = match.end() - match.start() if (match := SUFFIX.search(piece[start:])) else 0
        if size and piece[:-size] in SPECIAL:
            tail.append(piece[-size:])
            piece = piece[:-size]
            break
        if start:
            yield piece[:start]
        if size:
            tail.append(piece[-size:])
        if not start and not size:
            break
        piece = piece[start : len(piece) - size]
    if piece in SPECIAL:
        yield from SPECIAL[piece]
    elif "." in piece and ADDRESS.fullmatch(piece):
        yield piece
    elif piece:
        begin = 0
        for match in INFIX.finditer(piece):
            if match.start() == 0:
                continue
            if match.start() > begin:
                yield piece[begin : match.start()]
            yield match.group()
            begin = match.end()
        if begin < len(piece):
            yield piece[begin:]
    yield from reversed(tail)


def words_of(text: str) -> list[str]:
    """All words of a text in order, marks among them."""
    return list(itertools.chain.from_iterable(map(cut, text.split())))
