"""Gopher's repetition filter (Rae et al., arXiv:2112.11446, table A1): duplicate lines, paragraphs and n-grams.

Two facts keep this cheap for the documents that pass, which are most. A sequence of four words occurs no more often
than its first two. And each repeated sequence of six to ten words is made of repeated sequences of five: if those cover
few enough characters, no longer one can break its rule.
"""

from collections.abc import Sequence

import numpy as np

from jaxscale.runtime.text.document import Document, Outcome, Stage, drop_if
from jaxscale.tools.corpus.curate.config import RepetitionConfig
from jaxscale.tools.corpus.curate.hashes import MULTIPLIER
from jaxscale.tools.corpus.curate.words import TextStats, stats_of

# sequences are compared by a polynomial over the words' hashes
POWERS = {width: np.uint64(pow(MULTIPLIER, width, 1 << 64)) for width in (1, 2, 4, 8)}


def make_repetition(cfg: RepetitionConfig) -> Stage:
    """Returns a stage that drops documents that break one of Gopher's rules of repetition."""

    def repetition(documents: Sequence[Document]) -> list[Outcome]:
        return [
            drop_if(document, repetition_fault(document.text, stats, cfg))
            for document, stats in zip(documents, stats_of(documents, cfg.words))
        ]

    return repetition


def repetition_fault(text: str, stats: TextStats, cfg: RepetitionConfig) -> str:
    """Returns the first rule that the text breaks, or ""."""
    if not text or text.isspace():
        return "repetition: no text"
    fault = line_fault(text, cfg)
    fault = fault or (top_fault(stats, len(text), cfg.top) if cfg.top else "")
    return fault or (duplicate_fault(stats, len(text), cfg.duplicate) if cfg.duplicate else "")


def count_repeats(parts: Sequence[str]) -> tuple[int, int]:
    """Returns the number of parts that occurred before, and their characters."""
    if len(seen := set(parts)) == len(parts):
        return 0, 0
    return len(parts) - len(seen), sum(map(len, parts)) - sum(map(len, seen))


def line_fault(text: str, cfg: RepetitionConfig) -> str:
    """Returns the rule on lines or paragraphs that the text breaks, or "". Empty lines are ignored; spaces count."""
    lines = list(filter(None, text.split("\n")))
    if len(set(lines)) == len(lines):
        return ""  # then no paragraph is repeated either
    paragraphs = list(filter(None, (part.strip("\n") for part in text.split("\n\n"))))
    for what, most, most_chars, parts in (
        ("paragraphs", cfg.max_duplicate_paragraphs, cfg.max_duplicate_paragraph_chars, paragraphs),
        ("lines", cfg.max_duplicate_lines, cfg.max_duplicate_line_chars, lines),
    ):
        again, chars = count_repeats(parts)
        if most is not None and again > most * len(parts):
            return f"repetition: too many duplicate {what}"
        if most_chars is not None and chars > most_chars * len(text):
            return f"repetition: too many characters in duplicate {what}"
    return ""


def top_fault(stats: TextStats, characters: int, rules: Sequence[tuple[int, float]]) -> str:
    """Returns the rule on the most frequent n-gram that is broken, or "". stats: at least two words."""
    ends, pairs = stats.ends, ngram_keys(stats.hashes, 2)
    ordered = np.sort(pairs)
    lasts = np.flatnonzero(ordered[1:] != ordered[:-1])  # of each kind of pair but the last kind
    often = len(ordered) - 1 - int(lasts[-1]) if len(lasts) else len(ordered)
    if len(lasts):
        often = max(often, 1 + int(lasts[0]), int((lasts[1:] - lasts[:-1]).max(initial=0)))
    for n, most in rules:
        if stats.total < n:
            break
        spans = ends[n:] - ends[:-n]  # characters of each sequence; the spaces between its words count too
        least = int(most * characters / (int(spans.max()) + n - 1))  # to break the rule it must occur more often
        if often <= least:
            continue
        frequent = ordered[least:] == ordered[: len(ordered) - least]
        places = np.flatnonzero(is_member(pairs[: len(spans)], ordered[least:][frequent]))
        if not len(places) or often * (int(spans.take(places).max()) + n - 1) <= most * characters:
            continue
        keys = ngram_keys(stats.hashes, n).take(places)
        _, first, counts = np.unique(keys, return_index=True, return_counts=True)
        place = places[first[counts == counts.max()].min()]  # the first one among equally frequent ones
        if int(counts.max()) * (int(spans[place]) + n - 1) > most * characters:
            return f"repetition: too many characters in the top {n}-gram"
    return ""


def duplicate_fault(stats: TextStats, characters: int, rules: Sequence[tuple[int, float]]) -> str:
    """Returns the rule on repeated n-grams that is broken, or ""."""
    shortest, allowed = rules[0][0], min(most for _, most in rules) * characters
    keys = ngram_keys(stats.hashes, shortest)
    ordered = np.sort(keys)
    twice = ordered[1:] == ordered[:-1]
    if not (repeats := np.count_nonzero(twice)):
        return ""
    ends = stats.ends
    if repeats * int((ends[shortest:] - ends[:-shortest]).max()) <= allowed:  # as if all were the longest
        return ""
    places = np.flatnonzero(is_member(keys, ordered[1:][twice]))
    found = keys.take(places)
    order = found.argsort(kind="stable")
    found = found.take(order)
    again = places.take(order[1:][found[1:] == found[:-1]])  # each but the first of its kind
    covered = np.zeros(stats.total, bool)
    for at in range(shortest):
        covered[again + at] = True
    if stats.lengths[covered].sum() <= allowed:
        return ""
    for n, most in rules:
        if repeated_characters(ngram_keys(stats.hashes, n), ends, n) > most * characters:
            return f"repetition: too many characters in duplicate {n}-grams"
    return ""


def is_member(keys: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Returns bool, True for keys that are in `wanted`, which is sorted and not empty."""
    return members.take(members.searchsorted(keys), mode="clip") == keys


def repeated_characters(keys: np.ndarray, ends: np.ndarray, n: int) -> int:
    """Returns the characters in n-grams that occurred before, left to right without overlaps."""
    _, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
    places = np.flatnonzero(counts[group] > 1)
    characters = free = 0
    seen: set[int] = set()
    for place, key in zip(places.tolist(), group[places].tolist()):
        if place < free:
            continue
        if key in seen:
            free = place + n
            characters += int(ends[free] - ends[place])
        seen.add(key)
    return characters


def ngram_keys(hashes: np.ndarray, n: int) -> np.ndarray:
    """Returns uint64[max(0, words - n + 1)], a hash of each n-gram."""
    if len(hashes) < n:
        return hashes[:0]
    keys, width, combined = hashes, 1, hashes
    while True:  # n in binary: sequences of 1, 2, 4, 8 words, of which those in n are put one after another
        if n & width:
            combined = keys if not n % width else combined[: len(keys) - n % width] * POWERS[width] + keys[n % width :]
        if n < 2 * width:
            return combined
        keys = keys[:-width] * POWERS[width] + keys[width:]
        width *= 2
