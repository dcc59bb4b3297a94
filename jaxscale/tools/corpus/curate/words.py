"""Word statistics of documents as arrays, computed once for all quality filters.

Python needs 0.1 us per word and statistic. Here the pieces between two spaces that are letters or digits with marks
before and after, five of six in running text, are cut by array operations. The others ("10km", "don't",
"www.example.com") are cut by english.py and cached. Words split at whitespace, as in Gopher's paper, need arrays only.
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
from jaxscale.tools.corpus.curate.english import LOWER, MARKS, QUOTES, SIGNS, SPECIAL, cut, words_of
from jaxscale.tools.corpus.curate.hashes import MULTIPLIER, powers

BATCH_CHARS = 1 << 15  # characters handled at a time: as many as stay in a core's cache
MAX_REMEMBERED = 1 << 17  # odd pieces; about 30 MB with their tables
MAX_REMEMBERED_CHARS = 1 << 21  # of these pieces, 14 each in running text: at most 100 MB with their tables
MASK = (1 << 64) - 1
MIX = 0xBF58476D1CE4E5B9  # of a word's hash: a polynomial in MULTIPLIER, then mixed; both odd
SPACE, LETTERS, DIGITS, MARK, DOT, OTHER = range(6)  # kinds of characters
PLAIN, ALPHABETIC = 1, 1 << 20  # flags for a letter or digit, and for a letter; one sum counts both
SPACE_AFTER = re.compile(r"\s")


def hash_of(word: str) -> int:
    """Returns a stable 64-bit hash: equal words have equal hashes in every process."""
    value, power = 0, 1
    for character in word:
        value = value + ord(character) * power & MASK
        power = power * MULTIPLIER & MASK
    value = (value ^ value >> 32) * MIX & MASK
    return value ^ value >> 29


def _hashes_of(words: Sequence[str]) -> np.ndarray:
    """uint64[n]: hash_of each word."""
    codes = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), np.uint32)
    if not len(codes) or len(codes) > len(POWERS):
        return np.array([hash_of(word) for word in words], np.uint64)
    lengths = np.fromiter(map(len, words), np.intp, len(words))
    starts = lengths.cumsum() - lengths
    return _mixed(np.add.reduceat(codes * POWERS[: len(codes)], starts) * INVERSES.take(starts))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Returns the final mixing step of hash_of."""
    values = (values ^ values >> np.uint64(32)) * np.uint64(MIX)
    return values ^ values >> np.uint64(29)


def _kinds() -> np.ndarray:
    """uint8: the kind of each code point up to the last space of Unicode, and of all after it."""
    marks = set(re.sub(r"\\(.)|['’‘]", r"\1", MARKS + QUOTES)) | set("—–")  # apostrophes make odd pieces
    sign = re.compile(f"[{SIGNS}]")
    kinds = []
    for character in map(chr, range(0x3001)):
        if character.isspace():
            kinds.append(SPACE)
        elif character.isalpha():
            kinds.append(LETTERS)
        elif character in "0123456789":
            kinds.append(DIGITS)
        elif character == ".":
            kinds.append(DOT)
        else:
            kinds.append(MARK if character in marks or sign.match(character) else OTHER)
    return np.array([*kinds, OTHER], np.uint8)


def _suspects() -> np.ndarray:
    """uint8[65536]: by the first bits of the hash of letters, whether they may be special: 1 alone, 2 before a dot."""
    suspects = np.zeros(1 << 16, np.uint8)
    for piece in SPECIAL:
        if piece.isalpha():
            suspects[hash_of(piece) >> 48] |= 1
        elif piece[:-1].isalpha() and piece[-1] == ".":
            suspects[hash_of(piece[:-1]) >> 48] |= 2
    return suspects


KINDS = _kinds()
SUSPECTS = _suspects()
STRANGE = np.array([0, 1, 1, 0, 2, 2], np.uint8)  # of a kind
FACTS_OF_KIND = np.array([0, PLAIN | ALPHABETIC, PLAIN, 0, 0, 0])
ZERO = np.zeros(1, np.int64)
# characters after which a dot is a word
ENDS = np.array([*(bool(re.match(f"[0-9{LOWER}]", chr(code))) for code in range(0x500)), False])
POWERS, INVERSES = (table[: BATCH_CHARS + 64] for table in powers(BATCH_CHARS + 64))  # of MULTIPLIER


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


class _Runs(NamedTuple):
    """A text as R runs of characters of one kind, which form P pieces between spaces."""

    starts_R: np.ndarray  # in the text
    kinds_R: np.ndarray
    lengths_R: np.ndarray  # int32
    hashes_R: np.ndarray  # uint64
    firsts_P: np.ndarray  # the first run of each piece
    spaces_P: np.ndarray  # the run after each piece; the last one is the end of the text
    starts_P: np.ndarray  # in the text
    sizes_P: np.ndarray  # characters


