"""Toxicity score column; filtering by it, or by a word list, is optional.

The score is alt-profanity-check's linear model, trained on short comments. On ordinary documents it is above 0.5 for
9% and above 0.9 for 5%, mostly code and forum text, so that by default nothing is dropped. It takes longer than all
other stages that look at one document (about 560 us for 3.3 kB): leave it out where the score is not wanted.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

from jaxscale.runtime.text.document import Document, Outcome, Stage
from jaxscale.runtime.text.sources.part import PREPARE, importing
from jaxscale.tools.corpus.curate.config import ToxicityConfig
from jaxscale.tools.corpus.curate.quality import read_words

TOO_TOXIC = "toxicity: score too high"
LISTED = "toxicity: words of the list"
# Scripts that are written without spaces between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese).
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
WORD = re.compile(r"\w+")


def predict(texts: Sequence[str]) -> list[float]:
    """Returns the probability of abuse of each text, to 4 decimals: the last bits depend on the machine."""
    with importing("the toxicity score", "alt-profanity-check", f"{PREPARE}, or set score=False"):
        import profanity_check  # loads its own model file with joblib, from inside its own package
    return [round(float(p), 4) for p in profanity_check.predict_prob(list(texts))] if texts else []


def make_counter(words: Sequence[str]) -> Callable[[str], int]:
    """Returns a function that counts the entries in a text; whole words in scripts that separate words."""
    unspaced = [word for word in words if UNSPACED.search(word)]
    single = {word for word in words if WORD.fullmatch(word)}.difference(unspaced)
    others = [word for word in words if word not in single | set(unspaced)]
    phrases = {word: re.compile(rf"(?<!\w){re.escape(word)}(?!\w)") for word in others}

    def count(text: str) -> int:
        text = text.lower()
        found = len(single.intersection(WORD.findall(text))) if single else 0
        found += sum(word in text for word in unspaced)
        return found + sum(word in text and form.search(text) is not None for word, form in phrases.items())

    return count


def make_toxicity(cfg: ToxicityConfig) -> Stage:
    """Returns a stage that scores documents, and drops those above the threshold or with too many listed words."""
    count = make_counter(read_words(cfg.word_list, "toxicity.word_list", "#")) if cfg.word_list else None

    def judge(doc: Document, score: float | None) -> Outcome:
        if count and (listed := count(doc.text)) > cfg.max_listed:
            return Outcome(None, LISTED, detail=str(listed))
        if score is None:
            return Outcome(doc)
        if cfg.max_score is not None and score > cfg.max_score:
            return Outcome(None, TOO_TOXIC, detail=f"{score:.2f}")
        return Outcome(dataclasses.replace(doc, scores=(*doc.scores, ("toxicity", score))))

    def stage(docs: Sequence[Document]) -> list[Outcome]:
        texts = [doc.text[: cfg.head_chars or None] for doc in docs] if cfg.score else []
        return [judge(doc, score) for doc, score in zip(docs, predict(texts) if cfg.score else [None] * len(docs))]

    return stage
