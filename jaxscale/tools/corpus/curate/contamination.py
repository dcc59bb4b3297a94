"""Decontamination: drops documents that share 13 consecutive words with an evaluation item, or cuts the shared text.

The rule is that of GPT-3 (arXiv:2005.14165, appendix C). A match is 13 consecutive lower-cased words, ignoring
punctuation. A cut includes 200 characters on either side, remaining pieces have at least 200 characters, and documents
that need more than ten cuts are dropped. Unlike GPT-3, n-grams that occur in many training documents also match, and
item texts of 5 to 12 words are searched for as a whole.

Evaluation items are named FILE:LINE or FILE:ROW, counted from 1. An index stores their n-grams.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.data.permutation import mix64
from jaxscale.runtime.text.document import Document, Outcome, Stage, per_document
from jaxscale.runtime.text.sources.files import ignore_line, list_files
from jaxscale.runtime.text.sources.records import ENDINGS, MOST_TEXT, kind_of, read_records, text_lines
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate.config import ContaminationConfig
from jaxscale.tools.corpus.curate.duplicates import merge_spans
from jaxscale.tools.corpus.curate.hashes import hash_words, ngram_groups, ngram_hashes, powers, word_hashes, word_spans

MIN_BITS, MAX_BITS = 24, 32  # log2 of the Bloom filter's size in bits: 2 MB, which fits in cache, to 512 MB
CHOICE_WORDS = 8  # minimum words of a text in a list, since answer choices are often common phrases
MAX_ITEMS = 10  # ignore short texts that more items share; GPT-3 ignored n-grams of more than ten training documents
SPARE_BITS = 5  # at least 2^5 filter bits per n-gram: about 0.3% false positives
THREE, SEVEN, ONE_BIT = np.int64(3), np.int64(7), np.uint8(1) << np.arange(8, dtype=np.uint8)


class Evaluation(NamedTuple):
    """N-grams of all items, sorted by the hash of their first words. An n-gram in two items has two entries."""

    search_words: int  # number of first words to look up; all words are compared after that
    heads: np.ndarray  # uint64[k]: hash of the first words
    wholes: np.ndarray  # uint64[k]: hash of all words
    sizes: np.ndarray  # int64[k]: number of words
    items: np.ndarray  # int64[k]: item number
    names: list[str]  # name of each item
    counts: np.ndarray  # int64[items]: number of different n-grams
    filter: np.ndarray  # uint8[2^bits / 8]: Bloom filter of the heads; see bloom_lookup
    bits: int


class EvaluationItem(NamedTuple):
    """The texts of a record, or the lines of a paragraph in a text file."""

    names: list[str]  # item name of each text; a record has one name, a line its own
    texts: list[str]
    choices: list[bool]  # for each text, True if it is in a list
    spans_texts: bool  # True if an n-gram may span two texts


class Hits(NamedTuple):
    """Occurrences of evaluation n-grams in documents. An n-gram in two items has two entries."""

    documents: np.ndarray  # int64[k]
    places: np.ndarray  # int64[k]: index of the n-gram's first word
    entries: np.ndarray  # int64[k]: index entry


def make_contamination(cfg: ContaminationConfig) -> Stage:
    """Returns a stage that drops or cuts documents that contain evaluation items. `detail` lists the items."""
    if not cfg.is_named:
        return per_document(Outcome)
    evaluation = load_evaluation(cfg)

    def stage(documents: Sequence[Document]) -> list[Outcome]:
        hits = find_hits(hash_words(documents), evaluation)
        outcomes = [Outcome(document) for document in documents]
        for place in np.unique(hits.documents).tolist():
            document_hits = select(hits, hits.documents == place)
            items, found = np.unique(evaluation.items[np.unique(document_hits.entries)], return_counts=True)
            items = items[found >= cfg.min_item_share * evaluation.counts[items] - 1e-9]
            if len(items):
                document_hits = select(document_hits, np.isin(evaluation.items[document_hits.entries], items))
                outcomes[place] = apply_action(documents[place], document_hits, items, evaluation, cfg)
        return outcomes

    return stage


def count_items(cfg: ContaminationConfig) -> dict[str, int]:
    """Returns the number of items and the number of items that are too short to search for."""
    counts = load_evaluation(cfg).counts if cfg.is_named else np.zeros(0, np.int64)
    return {"items": len(counts), "too_short": int((counts == 0).sum())}


def find_hits(words: Sequence[np.ndarray], evaluation: Evaluation) -> Hits:
    """Returns all occurrences of evaluation n-grams in documents. `words` has the word hashes of each document."""
    found = [np.zeros((3, 0), np.int64)]
    for group, hashes in ngram_groups(words, evaluation.search_words):
        maybe = bloom_lookup(evaluation, hashes)
        begins = np.searchsorted(evaluation.heads, hashes[maybe])
        repeats = np.searchsorted(evaluation.heads, hashes[maybe], side="right") - begins
        if not repeats.any():
            continue
        entries = np.repeat(begins - np.cumsum(repeats) + repeats, repeats) + np.arange(repeats.sum())
        ends = np.cumsum([max(0, len(row) - evaluation.search_words + 1) for row in words[group]])
        places = np.repeat(maybe, repeats)
        documents = np.searchsorted(ends, places, side="right")
        places -= np.append(0, ends)[documents]
        found.append(np.stack([documents + group.start, places, entries]))
    hits = Hits(*np.concatenate(found, axis=1))
    return select(hits, verify_hits(hits, words, evaluation))


def verify_hits(hits: Hits, words: Sequence[np.ndarray], evaluation: Evaluation) -> np.ndarray:
    """Returns bool[k], True where all words of the n-gram match, not only the first words."""
    sizes = evaluation.sizes[hits.entries]
    equal = sizes == evaluation.search_words
    flat, lengths = np.concatenate([*words, np.zeros(0, np.uint64)]), np.array([len(row) for row in words], np.int64)
    begins = (lengths.cumsum() - lengths)[hits.documents] + hits.places
    for size in np.unique(sizes[~equal]).tolist():
        rows = np.flatnonzero((sizes == size) & (hits.places + size <= lengths[hits.documents]))
        grams = flat[begins[rows, None] + np.arange(size)]
        equal[rows] = mix64((grams * powers(size)[0][:size]).sum(axis=1)) == evaluation.wholes[hits.entries[rows]]
    return equal


def select(hits: Hits, mask: np.ndarray) -> Hits:
    """Returns the hits where the mask is True."""
    return Hits(*(column[mask] for column in hits))


def apply_action(
    document: Document, hits: Hits, items: np.ndarray, evaluation: Evaluation, cfg: ContaminationConfig
) -> Outcome:
    """Returns the outcome of a document: it is dropped, or the hits and their surroundings are cut."""
    detail = ", ".join(evaluation.names[item] for item in items.tolist())  # 'gsm8k.jsonl:17, gsm8k.jsonl:21'
    if cfg.action == "drop":
        return Outcome(None, "contamination: evaluation item", detail=detail)
    spans = word_spans(document.text)
    begins = np.maximum(spans[hits.places, 0] - cfg.cut_characters, 0)
    last_words = hits.places + evaluation.sizes[hits.entries] - 1
    ends = np.minimum(spans[last_words, 1] + cfg.cut_characters, len(document.text))
    begins, ends = (bounds.tolist() for bounds in merge_spans(begins, ends))
    if len(begins) > cfg.max_cuts:
        return Outcome(None, "contamination: too many cuts", detail=detail)
    pieces = [document.text[end:begin].strip() for end, begin in zip([0, *ends], [*begins, len(document.text)])]
    text = "\n".join(piece for piece in pieces if piece and len(piece) >= cfg.min_piece_characters)
    if not text:
        return Outcome(None, "contamination: nothing is left", detail=detail)
    return Outcome(document.edited(text), edits=(("evaluation item", len(begins)),), detail=detail)


def load_evaluation(cfg: ContaminationConfig) -> Evaluation:
    """Returns the index of the items in the configured files.

    Without cfg.fields, all texts of a record are indexed, including texts in nested lists and dicts. Short texts that
    occur in more than MAX_ITEMS items, such as instructions, are ignored.
    Raises BadInput if a file is missing or damaged, has an unknown type, or contains no text.
    """
    names: list[str] = []
    search_words = min(cfg.ngram_words, cfg.short_words or cfg.ngram_words)
    columns = [np.zeros((4, 0), np.uint64)]
    paths = list_evaluation_files(cfg.files)
    for path in paths:
        before = len(names)
        for item in read_items(path, frozenset(cfg.fields)):
            numbers = {name: len(names) + i for i, name in enumerate(dict.fromkeys(item.names))}
            names += numbers
            columns += item_ngrams(item, numbers, cfg.ngram_words, search_words)
        if [other.name for other in paths].count(path.name) > 1:
            names[before:] = [str(path.parent / name) for name in names[before:]]
        if len(names) == before:
            raise BadInput(f"{path} has no text{f' in the fields {sorted(cfg.fields)}' if cfg.fields else ''}")
    heads, wholes, sizes, owners = np.concatenate(columns, axis=1)
    short = np.flatnonzero(sizes < cfg.ngram_words)
    item_owners = np.unique(np.stack([wholes[short], owners[short]]), axis=1)
    found, counts = np.unique(item_owners[0], return_counts=True)
    mask = np.ones(len(wholes), bool)
    mask[short] = ~np.isin(wholes[short], found[counts > MAX_ITEMS])
    sizes, owners = sizes[mask].astype(np.int64), owners[mask].astype(np.int64)
    return make_index(search_words, heads[mask], wholes[mask], sizes, owners, names)


def item_ngrams(
    item: EvaluationItem, numbers: Mapping[str, int], ngram_words: int, search_words: int
) -> Iterator[np.ndarray]:
    """Yields uint64[4, k]: head, whole, size and item number of each n-gram. A short text is one n-gram."""
    words = [word_hashes(text) for text in item.texts]
    owners = [np.full(len(row), numbers[name], np.uint64) for row, name in zip(words, item.names)]
    if item.spans_texts:
        words, owners = [np.concatenate(words)], [np.concatenate(owners)]
    for row, owner, choice in zip(words, owners, item.choices):
        size = min(len(row), ngram_words)
        if size >= (max(search_words, min(CHOICE_WORDS, ngram_words)) if choice else search_words):
            wholes = ngram_hashes(row, size)
            count = len(wholes)
            heads = ngram_hashes(row, search_words)[:count]
            yield np.stack([heads, wholes, np.full(count, size, np.uint64), owner[:count]])  # owner: line of first word


def make_index(
    search_words: int, heads: np.ndarray, wholes: np.ndarray, sizes: np.ndarray, owners: np.ndarray, names: list[str]
) -> Evaluation:
    """Returns the index of n-grams, which may be in any order."""
    order = np.lexsort((owners, wholes, heads))
    heads, wholes, sizes, owners = heads[order], wholes[order], sizes[order], owners[order]
    new = np.ones(len(order), bool)
    new[1:] = (wholes[1:] != wholes[:-1]) | (owners[1:] != owners[:-1])
    heads, wholes, sizes, owners = heads[new], wholes[new], sizes[new], owners[new]
    bits = min(MAX_BITS, max(MIN_BITS, len(heads).bit_length() + SPARE_BITS))
    table = np.zeros(1 << bits - 3, np.uint8)
    for place in bloom_positions(heads, bits):
        np.bitwise_or.at(table, place >> THREE, ONE_BIT[place & SEVEN])
    counts = np.bincount(owners, minlength=len(names))
    return Evaluation(search_words, heads, wholes, sizes, owners, names, counts, table, bits)


def bloom_lookup(evaluation: Evaluation, hashes: np.ndarray) -> np.ndarray:
    """Returns int64[k], the sorted indices of hashes that are probably heads, without false negatives."""
    first, _ = bloom_positions(hashes, evaluation.bits)
    maybe = np.flatnonzero(evaluation.filter.take(first >> THREE) & ONE_BIT.take(first & SEVEN))
    _, second = bloom_positions(hashes[maybe], evaluation.bits)
    return maybe[(evaluation.filter[second >> THREE] & ONE_BIT[second & SEVEN]) != 0]


def bloom_positions(hashes: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the two bit positions of each hash in a Bloom filter (Bloom, 1970) of 2^bits bits."""
    return (hashes >> np.uint64(64 - bits)).view(np.int64), (hashes & np.uint64((1 << bits) - 1)).view(np.int64)


