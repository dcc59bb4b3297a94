"""Settings of the curation stages. Settings for personal data are in pii.py."""

import dataclasses
import functools
import math
import re
from typing import Any, Literal

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

WordKind = Literal["whitespace", "spacy"]
WORDS_HELP = (
    "word definition. whitespace: split at whitespace, as in the paper; spacy: spaCy's English tokenizer, as in "
    "datatrove, where each punctuation mark is also a word"
)


def check_range(cfg: Any, low: float, high: float, *names: str, remark: str = "") -> None:
    """Raises BadInput unless each setting is None or between `low` and `high`. `remark` is appended to the message."""
    for name in names:
        value = getattr(cfg, name)
        if value is not None and not low <= value <= high:
            rule = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise BadInput(f"{name}={value} must be {rule}{remark}")


def check_least(cfg: Any, low: float, *names: str, remark: str = "") -> None:
    """Raises BadInput unless each setting is None or at least `low`."""
    check_range(cfg, low, math.inf, *names, remark=remark)


check_rules = functools.partial(check_range, remark=", or None to turn off the rule")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepairConfig:
    """Text repair and length limits. Reports list the number of repaired and dropped documents by kind."""

    normalise: Literal["NFC", "NFKC", "off"] = setting(
        "NFC", "Unicode normal form; NFKC also replaces ligatures and full-width letters"
    )
    mojibake: bool = setting(True, "repair mojibake such as 'Ã©' and 'â€™' with ftfy")
    invalid: Literal["repair", "drop", "stop"] = setting(
        "repair",
        "action for text with control characters, unpaired surrogates or U+FFFD (undecodable bytes): remove the "
        "characters, drop the document, or stop with an error",
    )
    max_chars: int = setting(5_000_000, "maximum document length; 0: no limit")
    long_document: Literal["drop", "cut"] = setting("drop", "documents above max_chars: drop, or truncate")
    max_line_chars: int = setting(100_000, "maximum line length; 0: no limit")
    long_line: Literal["drop", "cut", "split"] = setting(
        "drop", "lines above max_line_chars: drop, truncate, or split at spaces"
    )

    def __post_init__(self):
        check_least(self, 0, "max_chars", "max_line_chars", remark=" characters; 0: no limit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """Languages to keep. Each document is saved with its language and the probability of this language."""

    keep: tuple[str, ...] = setting((), "ISO 639 codes of the languages to keep, such as ('en', 'de'); empty: all")
    min_probability: float = setting(0.0, "drop documents whose language has a lower probability; 0: drop none")
    head_chars: int = setting(
        400,
        "identify the language from this many characters at the start of the document; 0: all. Accuracy on 5,000 "
        "English web and book documents: 99.55% with 200, 99.71% with 400, 99.88% with 600. Time is proportional",
    )
    known: Literal["overwrite", "trust"] = setting(
        "overwrite",
        "documents that have an ISO 639 language code ('en', 'en-US'; see read.language_field): identify the "
        "language anyway, or use the code",
    )

    def __post_init__(self):
        check_range(self, 0, 1, "min_probability")
        check_least(self, 0, "head_chars", remark=" characters; 0: the whole text")
        if not all(re.fullmatch("[a-z]{2,3}", code) for code in self.keep):
            raise BadInput(f"keep={self.keep} must be ISO 639 codes of two or three lower-case letters, such as 'en'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepetitionConfig:
    """Thresholds of arXiv:2112.11446, table A1; None turns off a rule. Fractions refer to the whole text."""

    words: WordKind = setting("whitespace", WORDS_HELP)
    max_duplicate_lines: float | None = setting(0.30, "maximum fraction of lines that repeat an earlier line")
    max_duplicate_paragraphs: float | None = setting(0.30, "the same for paragraphs")
    max_duplicate_line_chars: float | None = setting(0.20, "maximum fraction of characters in duplicate lines")
    max_duplicate_paragraph_chars: float | None = setting(
        0.20, "maximum fraction of characters in duplicate paragraphs"
    )
    max_top_2gram: float | None = setting(0.20, "maximum fraction of characters in the most frequent 2-gram")
    max_top_3gram: float | None = setting(0.18, "the same for 3-grams")
    max_top_4gram: float | None = setting(0.16, "the same for 4-grams")
    max_duplicate_5gram: float | None = setting(0.15, "maximum fraction of characters in duplicate 5-grams")
    max_duplicate_6gram: float | None = setting(0.14, "the same for 6-grams")
    max_duplicate_7gram: float | None = setting(0.13, "the same for 7-grams")
    max_duplicate_8gram: float | None = setting(0.12, "the same for 8-grams")
    max_duplicate_9gram: float | None = setting(0.11, "the same for 9-grams")
    max_duplicate_10gram: float | None = setting(0.10, "the same for 10-grams")

    def __post_init__(self):
        check_rules(self, 0, 1, *(field.name for field in dataclasses.fields(self) if field.name != "words"))

    def ngram_rules(self, kind: Literal["top", "duplicate"]) -> list[tuple[int, float]]:
        """Returns (n, threshold) of each enabled rule for the most frequent n-gram or for duplicate n-grams."""
        pairs = ((n, getattr(self, f"max_{kind}_{n}gram", None)) for n in range(2, 11))
        return [(n, most) for n, most in pairs if most is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GopherConfig:
    """Thresholds of arXiv:2112.11446; None turns off a rule.

    With words="spacy", punctuation marks count as words in ratios, but not in word counts or word lengths.
    """

    words: WordKind = setting("whitespace", WORDS_HELP)
    min_words: int | None = setting(50, "minimum words per document")
    max_words: int | None = setting(100_000, "maximum words per document")
    min_word_length: float | None = setting(3.0, "minimum mean word length in characters")
    max_word_length: float | None = setting(10.0, "maximum mean word length in characters")
    max_symbol_ratio: float | None = setting(0.1, "maximum number of hash signs, or of ellipses, per word")
    max_bullet_lines: float | None = setting(0.9, "maximum fraction of lines that start with a bullet")
    max_ellipsis_lines: float | None = setting(0.3, "maximum fraction of lines that end with an ellipsis")
    min_alphabetic_words: float | None = setting(0.8, "minimum fraction of words that contain a letter")
    min_stop_words: int | None = setting(2, "minimum number of stop_words in the document")
    stop_words: tuple[str, ...] = setting(
        ("the", "be", "to", "of", "and", "that", "have", "with"), "common English words in lower case"
    )

    def __post_init__(self):
        check_rules(self, 0, 1, "max_symbol_ratio", "max_bullet_lines", "max_ellipsis_lines", "min_alphabetic_words")
        for low, high in (("min_words", "max_words"), ("min_word_length", "max_word_length")):
            check_rules(self, 0, math.inf, low, high)
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise BadInput(f"{low}={least} exceeds {high}={most} and would drop every document; reduce the minimum")
        check_range(self, 0, len(self.stop_words), "min_stop_words", remark=", the number of stop_words, or None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class C4Config:
    """Rules of arXiv:1910.10683, section 2.2; None or False turns off a rule. Removed lines are counted as edits.

    The defaults are those of the published code (c4_utils.py in TensorFlow Datasets) and the paper's journal version.
    The paper's first version, datatrove and FineWeb use 3 words and 5 sentences, and also ' as an end mark.
    """

    terminal_punctuation: bool = setting(True, "keep only lines that end with one of end_marks, but not with '...'")
    end_marks: tuple[str, ...] = setting((".", "?", "!", '"'), "end marks for terminal_punctuation")
    min_line_words: int | None = setting(5, "keep only lines with at least this many words")
    max_word_length: int | None = setting(1000, "remove lines with a word of more characters")
    javascript: bool = setting(True, "remove lines that mention JavaScript")
    policies: bool = setting(True, "remove lines about cookies, privacy policy or terms of use")
    citations: bool = setting(True, "remove [1], [edit] and [citation needed]")
    lorem_ipsum: bool = setting(True, "drop documents with lorem ipsum in a remaining line")
    curly_bracket: bool = setting(True, "drop documents with { in a remaining line")
    min_sentences: int | None = setting(3, "drop documents with fewer remaining sentences")
    bad_words: str | None = setting(None, "local file, one word or phrase per line: drop documents that contain any")

    def __post_init__(self):
        check_rules(self, 1, math.inf, "min_line_words", "max_word_length", "min_sentences")
        if not self.end_marks or not all(mark.strip() for mark in self.end_marks):
            raise BadInput(
                f"end_marks={self.end_marks!r} must be non-blank strings; to accept any line end, set "
                "terminal_punctuation=False"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineWebConfig:
    """Thresholds of arXiv:2406.17557; None turns off a rule. Blank lines are not counted."""

    min_punctuated_lines: float | None = setting(0.12, "minimum fraction of lines that end a sentence")
    max_short_lines: float | None = setting(0.67, "maximum fraction of short lines")
    short_line: int = setting(30, "maximum characters of a short line")
    max_duplicate_line_chars: float | None = setting(0.01, "maximum fraction of characters in duplicate lines")
    max_newlines_per_word: float | None = setting(0.3, "maximum newlines per word")

    def __post_init__(self):
        check_rules(self, 0, 1, "min_punctuated_lines", "max_short_lines", "max_duplicate_line_chars")
        check_rules(self, 0, math.inf, "max_newlines_per_word")
        check_least(self, 0, "short_line")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LicenceConfig:
    """Licences to keep, compared with each document's licence. Case is ignored; * and ? are wildcards."""

    allow: tuple[str, ...] = setting((), "licences to keep, such as ('cc-by-*', 'mit'); empty: all except denied ones")
    deny: tuple[str, ...] = setting((), "licences to drop even if allowed, such as ('*-nc-*', '*-nd-*')")
    unknown: Literal["keep", "drop", "stop"] = setting(
        "keep", "documents without a licence (or 'unknown', 'none', 'other'): keep, drop, or stop with an error"
    )

    def __post_init__(self):
        for name in ("allow", "deny"):
            if any(not pattern.strip() for pattern in getattr(self, name)):
                raise BadInput(f"{name}={getattr(self, name)} has an empty name; use `unknown` for missing licences")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToxicityConfig:
    """Score column "toxicity" and thresholds for dropping documents."""

    score: bool = setting(True, "save alt-profanity-check's probability as the score column 'toxicity'")
    max_score: float | None = setting(None, "drop documents with a higher score; None: only save the score")
    head_chars: int = setting(0, "score this many characters at the start of the document; 0: all")
    word_list: str = setting("", "file of words and phrases, one per line (# starts a comment); empty: no list")
    max_listed: int = setting(0, "drop documents with more distinct entries of word_list")

    def __post_init__(self):
        check_rules(self, 0, 1, "max_score")
        check_least(self, 0, "head_chars", "max_listed")
        if self.max_score is not None and not self.score:
            raise BadInput(f"max_score={self.max_score} requires score=True")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """Quality classifier. Its score (column "quality"), from 0 to 1, is high for text that resembles `good`."""

    good: tuple[str, ...] = setting((), "files of good training examples, in the formats of sources; globs allowed")
    bad: tuple[str, ...] = setting((), "files of bad training examples, such as a sample of the raw crawl")
    weights: str = setting(
        "", "use this model instead of training: classifier.weights of an earlier dataset, or a fastText .bin or .ftz"
    )
    label: str = setting("__label__hq", "fastText: label of good text; the default is the label of DCLM's model")
    min_score: float | None = setting(
        None, "drop documents with a lower score; None: only save the score and report its distribution"
    )
    max_words: int = setting(
        1000, "score this many words at the start of the document; 0: all; classifier.weights overrides this setting"
    )
    ngram_words: int = setting(2, "training: maximum n-gram length, in words")
    bits: int = setting(20, "training: 2^bits hashed n-gram weights")
    epochs: int = setting(10, "training: passes over the examples")
    max_examples: int = setting(100_000, "training: maximum examples of each kind, selected by hash")
    held_out: float = setting(0.1, "training: fraction of examples held out for evaluation")
    seed: int = setting(0, "training: seed of the example order")

    def __post_init__(self):
        check_rules(self, 0, 1, "min_score")
        check_range(self, 10, 24, "bits", remark=" (24 bits are 64 MB of weights)")
        check_least(self, 1, "ngram_words", "epochs", "max_examples")
        check_least(self, 0, "max_words", remark="; 0: all")
        if self.weights and (self.good or self.bad):
            raise BadInput("set either weights, to use a trained model, or good and bad, to train a new model")
        if not 0 < self.held_out < 1:
            raise BadInput(f"held_out={self.held_out} is the fraction for evaluation, and must be between 0 and 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UrlConfig:
    """URL blocklists: documents from listed addresses are dropped. No list is included."""

    lists: tuple[str, ...] = setting(
        (),
        "files of URLs, one per line, also .gz. A domain matches its subdomains and all their pages; a domain with a "
        "path matches URLs with that prefix. Hosts files, ||domain^ and # comments are supported; globs allowed",
    )
    words: str = setting("", "file of words, one per line: drop URLs that contain any of them as a whole word")
    unknown: Literal["keep", "drop"] = setting("keep", "documents without a URL")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactConfig:
    """Exact duplicates of whole documents. Whitespace is ignored."""

    lower: bool = setting(False, "ignore case")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineConfig:
    """Duplicate lines: only the first copy in the corpus is kept. Whitespace is ignored."""

    min_line_characters: int = setting(100, "minimum non-whitespace characters; shorter lines are not compared")
    lower: bool = setting(False, "ignore case")
    min_document_characters: int = setting(200, "drop documents with fewer characters after lines were removed")

    def __post_init__(self):
        check_least(self, 1, "min_line_characters")
        check_least(self, 0, "min_document_characters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearConfig:
    """Definition of near duplicates, and the size of the search."""

    threshold: float = setting(0.75, "drop documents whose n-grams have at least this Jaccard similarity")
    ngram_words: int = setting(5, "words per n-gram")
    permutations: int = setting(128, "signature length; the standard error of J is at most 0.5 / sqrt(length)")
    bands: int | None = setting(None, "bands of the signature; None: chosen from the threshold")
    rows: int | None = setting(None, "rows per band; None: chosen from the threshold")
    miss_weight: float = setting(
        0.95, "weight of missed duplicates when bands are chosen; false candidates have weight 1 - miss_weight"
    )
    seed: int = setting(1, "seed of the random permutations")

    def __post_init__(self):
        if not 0 < self.threshold <= 1:
            raise BadInput(f"threshold={self.threshold} must be a Jaccard similarity above 0 and at most 1")
        check_least(self, 1, "ngram_words", "permutations", "bands", "rows")
        check_range(self, 0, (1 << 64) - 1, "seed")
        if not 0 < self.miss_weight < 1:
            raise BadInput(f"miss_weight={self.miss_weight} must be between 0 and 1")
        if (self.bands is None) != (self.rows is None):
            raise BadInput(f"bands={self.bands} and rows={self.rows} must be set together; set both, or neither")
        if self.bands is not None and self.rows is not None and self.bands * self.rows > self.permutations:
            raise BadInput(
                f"bands={self.bands} with rows={self.rows} need a signature of {self.bands * self.rows} numbers, but "
                f"permutations={self.permutations}; decrease bands or rows, or increase permutations"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubstringConfig:
    """Passages that occur verbatim more than once in a block of about 16 MB."""

    min_bytes: int = setting(200, "remove repeated passages of at least this many UTF-8 bytes")
    min_document_characters: int = setting(200, "drop documents with fewer characters after passages were removed")

    def __post_init__(self):
        check_least(self, 8, "min_bytes", remark=" (200 bytes are about 50 tokens)")
        check_least(self, 0, "min_document_characters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContaminationConfig:
    """Removal of evaluation items from the training text."""

    files: tuple[str, ...] = setting(
        (),
        "evaluation files: .jsonl, .txt (also .gz, .zst), .parquet, .arrow; globs allowed. ('none',) searches for "
        "nothing and logs a warning",
    )
    fields: tuple[str, ...] = setting((), "item fields to search for, such as question; empty: all text fields")
    action: Literal["drop", "cut"] = setting("drop", "drop the document, or cut the match and its surroundings")
    ngram_words: int = setting(13, "words per matching n-gram")
    short_words: int | None = setting(
        5, "search for a shorter item as a whole if it has at least this many words; None: never"
    )
    min_item_share: float = setting(0.0, "minimum fraction of an item's n-grams that occur in the document")
    cut_characters: int = setting(200, "characters to cut before and after a match")
    min_piece_characters: int = setting(200, "remove pieces between cuts with fewer characters")
    max_cuts: int = setting(10, "drop documents that would need more cuts")

    def __post_init__(self):
        check_least(self, 2, "ngram_words", remark=" (usual: 13, strict: 8)")
        check_least(self, 1, "short_words", remark=", or None; short items match many unrelated documents")
        check_range(self, 0, 1, "min_item_share")
        check_least(self, 0, "cut_characters", "min_piece_characters", "max_cuts")

    @property
    def is_named(self) -> bool:
        """Returns False if files=('none',)."""
        return self.files != ("none",)
