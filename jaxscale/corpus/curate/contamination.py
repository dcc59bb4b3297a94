"""Decontamination: documents that share 13 words in a row with an evaluation item are dropped, or cut around them.

The rule is that of GPT-3 (arXiv:2005.14165, appendix C): a match is a sequence of 13 lower-cased words without
punctuation; a cut takes 200 characters on either side with it, keeps pieces of 200 characters or more, and drops a
document that is cut more than ten times. Unlike there, a sequence that many training documents have is not excused.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.corpus.curate.config import ContaminationConfig
from jaxscale.corpus.curate.evaluation import Evaluation, load_evaluation, may_hold
from jaxscale.corpus.curate.hashes import hash_words, ngram_groups, ngram_hashes, word_spans
from jaxscale.text.document import Document, Outcome, Stage


class Hits(NamedTuple):
    """Where word sequences of evaluation items are in some documents; one entry for each sequence and item."""

    documents: np.ndarray  # int64[k]
    places: np.ndarray  # int64[k]: the word at which the sequence begins
    entries: np.ndarray  # int64[k]: which entry of the index was hit


def make_contamination(cfg: ContaminationConfig) -> Stage:
    """A stage that drops or cuts documents which hold evaluation items, and names the items in `detail`."""
    limits = dict(fields=cfg.fields, ngram_words=cfg.ngram_words, short_words=cfg.short_words)
    evaluation = load_evaluation(cfg.files, **limits)

    def stage(documents: Sequence[Document]) -> list[Outcome]:
        hits = find_hits(hash_words(documents), evaluation)
        outcomes = [Outcome(document) for document in documents]
        for place in np.unique(hits.documents).tolist():
            own = select(hits, hits.documents == place)
            items = items_hit(own.entries, evaluation, cfg.min_item_share)
            if len(items):
                own = select(own, np.isin(evaluation.items[own.entries], items))
                outcomes[place] = treat(documents[place], own, items, evaluation, cfg)
        return outcomes

    return stage


def find_hits(words: Sequence[np.ndarray], evaluation: Evaluation) -> Hits:
    """All word sequences of evaluation items in documents, given as the hashes of their words."""
    found = [np.zeros((3, 0), np.int64)]
    for group, hashes in ngram_groups(words, evaluation.search_words):
        maybe = may_hold(evaluation, hashes)
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
    return select(hits, compare(hits, words, evaluation))


def compare(hits: Hits, words: Sequence[np.ndarray], evaluation: Evaluation) -> np.ndarray:
    """bool[k]: whether not only the first words of the sequence are there but all."""
    equal = evaluation.sizes[hits.entries] == evaluation.search_words
    for document in np.unique(hits.documents[~equal]).tolist():
        own = np.flatnonzero((hits.documents == document) & ~equal)
        sizes, places = evaluation.sizes[hits.entries[own]], hits.places[own]
        for size in np.unique(sizes).tolist():
            hashes = ngram_hashes(words[document], size)
            there = (sizes == size) & (places < len(hashes))
            equal[own[there]] = hashes[places[there]] == evaluation.wholes[hits.entries[own[there]]]
    return equal


def select(hits: Hits, which: np.ndarray) -> Hits:
    """The hits that the index array `which` selects."""
    return Hits(*(column[which] for column in hits))


def items_hit(entries: np.ndarray, evaluation: Evaluation, min_share: float) -> np.ndarray:
    """The numbers of the items of which a document has enough sequences, given the index entries that it hit."""
    items, found = np.unique(evaluation.items[np.unique(entries)], return_counts=True)
    return items[found >= min_share * evaluation.counts[items] - 1e-9]


def treat(
    document: Document, hits: Hits, items: np.ndarray, evaluation: Evaluation, cfg: ContaminationConfig
) -> Outcome:
    """The document dropped, or without the sequences that were hit and what is around them."""
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
    apart = np.flatnonzero(begins[1:] > ends[:-1]) + 1
    begins, ends = begins[np.append(0, apart)].tolist(), ends[np.append(apart - 1, len(ends) - 1)].tolist()
    if len(begins) > cfg.max_cuts:
        return Outcome(None, "contamination: too many cuts", detail=detail)
    pieces = [document.text[end:begin].strip() for end, begin in zip([0, *ends], [*begins, len(document.text)])]
    text = "\n".join(piece for piece in pieces if piece and len(piece) >= cfg.min_piece_characters)
    if not text:
        return Outcome(None, "contamination: nothing is left", detail=detail)
    edits = (("evaluation item", len(begins)),)
    return Outcome(dataclasses.replace(document, text=text), edits=edits, detail=detail)
