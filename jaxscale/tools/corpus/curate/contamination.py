"""Decontamination: documents that share 13 words in a row with an evaluation item are dropped, or cut around them.

The rule is that of GPT-3 (arXiv:2005.14165, appendix C): a match is 13 consecutive lower-cased words without
punctuation; a cut includes 200 characters on either side, pieces of 200 characters or more remain, and a document with
more than ten cuts is dropped. Unlike GPT-3, n-grams of many training documents also match, and texts of items that are
shorter than 13 words are searched for as a whole, down to 5 words.

Evaluation items are named FILE:LINE or FILE:ROW, from 1; an index holds their word sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.data.permutation import mix64
from jaxscale.runtime.text.document import Document, Outcome, Stage, per_document
from jaxscale.runtime.text.sources.files import ignore_line, list_files
from jaxscale.runtime.text.sources.records import ENDINGS, MOST_TEXT, kind_of, read_records, text_lines
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate.config import ContaminationConfig
from jaxscale.tools.corpus.curate.hashes import hash_words, ngram_groups, ngram_hashes, powers, word_hashes, word_spans

MIN_BITS, MAX_BITS = 24, 32  # size of the filter: from 2 MB, which fit in cache, to 512 MB
CHOICE_WORDS = 8  # for a text in a list: choices are often phrases ("the temperature of the water")
MAX_ITEMS = 10  # with the same short text; GPT-3 ignored n-grams that more than ten training documents had
SPARE_BITS = 5  # filter bits per n-gram are at least 2^5: about 0.3% false positives
THREE, SEVEN, ONE_BIT = np.int64(3), np.int64(7), np.uint8(1) << np.arange(8, dtype=np.uint8)


class Evaluation(NamedTuple):
    """N-grams of all items, sorted by the hash of their first words; an n-gram of two items has two entries."""

    search_words: int  # first words of an n-gram to search for, before all words are compared
    heads: np.ndarray  # uint64[k]: hash of the first words
    wholes: np.ndarray  # uint64[k]: hash of all words
    sizes: np.ndarray  # int64[k]: number of words
    items: np.ndarray  # int64[k]: item number
    names: list[str]  # of each item
    counts: np.ndarray  # int64[items]: number of different n-grams
    filter: np.ndarray  # uint8[2^bits / 8]: Bloom filter of the heads, see bloom_lookup
    bits: int


class Item(NamedTuple):
    """A record with its texts, or a paragraph of a text file, each line of which has its own name."""

    names: list[str]  # of each text; the same for all texts of a record
    texts: list[str]
    choices: list[bool]  # of each text: True in a list
    spans_texts: bool  # True if an n-gram may span two texts


class Hits(NamedTuple):
    """Occurrences of evaluation n-grams in documents; one entry for each n-gram and item."""

    documents: np.ndarray  # int64[k]
    places: np.ndarray  # int64[k]: index of the n-gram's first word
    entries: np.ndarray  # int64[k]: index entry


def make_contamination(cfg: ContaminationConfig) -> Stage:
    """Returns a stage that drops or cuts documents with evaluation items, and names the items in `detail`."""
    if not cfg.is_named:
        return per_document(Outcome)
    evaluation = configured_evaluation(cfg)

    def stage(documents: Sequence[Document]) -> list[Outcome]:
        hits = find_hits(hash_words(documents), evaluation)
        outcomes = [Outcome(document) for document in documents]
        for place in np.unique(hits.documents).tolist():
            document_hits = select(hits, hits.documents == place)
            items = matched_items(document_hits.entries, evaluation, cfg.min_item_share)
            if len(items):
                document_hits = select(document_hits, np.isin(evaluation.items[document_hits.entries], items))
                outcomes[place] = apply_action(documents[place], document_hits, items, evaluation, cfg)
        return outcomes

    return stage


def configured_evaluation(cfg: ContaminationConfig) -> Evaluation:
    """Returns the index of the configured items. Raises BadInput as load_evaluation does."""
    return load_evaluation(cfg.files, fields=cfg.fields, ngram_words=cfg.ngram_words, short_words=cfg.short_words)


def count_items(cfg: ContaminationConfig) -> dict[str, int]:
    """Returns the number of items, and of those too short to be found; 0 if no file is named."""
    counts = configured_evaluation(cfg).counts if cfg.is_named else np.zeros(0, np.int64)
    return {"items": len(counts), "too_short": int((counts == 0).sum())}


def find_hits(words: Sequence[np.ndarray], evaluation: Evaluation) -> Hits:
    """Returns all occurrences of evaluation n-grams in documents, given as hashes of their words."""
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
    """Returns bool[k], True where all words of the n-gram match, not only the first ones."""
    sizes = evaluation.sizes[hits.entries]
    equal = sizes == evaluation.search_words
    flat, lengths = np.concatenate([*words, np.zeros(0, np.uint64)]), np.array([len(row) for row in words], np.int64)
    begins = (lengths.cumsum() - lengths)[hits.documents] + hits.places
    for size in np.unique(sizes[~equal]).tolist():
        rows = np.flatnonzero((sizes == size) & (hits.places + size <= lengths[hits.documents]))
        grams = flat[begins[rows, None] + np.arange(size)]
        equal[rows] = mix64((grams * powers(size)[0][:size]).sum(axis=1)) == evaluation.wholes[hits.entries[rows]]
    return equal


def select(hits: Hits, selection: np.ndarray) -> Hits:
    """Returns the hits at the indices or mask `which`."""
    return Hits(*(column[selection] for column in hits))


def matched_items(entries: np.ndarray, evaluation: Evaluation, min_share: float) -> np.ndarray:
    """Returns the items of which a document has a sufficient share of n-grams. entries: index entries that it hit."""
    items, found = np.unique(evaluation.items[np.unique(entries)], return_counts=True)
    return items[found >= min_share * evaluation.counts[items] - 1e-9]


def apply_action(
    document: Document, hits: Hits, items: np.ndarray, evaluation: Evaluation, cfg: ContaminationConfig
) -> Outcome:
    """Returns the outcome: the document is dropped, or the hits and their surroundings are cut."""
    detail = ", ".join(evaluation.names[item] for item in items.tolist())  # 'gsm8k.jsonl:17, gsm8k.jsonl:21'
    if cfg.action == "drop":
        return Outcome(None, "contamination: evaluation item", detail=detail)
    spans = word_spans(document.text)
    begins = np.maximum(spans[hits.places, 0] - cfg.cut_characters, 0)
    ends = np.minimum(
        spans[hits.places + evaluation.sizes[hits.entries] - 1, 1] + cfg.cut_characters, len(document.text)
    )
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    splits = np.flatnonzero(begins[1:] > ends[:-1]) + 1
    begins, ends = begins[np.append(0, splits)].tolist(), ends[np.append(splits - 1, len(ends) - 1)].tolist()
    if len(begins) > cfg.max_cuts:
        return Outcome(None, "contamination: too many cuts", detail=detail)
    pieces = [document.text[end:begin].strip() for end, begin in zip([0, *ends], [*begins, len(document.text)])]
    text = "\n".join(piece for piece in pieces if piece and len(piece) >= cfg.min_piece_characters)
    if not text:
        return Outcome(None, "contamination: nothing is left", detail=detail)
    edits = (("evaluation item", len(begins)),)
    return Outcome(document.edited(text), edits=edits, detail=detail)


def load_evaluation(
    files: Sequence[str], *, fields: Sequence[str] = (), ngram_words: int = 13, short_words: int | None = 5
) -> Evaluation:
    """Returns the index of the items in these files.

    fields: of a record; empty: all its text, including nested lists and records. N-grams do not span texts of a record.
    A text with fewer than ngram_words words is one n-gram, if it has short_words or more, CHOICE_WORDS in a list, and
    at most MOST_ITEMS items have it. In a text file each line is an item, and n-grams span lines up to an empty line.
    Raises BadInput for a file that is missing, damaged, of another kind, or without text.
    """
    names: list[str] = []
    search_words = min(ngram_words, short_words or ngram_words)
    heads, wholes = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    sizes, owners = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    paths = list_evaluation_files(files)
    ambiguous = {path.name for path in paths if sum(path.name == other.name for other in paths) > 1}
    for path in paths:
        before = len(names)
        for item in read_items(path, frozenset(fields)):
            numbers = {name: len(names) + i for i, name in enumerate(dict.fromkeys(item.names))}
            names += numbers
            words = [word_hashes(text) for text in item.texts]
            owner_rows = [np.full(len(row), numbers[name]) for row, name in zip(words, item.names)]
            if item.spans_texts:
                words, owner_rows = [np.concatenate(words)], [np.concatenate(owner_rows)]
            for row, owner, choice in zip(words, owner_rows, item.choices):
                size = min(len(row), ngram_words)
                if size < (max(search_words, min(CHOICE_WORDS, ngram_words)) if choice else search_words):
                    continue  # too few words
                grams = ngram_hashes(row, size)
                wholes.append(grams)
                heads.append(ngram_hashes(row, search_words)[: len(grams)])
                sizes.append(np.full(len(grams), size))
                owners.append(owner[: len(grams)])  # an n-gram belongs to the line of its first word
        if path.name in ambiguous:  # the file name alone is ambiguous
            names[before:] = [str(path.parent / name) for name in names[before:]]
        if len(names) == before:
            raise BadInput(f"{path} holds no text{f' in the fields {sorted(fields)}' if fields else ''}")
    first, whole, length, item = (np.concatenate(column) for column in (heads, wholes, sizes, owners))
    mask = ~is_phrase(whole, length, item, ngram_words)
    return make_index(search_words, first[mask], whole[mask], length[mask], item[mask], names)


def is_phrase(wholes: np.ndarray, sizes: np.ndarray, owners: np.ndarray, ngram_words: int) -> np.ndarray:
    """Returns bool[k], True for short texts of more than MOST_ITEMS items, such as instructions."""
    short = np.flatnonzero(sizes < ngram_words)
    pairs = np.unique(np.stack([wholes[short], owners[short].astype(np.uint64)]), axis=1)
    found, counts = np.unique(pairs[0], return_counts=True)
    phrases = np.zeros(len(wholes), bool)
    phrases[short] = np.isin(wholes[short], found[counts > MAX_ITEMS])
    return phrases


def make_index(
    search_words: int,
    heads: np.ndarray,
    wholes: np.ndarray,
    sizes: np.ndarray,
    owners: np.ndarray,
    names: list[str],
) -> Evaluation:
    """Returns the index of n-grams given in any order."""
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
    """Returns int64[k], sorted: indices of hashes that may be heads. No false negatives (Bloom, 1970)."""
    first, _ = bloom_positions(hashes, evaluation.bits)
    maybe = np.flatnonzero(evaluation.filter.take(first >> THREE) & ONE_BIT.take(first & SEVEN))
    _, second = bloom_positions(hashes[maybe], evaluation.bits)
    return maybe[(evaluation.filter[second >> THREE] & ONE_BIT[second & SEVEN]) != 0]


def bloom_positions(hashes: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the two bit positions of each hash in a filter of 2^bits bits, from its upper and its lower bits."""
    return (hashes >> np.uint64(64 - bits)).view(np.int64), (hashes & np.uint64((1 << bits) - 1)).view(np.int64)


