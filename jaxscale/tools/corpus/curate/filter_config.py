"""Settings of filters by what a user brings: examples or weights of a classifier, lists of addresses."""

import dataclasses
from typing import Literal

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate.config import check_fractions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """Quality classifier: its score is the column "quality", from 0 to 1, high for text like `good`."""

    good: tuple[str, ...] = setting(
        (), "files of text that is wanted, read as those of sources are: the model is trained on them; globs allowed"
    )
    bad: tuple[str, ...] = setting((), "files of text that is not, such as a sample of the raw crawl")
    weights: str = setting(
        "", "a model to use instead of training: the classifier.weights of an earlier set, or fastText's .bin or .ftz"
    )
    label: str = setting("__label__hq", "fastText: the label of text that is wanted; by default that of DCLM's model")
    min_score: float | None = setting(
        None, "a document with a lower score is dropped; none: the score is only noted, and the report counts scores"
    )
    max_words: int = setting(
        1000, "how many words at its start a document is judged by; 0: all; classifier.weights has its own"
    )
    ngram_words: int = setting(2, "training: the longest sequence of words that has a weight")
    bits: int = setting(20, "training: 2^bits weights, which sequences of words share by their hashes")
    epochs: int = setting(10, "training: how often each example is seen")
    max_examples: int = setting(100_000, "training: maximum examples of each kind, chosen by their hashes")
    held_out: float = setting(0.1, "training: share of the examples that is held out for evaluation")
    seed: int = setting(0, "training: of the order of the examples")

    def __post_init__(self):
        check_fractions(self, "min_score")
        if self.weights and (self.good or self.bad):
            raise BadInput("weights names a model, and good and bad name examples to train one; set only one of them")
        if not 0 < self.held_out < 1:
            raise BadInput(f"held_out={self.held_out} must be between 0 and 1: the model is evaluated on this share")
        if not 10 <= self.bits <= 24:
            raise BadInput(f"bits={self.bits} must be from 10 to 24: 64 MB of weights at most")
        if min(self.ngram_words, self.epochs, self.max_examples) < 1 or self.max_words < 0:
            raise BadInput(
                f"ngram_words={self.ngram_words}, epochs={self.epochs} and max_examples={self.max_examples} must be 1 "
                f"or more, max_words={self.max_words} 0 or more"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class UrlConfig:
    """Lists of addresses whose documents are dropped; none is shipped."""

    lists: tuple[str, ...] = setting(
        (),
        "files of addresses, one a line, also .gz: a domain stands for all below it, a domain with a path for what "
        "begins so; lines of hosts files, ||domain^ and # remarks are understood; globs allowed",
    )
    words: str = setting("", "file of words, one a line: no address may hold one of them as a whole word")
    unknown: Literal["keep", "drop"] = setting("keep", "a document without an address")
