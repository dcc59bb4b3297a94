"""Repairs text: Unicode normalization, control characters, mojibake and overlong lines. Clean text is fast."""

import re
import unicodedata
from collections import Counter
from typing import Literal

from jaxscale.runtime.text.document import Document, Outcome, Stage, per_document
from jaxscale.runtime.text.sources.part import PREPARE, importing
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate.config import RepairConfig

# Signs of UTF-8 decoded as Windows-1252, Latin-1 or Mac Roman: a lead byte's character and a continuation byte's. Lead
# bytes of Chinese, Japanese and Korean decode to accented letters of French, and need two continuation bytes.
CONTINUATION = (
    "[\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u017d\u017e\u0192\u02c6\u02dc\u2013\u2014\u2018-\u201a\u201c-\u201e"
    "\u2020-\u2022\u2026\u2030\u2039\u203a\u20ac\u2122]"
)
TWO, THREE = "\u00c2-\u00c6\u00ce-\u00d1\u00d7-\u00d9", "\u00e0-\u00ef"  # lead bytes of two- and three-byte characters
MOJIBAKE = re.compile(  # begins with a set of characters, which re searches for quickly
    f"[{TWO}{THREE}\u00f0\u221a\u201a](?:(?<=[{TWO}]){CONTINUATION}|(?<=[{THREE}]){CONTINUATION}{CONTINUATION}|(?<=\u00e2)\u20ac|(?<=\u00f0)[\u0178\u009f]"
    "|(?<=\u221a)[\u00a9\u00a8\u00b1\u00b3\u00ba\u2202]|(?<=\u201a)\u00c4[\u00ec\u00ee\u00f4\u00f9\u00fa])"
)
LINE_ENDS = re.compile("\r\n?|\u2028|\u2029|\u0085")  # newlines of the Unicode standard, 5.8, except form feed and tab
# C0 and C1 controls except tab and line feed, byte order marks, and noncharacters
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufdd0-\ufdef\ufffe\uffff]")
SEPARATORS = re.compile("(?<=\\S)[\x0b\x0c\x1c-\x1f]+(?=\\S)")  # page breaks and similar characters between two words
SURROGATE = re.compile("[\ud800-\udfff]")
REPLACEMENT = "\ufffd"
BAD = re.compile(f"{CONTROL.pattern}|{SURROGATE.pattern}|{REPLACEMENT}")
ASCII = bytes(range(0x80))
ASCII_CONTROL = bytes(sorted({*range(0x20), 0x7F} - {0x09, 0x0A}))
MAX_ROUNDS = 4  # one repair may enable another; more than two rounds are rare

INVALID = "repair: invalid text"
TOO_LONG = "repair: document too long"
EMPTY = "repair: nothing left"


def scan(text: str) -> tuple[str, bool]:
    """Returns (non-ASCII characters, whether there are ASCII controls). Without both, slower tests are skipped."""
    raw = text.encode("utf-8", errors="surrogatepass")
    non_ascii = "" if text.isascii() else raw.translate(None, ASCII).decode("utf-8", errors="surrogatepass")
    return non_ascii, len(raw.translate(None, ASCII_CONTROL)) != len(raw)


def fit_lines(text: str, chars: int, policy: Literal["drop", "cut", "split"], edits: Counter) -> str:
    """Returns the text with lines longer than `chars` dropped, cut or split. Counts the changes in `edits`."""
    lines = []
    for line in text.split("\n"):
        if len(line) <= chars:
            lines.append(line)
            continue
        edits[{"drop": "long line dropped", "cut": "long line cut", "split": "long line split"}[policy]] += 1
        if policy == "cut":
            lines.append(line[:chars])
        elif policy == "split":
            begin = 0
            while len(line) - begin > chars:
                space = line.rfind(" ", begin + 1, begin + chars + 1)
                end = space if space > 0 else begin + chars  # a word longer than the limit is split
                lines.append(line[begin:end])
                begin = end + (space > 0)
            lines.append(line[begin:])
    return "\n".join(lines)


def repair_once(text: str, cfg: RepairConfig, edits: Counter) -> str | None:
    """Runs each repair once and counts it in `edits`. Returns None for invalid text unless cfg.invalid is 'repair'."""
    non_ascii, controls = scan(text)
    if non_ascii and cfg.mojibake and MOJIBAKE.search(non_ascii) and MOJIBAKE.search(text):
        with importing("undoing mojibake", "ftfy", f"{PREPARE}, or set mojibake=False"):
            import ftfy  # its fix_encoding leaves quotes and character widths unchanged
        lines = text.split("\n")
        repaired = "\n".join(ftfy.fix_encoding(line) if MOJIBAKE.search(line) else line for line in lines)
        if repaired != text:
            edits["mojibake"] += 1
            text = repaired
            non_ascii, controls = scan(text)
    if controls or LINE_ENDS.search(non_ascii):
        text, ends = LINE_ENDS.subn("\n", text)
        edits["line end"] += ends
        non_ascii, controls = scan(text) if ends else (non_ascii, controls)
    if controls or BAD.search(non_ascii):
        if cfg.invalid != "repair":
            return None
        edits["replacement character"] += text.count(REPLACEMENT)
        text = text.replace(REPLACEMENT, "")
        edits["control character"] += len(CONTROL.findall(text))
        text = CONTROL.sub("", SEPARATORS.sub(" ", text))
        text, count = SURROGATE.subn("", text)
        edits["half surrogate"] += count
    if non_ascii and cfg.normalise != "off" and not unicodedata.is_normalized(cfg.normalise, text):
        text = unicodedata.normalize(cfg.normalise, text)
        edits["normalised"] += 1
    if len(text) > cfg.max_line_chars > 0:
        text = fit_lines(text, cfg.max_line_chars, cfg.long_line, edits)
    if len(text) > cfg.max_chars > 0 and cfg.long_document == "cut":
        text = text[: cfg.max_chars]
        edits["document cut"] += 1
    return text


def repair(text: str, cfg: RepairConfig) -> tuple[str, Counter, str]:
    """Returns (repaired text, number of repairs by kind, reason to drop the document or '')."""
    edits: Counter = Counter()
    if len(text) > cfg.max_chars > 0 and cfg.long_document == "drop":  # before the slower steps
        return text, edits, TOO_LONG
    for _ in range(MAX_ROUNDS):
        repaired = repair_once(text, cfg, edits)
        if repaired is None:
            return text, edits, INVALID
        if repaired == text:
            break
        text = repaired
    if len(text) > cfg.max_chars > 0:  # NFC and NFKC can lengthen a text
        return text, edits, TOO_LONG
    return text, +edits, "" if text and not text.isspace() else EMPTY


def make_repair(cfg: RepairConfig) -> Stage:
    """Returns a stage that repairs texts and drops those that cannot be repaired."""

    def judge(doc: Document) -> Outcome:
        text, edits, reason = repair(doc.text, cfg)
        if reason == INVALID and cfg.invalid == "stop":
            raise BadInput(
                f"{doc.file or 'a document'} at {doc.offset}: the text has control characters, unpaired surrogates "
                "or U+FFFD; set repair.invalid to 'repair' or 'drop' to continue"
            )
        if reason:
            return Outcome(None, reason)
        result = doc if text == doc.text else doc.edited(text)
        return Outcome(result, edits=tuple(sorted(edits.items())))

    return per_document(judge)
