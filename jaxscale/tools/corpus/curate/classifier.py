"""Quality classifier: logistic regression on hashed word n-grams, or a fastText model.

A two-label fastText classifier (arXiv:1607.01759) without hidden layer: each n-gram of one or two words has a weight,
indexed by its hash (arXiv:0902.2206), and a document's score is the logistic function of their mean. GPT-3 selected
pages this way (arXiv:2005.14165, appendix A), DCLM with fastText itself (arXiv:2406.11794). Words: see hashes.py.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.text.document import Document, Outcome, Stage
from jaxscale.runtime.text.sources.part import importing
from jaxscale.system import foreign
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate.filter_config import ClassifierConfig
from jaxscale.tools.corpus.curate.hashes import hash_words, ngram_hashes, text_hash, word_hashes_of

COLUMN = "quality"
TOO_LOW = "classifier: score too low"
FORMAT = "jaxscale linear classifier 1"  # first line of a weights file
MAX_FILE_BYTES = 80 << 20  # of weights
FASTTEXT = (".bin", ".ftz")
MIN_EXAMPLES = 20  # examples of each kind; fewer give no meaningful accuracy
BATCH = 64  # examples per training step
LEARNING_RATE = 10.0  # of Adagrad; on the texts of docs/data.md ROC AUC is 0.926 with it, 0.918 with 3, 0.912 with 1
THRESHOLDS = tuple(step / 20 for step in range(1, 20))  # thresholds in the report


class LinearModel(NamedTuple):
    """Linear model over hashed n-grams."""

    weights: np.ndarray  # float32[2^bits]
    bias: float
    ngram_words: int
    max_words: int


class Examples(NamedTuple):
    """Texts as indices of their weights, and their labels."""

    indices: list[np.ndarray]  # int64[k] of each text
    good: np.ndarray  # bool[n]


def make_classifier(cfg: ClassifierConfig) -> Stage:
    """Returns a stage that adds each document's score, and drops documents below the threshold."""
    score = make_scorer(cfg)

    def judge(document: Document, found: float) -> Outcome:
        if cfg.min_score is not None and found < cfg.min_score:
            return Outcome(None, TOO_LOW, detail=f"{found:.4f}")
        return Outcome(dataclasses.replace(document, scores=(*document.scores, (COLUMN, found))))

    return lambda documents: [judge(document, found) for document, found in zip(documents, score(documents))]


def make_scorer(cfg: ClassifierConfig) -> Callable[[Sequence[Document]], list[float]]:
    """Returns a function from documents to scores, rounded to 4 decimals since the last bits depend on the machine."""
    if cfg.weights.endswith(FASTTEXT):
        return fasttext_scorer(cfg)
    model = read_model(cfg.weights)

    def score(documents: Sequence[Document]) -> list[float]:
        rows = [
            ngram_indices(row, model.ngram_words, model.max_words, len(model.weights)) for row in hash_words(documents)
        ]
        return [round(float(found), 4) for found in scores(rows, model.weights, model.bias)]

    return score


def fasttext_scorer(cfg: ClassifierConfig) -> Callable[[Sequence[Document]], list[float]]:
    """Returns a scorer with fastText's probability of cfg.label. Raises BadInput for a model without that label."""
    with importing(f"classifier.weights={cfg.weights}", "fasttext", "pip install fasttext-predict"):
        import fasttext
    try:
        model = fasttext.load_model(str(Path(cfg.weights).expanduser()))
    except (ValueError, MemoryError) as error:
        raise BadInput(f"classifier.weights={cfg.weights} is not a fastText model: {error}") from None
    known = {label for label, _ in fasttext_labels(model, "a")}
    if cfg.label not in known:
        raise BadInput(
            f"classifier.weights={cfg.weights} has no label {cfg.label}; name one of {', '.join(sorted(known)[:8])}"
        )

    def score(documents: Sequence[Document]) -> list[float]:
        heads = (
            " ".join(document.text.split(None, cfg.max_words or -1)[: cfg.max_words or None]) for document in documents
        )
        return [round(min(1.0, float(dict(fasttext_labels(model, header))[cfg.label])), 4) for header in heads]

    return score


def fasttext_labels(model: Any, text: str) -> list[tuple[str, float]]:
    """Returns (label, probability) for each label."""
    labels, probabilities = model.predict(text, k=-1)
    return list(zip(labels, probabilities))


def ngram_indices(words: np.ndarray, ngram_words: int, max_words: int, size: int) -> np.ndarray:
    """Returns int64[k], the weight indices of all n-grams of up to ngram_words words. size: a power of two."""
    words = words[: max_words or None]
    shift = np.uint64(64 - (size.bit_length() - 1))
    found = [ngram_hashes(words, n) >> shift for n in range(1, ngram_words + 1)]
    return np.concatenate(found).astype(np.int64)


def logits(rows: Sequence[np.ndarray], weights: np.ndarray, bias: float) -> np.ndarray:
    """Returns float64[n], the mean weight of each row plus the bias; the bias alone for an empty row."""
    lengths = np.array([len(row) for row in rows], np.int64)
    flat = np.concatenate([np.zeros(0, np.int64), *rows])
    sums = np.concatenate([[0.0], np.cumsum(weights.take(flat), dtype=np.float64)])
    ends = lengths.cumsum()
    return (sums[ends] - sums[ends - lengths]) / np.maximum(lengths, 1) + bias


def scores(rows: Sequence[np.ndarray], weights: np.ndarray, bias: float) -> np.ndarray:
    """Returns float64[n], the probability that each row is a good example."""
    return 1 / (1 + np.exp(-np.clip(logits(rows, weights, bias), -30, 30)))


