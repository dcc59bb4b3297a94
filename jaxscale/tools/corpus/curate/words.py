"""Splits English text into words and computes word statistics as arrays, shared by all quality filters.

The rules of Gopher, C4 and FineWeb were published with datatrove, which uses spaCy's words: "don't" is do + n't,
"state-of-the-art" is seven tokens, "(yes)." is four. This module makes the same split from the rules that spaCy
documents (https://spacy.io/usage/linguistic-features#how-tokenizer-works): split at whitespace, strip punctuation marks
from both ends, then split inside.

Python needs 0.1 us per word and statistic. For speed, the pieces between whitespace are hashed by array operations and
their words are looked up in tables. Words split at whitespace, as in Gopher's paper, need no table.
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

BATCH_CHARS = 1 << 15  # characters per batch, so that a batch fits in a core's cache
SLOT_BITS = 18  # log2 of the number of slots in the piece table (4 MB)
MAX_REMEMBERED = 1 << 21  # maximum number of cached words; 40 MB with their tables
MIX = 0xBF58476D1CE4E5B9  # odd multiplier that mixes the polynomial hash of a word
PLAIN, ALPHABETIC = 1, 2  # flags of a word: has a letter or digit; has a letter
SPACE_AFTER = re.compile(r"\s")
ZERO = np.zeros(1, np.int64)
IS_SPACE = np.array([chr(code).isspace() for code in range(0x3002)])  # up to the code point after Unicode's last space
MAX_CAREFUL = 1000  # maximum length, in characters, of a piece that is split by the rules; longer ones are not words

LOWER, UPPER = "a-zß-öø-ÿа-яё", "A-ZÀ-ÖØ-ÞА-ЯЁ"
LETTER = r"[^\W\d_]"
MARKS = r"…,:;!?¿؟¡()\[\]{}<>_#*&。？！，、；：～·।،۔؛٪"
QUOTES = "'\"”“`‘´’‚„»«「」『』（）〔〕【】《》〈〉⟦⟧"
MONEY = "$£€¥฿₠-₿﷼"
# characters of the general category So (Symbol, other) that are common in running text
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
ADDRESS = re.compile(  # URL, host name or e-mail address, which is one word
    rf"(?:[\w+\-.]{{2,}}://)?(?:\S+@)?(?:(?:\d{{1,3}}\.){{3}}\d{{1,3}}|(?:[A-Za-z0-9¡-\uffff][A-Za-z0-9¡-\uffff_-]{{0,63}}\.)+"
    rf"[{LOWER}]{{2,63}})(?::\d{{2,5}})?(?:[/?#]\S*)?"
)
COARSE = re.compile(r"\w+|[^\w\s]")
FACES = (
    ":) :-) :)) :-)) :))) :-))) (: (-: =) (= :] :-] [: [-: [= =] :o) (o: :} :-} 8) 8-) (-8 ;) ;-) (; (-; :( :-( :(( "
    ":-(( :((( :-((( ): )-: =( >:( :') :'-) :'( :'-( :/ :-/ =/ =| :| :-| ]= =[ :1 :P :-P :p :-p :O :-O :o :-o :0 :-0 "
    ":() >:o :* :-* :3 :-3 =3 >: :-> :X :-X :x :-x :D :-D ;D ;-D =D ^_^ -_- >.< o_O O_o <3 <33 </3"
)
# abbreviations and other pieces that are not split at their marks
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
    """Returns {piece: words} for pieces that the rules would split wrongly: contractions, abbreviations, emoticons."""
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
    """Splits a piece of text without whitespace into words. The concatenated words equal the piece."""
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
    """Yields the words of a piece. Splits off punctuation at both ends, then splits the rest if not in SPECIAL."""
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
    """Returns all words of a text in order, including punctuation marks."""
    return list(itertools.chain.from_iterable(map(cut, text.split())))


def hash_of(word: str) -> int:
    """Returns a 64-bit hash of a word that is the same in every process."""
    return int(_hashes_of([word])[0]) if word else 0


def _hashes_of(words: Sequence[str]) -> np.ndarray:
    """Returns uint64[n], the hash_of each word."""
    lengths = np.fromiter(map(len, words), np.intp, len(words))
    return _run_hashes(_values("".join(words)), lengths.cumsum() - lengths)


def _values(text: str) -> np.ndarray:
    """Returns uint32[characters], code point + 1. With 0 for NUL, runs of NUL of any length would have equal hashes."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32) + np.uint32(1)


