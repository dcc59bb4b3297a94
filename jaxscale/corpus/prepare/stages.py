"""The one dict from a stage's name in a recipe to the function that makes it."""

from collections.abc import Callable
from typing import Any

from jaxscale.corpus.curate.c4 import make_c4
from jaxscale.corpus.curate.contamination import ContaminationConfig, make_contamination
from jaxscale.corpus.curate.evaluation import load_evaluation
from jaxscale.corpus.curate.fineweb import make_fineweb
from jaxscale.corpus.curate.gopher import make_gopher
from jaxscale.corpus.curate.langid import make_language
from jaxscale.corpus.curate.licence import make_licence
from jaxscale.corpus.curate.pii import make_pii
from jaxscale.corpus.curate.repair import make_repair
from jaxscale.corpus.curate.repetition import make_repetition
from jaxscale.corpus.curate.substring import make_substring
from jaxscale.corpus.curate.toxicity import make_toxicity
from jaxscale.corpus.prepare.config import STAGES, PrepareConfig
from jaxscale.text.document import Stage


def make_decontamination(cfg: ContaminationConfig) -> Stage:
    """The stage over the evaluation files that its settings name."""
    index = load_evaluation(cfg.files, fields=cfg.fields, ngram_words=cfg.ngram_words, short_words=cfg.short_words)
    return make_contamination(cfg, index)


MAKERS: dict[str, Callable[[Any], Stage]] = {
    "repair": make_repair,
    "language": make_language,
    "gopher_repetition": make_repetition,
    "gopher_quality": make_gopher,
    "c4": make_c4,
    "fineweb": make_fineweb,
    "licence": make_licence,
    "toxicity": make_toxicity,
    "substring": make_substring,
    "decontaminate": make_decontamination,
    "pii": make_pii,
}
assert set(MAKERS) == set(STAGES)


def make_stage(cfg: PrepareConfig, name: str) -> Stage:
    """The stage of that name, with its settings in the recipe."""
    return MAKERS[name](getattr(cfg, name))