def train_classifier(good: Iterable[str], bad: Iterable[str], cfg: ClassifierConfig) -> tuple[bytes, dict[str, Any]]:
    """Returns (content of the weights file, facts for the report). The order of the examples does not matter.

    Texts in both sets are ignored. Raises BadInput for fewer than MIN_EXAMPLES examples of a kind.
    """
    kinds = [sample_texts(texts, cfg.max_examples) for texts in (good, bad)]
    both = kinds[0].keys() & kinds[1].keys()
    chosen = [{key: text for key, text in kind.items() if key not in both} for kind in kinds]
    for name, kind in zip(("good", "bad"), chosen):
        if len(kind) < MIN_EXAMPLES:
            raise BadInput(
                f"classifier.{name} has {len(kind)} different texts that the other does not have; "
                f"{MIN_EXAMPLES} or more of each kind are needed, and thousands are usual"
            )
    keys = [(key, is_good) for is_good, kind in zip((True, False), chosen) for key in kind]
    holdout = np.array([in_holdout(key, cfg.held_out) for key, _ in keys])
    texts = [chosen[not is_good][key] for key, is_good in keys]
    rows = [ngram_indices(row, cfg.ngram_words, cfg.max_words, 1 << cfg.bits) for row in word_hashes_of(texts)]
    labels = np.array([is_good for _, is_good in keys])
    select_examples = lambda mask: Examples([rows[i] for i in np.flatnonzero(mask)], labels[mask])
    train, test = select_examples(~holdout), select_examples(holdout)
    for part in (train, test):
        if part.good.all() or not part.good.any():
            raise BadInput(f"classifier.held_out={cfg.held_out} leaves examples of one kind alone; give more examples")
    weights, bias = fit(train, cfg)
    facts = {"good": len(chosen[0]), "bad": len(chosen[1]), "in_both": len(both)}
    facts |= {"held_out": [int(test.good.sum()), int((~test.good).sum())]}
    return serialize_model(weights, bias, cfg), facts | evaluate_scores(scores(test.indices, weights, bias), test.good)


def sample_texts(texts: Iterable[str], max_texts: int) -> dict[int, str]:
    """Returns {hash: text} of the different texts with the smallest hashes."""
    found: dict[int, str] = {}
    for text in texts:
        found.setdefault(text_hash(text), text)
        if len(found) > 2 * max_texts:
            found = {key: found[key] for key in sorted(found)[:max_texts]}
    return {key: found[key] for key in sorted(found)[:max_texts]}


def in_holdout(key: int, share: float) -> bool:
    """True if the text with this 128-bit hash is in the held-out set; independent of the order of `choose`."""
    return key % (1 << 32) < share * (1 << 32)


def fit(examples: Examples, cfg: ClassifierConfig) -> tuple[np.ndarray, float]:
    """Returns (float32[2^bits], bias), trained with Adagrad (Duchi et al., 2011); both kinds weigh the same."""
    size, rng = 1 << cfg.bits, np.random.Generator(np.random.Philox(cfg.seed))
    weights, squares = np.zeros(size, np.float32), np.full(size, 1e-12, np.float32)
    bias = bias_squares = 0.0
    share = np.where(examples.good, 0.5 / examples.good.mean(), 0.5 / (~examples.good).mean())
    for _ in range(cfg.epochs):
        order = rng.permutation(len(examples.good))
        for begin in range(0, len(order), BATCH):
            batch = order[begin : begin + BATCH]
            rows = [examples.indices[i] for i in batch]
            slopes = (scores(rows, weights, bias) - examples.good[batch]) * share[batch] / len(batch)
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
    """Returns balanced accuracy, ROC AUC and the shares above each threshold, on held-out examples."""
    rank = np.argsort(np.argsort(found, kind="stable"), kind="stable")[good] + 1.0
    pairs = good.sum() * (~good).sum()
    shares = [
        [least, float((found[good] >= least).mean()), float((found[~good] >= least).mean())] for least in THRESHOLDS
    ]
    accuracy = ((found[good] >= 0.5).mean() + (found[~good] < 0.5).mean()) / 2
    auc = (rank.sum() - good.sum() * (good.sum() + 1) / 2) / pairs
    return {"accuracy": float(accuracy), "auc": float(auc), "kept": shares}


def serialize_model(weights: np.ndarray, bias: float, cfg: ClassifierConfig) -> bytes:
    """Returns the content of a weights file: a line of JSON, then the weights as little-endian float32."""
    header = {"format": FORMAT, "bits": cfg.bits, "ngram_words": cfg.ngram_words, "max_words": cfg.max_words}
    return json.dumps(header | {"bias": bias}, sort_keys=True).encode() + b"\n" + weights.astype("<f4").tobytes()


def read_model(path: str) -> LinearModel:
    """Returns the model in a weights file. Raises BadInput for another or a truncated file."""
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
        raise BadInput(f"classifier.weights={path} is neither a file that prepare wrote nor a .bin or .ftz of fastText")
    is_complete = all(
        type(header.get(name)) is int and header[name] >= 0 for name in ("bits", "ngram_words", "max_words")
    )
    if (
        not is_complete
        or not isinstance(header.get("bias"), float)
        or header["bits"] > 24
        or len(payload) != 4 << header["bits"]
    ):
        raise BadInput(f"classifier.weights={path} is incomplete; restore it, or train it again")
    weights = np.frombuffer(payload, "<f4")
    if not np.isfinite(weights).all() or not math.isfinite(header["bias"]):
        raise BadInput(f"classifier.weights={path} holds numbers that are not finite; train it again")
    return LinearModel(weights, header["bias"], max(1, min(header["ngram_words"], 9)), header["max_words"])
