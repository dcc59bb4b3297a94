"""Quality filters of Gopher, C4 and FineWeb.

Gopher: Rae et al., arXiv:2112.11446, table A1 and section A1.1. C4: Raffel et al., arXiv:1910.10683, section 2.2, keeps
the lines of a page that are sentences. Where the paper is ambiguous, this module follows its published code:
https://github.com/tensorflow/datasets/blob/master/tensorflow_datasets/text/c4_utils.py
FineWeb: Penedo et al., arXiv:2406.17557, section 3.6, drops lists, menus and duplicate lines.

Two facts make Gopher's repetition filter fast for documents that pass. A sequence of four words occurs no more often
than its first two words. And each repeated sequence of six to ten words consists of repeated sequences of five: if
these cover few enough characters, no longer sequence can break its rule.
"""

import collections
import functools
import itertools
import os
import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from jaxscale.runtime.text.document import Document, Outcome, Stage, drop_if, per_document
from jaxscale.runtime.text.sources.records import text_lines
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate.config import C4Config, FineWebConfig, GopherConfig, RepetitionConfig
from jaxscale.tools.corpus.curate.hashes import MULTIPLIER
from jaxscale.tools.corpus.curate.words import TextStats, cut, hash_of, stats_of

BULLETS = ("•", "-")
ELLIPSES = ("...", "…")
CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
MAX_CACHED_CHARS = 64  # pieces with more characters rarely recur, and are not cached
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
SENTENCE_ENDS = frozenset(".!?։؟۔।॥。！？．｡‼‽⁇⁈⁉⸮။።፧᙮᠃᠉꓿܀܁܂߹﹒﹖﹗꛳꛷᪨᪩᭚᭛᱾᱿")
# sentence ends of the scripts of the web: Unicode's property Sentence_Terminal, https://unicode.org/reports/tr29
SCRIPT_TERMINAL = tuple(".!?։؟۔।॥。！？．｡‼‽⁇⁈⁉⸮။።፧។៕᙮᠃᠉꓿܀܁܂؞؝߹﹒﹖﹗꛳꛷᪨᪩᭚᭛᱾᱿")


def make_gopher(cfg: GopherConfig) -> Stage:
    """Returns a stage that drops documents that break one of Gopher's quality rules."""
    stop_hashes = [np.uint64(hash_of(word)) for word in cfg.stop_words]

    def gopher(documents: Sequence[Document]) -> list[Outcome]:
        judged = zip(documents, stats_of(documents, cfg.words))
        return [drop_if(document, gopher_fault(document.text, stats, cfg, stop_hashes)) for document, stats in judged]

    return gopher


def gopher_fault(text: str, stats: TextStats, cfg: GopherConfig, stop_hashes: Sequence[np.uint64]) -> str:
    """Returns the first rule that the text breaks, or ''. stop_hashes: hashes of cfg.stop_words."""
    if cfg.min_words is not None and stats.plain < cfg.min_words:
        return f"gopher: fewer than {cfg.min_words} words"
    if cfg.max_words is not None and stats.plain > cfg.max_words:
        return f"gopher: more than {cfg.max_words} words"
    mean_length = stats.plain_chars / max(stats.plain, 1)
    if cfg.min_word_length is not None and mean_length < cfg.min_word_length:
        return "gopher: words too short"
    if cfg.max_word_length is not None and mean_length > cfg.max_word_length:
        return "gopher: words too long"
    total = max(stats.total, 1)
    if cfg.max_symbol_ratio is not None:
        if text.count("#") > cfg.max_symbol_ratio * total:
            return "gopher: too many hash signs"
        if sum(map(text.count, ELLIPSES)) > cfg.max_symbol_ratio * total:
            return "gopher: too many ellipses"
    lines = text.splitlines()
    if cfg.max_bullet_lines is not None:
        most = cfg.max_bullet_lines * len(lines)  # counting bullets anywhere is a fast upper bound
        if sum(map(text.count, BULLETS)) > most and sum(line.lstrip().startswith(BULLETS) for line in lines) > most:
            return "gopher: too many bullet lines"
    if cfg.max_ellipsis_lines is not None:
        most = cfg.max_ellipsis_lines * len(lines)
        if sum(map(text.count, ELLIPSES)) > most and sum(line.rstrip().endswith(ELLIPSES) for line in lines) > most:
            return "gopher: too many lines end in an ellipsis"
    if cfg.min_alphabetic_words is not None and stats.alphabetic < cfg.min_alphabetic_words * total:
        return "gopher: too few words with a letter"
    if cfg.min_stop_words:
        present = (stop_hash for stop_hash in stop_hashes if (stats.hashes == stop_hash).any())
        if len(list(itertools.islice(present, cfg.min_stop_words))) < cfg.min_stop_words:
            return "gopher: too few stop words"
    return ""


