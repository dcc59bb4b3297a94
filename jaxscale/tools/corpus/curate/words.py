"""English words, and their statistics as arrays, computed once for all quality filters.

The rules of Gopher, C4 and FineWeb were published with datatrove, whose English words are spaCy's: "don't" is do + n't,
"state-of-the-art" seven tokens, "(yes)." four. The same split is made here from the rules that spaCy documents
(https://spacy.io/usage/linguistic-features#how-tokenizer-works): cut at white space, take marks off both ends, then cut
inside.

Python needs 0.1 us per word and statistic. Here the pieces between two spaces are hashed by array operations, and their
words are looked up in tables. Words split at whitespace, as in Gopher's paper, need no table.
"""

import dataclasses
import functools
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.config import WordKind
from jaxscale.tools.corpus.curate.hashes import powers

BATCH_CHARS = 1 << 15  # characters handled at a time: as many as stay in a core's cache
SLOT_BITS = 18  # of the table of pieces by their hashes: 4 MB
MAX_REMEMBERED = 1 << 21  # words of pieces; 40 MB with their tables
MIX = 0xBF58476D1CE4E5B9  # of a word's hash: a polynomial in MULTIPLIER, then mixed; both odd
PLAIN, ALPHABETIC = 1, 2  # flags for a letter or digit, and for a letter
SPACE_AFTER = re.compile(r"\s")
ZERO = np.zeros(1, np.int64)
IS_SPACE = np.array([chr(code).isspace() for code in range(0x3002)])  # up to the last space of Unicode, and one more
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


def hash_of(word: str) -> int:
    """Returns a stable 64-bit hash: equal words have equal hashes in every process."""
    return int(_hashes_of([word])[0]) if word else 0


def _hashes_of(words: Sequence[str]) -> np.ndarray:
    """uint64[n]: hash_of each word."""
    lengths = np.fromiter(map(len, words), np.intp, len(words))
    return _run_hashes(_values("".join(words)), lengths.cumsum() - lengths)


