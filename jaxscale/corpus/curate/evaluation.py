"""Searchable index of the n-grams in evaluation files. Items are named FILE:LINE or FILE:ROW, from 1."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.corpus.curate.hashes import ngram_hashes, word_hashes
from jaxscale.system.exits import BadInput
from jaxscale.text.sources.records import ENDINGS, UNREADABLE, kind_of, read_records, text_lines

MIN_BITS, MAX_BITS = 24, 32  # of the filter: 2 MB that stay in the cache, up to 512 MB
SPARE_BITS = 5  # the filter has at least 2^5 bits for each sequence: it lets about 0.3% of other sequences through


class Evaluation(NamedTuple):
    """The sequences of all items, sorted by the hash of their first words; one that two items have is there twice."""

    search_words: int  # how many first words of a sequence are searched for, before the whole is compared
    heads: np.ndarray  # uint64[k]: the hash of the first words
    wholes: np.ndarray  # uint64[k]: the hash of all words
    sizes: np.ndarray  # int64[k]: how many words
    items: np.ndarray  # int64[k]: the item's number
    names: list[str]  # of each item
    counts: np.ndarray  # int64[items]: how many different sequences it has
    filter: np.ndarray  # uint8[2^bits / 8]: a Bloom filter of the heads, see may_hold
    bits: int
    short: int  # items that were left out since they have too few words


class Item(NamedTuple):
    """A record with the texts in it, or a paragraph of a text file, each line of which has its own name."""

    names: list[str]  # of each text; of a record all the same
    texts: list[str]
    runs_on: bool  # may a sequence begin in one text and end in the next?


def load_evaluation(
    files: Sequence[str], *, fields: Sequence[str] = (), ngram_words: int = 13, short_words: int | None = 8
) -> Evaluation:
    """The index of the items in these files.

    fields: of a record, look at these alone; without, at all its text, also inside lists and records within it.
    A sequence does not run from one text of a record into another. A record none of whose texts has ngram_words words
    counts by its longest text as a whole, if that has short_words or more. In a text file each line is an item, and
    sequences run on until an empty line.
    Raises BadInput for a file that is missing, damaged, of another kind, or holds no text.
    """
    names: list[str] = []
    search_words = min(ngram_words, short_words or ngram_words)
    heads, wholes = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    sizes, owners = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    short = 0
    paths = matching(files)
    alike = {path.name for path in paths if sum(path.name == other.name for other in paths) > 1}
    for path in paths:
        before = len(names)
        for item in read_items(path, frozenset(fields)):
            numbers = {name: len(names) + i for i, name in enumerate(dict.fromkeys(item.names))}
            names += numbers
            words = [word_hashes(text) for text in item.texts]
            whose = [np.full(len(row), numbers[name]) for row, name in zip(words, item.names)]
            if item.runs_on:
                words, whose = [np.concatenate(words)], [np.concatenate(whose)]
            longest = max(range(len(words)), key=lambda i: len(words[i]))
            size = min(len(words[longest]), ngram_words)
            if size < search_words:
                short += len(numbers)
                continue
            if size < ngram_words:
                words, whose = words[longest : longest + 1], whose[longest : longest + 1]
            for row, owner in zip(words, whose):
                grams = ngram_hashes(row, size)
                wholes.append(grams)
                heads.append(ngram_hashes(row, search_words)[: len(grams)])
                sizes.append(np.full(len(grams), size))
                owners.append(owner[: len(grams)])  # a sequence is of the line in which it begins
        if path.name in alike:  # the name alone would not tell which
            names[before:] = [str(path.parent / name) for name in names[before:]]
        if len(names) == before:
            raise BadInput(f"{path} holds no text{f' in the fields {sorted(fields)}' if fields else ''}")
    columns = (np.concatenate(column) for column in (heads, wholes, sizes, owners))
    return make_index(search_words, *columns, names, short)


def make_index(
    search_words: int,
    heads: np.ndarray,
    wholes: np.ndarray,
    sizes: np.ndarray,
    owners: np.ndarray,
    names: list[str],
    short: int = 0,
) -> Evaluation:
    """The index of sequences, given in any order."""
    order = np.lexsort((owners, wholes, heads))
    heads, wholes, sizes, owners = heads[order], wholes[order], sizes[order], owners[order]
    new = np.ones(len(order), bool)
    new[1:] = (wholes[1:] != wholes[:-1]) | (owners[1:] != owners[:-1])
    heads, wholes, sizes, owners = heads[new], wholes[new], sizes[new], owners[new]
    bits = min(MAX_BITS, max(MIN_BITS, len(heads).bit_length() + SPARE_BITS))
    table = np.zeros(1 << bits - 3, np.uint8)
    for place in probes(heads, bits):
        np.bitwise_or.at(table, place >> THREE, ONE_BIT[place & SEVEN])
    counts = np.bincount(owners, minlength=len(names))
    return Evaluation(search_words, heads, wholes, sizes, owners, names, counts, table, bits, short)


def may_hold(evaluation: Evaluation, hashes: np.ndarray) -> np.ndarray:
    """int64[k], sorted: the places of the hashes that may be heads. A head is never missed (Bloom, 1970)."""
    first, _ = probes(hashes, evaluation.bits)
    maybe = np.flatnonzero(evaluation.filter.take(first >> THREE) & ONE_BIT.take(first & SEVEN))
    _, second = probes(hashes[maybe], evaluation.bits)
    return maybe[(evaluation.filter[second >> THREE] & ONE_BIT[second & SEVEN]) != 0]


def probes(hashes: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The two places of each hash in a filter of 2^bits bits: its upper and its lower bits."""
    return (hashes >> np.uint64(64 - bits)).view(np.int64), (hashes & np.uint64((1 << bits) - 1)).view(np.int64)