def list_evaluation_files(files: Sequence[str], say: Callable[[str], None] = ignore_line) -> list[Path]:
    """Returns the files that match the names or globs, sorted. Raises BadInput if a name has no match."""
    found, problems = list_files(tuple(files), "decontaminate.files", "items", say=say)
    if problems:
        raise BadInput(f"{problems[0]}; set decontaminate.files to existing files")
    return [Path(file.path) for file in found]


def read_items(path: Path, fields: frozenset[str]) -> Iterator[EvaluationItem]:
    """Yields each record that has text, or each paragraph of a text file. Raises BadInput for an invalid file."""
    kind = kind_of(path)
    if kind not in (".txt", *ENDINGS):
        raise BadInput(f"evaluation file {path} must be .jsonl, .txt (also .gz, .zst), .parquet or .arrow")
    if kind == ".txt":
        lines = text_lines(str(path), MOST_TEXT)
        for has_text, paragraph in itertools.groupby(lines, key=lambda numbered: bool(numbered[1].strip())):
            if has_text:
                numbers, texts = zip(*paragraph)
                yield EvaluationItem([f"{path.name}:{number}" for number in numbers], list(texts), [False], True)
        return
    for name, value in read_records(path):
        if fields:
            value = {key: part for key, part in value.items() if key in fields} if isinstance(value, dict) else {}
        if found := [(text, choice) for text, choice in texts_in(value) if text.strip()]:
            texts, choices = map(list, zip(*found))
            yield EvaluationItem([name] * len(found), texts, choices, False)


def texts_in(value: Any, in_list: bool = False) -> Iterator[tuple[str, bool]]:
    """Yields (string, whether it is in a list) for all strings in nested data, in order, without keys."""
    if isinstance(value, str):
        yield value, in_list
    elif isinstance(value, dict):
        for part in value.values():
            yield from texts_in(part, in_list)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from texts_in(part, True)
