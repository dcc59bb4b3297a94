"""Document classifiers: quality (logistic regression on hashed word n-grams, or a fastText model) and toxicity.

The quality classifier is a fastText classifier (arXiv:1607.01759) with two labels and no hidden layer. Each n-gram of
one or two words has a weight, indexed by its hash (arXiv:0902.2206), and a document's score is the logistic function of
the mean weight. GPT-3 selected pages this way (arXiv:2005.14165, appendix A), and DCLM with fastText itself
(arXiv:2406.11794). hashes.py defines words.

Toxicity is scored by alt-profanity-check's linear model, which was trained on short comments. Of ordinary documents, 9%
score above 0.5 and 5% above 0.9, mostly code and forum text, so no document is dropped by default. The stage takes
longer than all other single-document stages (about 560 us for 3.3 kB). Dropping documents is optional.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.runtime.text.document import Document, Outcome, Stage
from jaxscale.runtime.text.sources.part import PREPARE, importing
from jaxscale.system import foreign
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate.config import ClassifierConfig, ToxicityConfig
from jaxscale.tools.corpus.curate.hashes import hash_words, ngram_hashes, text_hash, word_hashes_of
from jaxscale.tools.corpus.curate.quality import read_words

COLUMN = "quality"
TOO_LOW = "classifier: score too low"
FORMAT = "jaxscale linear classifier 1"  # first line of a weights file
MAX_FILE_BYTES = 80 << 20  # maximum size of a weights file
FASTTEXT = (".bin", ".ftz")
MIN_EXAMPLES = 20  # examples of each kind; with fewer, the accuracy is not meaningful
BATCH = 64  # examples per training step
LEARNING_RATE = 10.0  # of Adagrad; ROC AUC on the texts of docs/prepare.md: 0.926 with 10, 0.918 with 3, 0.912 with 1
TOO_TOXIC = "toxicity: score too high"
LISTED = "toxicity: words of the list"
# Scripts without spaces between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese).
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
WORD = re.compile(r"\w+")
THRESHOLDS = tuple(step / 20 for step in range(1, 20))  # thresholds in the report


def make_classifier(cfg: ClassifierConfig) -> Stage:
    """Returns a stage that adds a score to each document and drops documents below the threshold."""
    score = make_scorer(cfg)

    def judge(document: Document, found: float) -> Outcome:
        if cfg.min_score is not None and found < cfg.min_score:
            return Outcome(None, TOO_LOW, detail=f"{found:.4f}")
        return Outcome(dataclasses.replace(document, scores=(*document.scores, (COLUMN, found))))

    return lambda documents: [judge(document, found) for document, found in zip(documents, score(documents))]


def make_scorer(cfg: ClassifierConfig) -> Callable[[Sequence[Document]], list[float]]:
    """Returns a function that scores documents. Scores are rounded, because their last digits depend on the machine."""
    if cfg.weights.endswith(FASTTEXT):
        return fasttext_scorer(cfg)
    weights, bias, ngram_words, max_words = read_model(cfg.weights)

    def score(documents: Sequence[Document]) -> list[float]:
        rows = [ngram_indices(words, ngram_words, max_words, len(weights)) for words in hash_words(documents)]
        return [round(float(found), 4) for found in scores(rows, weights, bias)]

    return score


def fasttext_scorer(cfg: ClassifierConfig) -> Callable[[Sequence[Document]], list[float]]:
    """Returns a function that computes fastText's probability of cfg.label. Raises BadInput for an unknown label."""
    with importing(f"classifier.weights={cfg.weights}", "fasttext", "pip install fasttext-predict"):
        import fasttext
    try:
        model = fasttext.load_model(str(Path(cfg.weights).expanduser()))
    except (ValueError, MemoryError) as error:
        raise BadInput(f"classifier.weights={cfg.weights} is not a fastText model: {error}") from None
    labels = lambda text: dict(zip(*model.predict(text, k=-1)))  # {label: probability}
    if cfg.label not in (known := labels("a")):
        raise BadInput(f"classifier.weights={cfg.weights} has no label {cfg.label}; use {', '.join(sorted(known)[:8])}")

    def score(documents: Sequence[Document]) -> list[float]:
        words = (document.text.split(None, cfg.max_words or -1)[: cfg.max_words or None] for document in documents)
        return [round(min(1.0, float(labels(" ".join(head))[cfg.label])), 4) for head in words]

    return score