def make_repetition(cfg: RepetitionConfig) -> Stage:
    """Returns a stage that drops documents that break one of Gopher's repetition rules."""
    top, duplicate = cfg.ngram_rules("top"), cfg.ngram_rules("duplicate")

    def fault(text: str, stats: TextStats) -> str:
        if not text or text.isspace():
            return "repetition: no text"
        found = line_fault(text, cfg)
        found = found or (top_fault(stats, len(text), top) if top else "")
        return found or (duplicate_fault(stats, len(text), duplicate) if duplicate else "")

    def repetition(documents: Sequence[Document]) -> list[Outcome]:
        judged = zip(documents, stats_of(documents, cfg.words))
        return [drop_if(document, fault(document.text, stats)) for document, stats in judged]

    return repetition


def count_repeats(parts: Sequence[str]) -> tuple[int, int]:
    """Returns (number of parts that occurred before, their characters)."""
    if len(seen := set(parts)) == len(parts):
        return 0, 0
    return len(parts) - len(seen), sum(map(len, parts)) - sum(map(len, seen))


def line_fault(text: str, cfg: RepetitionConfig) -> str:
    """Returns the first exceeded limit on duplicate lines or paragraphs, or ''. Ignores only empty lines."""
    lines = list(filter(None, text.split("\n")))
    if len(set(lines)) == len(lines):
        return ""  # without repeated lines, no paragraph is repeated
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
    """Returns the first exceeded limit on the most frequent n-gram, or ''. The text must have at least two words."""
    ends, pairs = stats.ends, ngram_keys(stats.hashes, 2)
    ordered = np.sort(pairs)
    lasts = np.flatnonzero(ordered[1:] != ordered[:-1])  # last index of each distinct pair except the largest
    often = len(ordered) - 1 - int(lasts[-1]) if len(lasts) else len(ordered)
    if len(lasts):
        often = max(often, 1 + int(lasts[0]), int((lasts[1:] - lasts[:-1]).max(initial=0)))
    for n, most in rules:
        if stats.total < n:
            break
        spans = ends[n:] - ends[:-n]  # characters of each n-gram without spaces; n - 1 spaces are added below
        least = int(most * characters / (int(spans.max()) + n - 1))  # an n-gram that breaks the rule occurs more often
        if often <= least:
            continue
        frequent = ordered[least:] == ordered[: len(ordered) - least]
        places = np.flatnonzero(is_member(pairs[: len(spans)], ordered[least:][frequent]))
        if not len(places) or often * (int(spans.take(places).max()) + n - 1) <= most * characters:
            continue
        keys = ngram_keys(stats.hashes, n).take(places)
        _, first, counts = np.unique(keys, return_index=True, return_counts=True)
        place = places[first[counts == counts.max()].min()]  # first occurrence among equally frequent n-grams
        if int(counts.max()) * (int(spans[place]) + n - 1) > most * characters:
            return f"repetition: too many characters in the top {n}-gram"
    return ""


