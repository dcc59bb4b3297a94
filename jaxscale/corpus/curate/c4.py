"""C4's filter (Raffel et al., arXiv:1910.10683, section 2.2): keeps the lines of a page that are sentences.

Where the paper leaves a choice, its published code decides:
https://github.com/tensorflow/datasets/blob/master/tensorflow_datasets/text/c4_utils.py
"""

import collections
import dataclasses
import functools
import pathlib
import re
import unicodedata
from collections.abc import Sequence

from jaxscale.corpus.curate.config import C4Config
from jaxscale.corpus.curate.english import cut
from jaxscale.system.exits import BadInput
from jaxscale.text.document import Document, Outcome, Stage, each

TERMINAL = (".", "?", "!", '"', "'")
CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
SENTENCE_ENDS = frozenset(".!?։؟۔।॥。！？．｡‼‽⁇⁈⁉⸮။።፧᙮᠃᠉꓿܀܁܂߹﹒﹖﹗꛳꛷᪨᪩᭚᭛᱾᱿")


def make_c4(cfg: C4Config) -> Stage:
    """A stage that takes out lines, counted by reason, and drops what is no page of text.

    Raises: BadInput if the file of bad words cannot be read or is empty.
    """
    bad_words = read_bad_words(cfg.bad_words) if cfg.bad_words is not None else None
    return each(lambda document: c4_outcome(document, cfg, bad_words))


def read_bad_words(file: str) -> re.Pattern[str]:
    """A pattern that finds any of the file's words, as whole words, in a text of lower case."""
    try:
        lines = pathlib.Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"bad_words={file!r} cannot be read: {error}; name a UTF-8 file, a word a line") from None
    words = sorted({line.strip().lower() for line in lines} - {""})
    if not words:
        raise BadInput(f"bad_words={file!r} has no words; put one on each line, or set it to None")
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)")


def c4_outcome(document: Document, cfg: C4Config, bad_words: re.Pattern[str] | None = None) -> Outcome:
    """The document with the lines that are kept, or why it is dropped."""
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
    kept: list[str] = []
    edits: collections.Counter[str] = collections.Counter()
    for line in map(str.strip, text.splitlines()):
        if not line:
            if keeps_blank:
                kept.append(line)
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
        if cfg.terminal_punctuation and (not line.endswith(TERMINAL) or line.endswith("...")):
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
        kept.append(line)
    if cfg.min_sentences is not None and not has_sentences(kept, cfg.min_sentences):
        return Outcome(None, f"c4: fewer than {cfg.min_sentences} sentences")
    cleaned = "\n".join(kept).strip()
    if not cleaned:
        return Outcome(None, "c4: no line left")
    if cleaned != text:
        document = dataclasses.replace(document, text=cleaned)
    return Outcome(document, edits=tuple(sorted(edits.items())))


def has_sentences(lines: Sequence[str], least: int) -> bool:
    """Whether the lines have at least `least` sentences; a line that is not blank has one, however it ends."""
    missing = least - sum(not line.isspace() and line != "" for line in lines)
    for line in lines:
        if missing <= 0:
            return True
        missing -= count_sentences(line, missing + 1) - 1
    return missing <= 0


def count_sentences(line: str, enough: int) -> int:
    """Sentences of a line, counted up to `enough`: after . ! or ? the first word that is no mark begins a new one."""
    count, ended = 1, False
    for piece in line.split():
        for kind in ("word",) if piece.isalnum() else _kinds(piece):
            if kind == "end":
                ended = True
            elif kind == "word":
                count += ended
                ended = False
        if count >= enough:
            break
    return count


@functools.lru_cache(maxsize=1 << 15)
def _kinds(piece: str) -> tuple[str, ...]:
    """What the words of a piece are to a sentence: its end, a word, or another mark."""
    return tuple("end" if w in SENTENCE_ENDS else "mark" if _is_mark(w) else "word" for w in cut(piece))


def _is_mark(word: str) -> bool:
    return all(unicodedata.category(character)[0] == "P" for character in word)