def _run_hashes(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns uint64[n], hashes of the runs of characters that begin at `starts`. Zeros after a run are ignored."""
    up, down = powers(len(values))
    hashes = np.add.reduceat(values * up[: len(values)], starts) * down.take(starts)
    hashes = (hashes ^ hashes >> np.uint64(32)) * np.uint64(MIX)
    return hashes ^ hashes >> np.uint64(29)


@dataclasses.dataclass(frozen=True)
class TextStats:
    """Word statistics of a text. The words are spaCy's, which include punctuation marks, or are split at whitespace."""

    hashes: np.ndarray  # uint64[n]: hash_of each word
    lengths: np.ndarray  # int32[n]: characters
    plain: int  # words with a letter or a digit; all words if split at whitespace
    plain_chars: int  # characters of plain words
    alphabetic: int  # words with a letter

    @property
    def total(self) -> int:
        """Number of words, including marks."""
        return len(self.hashes)

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """int64[n + 1]: cumulative number of characters of the words."""
        return np.concatenate([ZERO, self.lengths.cumsum(dtype=np.int64)])


def stats_of(documents: Sequence[Document], words: WordKind = "spacy") -> list[TextStats]:
    """Returns the statistics of each document, cached on the document. One call for many documents is much faster."""
    name = f"{words} words"
    new = [document for document in documents if name not in document.computed]
    for document, stats in zip(new, block_stats([document.text for document in new], words)):
        document.computed[name] = stats
    return [document.computed[name] for document in documents]


def block_stats(texts: Sequence[str], words: WordKind = "spacy") -> list[TextStats]:
    """Returns the statistics of each text. Batches short texts, since a batch has a fixed cost of about 500 words."""
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
    """Splits a text at whitespace into parts of about BATCH_CHARS / 2 characters, or more without whitespace."""
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
    """Pieces between whitespace of D texts that are joined by spaces."""

    text: str
    values: np.ndarray  # uint32[characters]
    starts_P: np.ndarray
    sizes_P: np.ndarray  # characters
    hashes_P: np.ndarray
    edges_D: np.ndarray  # int64[D + 1]: number of pieces before each text


def _split(texts: Sequence[str]) -> _Pieces:
    """Returns the pieces of the texts as split by str.split()."""
    text = f" {' '.join(texts)} "
    values = _values(text)
    inside = ~IS_SPACE.take(values - 1, mode="clip")
    edges = 1 + np.flatnonzero(inside[1:] != inside[:-1])
    starts_P = edges[::2]
    edges_D = np.searchsorted(starts_P, np.cumsum([1, *(len(text) + 1 for text in texts)]))
    return _Pieces(text, values, starts_P, edges[1::2] - starts_P, _run_hashes(values * inside, starts_P), edges_D)


def _batch(texts: Sequence[str]) -> list[TextStats]:
    """Returns the statistics of each text. Axes: P pieces between whitespace, N words, D documents."""
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
    """Returns the statistics of each text, with words split by str.split()."""
    _, values, starts, sizes, hashes, edges_D = _split(texts)
    has_letter = np.logical_or.reduceat(letter_table().take(values - 1), starts)
    return _cut_stats(hashes, sizes.astype(np.int32), edges_D, (np.ones_like(sizes), sizes, has_letter))


def _cut_stats(
    hashes: np.ndarray, lengths: np.ndarray, edges_D: np.ndarray, numbers: Sequence[np.ndarray]
) -> list[TextStats]:
    """Splits the words of all texts into TextStats. numbers: values per word; their sums are the last three fields."""
    sums = (np.concatenate([ZERO, number.cumsum(dtype=np.int64)]) for number in numbers)
    totals = zip(*(np.diff(total.take(edges_D)).tolist() for total in sums))
    edges = edges_D.tolist()
    return [TextStats(hashes[a:b], lengths[a:b], *total) for a, b, total in zip(edges, edges[1:], totals)]


@functools.cache
def letter_table() -> np.ndarray:
    """Returns bool[0x110000], str.isalpha() of each code point. The first call takes about 0.1 s."""
    return np.fromiter((chr(point).isalpha() for point in range(0x110000)), bool, 0x110000)


def _facts(word: str) -> int:
    if word.isalpha() or any(map(str.isalpha, word)):
        return PLAIN | ALPHABETIC
    return PLAIN if any(map(str.isalnum, word)) else 0


class _Memory:
    """Cache of the words of each piece, stored in arrays. Pieces with equal 64-bit hashes share an entry."""

    def __init__(self):
        self.lock = threading.Lock()
        self.keys = np.zeros(1 << SLOT_BITS, np.uint64)  # hash of the last piece in each slot
        self.rows = np.zeros(1 << SLOT_BITS, np.intp)  # index of that piece
        self.used_rows = self.used = 0  # number of pieces, and of their words
        self.firsts, self.counts = np.zeros(1 << 12, np.intp), np.zeros(1 << 12, np.intp)  # words of each piece
        self.hashes = np.zeros(1 << 13, np.uint64)  # words of all pieces, concatenated
        self.lengths = np.zeros(1 << 13, np.int32)
        self.facts = np.zeros(1 << 13, np.uint8)

    def look_up(self, pieces: _Pieces) -> np.ndarray:
        """Returns the indices of the pieces. Adds new pieces."""
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
        """Writes values to a table from index `place` on. Doubles the table if it is full."""
        table, end = getattr(self, name), place + len(values)
        if end > len(table):
            table = np.concatenate([table, np.zeros(max(end, 2 * len(table)) - len(table), table.dtype)])
            setattr(self, name, table)
        table[place:end] = values

    def ready(self) -> "_Memory":
        """Returns this cache, or a new empty cache that replaces it if it is full."""
        global _memory
        if self.used > MAX_REMEMBERED:
            _memory = _Memory()
        return _memory


_memory = _Memory()
