"""Hashes of words, word n-grams, lines and texts for deduplication, the same on every machine.

A run of characters c_0 c_1 ... hashes to mix64(sum V[c_i] * M^i mod 2^64): a polynomial hash (Karp and Rabin, 1987),
because all runs of a text can then be hashed at once by array operations. It is not secure against deliberate
collisions. Letters are those of Python's version of Unicode, so a character may hash differently under a newer Python.
"""

import functools
import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.runtime.data.permutation import mix64
from jaxscale.runtime.text.document import Document

MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so it has an inverse mod 2^64; the golden ratio's bits, as in SplitMix64
INVERSE = pow(MULTIPLIER, -1, 1 << 64)
PIECE = 1 << 20  # a longer text is hashed in pieces of about this many characters, so that memory stays bounded
WHITESPACE = b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"
NO_BREAK_SPACE, IDEOGRAPHIC_SPACE = "\xa0".encode(), "\u3000".encode()
SPACE = re.compile(r"[ \n]")
HASHED_TOGETHER = 1 << 16  # characters of several texts whose words are hashed at once
TOGETHER = 1 << 14  # words that are hashed into n-grams at once: the arrays stay in the cache
LOWER = bytes(range(256)).lower()


class Sketch(NamedTuple):
    """Join keys of a block of documents: items with equal keys may be duplicates of each other."""

    keys: np.ndarray  # uint64[m]
    places: np.ndarray  # int64[m]: index of the document in the block, or of the line among all its lines
    signatures: np.ndarray | None = None  # uint32[documents, permutations], if candidates are verified


def word_hashes(text: str) -> np.ndarray:
    """Returns uint64[n], a hash of each lower-cased word. A word is a maximal run of letters, numbers and marks.

    Those are the Unicode categories L, N and M. A word's hash does not depend on its surroundings. Lower-casing is
    Unicode's simple mapping of single characters, and both forms of the small sigma are equal.
    """
    return np.concatenate([runs_and_starts(piece)[0] for piece in pieces(text)])


def word_hashes_of(texts: Sequence[str]) -> list[np.ndarray]:
    """Returns word_hashes of each text; several times faster for short texts, since array operations span many."""
    rows: list[np.ndarray] = []
    for part in groups([len(text) + 1 for text in texts], HASHED_TOGETHER):
        group = texts[part]
        sizes = [len(text) + 1 for text in group]
        if len(group) == 1 or sum(sizes) > PIECE:
            rows += map(word_hashes, group)
        else:
            hashes, starts = runs_and_starts("\n".join(group))  # a newline is in no word
            rows += np.split(hashes, starts.searchsorted(np.cumsum(sizes))[:-1])
    return rows


def groups(sizes: Sequence[int], least: int) -> Iterator[slice]:
    """Yields slices of consecutive items, each as short as its sizes sum to `least`, the last one shorter."""
    begin, total = 0, 0
    for end, size in enumerate(sizes, 1):
        total += size
        if total >= least or end == len(sizes):
            yield slice(begin, end)
            begin, total = end, 0


def hash_words(documents: Sequence[Document]) -> list[np.ndarray]:
    """Returns word_hashes of each document, computed together and cached on the document."""
    unknown = [document for document in documents if "words" not in document.computed]
    for document, words in zip(unknown, word_hashes_of([document.text for document in unknown])):
        document.computed["words"] = words
    return [document.computed["words"] for document in documents]