def list_evaluation_files(files: Sequence[str], say: Callable[[str], None] = ignore_line) -> list[Path]:
    """Returns the files that match the names or globs, sorted. say: as in list_files.

    Raises BadInput for a name without a match.
    """
    found, problems = list_files(tuple(files), "decontaminate.files", "items", say=say)
    if problems:
        raise BadInput(f"{problems[0]}; nothing can be searched for")
    return [Path(file.path) for file in found]


def read_items(path: Path, fields: frozenset[str]) -> Iterator[Item]:
    """Yields the items of a file that have text. Raises BadInput with the file and the line."""
    kind = kind_of(path)
    if kind not in (".txt", *ENDINGS):
        raise BadInput(f"evaluation file {path} must be .jsonl, .txt (also .gz, .zst), .parquet or .arrow")
    if kind == ".txt":
        found = read_paragraphs(path)
    else:
        found = (record_item(name, value, fields) for name, value in read_records(path))
    for item in found:
        if item.texts:
            yield item


def read_paragraphs(path: Path) -> Iterator[Item]:
    """Yields an item for each run of non-empty lines."""
    names, texts = [], []
    for number, line in text_lines(str(path), MOST_TEXT):
        if line.strip():
            names.append(f"{path.name}:{number}")
            texts.append(line)
        elif names:
            yield Item(names, texts, [False], True)
            names, texts = [], []
    yield Item(names, texts, [False], True)


def record_item(name: str, value: Any, fields: frozenset[str]) -> Item:
    """Returns the item of a record: all its texts, or those in the named fields."""
    if fields:
        value = {key: part for key, part in value.items() if key in fields} if isinstance(value, dict) else {}
    found = [(text, choice) for text, choice in texts_in(value) if text.strip()]
    return Item([name] * len(found), [text for text, _ in found], [choice for _, choice in found], False)


def texts_in(value: Any, in_list: bool = False) -> Iterator[tuple[str, bool]]:
    """Yields (string, True in a list) for all values in nested plain data, in order; keys are skipped."""
    if isinstance(value, str):
        yield value, in_list
    elif isinstance(value, dict):
        for part in value.values():
            yield from texts_in(part, in_list)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from texts_in(part, True)