def _runs(codes: np.ndarray) -> _Runs:
    """Returns the runs of a text that begins and ends with a space."""
    kinds = KINDS.take(codes, mode="clip")
    starts_R = 1 + np.flatnonzero((kinds[1:] != kinds[:-1]) | (kinds[1:] == MARK))  # each mark is a run
    kinds_R = kinds.take(starts_R)
    spaces_P = np.flatnonzero(kinds_R == SPACE)
    firsts_P = np.zeros_like(spaces_P)
    firsts_P[1:] = spaces_P[:-1] + 1
    starts_P, ends_P = starts_R.take(firsts_P), starts_R.take(spaces_P)
    lengths_R = np.empty(len(starts_R), np.int32)
    lengths_R[:-1] = starts_R[1:] - starts_R[:-1]
    lengths_R[-1:] = 1
    hashes_R = _mixed(np.add.reduceat(codes * POWERS[: len(codes)], starts_R) * INVERSES.take(starts_R))
    return _Runs(starts_R, kinds_R, lengths_R, hashes_R, firsts_P, spaces_P, starts_P, ends_P - starts_P)


def _is_odd(codes: np.ndarray, runs: _Runs) -> np.ndarray:
    """Returns bool[P], True for pieces that english.py has to cut, since their runs may not be their words."""
    kinds_R = runs.kinds_R
    suspects_R = SUSPECTS.take(runs.hashes_R >> np.uint64(48)) * (kinds_R == LETTERS)
    strange_R = STRANGE.take(kinds_R) + (suspects_R & 1)  # two of letters or digits, or one other: an odd piece
    dots = np.flatnonzero((kinds_R == DOT) & (runs.lengths_R == 1))
    before = np.maximum(dots - 1, 0)
    after_word = (STRANGE.take(kinds_R.take(before)) == 1) & (suspects_R.take(before) < 2)  # no dot of Mr. or U.S.
    ends_word = after_word & ENDS.take(codes.take(runs.starts_R.take(dots) - 1), mode="clip")
    strange_R[dots[ends_word]] = 0
    firsts_P, sizes_P = runs.firsts_P, runs.sizes_P
    strange_P = np.add.reduceat(strange_R, firsts_P, dtype=np.intp) if len(firsts_P) else firsts_P
    marks_P = runs.spaces_P - firsts_P - (strange_P > 0)  # in pieces that are not odd already
    return (strange_P > 1) | ((marks_P > 0) & (sizes_P > 1) & (sizes_P - marks_P < 2))  # :D and (a) may be special


def _batch(texts: Sequence[str]) -> list[TextStats]:
    """Returns statistics of each text. P pieces between spaces, R runs of characters, N words, D documents."""
    text = f" {' '.join(texts)} "
    if len(text) > len(POWERS):  # one piece that is longer than a batch
        return [_piece_by_piece(text) for text in texts]
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    runs = _runs(codes)
    odd_P, counts_P = _is_odd(codes, runs), runs.spaces_P - runs.firsts_P

    odd = np.flatnonzero(odd_P)
    odd_starts = runs.starts_P.take(odd)
    pieces = [text[a:b] for a, b in zip(odd_starts.tolist(), (odd_starts + runs.sizes_P.take(odd)).tolist())]
    memory = _memory.ready()
    rows = memory.look_up(pieces)
    odd_counts = memory.counts.take(rows)
    counts_P[odd] = odd_counts
    places = np.repeat(memory.firsts.take(rows) - odd_counts.cumsum() + odd_counts, odd_counts)
    places += np.arange(len(places))

    regular = np.flatnonzero(np.repeat(~odd_P, runs.spaces_P - runs.firsts_P + 1) & (runs.kinds_R != SPACE))
    odd_N = np.repeat(odd_P, counts_P)
    odd_so_far = odd_N.cumsum()
    order_N = np.where(odd_N, odd_so_far + (len(regular) - 1), np.arange(len(odd_N)) - odd_so_far)
    hashes, lengths, facts = (
        np.concatenate([regular_values.take(regular), odd_values.take(places)]).take(order_N)
        for regular_values, odd_values in (
            (runs.hashes_R, memory.hashes),
            (runs.lengths_R, memory.lengths),
            (FACTS_OF_KIND.take(runs.kinds_R), memory.facts),
        )
    )

    offsets = np.cumsum([1, *(len(text) + 1 for text in texts)])
    edges_D = np.searchsorted(runs.starts_P, offsets)
    edges_D = np.concatenate([ZERO, counts_P.cumsum()]).take(edges_D)
    facts += (facts & 1) * lengths << 40
    sums_D = np.diff(np.concatenate([ZERO, facts.cumsum()]).take(edges_D)).tolist()
    edges = edges_D.tolist()
    return [
        TextStats(hashes[a:b], lengths[a:b], total & 0xFFFFF, total >> 40, total >> 20 & 0xFFFFF)
        for a, b, total in zip(edges, edges[1:], sums_D)
    ]


