"""Hashes of words, word n-grams, lines and texts for deduplication, identical on every machine.

A run of characters c_0 c_1 ... has the polynomial hash mix64(sum V[c_i] * M^i mod 2^64) (Karp and Rabin, 1987), because
array operations can hash all runs of a text at once. It is not secure against deliberate collisions. Letters are
defined by Python's version of Unicode, so hashes of some characters may differ under a newer Python.
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

MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so invertible mod 2^64; bits of the golden ratio, as in SplitMix64
INVERSE = pow(MULTIPLIER, -1, 1 << 64)
PIECE = 1 << 20  # longer texts are hashed in pieces of about this many characters, to bound memory
WHITESPACE = b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"
NO_BREAK_SPACE, IDEOGRAPHIC_SPACE = "\xa0".encode(), "\u3000".encode()
SPACE = re.compile(r"[ \n]")
HASHED_TOGETHER = 1 << 16  # words of short texts are hashed in groups of about this many characters
TOGETHER = 1 << 14  # n-grams are hashed in groups of about this many words, so that the arrays fit in cache
LOWER = bytes(range(256)).lower()


class Sketch(NamedTuple):
    """Hash keys of a block's documents or lines. Equal keys mark duplicates, or candidates for near duplicates."""

    keys: np.ndarray  # uint64[m]
    places: np.ndarray  # int64[m]: index of the document in the block, or index of the line among the block's lines
    signatures: np.ndarray | None = None  # uint32[documents, permutations], for joins that verify candidates


def word_hashes(text: str) -> np.ndarray:
    """Returns uint64[n], a hash of each lower-cased word of a text.

    A word is a maximal run of Unicode letters (L), numbers (N) and marks (M). Its hash does not depend on the text
    around it. Characters are lower-cased one by one, and the two forms of the small sigma have equal values.
    """
    return np.concatenate([runs_and_starts(piece)[0] for piece in pieces(text)])


def word_hashes_of(texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the word hashes of each text. Concatenates short texts, which is several times faster."""
    rows: list[np.ndarray] = []
    for part in groups([len(text) + 1 for text in texts], HASHED_TOGETHER):
        group = texts[part]
        sizes = [len(text) + 1 for text in group]
        if len(group) == 1 or sum(sizes) > PIECE:
            rows += map(word_hashes, group)
        else:
            hashes, starts = runs_and_starts("\n".join(group))  # no word contains a newline
            rows += np.split(hashes, starts.searchsorted(np.cumsum(sizes))[:-1])
    return rows


def groups(sizes: Sequence[int], least: int) -> Iterator[slice]:
    """Yields slices of consecutive items. Each slice ends as soon as its total size reaches `least`."""
    begin, total = 0, 0
    for end, size in enumerate(sizes, 1):
        total += size
        if total >= least or end == len(sizes):
            yield slice(begin, end)
            begin, total = end, 0


def hash_words(documents: Sequence[Document]) -> list[np.ndarray]:
    """Returns word_hashes of each document and caches them on the document."""
    unknown = [document for document in documents if "words" not in document.computed]
    for document, words in zip(unknown, word_hashes_of([document.text for document in unknown])):
        document.computed["words"] = words
    return [document.computed["words"] for document in documents]


def runs_and_starts(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (uint64[n] hashes, int64[n] start positions) of the words of a text."""
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
    sums = np.add.accumulate(sums, out=sums)  # characters between words are zero
    sums = np.append(sums.take(starts[1:] - 1), sums[-1:])  # faster than reduceat for short words
    sums[1:] -= sums[:-1]
    return mix64(sums * down.take(starts)), starts


def word_spans(text: str) -> np.ndarray:
    """Returns int64[n, 2], the character offsets of the start and end of each word, as in word_hashes(text)."""
    begin, spans = 0, []
    for piece in pieces(text):
        inside = np.concatenate([[0], (word_values(piece) != 0).view(np.int8), [0]])
        spans.append(np.flatnonzero(np.diff(inside)).reshape(-1, 2) + begin)
        begin += len(piece)
    return np.concatenate(spans)


def word_values(text: str) -> np.ndarray:
    """Returns uint64[characters], the letter_values() of each character of the text."""
    if text.isascii():
        return ASCII_VALUES.take(np.frombuffer(text.encode("ascii"), np.uint8))
    return character_values().take(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32))


def ngram_hashes(hashes: np.ndarray, n: int) -> np.ndarray:
    """Returns uint64[max(0, len(hashes) - n + 1)], a hash of each n-gram of words. hashes: hashes of the words."""
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
    """Returns (concatenated n-gram hashes, number of n-grams per text). rows: word hashes of each text."""
    groups = [np.zeros(0, np.uint64), *(hashes for _, hashes in ngram_groups(rows, n))]
    return np.concatenate(groups), np.array([max(0, len(row) - n + 1) for row in rows], np.int64)


def ngram_groups(rows: Sequence[np.ndarray], n: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields (slice of rows, concatenated n-gram hashes of these rows). Hashes short rows together for speed."""
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
    """Returns the text as UTF-8 without ASCII whitespace, no-break spaces and ideographic spaces."""
    if text.isascii():
        return text.encode("ascii").translate(LOWER if lower else None, WHITESPACE)
    data = (text.lower() if lower else text).encode("utf-8", "surrogatepass").translate(None, WHITESPACE)
    return data.replace(NO_BREAK_SPACE, b"").replace(IDEOGRAPHIC_SPACE, b"")


def line_hashes(text: str, min_characters: int, *, lower: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Returns (hashes, line numbers) of the lines with at least min_characters non-whitespace characters."""
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


MAX_CACHED_BITS = 20  # log2 of the largest cached tables of powers, 16 MB for both


def powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tables of M^i and M^-i mod 2^64 for i from 0 to at least count - 1, where M is MULTIPLIER."""
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
    """Returns uint64[len(points)], a hash of each lower-cased letter, number or mark, and 0 for other characters."""
    is_in_word = lambda point: unicodedata.category(chr(point))[0] in "LNM"
    lower = lambda point: ord(chr(point).lower()[0])  # only the dotted I has a lower case of two characters
    lowered = np.array([lower(point) if is_in_word(point) else -1 for point in points], np.int64)
    lowered[lowered == 0x3C2] = 0x3C3  # the final sigma
    hashes = mix64((lowered.astype(np.uint64) + np.uint64(1)) * np.uint64(MULTIPLIER))
    return np.where(lowered < 0, np.uint64(0), hashes)


@functools.cache
def character_values() -> np.ndarray:
    """Returns uint64[0x110000] (9 MB), the letter_values() of all code points. The first call takes about 0.2 s."""
    values = np.zeros(0x110000, np.uint64)
    for begin, end in ((0, 0x40000), (0xE0000, 0xE0200)):  # Unicode 17 has no letter, number or mark outside these
        values[begin:end] = letter_values(range(begin, end))
    return values


def pieces(text: str) -> list[str]:
    """Splits the text at spaces or newlines into pieces of at least PIECE characters. The last piece may be shorter."""
    cut, begin = [], 0
    while match := SPACE.search(text, begin + PIECE):
        cut.append(text[begin : match.start()])
        begin = match.start()
    return [*cut, text[begin:]]


ASCII_VALUES = letter_values(range(128))
