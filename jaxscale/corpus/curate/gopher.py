"""Gopher's quality filter (Rae et al., arXiv:2112.11446, table A1 and section A1.1)."""

from collections.abc import Sequence

import numpy as np

from jaxscale.corpus.curate.config import GopherConfig
from jaxscale.corpus.curate.words import TextStats, hash_of, stats_of
from jaxscale.text.document import Document, Outcome, Stage, outcome_of

BULLETS = ("•", "-")
ELLIPSES = ("...", "…")


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
