"""FineWeb's filter (Penedo et al., arXiv:2406.17557, section 3.6): lists, menus and duplicate lines."""

from jaxscale.corpus.curate.config import FineWebConfig
from jaxscale.corpus.curate.repetition import said_again
from jaxscale.corpus.curate.words import stats_of
from jaxscale.text.document import Document, Stage, each, outcome_of

# ends of a sentence in the scripts of the web: Unicode's property Sentence_Terminal, https://unicode.org/reports/tr29
TERMINAL = tuple(".!?։؟۔।॥。！？．｡‼‽⁇⁈⁉⸮။።፧។៕᙮᠃᠉꓿܀܁܂؞؝߹﹒﹖﹗꛳꛷᪨᪩᭚᭛᱾᱿")


def make_fineweb(cfg: FineWebConfig) -> Stage:
    """A stage that drops what breaks one of FineWeb's rules."""
    return each(lambda document: outcome_of(document, fineweb_fault(document, cfg)))


def fineweb_fault(document: Document, cfg: FineWebConfig) -> str:
    """The first rule that the document breaks, or ""."""
    text = document.text
    lines = [line for line in text.split("\n") if line and not line.isspace()]
    if not lines:
        return "fineweb: no text"
    if cfg.min_punctuated_lines is not None:
        if sum(line.endswith(TERMINAL) for line in lines) < cfg.min_punctuated_lines * len(lines):
            return "fineweb: too few lines end a sentence"
    if cfg.max_short_lines is not None:
        if sum(len(line) <= cfg.short_line for line in lines) > cfg.max_short_lines * len(lines):
            return "fineweb: too many short lines"
    newlines = text.count("\n")
    if cfg.max_duplicate_line_chars is not None:
        if said_again(lines)[1] > cfg.max_duplicate_line_chars * (len(text) - newlines):
            return "fineweb: lines said again"
    if cfg.max_newlines_per_word is not None:
        least = newlines / cfg.max_newlines_per_word if cfg.max_newlines_per_word else newlines and float("inf")
        if len(text.split(None, int(min(least, len(text))))) <= least and stats_of([document])[0].total < least:
            return "fineweb: too many line ends"  # there are at least as many words as pieces between spaces
    return ""
