"""Settings of the curation stages, except those of personal data, which are in pii.py."""

import dataclasses
import functools
import math
import re
from typing import Any, Literal

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

WordKind = Literal["whitespace", "spacy"]
WORDS_HELP = (
    "what a word is. whitespace: what stands between whitespace, as in the paper; spacy: as spaCy's English cuts them "
    "and datatrove counts them, where each mark is a word too"
)


def check_range(cfg: Any, low: float, high: float, *names: str, remark: str = "") -> None:
    """Raises BadInput unless these settings are from `low` to `high`, or None. remark: follows the rule."""
    for name in names:
        value = getattr(cfg, name)
        if value is not None and not low <= value <= high:
            rule = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise BadInput(f"{name}={value} must be {rule}{remark}")


def check_least(cfg: Any, low: float, *names: str, remark: str = "") -> None:
    """Raises BadInput unless these settings are at least `low`, or None."""
    check_range(cfg, low, math.inf, *names, remark=remark)


check_rules = functools.partial(check_range, remark=", or None for no such rule")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepairConfig:
    """Repairs of a text, and limits on its length. Repairs and removals are counted by kind."""

    normalise: Literal["NFC", "NFKC", "off"] = setting(
        "NFC", "Unicode normal form; NFKC also unfolds ligatures and wide letters"
    )
    mojibake: bool = setting(True, "undo wrong decodings with ftfy where their marks show ('Ã©', 'â€™')")
    invalid: Literal["repair", "drop", "stop"] = setting(
        "repair",
        "a text with control characters, half surrogates or U+FFFD, the mark of bytes that were none: take the "
        "characters out, drop the document, or stop and name it",
    )
    max_chars: int = setting(5_000_000, "longest document; 0: any")
    long_document: Literal["drop", "cut"] = setting("drop", "a longer document: drop it, or keep its beginning")
    max_line_chars: int = setting(100_000, "longest line; 0: any")
    long_line: Literal["drop", "cut", "split"] = setting(
        "drop", "a longer line: drop the line, keep its beginning, or split it at spaces into lines that fit"
    )

    def __post_init__(self):
        check_least(self, 0, "max_chars", "max_line_chars", remark=" characters; 0: no limit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """Languages to keep. The language and its probability are saved with every document."""

    keep: tuple[str, ...] = setting(
        (), "ISO 639 codes of the languages that are kept, such as ('en', 'de'); empty: all"
    )
    min_probability: float = setting(0.0, "a document whose language is less probable than this is dropped; 0: none is")
    head_chars: int = setting(
        400,
        "how many characters at its start a document is judged by: of 5,000 English web and book documents, 99.55% "
        "were right with 200, 99.71% with 400, 99.88% with 600, and the cost grows in proportion; 0: the whole text",
    )
    known: Literal["overwrite", "trust"] = setting(
        "overwrite",
        "a document whose file names its language by an ISO 639 code ('en', 'en-US'; see read.language_field): "
        "identify it all the same, or take the file's word",
    )

    def __post_init__(self):
        check_range(self, 0, 1, "min_probability")
        check_least(self, 0, "head_chars", remark=" characters; 0: the whole text")
        if not all(re.fullmatch("[a-z]{2,3}", code) for code in self.keep):
            raise BadInput(f"keep={self.keep} must hold ISO 639 codes, of two or three small letters, such as 'en'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepetitionConfig:
    """The thresholds of arXiv:2112.11446, table A1; None switches a rule off. Characters are of the whole text."""

    words: WordKind = setting("whitespace", WORDS_HELP)
    max_duplicate_lines: float | None = setting(0.30, "drop if a larger part of the lines occurred before")
    max_duplicate_paragraphs: float | None = setting(0.30, "drop if a larger part of the paragraphs occurred before")
    max_duplicate_line_chars: float | None = setting(0.20, "drop if repeated lines hold more of the characters")
    max_duplicate_paragraph_chars: float | None = setting(0.20, "drop if repeated paragraphs hold more of them")
    max_top_2gram: float | None = setting(0.20, "drop if the most frequent pair of words holds more of the characters")
    max_top_3gram: float | None = setting(0.18, "the same for three words")
    max_top_4gram: float | None = setting(0.16, "the same for four words")
    max_duplicate_5gram: float | None = setting(
        0.15, "drop if repeated sequences of 5 words hold more of the characters"
    )
    max_duplicate_6gram: float | None = setting(0.14, "the same for 6 words")
    max_duplicate_7gram: float | None = setting(0.13, "the same for 7 words")
    max_duplicate_8gram: float | None = setting(0.12, "the same for 8 words")
    max_duplicate_9gram: float | None = setting(0.11, "the same for 9 words")
    max_duplicate_10gram: float | None = setting(0.10, "the same for 10 words")

    def __post_init__(self):
        check_rules(self, 0, 1, *(field.name for field in dataclasses.fields(self) if field.name != "words"))

    def ngram_rules(self, kind: Literal["top", "duplicate"]) -> list[tuple[int, float]]:
        """(words, threshold) of the rules for the most frequent, or for repeated, sequences that are on."""
        pairs = ((n, getattr(self, f"max_{kind}_{n}gram", None)) for n in range(2, 11))
        return [(n, most) for n, most in pairs if most is not None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GopherConfig:
    """The thresholds of arXiv:2112.11446; None switches a rule off.

    With words="spacy" a mark by itself is a word for the ratios, though not one for counts and lengths.
    """

    words: WordKind = setting("whitespace", WORDS_HELP)
    min_words: int | None = setting(50, "drop a document of fewer words")
    max_words: int | None = setting(100_000, "drop a document of more words")
    min_word_length: float | None = setting(3.0, "drop if words have fewer characters on average")
    max_word_length: float | None = setting(10.0, "drop if words have more characters on average")
    max_symbol_ratio: float | None = setting(0.1, "drop if there are more hash signs, or ellipses, for each word")
    max_bullet_lines: float | None = setting(0.9, "drop if a larger part of the lines begins with a bullet")
    max_ellipsis_lines: float | None = setting(0.3, "drop if a larger part of the lines ends in an ellipsis")
    min_alphabetic_words: float | None = setting(0.8, "drop if a smaller part of the words has a letter")
    min_stop_words: int | None = setting(2, "drop if fewer of stop_words are in it")
    stop_words: tuple[str, ...] = setting(
        ("the", "be", "to", "of", "and", "that", "have", "with"), "words that running English has (lower case)"
    )

    def __post_init__(self):
        check_rules(self, 0, 1, "max_symbol_ratio", "max_bullet_lines", "max_ellipsis_lines", "min_alphabetic_words")
        for low, high in (("min_words", "max_words"), ("min_word_length", "max_word_length")):
            check_rules(self, 0, math.inf, low, high)
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise BadInput(f"{low}={least} is above {high}={most}: every document would be dropped")
        check_range(self, 0, len(self.stop_words), "min_stop_words", remark=", the number of stop_words, or None")


@dataclasses.dataclass(frozen=True, kw_only=True)
class C4Config:
    """The rules of arXiv:1910.10683, section 2.2; None or False switches one off. A removed line is an edit.

    The numbers are those of the published code (c4_utils.py of TensorFlow Datasets) and of the paper's journal version.
    The paper's first version had 3 words and 5 sentences, as do datatrove and FineWeb, with ' as an end mark.
    """

    terminal_punctuation: bool = setting(True, "keep only lines that end in one of end_marks, and not in ...")
    end_marks: tuple[str, ...] = setting((".", "?", "!", '"'), "what terminal_punctuation takes for the end of a line")
    min_line_words: int | None = setting(5, "keep only lines of at least this many words")
    max_word_length: int | None = setting(1000, "keep only lines without a longer word")
    javascript: bool = setting(True, "keep only lines that do not say JavaScript")
    policies: bool = setting(True, "keep only lines that do not speak of cookies, privacy policy or terms of use")
    citations: bool = setting(True, "take out [1], [edit] and [citation needed]")
    lorem_ipsum: bool = setting(True, "drop a document that says lorem ipsum in a line that would be kept")
    curly_bracket: bool = setting(True, "drop a document with { in a line that would be kept")
    min_sentences: int | None = setting(3, "drop a document of which fewer sentences are left")
    bad_words: str | None = setting(None, "local file, one word or phrase a line: drop a document with one of them")

    def __post_init__(self):
        check_rules(self, 1, math.inf, "min_line_words", "max_word_length", "min_sentences")
        if not self.end_marks or not all(mark.strip() for mark in self.end_marks):
            raise BadInput(
                f"end_marks={self.end_marks!r} must name marks that are not blank; terminal_punctuation=False keeps "
                "lines however they end"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineWebConfig:
    """The thresholds of arXiv:2406.17557; None switches a rule off. Blank lines are not counted as lines."""

    min_punctuated_lines: float | None = setting(0.12, "drop if a smaller part of the lines ends a sentence")
    max_short_lines: float | None = setting(0.67, "drop if a larger part of the lines is short")
    short_line: int = setting(30, "characters of the longest short line")
    max_duplicate_line_chars: float | None = setting(0.01, "drop if repeated lines hold more of the characters")
    max_newlines_per_word: float | None = setting(0.3, "drop if there are more line ends for each word")

    def __post_init__(self):
        check_rules(self, 0, 1, "min_punctuated_lines", "max_short_lines", "max_duplicate_line_chars")
        check_rules(self, 0, math.inf, "max_newlines_per_word")
        check_least(self, 0, "short_line")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LicenceConfig:
    """Licences to keep, by the name in the file; matching ignores case, and * and ? are wildcards."""

    allow: tuple[str, ...] = setting(
        (), "licences that are kept, such as ('cc-by-*', 'mit'); empty: all that are not denied"
    )
    deny: tuple[str, ...] = setting(
        (), "licences that are dropped even if they are allowed, such as ('*-nc-*', '*-nd-*')"
    )
    unknown: Literal["keep", "drop", "stop"] = setting(
        "keep", "a document that names no licence (or 'unknown', 'none', 'other'): keep or drop it, or stop and name it"
    )

    def __post_init__(self):
        for name in ("allow", "deny"):
            if any(not pattern.strip() for pattern in getattr(self, name)):
                raise BadInput(f"{name}={getattr(self, name)} holds an empty name; say what becomes of it by `unknown`")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToxicityConfig:
    """The score column "toxicity", and the thresholds for dropping documents."""

    score: bool = setting(True, "note alt-profanity-check's probability as the score column 'toxicity'")
    max_score: float | None = setting(None, "a document with a higher score is dropped; none: the score is only noted")
    head_chars: int = setting(0, "how many characters at its start a document is scored by; 0: the whole text")
    word_list: str = setting("", "file of words and phrases, one a line, # before remarks; empty: no list")
    max_listed: int = setting(0, "a document with more different entries of the list than this is dropped")

    def __post_init__(self):
        check_rules(self, 0, 1, "max_score")
        check_least(self, 0, "head_chars", "max_listed")
        if self.max_score is not None and not self.score:
            raise BadInput(f"max_score={self.max_score} needs score=True")


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
        check_rules(self, 0, 1, "min_score")
        check_range(self, 10, 24, "bits", remark=": 64 MB of weights at most")
        check_least(self, 1, "ngram_words", "epochs", "max_examples")
        check_least(self, 0, "max_words", remark="; 0: all")
        if self.weights and (self.good or self.bad):
            raise BadInput("weights names a model, and good and bad name examples to train one; set only one of them")
        if not 0 < self.held_out < 1:
            raise BadInput(f"held_out={self.held_out} must be between 0 and 1: the model is evaluated on this share")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactConfig:
    """Exact duplicates of whole documents. Whitespace is never compared."""

    lower: bool = setting(False, "take upper and lower case for the same")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineConfig:
    """Repeated lines: of all copies in the corpus only the first is kept. Whitespace is never compared."""

    min_line_characters: int = setting(100, "leave shorter lines alone; characters that are no whitespace")
    lower: bool = setting(False, "take upper and lower case for the same")
    min_document_characters: int = setting(200, "drop a document that lost lines and has fewer characters left")

    def __post_init__(self):
        check_least(self, 1, "min_line_characters")
        check_least(self, 0, "min_document_characters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearConfig:
    """Definition of near duplicates, and the size of the search."""

    threshold: float = setting(0.75, "drop a document whose n-grams have this Jaccard similarity to those of another")
    ngram_words: int = setting(5, "words in an n-gram")
    permutations: int = setting(128, "numbers in a signature; the standard error of J is at most 0.5 / its root")
    bands: int | None = setting(None, "bands of the signature; none: chosen from the threshold")
    rows: int | None = setting(None, "numbers in a band; none: chosen from the threshold")
    miss_weight: float = setting(
        0.95, "where bands are chosen, how much a miss counts; a false candidate counts the rest"
    )
    seed: int = setting(1, "of the random orders")

    def __post_init__(self):
        if not 0 < self.threshold <= 1:
            raise BadInput(f"threshold={self.threshold} must be above 0 and at most 1: it is a Jaccard similarity")
        check_least(self, 1, "ngram_words", "permutations", "bands", "rows")
        check_range(self, 0, (1 << 64) - 1, "seed")
        if not 0 < self.miss_weight < 1:
            raise BadInput(f"miss_weight={self.miss_weight} must be between 0 and 1")
        if (self.bands is None) != (self.rows is None):
            raise BadInput(f"bands={self.bands} and rows={self.rows}: give both, or neither")
        if self.bands is not None and self.rows is not None and self.bands * self.rows > self.permutations:
            raise BadInput(
                f"bands={self.bands} of rows={self.rows} need {self.bands * self.rows} numbers of a signature "
                f"that has permutations={self.permutations}; give fewer"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubstringConfig:
    """Passages that occur verbatim several times in a block of about 16 MB."""

    min_bytes: int = setting(200, "cut passages of at least this many bytes that were there before, in UTF-8")
    min_document_characters: int = setting(200, "drop a document that lost passages and has fewer characters left")

    def __post_init__(self):
        check_least(self, 8, "min_bytes", remark=" (50 tokens are about 200)")
        check_least(self, 0, "min_document_characters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContaminationConfig:
    """Handling of evaluation items in the training text."""

    files: tuple[str, ...] = setting(
        (),
        "evaluation files: .jsonl, .txt (also .gz, .zst), .parquet, .arrow; globs allowed; ('none',): nothing is "
        "looked for, which is said",
    )
    fields: tuple[str, ...] = setting(
        (), "fields of an item to look for, such as question; none given: all that are text"
    )
    action: Literal["drop", "cut"] = setting(
        "drop", "drop the document, or cut the words that match and what is around"
    )
    ngram_words: int = setting(13, "words in a row that make a match")
    short_words: int | None = setting(
        5, "search for the whole text of a shorter item if it has at least this many words; none: never"
    )
    min_item_share: float = setting(0.0, "an item counts only if this share of its word sequences is in the document")
    cut_characters: int = setting(200, "characters to cut before and after a match")
    min_piece_characters: int = setting(200, "minimum characters of a piece between cuts; shorter pieces are removed")
    max_cuts: int = setting(10, "drop a document that would be cut in more places than this")

    def __post_init__(self):
        check_least(self, 2, "ngram_words", remark="; 13 is usual, 8 is strict")
        check_least(self, 1, "short_words", remark=", or none; few words match everywhere")
        check_range(self, 0, 1, "min_item_share")
        check_least(self, 0, "cut_characters", "min_piece_characters", "max_cuts")

    @property
    def is_named(self) -> bool:
        """False if files=('none',)."""
        return self.files != ("none",)
