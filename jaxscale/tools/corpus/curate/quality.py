"""Published quality filters: those of Gopher, C4 and FineWeb.

Gopher: Rae et al., arXiv:2112.11446, table A1 and section A1.1. C4: Raffel et al., arXiv:1910.10683, section 2.2, keeps
the lines of a page that are sentences; where the paper leaves a choice, its published code decides:
https://github.com/tensorflow/datasets/blob/master/tensorflow_datasets/text/c4_utils.py
FineWeb: Penedo et al., arXiv:2406.17557, section 3.6: lists, menus and duplicate lines.
"""

import collections
import functools
import os
import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from jaxscale.runtime.text.document import Document, Outcome, Stage, drop_if, per_document
from jaxscale.runtime.text.sources.records import text_lines
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate.config import C4Config, FineWebConfig, GopherConfig
from jaxscale.tools.corpus.curate.english import cut
from jaxscale.tools.corpus.curate.repetition import count_repeats
from jaxscale.tools.corpus.curate.words import TextStats, hash_of, stats_of

BULLETS = ("•", "-")
ELLIPSES = ("...", "…")
CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
MAX_CACHED_CHARS = 64  # longest piece in characters whose kinds are cached; longer ones rarely recur
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
SENTENCE_ENDS = frozenset(".!?։؟۔।॥。！？．｡‼‽⁇⁈⁉⸮။።፧᙮᠃᠉꓿܀܁܂߹﹒﹖﹗꛳꛷᪨᪩᭚᭛᱾᱿")
# ends of a sentence in the scripts of the web: Unicode's property Sentence_Terminal, https://unicode.org/reports/tr29
SCRIPT_TERMINAL = tuple(".!?։؟۔।॥。！？．｡‼‽⁇⁈⁉⸮။።፧។៕᙮᠃᠉꓿܀܁܂؞؝߹﹒﹖﹗꛳꛷᪨᪩᭚᭛᱾᱿")


def make_gopher(cfg: GopherConfig) -> Stage:
    """Returns a stage that drops documents that break one of Gopher's rules of quality."""
    stop_hashes = [np.uint64(hash_of(word)) for word in cfg.stop_words]

    def gopher(documents: Sequence[Document]) -> list[Outcome]:
        judged = zip(documents, stats_of(documents, cfg.words))
        return [drop_if(document, gopher_fault(document.text, stats, cfg, stop_hashes)) for document, stats in judged]

    return gopher


def gopher_fault(text: str, stats: TextStats, cfg: GopherConfig, stop_hashes: Sequence[np.uint64]) -> str:
    """Returns the first rule that the text breaks, or "". stop_hashes: of cfg.stop_words."""
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
        most = cfg.max_bullet_lines * len(lines)  # a line with a bullet has one somewhere: counting is the quick check
        if sum(map(text.count, BULLETS)) > most and sum(line.lstrip().startswith(BULLETS) for line in lines) > most:
            return "gopher: too many bullet lines"
    if cfg.max_ellipsis_lines is not None:
        most = cfg.max_ellipsis_lines * len(lines)
        if sum(map(text.count, ELLIPSES)) > most and sum(line.rstrip().endswith(ELLIPSES) for line in lines) > most:
            return "gopher: too many lines end in an ellipsis"
    if cfg.min_alphabetic_words is not None and stats.alphabetic < cfg.min_alphabetic_words * total:
        return "gopher: too few words with a letter"
    if cfg.min_stop_words:
        missing = cfg.min_stop_words
        for stop_hash in stop_hashes:
            missing -= bool((stats.hashes == stop_hash).any())
            if not missing:
                break
        if missing:
            return "gopher: too few stop words"
    return ""


def make_c4(cfg: C4Config) -> Stage:
    """Returns a stage that removes lines, counted by reason, and drops pages that are not text.

    Raises: BadInput if the file of bad words cannot be read or is empty.
    """
    bad_words = pattern_of(load_bad_words(cfg.bad_words)) if cfg.bad_words is not None else None
    return per_document(lambda document: c4_outcome(document, cfg, bad_words))


def load_bad_words(file: str) -> list[str]:
    """Returns the entries of the file. Raises BadInput as read_words does."""
    return read_words(file, "c4.bad_words")


def pattern_of(words: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern that finds any of the words, as whole words, in lower-case text."""
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)")


def read_words(file: str, setting: str, remark: str = "") -> list[str]:
    """Returns the entries of a word list, one per line, in lower case. remark: prefix of a comment; '': none."""
    try:
        lines = [line for _, line in text_lines(os.path.expanduser(file))]
    except BadInput as error:
        raise BadInput(f"{setting}={file!r}: {error}; name a UTF-8 file, a word a line") from None
    words = sorted({(line.partition(remark)[0] if remark else line).strip().lower() for line in lines} - {""})
    if not words:
        raise BadInput(f"{setting}={file!r} has no words; put one on each line, or leave the setting out")
    return words


def c4_outcome(document: Document, cfg: C4Config, bad_words: re.Pattern[str] | None = None) -> Outcome:
    """Returns the outcome: the document with the remaining lines, or the reason to drop it."""
    text = document.text
    if bad_words and (found := bad_words.search(text.lower())):
        return Outcome(None, "c4: bad word", detail=found.group())
    lowered = text.encode(errors="surrogatepass").lower()  # three times as fast as text.lower(); the phrases are ASCII
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
            if count:
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
    return Outcome(document, edits=tuple(sorted(edits.items())))


def has_sentences(lines: Sequence[str], least: int) -> bool:
    """True if the lines have at least `least` sentences; every non-blank line has at least one."""
    missing = least - sum(not line.isspace() and line != "" for line in lines)
    for line in lines:
        if missing <= 0:
            return True
        missing -= count_sentences(line, missing + 1) - 1
    return missing <= 0


def count_sentences(line: str, enough: int) -> int:
    """Returns the number of sentences of a line, up to `enough`: the first word after . ! or ? begins a new one."""
    count, ended = 1, False
    for piece in line.split():
        for kind in (
            ("word",) if piece.isalnum() else (_kinds if len(piece) > MAX_CACHED_CHARS else _known_kinds)(piece)
        ):
            if kind == "end":
                ended = True
            elif kind == "word":
                count += ended
                ended = False
        if count >= enough:
            break
    return count


def _kinds(piece: str) -> tuple[str, ...]:
    """Returns the kinds of a piece's words: sentence end, word, or another mark."""
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
            return "fineweb: too many newlines"  # there are at least as many words as pieces between spaces
    return ""