def runs_and_starts(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (uint64[n] hashes, int64[n] start positions in the text) of its words."""
    values = word_values(text)
    inside = values != 0
    starts = (inside[1:] > inside[:-1]).nonzero()[0]
    starts += 1
    if inside.size and inside[0]:
        starts = np.concatenate([[0], starts])
    if not len(starts):
        return np.zeros(0, np.uint64), starts
    up, down = powers(len(values))
    sums = values * up[: len(values)]
    sums = np.add.accumulate(sums, out=sums)  # zeros between the words add nothing
    sums = np.append(sums.take(starts[1:] - 1), sums[-1:])  # faster than reduceat, as words are short
    sums[1:] -= sums[:-1]
    return mix64(sums * down.take(starts)), starts


def word_spans(text: str) -> np.ndarray:
    """Returns int64[n, 2], start and end of each word of word_hashes(text), in characters."""
    begin, spans = 0, []
    for piece in pieces(text):
        inside = np.concatenate([[0], (word_values(piece) != 0).view(np.int8), [0]])
        spans.append(np.flatnonzero(np.diff(inside)).reshape(-1, 2) + begin)
        begin += len(piece)
    return np.concatenate(spans)


def word_values(text: str) -> np.ndarray:
    """Returns uint64[characters], the value of each character in a word, 0 for others."""
    if text.isascii():
        return ASCII_VALUES.take(np.frombuffer(text.encode("ascii"), np.uint8))
    return character_values().take(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32))


def ngram_hashes(hashes: np.ndarray, n: int) -> np.ndarray:
    """Returns uint64[max(0, len - n + 1)], a hash of each n adjacent words, from the hashes of the words."""
    assert n > 0, n
    count = len(hashes) - n + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    if n == 1:
        return mix64(hashes)
    up, down = powers(len(hashes))
    sums = np.cumsum(hashes * up[: len(hashes)])
    sums[n:] -= sums[:-n]
    return mix64(sums[n - 1 :] * down[:count])


def ngram_table(rows: Sequence[np.ndarray], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (uint64[sum of counts], int64[rows] counts): concatenated ngram_hashes of many rows."""
    groups = [np.zeros(0, np.uint64), *(hashes for _, hashes in ngram_groups(rows, n))]
    return np.concatenate(groups), np.array([max(0, len(row) - n + 1) for row in rows], np.int64)


def ngram_groups(rows: Sequence[np.ndarray], n: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields (slice of rows, uint64[k] their ngram_hashes); short rows are hashed together, several times faster."""
    for part in groups([len(row) for row in rows], TOGETHER):
        flat = np.concatenate(rows[part])
        ends = np.cumsum([len(row) for row in rows[part]])
        whole = np.ones(len(flat), bool)
        across = (ends[:, None] - np.arange(1, n)).ravel()  # start of an n-gram that would span two rows
        whole[across[across >= 0]] = False
        hashes = ngram_hashes(flat, n)
        yield part, hashes[whole[: len(hashes)]]


def text_hash(text: str, *, lower: bool = False) -> int:
    """Returns a 128-bit hash (BLAKE2b) of the text without whitespace, optionally lower-cased."""
    return int.from_bytes(hashlib.blake2b(without_whitespace(text, lower), digest_size=16).digest(), "little")


def without_whitespace(text: str, lower: bool) -> bytes:
    """Returns the UTF-8 text without ASCII whitespace, no-break and ideographic spaces: line breaks may differ."""
    if text.isascii():
        return text.encode("ascii").translate(LOWER if lower else None, WHITESPACE)
    data = (text.lower() if lower else text).encode("utf-8", "surrogatepass").translate(None, WHITESPACE)
    return data.replace(NO_BREAK_SPACE, b"").replace(IDEOGRAPHIC_SPACE, b"")


def line_hashes(text: str, min_characters: int, *, lower: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Returns (uint64[k], int64[k]): hashes and numbers of lines with at least this many characters but whitespace."""
    hashes, places = [], []
    for place, line in enumerate(text.split("\n")):
        if len(line) < min_characters:
            continue
        packed = without_whitespace(line, lower)
        characters = len(packed) if line.isascii() else len(packed.decode("utf-8", "surrogatepass"))
        if characters >= min_characters:
            hashes.append(hashlib.blake2b(packed, digest_size=8).digest())
            places.append(place)
    return np.frombuffer(b"".join(hashes), "<u8").astype(np.uint64), np.array(places, np.int64)


MAX_CACHED_BITS = 20  # of tables of powers that are kept: 16 MB for both


def powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (M^i, M^-i) mod 2^64 for i in 0 ... at least count - 1."""
    bits = max(12, (count - 1).bit_length())
    return cached_power_tables(bits) if bits <= MAX_CACHED_BITS else power_tables(bits)


def power_tables(bits: int) -> tuple[np.ndarray, np.ndarray]:
    tables = []
    for base in (MULTIPLIER, INVERSE):
        table = np.ones(1, np.uint64)
        for bit in range(bits):
            table = np.concatenate([table, table * np.uint64(pow(base, 1 << bit, 1 << 64))])
        table.flags.writeable = False
        tables.append(table)
    return tables[0], tables[1]


cached_power_tables = functools.cache(power_tables)


def letter_values(points: range) -> np.ndarray:
    """Returns uint64[len(points)], a hash of a letter's, number's or mark's lower-cased form, 0 for others."""
    is_in_word = lambda point: unicodedata.category(chr(point))[0] in "LNM"
    lower = lambda point: ord(chr(point).lower()[0])  # only the dotted I becomes two characters
    lowered = np.array([lower(point) if is_in_word(point) else -1 for point in points], np.int64)
    lowered[lowered == 0x3C2] = 0x3C3  # the final sigma
    hashes = mix64((lowered.astype(np.uint64) + np.uint64(1)) * np.uint64(MULTIPLIER))
    return np.where(lowered < 0, np.uint64(0), hashes)


@functools.cache
def character_values() -> np.ndarray:
    """Returns uint64[0x110000], 9 MB: letter_values of all of Unicode. Cached per process; takes about 0.2 s."""
    values = np.zeros(0x110000, np.uint64)
    for begin, end in ((0, 0x40000), (0xE0000, 0xE0200)):  # beyond, Unicode 17 has no letter, number or mark
        values[begin:end] = letter_values(range(begin, end))
    return values


def pieces(text: str) -> list[str]:
    """Returns the text cut at spaces or newlines into pieces of at least PIECE characters, never inside a word."""
    cut, begin = [], 0
    while match := SPACE.search(text, begin + PIECE):
        cut.append(text[begin : match.start()])
        begin = match.start()
    return [*cut, text[begin:]]


ASCII_VALUES = letter_values(range(128))