def _spaced_batch(texts: Sequence[str]) -> list[TextStats]:
    """Returns statistics of each text, with words split at whitespace as by str.split()."""
    text = f" {' '.join(texts)} "
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    up, down = powers(len(codes))
    inside = KINDS.take(codes, mode="clip") != SPACE
    edges = 1 + np.flatnonzero(inside[1:] != inside[:-1])
    starts, lasts = edges[::2], edges[1::2] - 1
    if not len(starts):
        return [TextStats(np.zeros(0, np.uint64), np.zeros(0, np.int32), 0, 0, 0) for _ in texts]
    hashes = _mixed(np.add.reduceat(codes * up[: len(codes)] * inside, starts) * down.take(starts))
    alphabetic = np.concatenate([ZERO, np.logical_or.reduceat(letter_table().take(codes), starts).cumsum()])
    sizes = lasts - starts + 1
    lengths, ends = sizes.astype(np.int32), np.concatenate([ZERO, sizes.cumsum()])
    places = np.searchsorted(starts, np.cumsum([1, *(len(text) + 1 for text in texts)])).tolist()
    total = lambda sums, a, b: int(sums[b] - sums[a])
    return [
        TextStats(hashes[a:b], lengths[a:b], b - a, total(ends, a, b), total(alphabetic, a, b))
        for a, b in zip(places, places[1:])
    ]


@functools.cache
def letter_table() -> np.ndarray:
    """Returns bool[0x110000], str.isalpha of each code point. Cached per process; takes about 0.1 s."""
    return np.fromiter((chr(point).isalpha() for point in range(0x110000)), bool, 0x110000)


def _piece_by_piece(text: str) -> TextStats:
    words = words_of(text)
    hashes = np.array([hash_of(word) for word in words], np.uint64)
    lengths = np.array([len(word) for word in words], np.int32)
    facts = np.array([_facts(word) for word in words], np.int64)
    plain = facts & PLAIN
    return TextStats(hashes, lengths, int(plain.sum()), int((plain * lengths).sum()), int((facts // ALPHABETIC).sum()))


def _facts(word: str) -> int:
    if word.isalpha() or any(map(str.isalpha, word)):
        return PLAIN | ALPHABETIC
    return PLAIN if any(map(str.isalnum, word)) else 0


class _Memory:
    """Cache of odd pieces and their words, in tables. It never changes the result of block_stats."""

    def __init__(self):
        self.lock = threading.Lock()
        self.rows: dict[str, int] = {}  # of pieces
        self.firsts, self.counts = np.zeros(1 << 12, np.int64), np.zeros(1 << 12, np.int64)  # of a piece, in its words
        self.used = self.characters = 0  # words and characters of all pieces
        self.hashes = np.zeros(1 << 13, np.uint64)  # of all words of all pieces, one after another
        self.lengths = np.zeros(1 << 13, np.int32)
        self.facts = np.zeros(1 << 13, np.int64)

    def look_up(self, pieces: Sequence[str]) -> np.ndarray:
        """Returns the rows of the pieces, adding those that are new."""
        with self.lock:
            if new := [piece for piece in dict.fromkeys(pieces) if piece not in self.rows]:
                self._enter(new)
            return np.fromiter(map(self.rows.__getitem__, pieces), np.intp, len(pieces))

    def _enter(self, pieces: Sequence[str]) -> None:
        cuts = [cut(piece) for piece in pieces]
        words = list(itertools.chain.from_iterable(cuts))
        row, counts = len(self.rows), np.fromiter(map(len, cuts), np.int64, len(cuts))
        first, last = self.used, self.used + len(words)
        if row + len(cuts) > len(self.firsts):
            self.firsts, self.counts = (_longer(table, row + len(cuts)) for table in (self.firsts, self.counts))
        if last > len(self.hashes):
            tables = (self.hashes, self.lengths, self.facts)
            self.hashes, self.lengths, self.facts = (_longer(table, last) for table in tables)
        self.hashes[first:last] = _hashes_of(words)
        self.lengths[first:last] = np.fromiter(map(len, words), np.int32, len(words))
        self.facts[first:last] = np.fromiter(map(_facts, words), np.int64, len(words))
        self.counts[row : row + len(cuts)] = counts
        self.firsts[row : row + len(cuts)] = first + counts.cumsum() - counts
        self.rows.update(zip(pieces, range(row, row + len(cuts))))
        self.used, self.characters = last, self.characters + sum(map(len, pieces))

    def ready(self) -> "_Memory":
        """Returns this memory, or replaces it by a new one if it is full."""
        global _memory
        if len(self.rows) > MAX_REMEMBERED or self.characters > MAX_REMEMBERED_CHARS:
            _memory = _Memory()
        return _memory


def _longer(table: np.ndarray, least: int) -> np.ndarray:
    larger = np.zeros(max(2 * len(table), least), table.dtype)
    larger[: len(table)] = table
    return larger


_memory = _Memory()