THREE, SEVEN, ONE_BIT = np.int64(3), np.int64(7), np.uint8(1) << np.arange(8, dtype=np.uint8)


def matching(files: Sequence[str]) -> list[Path]:
    """The files that the names or globs stand for, sorted. Raises BadInput for one that stands for none."""
    found = []
    for pattern in files:
        full = os.path.expanduser(pattern)
        paths = [full] if os.path.isfile(full) else sorted(filter(os.path.isfile, glob.glob(full, recursive=True)))
        if not paths:
            raise BadInput(f"evaluation file {pattern} does not exist; nothing can be searched for")
        found += paths
    return [Path(path) for path in dict.fromkeys(found)]


def read_items(path: Path, fields: frozenset[str]) -> Iterator[Item]:
    """Yields the items of a file that have text. Raises BadInput that names the file and the line."""
    kind = kind_of(path)
    if kind not in (".txt", *ENDINGS):
        raise BadInput(f"evaluation file {path} must be .jsonl, .txt (also .gz), .parquet or .arrow")
    try:
        if kind == ".txt":
            found = read_paragraphs(path)
        else:
            found = (record(name, value, fields) for name, value in read_records(path))
        for item in found:
            if item.texts:
                yield item
    except UNREADABLE as error:
        raise BadInput(f"evaluation file {path} cannot be read: {error}") from None


def read_paragraphs(path: Path) -> Iterator[Item]:
    """Yields an item for each run of lines that are not empty."""
    names, texts = [], []
    for name, line in text_lines(path):
        if line.strip():
            names.append(name)
            texts.append(line)
        elif names:
            yield Item(names, texts, True)
            names, texts = [], []
    yield Item(names, texts, True)


def record(name: str, value: Any, fields: frozenset[str]) -> Item:
    """The item of a record: its texts, or those in the named fields."""
    if fields:
        value = {key: part for key, part in value.items() if key in fields} if isinstance(value, dict) else {}
    found = [text for text in texts_in(value) if text.strip()]
    return Item([name] * len(found), found, False)


def texts_in(value: Any) -> Iterator[str]:
    """Yields all strings in nested plain data, in order; of keys none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from texts_in(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from texts_in(part)