def duplicate_fault(stats: TextStats, characters: int, rules: Sequence[tuple[int, float]]) -> str:
    """Returns the first exceeded limit on repeated n-grams, or ''."""
    shortest, allowed = rules[0][0], min(most for _, most in rules) * characters
    keys = ngram_keys(stats.hashes, shortest)
    ordered = np.sort(keys)
    twice = ordered[1:] == ordered[:-1]
    if not (repeats := np.count_nonzero(twice)):
        return ""
    ends = stats.ends
    if repeats * int((ends[shortest:] - ends[:-shortest]).max()) <= allowed:  # upper bound
        return ""
    places = np.flatnonzero(is_member(keys, ordered[1:][twice]))
    found = keys.take(places)
    order = found.argsort(kind="stable")
    found = found.take(order)
    again = places.take(order[1:][found[1:] == found[:-1]])  # all occurrences except the first
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
    """Returns a boolean mask of the keys that are in `members`, which must be sorted and not empty."""
    return members.take(members.searchsorted(keys), mode="clip") == keys


def repeated_characters(keys: np.ndarray, ends: np.ndarray, n: int) -> int:
    """Returns the number of characters in n-grams that repeat an earlier n-gram. Skips overlapping n-grams."""
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
    """Returns uint64[max(0, words - n + 1)], a polynomial hash of the word hashes of each n-gram."""
    count = max(0, len(hashes) - n + 1)
    keys = hashes[:count].copy()
    for place in range(1, n):
        keys *= np.uint64(MULTIPLIER)
        keys += hashes[place : place + count]
    return keys


def make_c4(cfg: C4Config) -> Stage:
    """Returns a stage that applies the rules of C4, which remove lines or drop whole documents."""
    bad_words = None
    if cfg.bad_words is not None:
        words = "|".join(map(re.escape, read_words(cfg.bad_words, "c4.bad_words")))
        bad_words = re.compile(rf"(?<!\w)(?:{words})(?!\w)")  # whole words in lower-case text
    return per_document(lambda document: c4_outcome(document, cfg, bad_words))


def read_words(file: str, setting: str, remark: str = "") -> list[str]:
    """Returns the words of a file, sorted and in lower case. remark: prefix of comments; '' if there are none."""
    try:
        lines = [line for _, line in text_lines(os.path.expanduser(file))]
    except BadInput as error:
        raise BadInput(f"{setting}={file!r}: {error}; use a UTF-8 file with one word per line") from None
    words = sorted({(line.partition(remark)[0] if remark else line).strip().lower() for line in lines} - {""})
    if not words:
        raise BadInput(f"{setting}={file!r} has no words; put one word per line, or remove the setting")
    return words


def c4_outcome(document: Document, cfg: C4Config, bad_words: re.Pattern[str] | None = None) -> Outcome:
    """Returns the document with the remaining lines, or the reason to drop it."""
    text = document.text
    if bad_words and (found := bad_words.search(text.lower())):
        return Outcome(None, "c4: bad word", detail=found.group())
    lowered = text.encode(errors="surrogatepass").lower()  # three times as fast as text.lower(); phrases are ASCII
    has_lorem_ipsum = cfg.lorem_ipsum and b"lorem ipsum" in lowered
    has_javascript = cfg.javascript and b"javascript" in lowered
    has_policies = cfg.policies and any(policy in lowered for policy in (b"cookie", b"terms of use", b"privacy policy"))
    has_bracket = cfg.curly_bracket and "{" in text
    has_citation = cfg.citations and "[" in text
    keeps_blank = not cfg.terminal_punctuation and cfg.min_line_words is None
    lines_left: list[str] = []
    edits: collections.Counter[str] = collections.Counter()
    for line in map(str.strip, text.splitlines()):
        if not line:
            if keeps_blank:
                lines_left.append(line)
            continue
        if cfg.max_word_length is not None and len(line) > cfg.max_word_length:
            if any(len(word) > cfg.max_word_length for word in line.split()):
                edits["c4: line with a long word"] += 1
                continue
        whole = line
        if has_citation:
            line, count = CITATION.subn("", line)
            edits["c4: citation"] += count
        if cfg.terminal_punctuation and (not line.endswith(cfg.end_marks) or line.endswith("...")):
            edits["c4: line without terminal punctuation"] += 1
            continue
        if cfg.min_line_words is not None and len(whole.split(None, cfg.min_line_words)) < cfg.min_line_words:
            edits["c4: line of few words"] += 1
            continue
        if has_lorem_ipsum and "lorem ipsum" in line.lower():
            return Outcome(None, "c4: lorem ipsum")
        if has_javascript and "javascript" in line.lower():
            edits["c4: line with javascript"] += 1
            continue
        if has_bracket and "{" in line:
            return Outcome(None, "c4: curly bracket")
        if has_policies and any(policy in line.lower() for policy in POLICIES):
            edits["c4: line on policies"] += 1
            continue
        lines_left.append(line)
    if cfg.min_sentences is not None and not has_sentences(lines_left, cfg.min_sentences):
        return Outcome(None, f"c4: fewer than {cfg.min_sentences} sentences")
    cleaned = "\n".join(lines_left).strip()
    if not cleaned:
        return Outcome(None, "c4: no line left")
    if cleaned != text:
        document = document.edited(cleaned)
    return Outcome(document, edits=tuple(sorted((+edits).items())))