def ngram_indices(words: np.ndarray, ngram_words: int, max_words: int, size: int) -> np.ndarray:
    """Returns int64[k], the indices of the weights of all n-grams of 1 to ngram_words words. `size`: a power of two."""
    words = words[: max_words or None]
    shift = np.uint64(64 - (size.bit_length() - 1))
    found = [ngram_hashes(words, n) >> shift for n in range(1, ngram_words + 1)]
    return np.concatenate(found).astype(np.int64)


def scores(rows: Sequence[np.ndarray], weights: np.ndarray, bias: float) -> np.ndarray:
    """Returns float64[n], the probability that each document is good: logistic(mean n-gram weight + bias)."""
    lengths = np.array([len(row) for row in rows], np.int64)
    flat = np.concatenate([np.zeros(0, np.int64), *rows])
    sums = np.concatenate([[0.0], np.cumsum(weights.take(flat), dtype=np.float64)])
    ends = lengths.cumsum()
    logits = (sums[ends] - sums[ends - lengths]) / np.maximum(lengths, 1) + bias  # an empty row gives the bias
    return 1 / (1 + np.exp(-np.clip(logits, -30, 30)))


def train_classifier(good: Iterable[str], bad: Iterable[str], cfg: ClassifierConfig) -> tuple[bytes, dict[str, Any]]:
    """Returns (content of the weights file, facts for the report). The order of the examples has no effect.

    Texts that are both good and bad are ignored. Raises BadInput for fewer than MIN_EXAMPLES good or bad texts.
    """
    kinds = [sample_texts(texts, cfg.max_examples) for texts in (good, bad)]
    both = kinds[0].keys() & kinds[1].keys()
    chosen = [{key: text for key, text in kind.items() if key not in both} for kind in kinds]
    for name, kind in zip(("good", "bad"), chosen):
        if len(kind) < MIN_EXAMPLES:
            raise BadInput(
                f"classifier.{name} has {len(kind)} distinct texts, excluding texts in both good and bad; provide at "
                f"least {MIN_EXAMPLES}, preferably thousands"
            )
    keys = [key for kind in chosen for key in kind]
    is_test = np.array([key % (1 << 32) < cfg.held_out * (1 << 32) for key in keys])  # sample_texts used the upper bits
    words = word_hashes_of([text for kind in chosen for text in kind.values()])
    rows = [ngram_indices(row, cfg.ngram_words, cfg.max_words, 1 << cfg.bits) for row in words]
    good = np.arange(len(keys)) < len(chosen[0])
    for part in (good[~is_test], good[is_test]):
        if part.all() or not part.any():
            raise BadInput(f"classifier.held_out={cfg.held_out} leaves no good or no bad texts in a split; add texts")
    weights, bias = fit([rows[i] for i in np.flatnonzero(~is_test)], good[~is_test], cfg)
    test_scores, test_good = scores([rows[i] for i in np.flatnonzero(is_test)], weights, bias), good[is_test]
    facts = {"good": len(chosen[0]), "bad": len(chosen[1]), "in_both": len(both)}
    facts |= {"held_out": [int(test_good.sum()), int((~test_good).sum())]}
    header = {"format": FORMAT, "bits": cfg.bits, "ngram_words": cfg.ngram_words, "max_words": cfg.max_words}
    content = json.dumps(header | {"bias": bias}, sort_keys=True).encode() + b"\n" + weights.astype("<f4").tobytes()
    return content, facts | evaluate_scores(test_scores, test_good)


def sample_texts(texts: Iterable[str], max_texts: int) -> dict[int, str]:
    """Returns {hash: text} of the distinct texts with the smallest hashes, at most `max_texts`."""
    found: dict[int, str] = {}
    for text in texts:
        found.setdefault(text_hash(text), text)
        if len(found) > 2 * max_texts:
            found = {key: found[key] for key in sorted(found)[:max_texts]}
    return {key: found[key] for key in sorted(found)[:max_texts]}


