"""Gopher's rules of quality (Rae et al., arXiv:2112.11446, table A1 and section A1.1): is this prose?"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxscale.corpus.curate.words import TextStats, hash_of, stats_of
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput
from jaxscale.text.document import Document, Outcome, Stage, outcome_of

BULLETS = ("•", "-")
ELLIPSES = ("...", "…")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GopherConfig:
    """The thresholds of arXiv:2112.11446; None switches a rule off. A mark by itself is a word, but not a plain one."""

    min_words: int | None = setting(50, "drop a document of fewer plain words")
    max_words: int | None = setting(100_000, "drop a document of more plain words")
    min_word_length: float | None = setting(3.0, "drop if plain words have fewer characters on average")
    max_word_length: float | None = setting(10.0, "drop if plain words have more characters on average")
    max_symbol_ratio: float | None = setting(0.1, "drop if there are more hash signs, or ellipses, for each word")
    max_bullet_lines: float | None = setting(0.9, "drop if a larger part of the lines begins with a bullet")
    max_ellipsis_lines: float | None = setting(0.3, "drop if a larger part of the lines ends in an ellipsis")
    min_alphabetic_words: float | None = setting(0.8, "drop if a smaller part of the words has a letter")
    min_stop_words: int | None = setting(2, "drop if fewer of stop_words are in it")
    stop_words: tuple[str, ...] = setting(
        ("the", "be", "to", "of", "and", "that", "have", "with"), "words that running English has (lower case)"
    )

    def __post_init__(self):
        for name in ("max_symbol_ratio", "max_bullet_lines", "max_ellipsis_lines", "min_alphabetic_words"):
            check_fraction(name, getattr(self, name))
        for low, high in (("min_words", "max_words"), ("min_word_length", "max_word_length")):
            least, most = getattr(self, low), getattr(self, high)
            for name, value in ((low, least), (high, most)):
                if value is not None and value < 0:
                    raise BadInput(f"{name}={value} must be at least 0, or None for no such rule")
            if least is not None and most is not None and least > most:
                raise BadInput(f"{low}={least} is above {high}={most}: every document would be dropped")
        if self.min_stop_words is not None and not 0 <= self.min_stop_words <= len(self.stop_words):
            raise BadInput(
                f"min_stop_words={self.min_stop_words} must be at least 0 and at most the {len(self.stop_words)} words "
                "of stop_words, or None for no such rule"
            )


def check_fraction(name: str, value: float | None) -> None:
    """Raises BadInput unless the threshold is from 0 to 1, or None."""
    if value is not None and not 0 <= value <= 1:
        raise BadInput(f"{name}={value} must be from 0 to 1, or None for no such rule")


def make_gopher(cfg: GopherConfig) -> Stage:
    """A stage that drops what breaks one of Gopher's rules of quality."""
    stop_hashes = [np.uint64(hash_of(word)) for word in cfg.stop_words]

    def gopher(documents: Sequence[Document]) -> list[Outcome]:
        judged = zip(documents, stats_of(documents))
        return [
            outcome_of(document, gopher_fault(document.text, stats, cfg, stop_hashes)) for document, stats in judged
        ]

    return gopher


def gopher_fault(text: str, stats: TextStats, cfg: GopherConfig, stop_hashes: Sequence[np.uint64]) -> str:
    """The first rule that the text breaks, or "". stop_hashes: of cfg.stop_words."""
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