def has_sentences(lines: Sequence[str], least: int) -> bool:
    """Returns True if the lines have at least `least` sentences. A non-blank line has at least one."""
    missing = least - sum(not line.isspace() and line != "" for line in lines)
    for line in lines:
        if missing <= 0:
            return True
        missing -= count_sentences(line, missing + 1) - 1
    return missing <= 0


def count_sentences(line: str, enough: int) -> int:
    """Counts the sentences in a line and stops at `enough`. The first word after . ! or ? starts a sentence."""
    count, ended = 1, False
    for piece in line.split():
        kinds_of = _kinds if len(piece) > MAX_CACHED_CHARS else _known_kinds
        for kind in ("word",) if piece.isalnum() else kinds_of(piece):
            if kind == "word":
                count += ended
            ended = kind == "end" or ended and kind == "mark"
        if count >= enough:
            break
    return count


def _kinds(piece: str) -> tuple[str, ...]:
    """Returns the kind of each word of `piece`: 'end' (ends a sentence), 'word', or 'mark' (other punctuation)."""
    is_mark = lambda word: all(unicodedata.category(character)[0] == "P" for character in word)
    return tuple("end" if w in SENTENCE_ENDS else "mark" if is_mark(w) else "word" for w in cut(piece))


_known_kinds = functools.lru_cache(maxsize=1 << 15)(_kinds)


def make_fineweb(cfg: FineWebConfig) -> Stage:
    """Returns a stage that drops documents that break one of FineWeb's rules."""
    return per_document(lambda document: drop_if(document, fineweb_fault(document, cfg)))


def fineweb_fault(document: Document, cfg: FineWebConfig) -> str:
    """Returns the first rule that the document breaks, or ""."""
    text = document.text
    lines = [line for line in text.split("\n") if line and not line.isspace()]
    if not lines:
        return "fineweb: no text"
    if cfg.min_punctuated_lines is not None:
        if sum(line.endswith(SCRIPT_TERMINAL) for line in lines) < cfg.min_punctuated_lines * len(lines):
            return "fineweb: too few lines end a sentence"
    if cfg.max_short_lines is not None:
        if sum(len(line) <= cfg.short_line for line in lines) > cfg.max_short_lines * len(lines):
            return "fineweb: too many short lines"
    newlines = text.count("\n")
    if cfg.max_duplicate_line_chars is not None:
        if count_repeats(lines)[1] > cfg.max_duplicate_line_chars * (len(text) - newlines):
            return "fineweb: too many characters in duplicate lines"
    if cfg.max_newlines_per_word is not None:
        least = newlines / cfg.max_newlines_per_word if cfg.max_newlines_per_word else newlines and float("inf")
        if len(text.split(None, int(min(least, len(text))))) <= least and stats_of([document])[0].total < least:
            return "fineweb: too many newlines"  # the number of pieces is a lower bound of the number of words
    return ""