def fit(indices: Sequence[np.ndarray], good: np.ndarray, cfg: ClassifierConfig) -> tuple[np.ndarray, float]:
    """Returns (weights float32[2^bits], bias), trained with Adagrad. Good and bad texts have equal total weight."""
    size, rng = 1 << cfg.bits, np.random.Generator(np.random.Philox(cfg.seed))
    weights, squares = np.zeros(size, np.float32), np.full(size, 1e-12, np.float32)
    bias = bias_squares = 0.0
    share = np.where(good, 0.5 / good.mean(), 0.5 / (~good).mean())
    for _ in range(cfg.epochs):
        order = rng.permutation(len(good))
        for begin in range(0, len(order), BATCH):
            batch = order[begin : begin + BATCH]
            rows = [indices[i] for i in batch]
            slopes = (scores(rows, weights, bias) - good[batch]) * share[batch] / len(batch)
            lengths = np.array([len(row) for row in rows])
            flat = np.concatenate(rows)
            places, inverse = np.unique(flat, return_inverse=True)
            gradient = np.bincount(inverse, np.repeat(slopes / np.maximum(lengths, 1), lengths), len(places))
            squares[places] += gradient.astype(np.float32) ** 2
            weights[places] -= (LEARNING_RATE * gradient / np.sqrt(squares[places])).astype(np.float32)
            bias_squares += float(slopes.sum()) ** 2
            bias -= 0.1 * LEARNING_RATE * float(slopes.sum()) / math.sqrt(bias_squares + 1e-12)
    return weights, bias


def evaluate_scores(found: np.ndarray, good: np.ndarray) -> dict[str, Any]:
    """Returns the balanced accuracy, the ROC AUC and, for each threshold, the fractions of good and bad texts above."""
    rank = np.argsort(np.argsort(found, kind="stable"), kind="stable")[good] + 1.0
    pairs = good.sum() * (~good).sum()
    above = lambda kind, least: float((found[kind] >= least).mean())
    shares = [[least, above(good, least), above(~good, least)] for least in THRESHOLDS]
    accuracy = ((found[good] >= 0.5).mean() + (found[~good] < 0.5).mean()) / 2
    auc = (rank.sum() - good.sum() * (good.sum() + 1) / 2) / pairs
    return {"accuracy": float(accuracy), "auc": float(auc), "kept": shares}


def read_model(path: str) -> tuple[np.ndarray, float, int, int]:
    """Returns (weights, bias, ngram_words, max_words) from a file. Raises BadInput if it is invalid or truncated."""
    try:
        content = foreign.read_named(path, MAX_FILE_BYTES)
    except OSError as error:
        raise BadInput(f"classifier.weights={path} cannot be read: {error.strerror or error}") from None
    first, _, payload = content.partition(b"\n")
    try:
        header = foreign.parse_json(first) if first.startswith(b"{") else None
    except BadInput:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise BadInput(f"classifier.weights={path} is neither a file written by prepare nor a fastText .bin or .ftz")
    sizes = [header.get(name) for name in ("bits", "ngram_words", "max_words")]
    is_complete = all(type(size) is int and size >= 0 for size in sizes) and isinstance(header.get("bias"), float)
    if not is_complete or header["bits"] > 24 or len(payload) != 4 << header["bits"]:
        raise BadInput(f"classifier.weights={path} is incomplete; restore the file, or train the classifier again")
    weights = np.frombuffer(payload, "<f4")
    if not np.isfinite(weights).all() or not math.isfinite(header["bias"]):
        raise BadInput(f"classifier.weights={path} has non-finite values; train the classifier again")
    return weights, header["bias"], max(1, min(header["ngram_words"], 9)), header["max_words"]


def predict(texts: Sequence[str]) -> list[float]:
    """Returns the probability that each text is abusive, rounded because the last digits depend on the machine."""
    with importing("the toxicity score", "alt-profanity-check", f"{PREPARE}, or set score=False"):
        import profanity_check  # loads its model file with joblib, from inside its package
    return [round(float(p), 4) for p in profanity_check.predict_prob(list(texts))] if texts else []


def make_counter(words: Sequence[str]) -> Callable[[str], int]:
    """Returns a function that counts the distinct entries of `words` in a text. Most scripts require whole words."""
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
    """Returns a stage that scores documents. Drops documents above the threshold or with too many listed words."""
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
