"""A learned filter of quality: logistic regression on hashed sequences of words, or a fastText model.

For two labels a fastText classifier (arXiv:1607.01759) without its hidden layer: each sequence of one or two words has
a weight, at the place of its hash (arXiv:0902.2206), and a document's score is the logistic function of their mean. So
GPT-3 chose pages (arXiv:2005.14165, appendix A), and with fastText itself DCLM (arXiv:2406.11794). Words are those of
hashes.py, which deduplication and decontamination use too.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxscale.corpus.curate.filter_config import ClassifierConfig
from jaxscale.corpus.curate.hashes import hash_words, ngram_hashes, text_hash, word_hashes_of
from jaxscale.system import foreign
from jaxscale.system.exits import BadInput
from jaxscale.text.document import Document, Outcome, Stage
from jaxscale.text.sources.part import needs

COLUMN = "quality"
TOO_LOW = "classifier: score too low"
FORMAT = "jaxscale linear classifier 1"  # in the first line of a file of weights
LARGEST = 80 << 20  # bytes of such a file
FASTTEXT = (".bin", ".ftz")
FEWEST = 20  # examples of each kind; with fewer the accuracy says nothing
BATCH = 64  # examples in a step of training
LEARNING_RATE = 10.0  # of Adagrad; on the texts of docs/data.md ROC AUC is 0.926 with it, 0.918 with 3, 0.912 with 1
MARGINS = tuple(step / 20 for step in range(1, 20))  # thresholds that the report shows


class Model(NamedTuple):
    """A linear model."""

    weights: np.ndarray  # float32[2^bits]
    bias: float
    ngram_words: int
    max_words: int


class Examples(NamedTuple):
    """Texts as the places of their weights."""

    places: list[np.ndarray]  # int64[k] of each text
    good: np.ndarray  # bool[n]


def make_classifier(cfg: ClassifierConfig) -> Stage:
    """A stage that notes the score of each document, and drops those below the threshold."""
    score = make_scorer(cfg)

    def judge(document: Document, found: float) -> Outcome:
        if cfg.min_score is not None and found < cfg.min_score:
            return Outcome(None, TOO_LOW, detail=f"{found:.4f}")
        return Outcome(dataclasses.replace(document, scores=(*document.scores, (COLUMN, found))))

    return lambda documents: [judge(document, found) for document, found in zip(documents, score(documents))]


def make_scorer(cfg: ClassifierConfig) -> Callable[[Sequence[Document]], list[float]]:
    """A function from documents to scores, to 4 decimals: the last bits of a sum depend on the machine."""
    if cfg.weights.endswith(FASTTEXT):
        return fasttext_scorer(cfg)
    model = read_model(cfg.weights)

    def score(documents: Sequence[Document]) -> list[float]:
        rows = [places_of(row, model.ngram_words, model.max_words, len(model.weights)) for row in hash_words(documents)]
        return [round(float(found), 4) for found in scores(rows, model.weights, model.bias)]

    return score


def fasttext_scorer(cfg: ClassifierConfig) -> Callable[[Sequence[Document]], list[float]]:
    """The probability of cfg.label by a fastText model. Raises BadInput for a model without such a label."""
    with needs(f"classifier.weights={cfg.weights}", "fasttext", "pip install fasttext-predict"):
        import fasttext
    try:
        model = fasttext.load_model(str(Path(cfg.weights).expanduser()))
    except (ValueError, MemoryError) as error:
        raise BadInput(f"classifier.weights={cfg.weights} is no model of fastText: {error}") from None
    known = {label for label, _ in fasttext_labels(model, "a")}
    if cfg.label not in known:
        raise BadInput(
            f"classifier.weights={cfg.weights} has no label {cfg.label}; name one of {', '.join(sorted(known)[:8])}"
        )

    def score(documents: Sequence[Document]) -> list[float]:
        heads = (
            " ".join(document.text.split(None, cfg.max_words or -1)[: cfg.max_words or None]) for document in documents
        )
        return [round(min(1.0, float(dict(fasttext_labels(model, head))[cfg.label])), 4) for head in heads]

    return score


def fasttext_labels(model: Any, text: str) -> list[tuple[str, float]]:
    """(label, probability) for each label."""
    labels, probabilities = model.predict(text, k=-1)
    return list(zip(labels, probabilities))


def places_of(words: np.ndarray, ngram_words: int, max_words: int, size: int) -> np.ndarray:
    """int64[k]: the places of the weights of all sequences of up to ngram_words words. size: a power of two."""
    words = words[: max_words or None]
    shift = np.uint64(64 - (size.bit_length() - 1))
    found = [ngram_hashes(words, n) >> shift for n in range(1, ngram_words + 1)]
    return np.concatenate(found).astype(np.int64)


def margins(rows: Sequence[np.ndarray], weights: np.ndarray, bias: float) -> np.ndarray:
    """float64[n]: the mean weight of each row, with the bias; of an empty one the bias alone."""
    lengths = np.array([len(row) for row in rows], np.int64)
    flat = np.concatenate([np.zeros(0, np.int64), *rows])
    sums = np.concatenate([[0.0], np.cumsum(weights.take(flat), dtype=np.float64)])
    ends = lengths.cumsum()
    return (sums[ends] - sums[ends - lengths]) / np.maximum(lengths, 1) + bias


def scores(rows: Sequence[np.ndarray], weights: np.ndarray, bias: float) -> np.ndarray:
    """float64[n]: the probability that each row is of the good ones."""
    return 1 / (1 + np.exp(-np.clip(margins(rows, weights, bias), -30, 30)))


def train_classifier(good: Iterable[str], bad: Iterable[str], cfg: ClassifierConfig) -> tuple[bytes, dict[str, Any]]:
    """(a file of weights, what the report says of it), from examples in any order: equal sets give equal weights.

    A text that both sets hold is left out. Raises BadInput for fewer than FEWEST examples of a kind.
    """
    kinds = [choose(texts, cfg.max_examples) for texts in (good, bad)]
    both = kinds[0].keys() & kinds[1].keys()
    chosen = [{key: text for key, text in kind.items() if key not in both} for kind in kinds]
    for name, kind in zip(("good", "bad"), chosen):
        if len(kind) < FEWEST:
            raise BadInput(
                f"classifier.{name} has {len(kind)} different texts that the other does not have; "
                f"{FEWEST} or more of each kind are needed, and thousands are usual"
            )
    keys = [(key, is_good) for is_good, kind in zip((True, False), chosen) for key in kind]
    held = np.array([is_held_out(key, cfg.held_out) for key, _ in keys])
    texts = [chosen[not is_good][key] for key, is_good in keys]
    rows = [places_of(row, cfg.ngram_words, cfg.max_words, 1 << cfg.bits) for row in word_hashes_of(texts)]
    labels = np.array([is_good for _, is_good in keys])
    pick = lambda which: Examples([rows[i] for i in np.flatnonzero(which)], labels[which])
    train, test = pick(~held), pick(held)
    for part in (train, test):
        if part.good.all() or not part.good.any():
            raise BadInput(f"classifier.held_out={cfg.held_out} leaves examples of one kind alone; give more examples")
    weights, bias = fit(train, cfg)
    facts = {"good": len(chosen[0]), "bad": len(chosen[1]), "in_both": len(both)}
    facts |= {"held_out": [int(test.good.sum()), int((~test.good).sum())]}
    return written(weights, bias, cfg), facts | measured(scores(test.places, weights, bias), test.good)


def choose(texts: Iterable[str], most: int) -> dict[int, str]:
    """{hash: text} of different texts, those with the smallest hashes."""
    found: dict[int, str] = {}
    for text in texts:
        found.setdefault(text_hash(text), text)
        if len(found) > 2 * most:
            found = {key: found[key] for key in sorted(found)[:most]}
    return {key: found[key] for key in sorted(found)[:most]}


def is_held_out(key: int, share: float) -> bool:
    """Whether a text of this 128-bit hash is kept back; not by the bits that choose among too many."""
    return key % (1 << 32) < share * (1 << 32)


def fit(examples: Examples, cfg: ClassifierConfig) -> tuple[np.ndarray, float]:
    """(float32[2^bits], bias) by Adagrad (Duchi et al., 2011); each kind counts the same, however many it has."""
    size, rng = 1 << cfg.bits, np.random.Generator(np.random.Philox(cfg.seed))
    weights, squares = np.zeros(size, np.float32), np.full(size, 1e-12, np.float32)
    bias = bias_squares = 0.0
    share = np.where(examples.good, 0.5 / examples.good.mean(), 0.5 / (~examples.good).mean())
    for _ in range(cfg.epochs):
        order = rng.permutation(len(examples.good))
        for begin in range(0, len(order), BATCH):
            batch = order[begin : begin + BATCH]
            rows = [examples.places[i] for i in batch]
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


def measured(found: np.ndarray, good: np.ndarray) -> dict[str, Any]:
    """What held-out examples say: accuracy where both kinds count the same, ROC AUC, what thresholds keep of each."""
    rank = np.argsort(np.argsort(found, kind="stable"), kind="stable")[good] + 1.0
    pairs = good.sum() * (~good).sum()
    kept = [[least, float((found[good] >= least).mean()), float((found[~good] >= least).mean())] for least in MARGINS]
    accuracy = ((found[good] >= 0.5).mean() + (found[~good] < 0.5).mean()) / 2
    auc = (rank.sum() - good.sum() * (good.sum() + 1) / 2) / pairs
    return {"accuracy": float(accuracy), "auc": float(auc), "kept": kept}


def written(weights: np.ndarray, bias: float, cfg: ClassifierConfig) -> bytes:
    """The content of a file of weights: a line of JSON, then the weights as little-endian float32."""
    head = {"format": FORMAT, "bits": cfg.bits, "ngram_words": cfg.ngram_words, "max_words": cfg.max_words}
    return json.dumps(head | {"bias": bias}, sort_keys=True).encode() + b"\n" + weights.astype("<f4").tobytes()


def read_model(path: str) -> Model:
    """The model in a file of weights. Raises BadInput for a file that is none, or not whole."""
    try:
        content = foreign.read_named(path, LARGEST)
    except OSError as error:
        raise BadInput(f"classifier.weights={path} cannot be read: {error.strerror or error}") from None
    first, _, rest = content.partition(b"\n")
    try:
        head = foreign.parse_json(first) if first.startswith(b"{") else None
    except BadInput:
        head = None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise BadInput(
            f"classifier.weights={path} is no classifier.weights that prepare wrote, nor .bin or .ftz of fastText"
        )
    whole = all(type(head.get(name)) is int and head[name] >= 0 for name in ("bits", "ngram_words", "max_words"))
    if not whole or not isinstance(head.get("bias"), float) or head["bits"] > 24 or len(rest) != 4 << head["bits"]:
        raise BadInput(f"classifier.weights={path} is not whole; bring it back, or train it again")
    weights = np.frombuffer(rest, "<f4")
    if not np.isfinite(weights).all() or not math.isfinite(head["bias"]):
        raise BadInput(f"classifier.weights={path} holds numbers that are none; train it again")
    return Model(weights, head["bias"], max(1, min(head["ngram_words"], 9)), head["max_words"])