def _values(text: str) -> np.ndarray:
    """uint32[characters]: code points plus 1, so that runs of NUL differ in their hashes."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32) + np.uint32(1)


def _run_hashes(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """uint64[n]: hashes of the runs of characters that begin at `starts`; zeros after a run do not change its hash."""
    up, down = powers(len(values))
    hashes = np.add.reduceat(values * up[: len(values)], starts) * down.take(starts)
    hashes = (hashes ^ hashes >> np.uint64(32)) * np.uint64(MIX)
    return hashes ^ hashes >> np.uint64(29)


@dataclasses.dataclass(frozen=True)
class TextStats:
    """Word statistics for the filter rules; of words_of, where each mark is a word, or of words split at whitespace."""

    hashes: np.ndarray  # uint64[n]: of each word, see hash_of
    lengths: np.ndarray  # int32[n]: characters
    plain: int  # words with a letter or a digit; all words if split at whitespace
    plain_chars: int  # characters of plain words
    alphabetic: int  # words with a letter

    @property
    def total(self) -> int:
        """Number of words, marks included."""
        return len(self.hashes)

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """int64[n + 1]: cumulative characters of the words."""
        return np.concatenate([ZERO, self.lengths.cumsum(dtype=np.int64)])


def stats_of(documents: Sequence[Document], words: WordKind = "spacy") -> list[TextStats]:
    """Returns the statistics of each document, cached on it; several times faster for many documents at once."""
    name = f"{words} words"
    new = [document for document in documents if name not in document.computed]
    for document, stats in zip(new, block_stats([document.text for document in new], words)):
        document.computed[name] = stats
    return [document.computed[name] for document in documents]


def block_stats(texts: Sequence[str], words: WordKind = "spacy") -> list[TextStats]:
    """Returns the statistics of each text; short texts are batched, since an array call costs as much as 500 words."""
    count: Callable[[Sequence[str]], list[TextStats]] = _batch if words == "spacy" else _spaced_batch
    stats: list[TextStats] = []
    waiting: list[str] = []
    size = 0
    for text in texts:
        if waiting and size + len(text) > BATCH_CHARS:
            stats += count(waiting)
            waiting, size = [], 0
        if len(text) > BATCH_CHARS:
            stats.append(_joined([count([part])[0] for part in _parts(text)]))
        else:
            waiting.append(text)
            size += len(text) + 1
    return stats + (count(waiting) if waiting else [])


def _parts(text: str) -> Iterator[str]:
    """Yields the text cut at whitespace into parts of about half a batch; longer ones only without whitespace."""
    begin = 0
    while begin < len(text):
        space = SPACE_AFTER.search(text, begin + BATCH_CHARS // 2)
        end = space.end() if space else len(text)
        yield text[begin:end]
        begin = end


def _joined(parts: Sequence[TextStats]) -> TextStats:
    return TextStats(
        np.concatenate([part.hashes for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        *(sum(getattr(part, name) for part in parts) for name in ("plain", "plain_chars", "alphabetic")),
    )


class _Pieces(NamedTuple):
    """The pieces between spaces of D texts, joined by spaces."""

    text: str
    values: np.ndarray  # uint32[characters]
    starts_P: np.ndarray
    sizes_P: np.ndarray  # characters
    hashes_P: np.ndarray
    edges_D: np.ndarray  # int64[D + 1]: number of pieces before each text


def _split(texts: Sequence[str]) -> _Pieces:
    """Returns the pieces of str.split()."""
    text = f" {' '.join(texts)} "
    values = _values(text)
    inside = ~IS_SPACE.take(values - 1, mode="clip")
    edges = 1 + np.flatnonzero(inside[1:] != inside[:-1])
    starts_P = edges[::2]
    edges_D = np.searchsorted(starts_P, np.cumsum([1, *(len(text) + 1 for text in texts)]))
    return _Pieces(text, values, starts_P, edges[1::2] - starts_P, _run_hashes(values * inside, starts_P), edges_D)


def _batch(texts: Sequence[str]) -> list[TextStats]:
    """Returns statistics of each text. P pieces between spaces, N words, D documents."""
    pieces, memory = _split(texts), _memory.ready()
    rows_P = memory.look_up(pieces)
    counts_P = memory.counts.take(rows_P)
    ends_P = counts_P.cumsum()
    places_N = np.repeat(memory.firsts.take(rows_P) - ends_P + counts_P, counts_P)
    places_N += np.arange(len(places_N))
    hashes, lengths, facts = (table.take(places_N) for table in (memory.hashes, memory.lengths, memory.facts))
    plain = facts & PLAIN
    edges_D = np.concatenate([ZERO, ends_P]).take(pieces.edges_D)
    return _cut_stats(hashes, lengths, edges_D, (plain, plain * lengths, facts // ALPHABETIC))


def _spaced_batch(texts: Sequence[str]) -> list[TextStats]:
    """Returns statistics of each text, with words split at whitespace as by str.split()."""
    _, values, starts, sizes, hashes, edges_D = _split(texts)
    has_letter = np.logical_or.reduceat(letter_table().take(values - 1), starts)
    return _cut_stats(hashes, sizes.astype(np.int32), edges_D, (np.ones_like(sizes), sizes, has_letter))


def _cut_stats(
    hashes: np.ndarray, lengths: np.ndarray, edges_D: np.ndarray, numbers: Sequence[np.ndarray]
) -> list[TextStats]:
    """Returns statistics of each text. numbers: of each word, for the sums `plain`, `plain_chars` and `alphabetic`."""
    sums = (np.concatenate([ZERO, number.cumsum(dtype=np.int64)]) for number in numbers)
    totals = zip(*(np.diff(total.take(edges_D)).tolist() for total in sums))
    edges = edges_D.tolist()
    return [TextStats(hashes[a:b], lengths[a:b], *total) for a, b, total in zip(edges, edges[1:], totals)]


@functools.cache
def letter_table() -> np.ndarray:
    """Returns bool[0x110000], str.isalpha of each code point. Cached per process; takes about 0.1 s."""
    return np.fromiter((chr(point).isalpha() for point in range(0x110000)), bool, 0x110000)


def _facts(word: str) -> int:
    if word.isalpha() or any(map(str.isalpha, word)):
        return PLAIN | ALPHABETIC
    return PLAIN if any(map(str.isalnum, word)) else 0


class _Memory:
    """Cache of pieces and their words, in tables. Results differ only between pieces with equal 64-bit hashes."""

    def __init__(self):
        self.lock = threading.Lock()
        self.keys = np.zeros(1 << SLOT_BITS, np.uint64)  # hash of the last piece with these upper bits
        self.rows = np.zeros(1 << SLOT_BITS, np.intp)  # of these pieces
        self.used_rows = self.used = 0  # pieces, and words of all pieces
        self.firsts, self.counts = np.zeros(1 << 12, np.intp), np.zeros(1 << 12, np.intp)  # of a piece, in its words
        self.hashes = np.zeros(1 << 13, np.uint64)  # of all words of all pieces, one after another
        self.lengths = np.zeros(1 << 13, np.int32)
        self.facts = np.zeros(1 << 13, np.uint8)

    def look_up(self, pieces: _Pieces) -> np.ndarray:
        """Returns the rows of the pieces, adding those that are new."""
        slots = (pieces.hashes_P >> np.uint64(64 - SLOT_BITS)).view(np.int64)
        with self.lock:
            rows = self.rows.take(slots)
            unknown = np.flatnonzero(self.keys.take(slots) != pieces.hashes_P)
            if len(unknown):
                keys, slots = pieces.hashes_P[unknown], slots[unknown]
                _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
                spans = zip(pieces.starts_P[unknown[first]].tolist(), pieces.sizes_P[unknown[first]].tolist())
                rows[unknown] = self.used_rows + inverse
                self._enter([cut(pieces.text[start : start + size]) for start, size in spans])
                self.keys[slots], self.rows[slots] = keys, rows[unknown]
            return rows

    def _enter(self, cuts: Sequence[Sequence[str]]) -> None:
        words = list(itertools.chain.from_iterable(cuts))
        counts = np.fromiter(map(len, cuts), np.intp, len(cuts))
        self._put("counts", self.used_rows, counts)
        self._put("firsts", self.used_rows, self.used + counts.cumsum() - counts)
        self._put("hashes", self.used, _hashes_of(words))
        self._put("lengths", self.used, np.fromiter(map(len, words), np.int32, len(words)))
        self._put("facts", self.used, np.fromiter(map(_facts, words), np.uint8, len(words)))
        self.used_rows, self.used = self.used_rows + len(cuts), self.used + len(words)

    def _put(self, name: str, place: int, values: np.ndarray) -> None:
        """Writes values at a place of a table, which doubles when it is full."""
        table, end = getattr(self, name), place + len(values)
        if end > len(table):
            table = np.concatenate([table, np.zeros(max(end, 2 * len(table)) - len(table), table.dtype)])
            setattr(self, name, table)
        table[place:end] = values

    def ready(self) -> "_Memory":
        """Returns this memory, or replaces it by a new one if it is full."""
        global _memory
        if self.used > MAX_REMEMBERED:
            _memory = _Memory()
        return _memory


_memory = _Memory()
