"""Language identification with py3langid's model, vectorized over a block of documents.

The model (Lui and Baldwin, "langid.py", ACL 2012; 97 languages) is an automaton over bytes whose states emit features,
and a naive Bayes score: the sum of log(1 + count) times the feature's log-likelihoods, plus the class priors. The
library steps the automaton byte by byte in Python. Here, one numpy call advances all documents by one byte. The sums
are exact, so all machines give the same bits: log-likelihoods are multiples of 2^-10 below 32 (float16 in the model,
int16 here), log(1 + count) is a float32, and a float64 represents each product and any sum below 2^19 exactly, in any
order of addition.
"""

import dataclasses
import functools
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxscale.runtime.text.document import Document, Outcome, Stage
from jaxscale.runtime.text.sources.part import PREPARE, importing
from jaxscale.system.exits import BadInput
from jaxscale.tools.corpus.curate.config import LanguageConfig

REASON = "language: not wanted"
DOUBT = "language: not sure enough"
UNKNOWN = "und"  # ISO 639-2 code for "undetermined": a text without features, such as an empty one
TAG = re.compile(r"([a-z]{2,3})([-_].*)?", re.DOTALL)  # BCP 47: an ISO 639 language code, then script, region, ...
CHUNK = 1024  # documents per step: enough to amortize numpy's cost per call, few enough for the cache
SCALE = 1024
NEXT_BITS = 32  # lower bits of a table entry: index of the next row; the upper bits have the feature


class LanguageModel(NamedTuple):
    """Automaton and scores, arranged for stepping many texts at once."""

    table: np.ndarray  # uint64[rows * 256], indexed by row + byte: next row; upper bits: 1 + feature, or 0
    start: int  # index of the first state's row
    likelihoods: np.ndarray  # int16[features, classes]: log P(feature | class), in units of 1 / SCALE
    priors: np.ndarray  # float64[classes]: log P(class)
    labels: tuple[str, ...]  # language code of each class; scripts of one language have the same code
    first: np.ndarray  # intp[classes]: the first class with the same label


@functools.cache
def load_model() -> LanguageModel:
    """Returns py3langid's model (about 110 MB), cached per process. Raises BadInput if the package is missing."""
    with importing("identifying languages", "py3langid", f"{PREPARE}, or remove the stage"):
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    model = LanguageIdentifier.from_model_file(MODEL_FILE)
    moves = np.frombuffer(model.tk_nextmove, dtype=f"u{model.tk_nextmove.itemsize}")
    rows = np.frombuffer(model.tk_row, dtype=f"u{model.tk_row.itemsize}").astype(np.uint64) << np.uint64(8)
    features = (np.asarray(model.tk_output, np.int64) + 1).astype(np.uint64)  # 0: the state emits no feature
    labels = tuple(model.nb_classes)
    first = np.array([labels.index(label) for label in labels], np.intp)
    packed = rows | features << np.uint64(NEXT_BITS)
    scaled = np.asarray(model.nb_ptc, np.float32) * SCALE
    likelihoods = scaled.astype(np.int16)
    if np.any(likelihoods != scaled):
        raise BadInput("the scores of the installed py3langid model cannot be summed exactly; install py3langid 0.4")
    return LanguageModel(packed[moves], int(rows[0]), likelihoods, np.asarray(model.nb_pc, np.float64), labels, first)


def as_bytes(text: str) -> bytes:
    """Normalizes a text like the model's training data: NFC, and lower case if it is in capitals. Returns UTF-8."""
    if text.isupper():
        text = text.lower()
    if text.isascii():
        return text.encode("ascii")
    return unicodedata.normalize("NFC", text).encode("utf-8", errors="surrogatepass")


def walk(table: np.ndarray, start: int, texts: Sequence[bytes]) -> np.ndarray:
    """Returns uint32[T, D]: 1 + the feature that text d emits after byte t, or 0. texts: longest first."""
    lengths = np.array([len(text) for text in texts])
    T, D = int(lengths[0]) if len(texts) else 0, len(texts)
    features_TD = np.zeros((T, D), np.uint32)
    bytes_DT = np.zeros((D, T), np.uint8)
    for row, text in zip(bytes_DT, texts):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    bytes_TD = np.ascontiguousarray(bytes_DT.T).astype(np.uint64)
    active = np.searchsorted(-lengths, -np.arange(T), side="left")  # number of texts longer than t
    place, low = np.full(D, start, np.uint64), np.uint64((1 << NEXT_BITS) - 1)
    for t, n in enumerate(active.tolist()):
        entry = table[place[:n] + bytes_TD[t, :n]]
        features_TD[t, :n] = entry >> np.uint64(NEXT_BITS)
        np.bitwise_and(entry, low, out=place[:n])
    return features_TD


@functools.lru_cache(maxsize=4)
def log_counts(most: int) -> np.ndarray:
    """Returns float64[most + 1], log(1 + n) rounded to float32, so that all C libraries give the same values."""
    return np.array([math.log1p(n) for n in range(most + 1)], np.float32).astype(np.float64)


def scores(model: LanguageModel, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Returns log posteriors, float64[D, classes], and bool[D], True for texts with a feature. texts: longest first."""
    features_DT = np.ascontiguousarray(walk(model.table, model.start, texts).T)
    D, T = features_DT.shape
    found = np.zeros((D, len(model.labels)))
    features_DT.sort(axis=1)
    starts_DT = np.zeros((D, T), bool)  # True at the first of equal features
    starts_DT[:, :1], starts_DT[:, 1:] = True, features_DT[:, 1:] != features_DT[:, :-1]
    starts_DT &= features_DT > 0
    owners, places = np.nonzero(starts_DT)
    counts = np.diff(places, append=0)
    last = np.flatnonzero(np.diff(owners, append=-1)) if len(owners) else np.zeros(0, np.intp)
    counts[last] = T - places[last]  # the run of the highest feature extends to the end
    weights = log_counts(T)[counts]
    rows = features_DT[owners, places] - 1
    bounds = np.searchsorted(owners, np.arange(D + 1))
    most = int(np.diff(bounds).max(initial=0))
    gathered, exact = np.empty((most, found.shape[1]), np.int16), np.empty((most, found.shape[1]))  # reused, in cache
    for d in range(D):
        begin, end = int(bounds[d]), int(bounds[d + 1])
        part = model.likelihoods.take(rows[begin:end], axis=0, out=gathered[: end - begin], mode="clip")
        np.copyto(exact[: end - begin], part)
        np.matmul(weights[begin:end], exact[: end - begin], out=found[d])
    return found / SCALE + model.priors, bounds[1:] > bounds[:-1]


def identify(texts: Sequence[str], model: LanguageModel | None = None) -> list[tuple[str, float]]:
    """Returns (language, probability) of each text, as py3langid does. A text without features gives ('und', 0.0)."""
    model = model or load_model()
    encoded = [as_bytes(text) for text in texts]
    order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i]))
    answers = [(UNKNOWN, 0.0)] * len(encoded)
    for begin in range(0, len(order), CHUNK):
        part = order[begin : begin + CHUNK]
        values, seen = scores(model, [encoded[i] for i in part])
        lengths = np.array([max(1, len(encoded[i])) for i in part])
        values /= np.sqrt(lengths)[:, None]
        odds = np.exp(values - values.max(axis=1, keepdims=True, initial=-np.inf))
        merged = np.zeros_like(odds)
        np.add.at(merged.T, model.first, odds.T)
        best = merged.argmax(axis=1)
        probability = merged[np.arange(len(part)), best] / merged.sum(axis=1)
        for i, language, sure, any_sign in zip(part, best, probability, seen):
            if any_sign:
                answers[i] = (model.labels[language], round(float(sure), 4))  # the last bits of exp differ by machine
    return answers


def make_language(cfg: LanguageConfig) -> Stage:
    """Returns a stage that records each document's language and its probability, and drops documents by both."""
    keep = frozenset(cfg.keep)
    if cfg.known != "trust" and (unknown := keep - set(load_model().labels)):  # files may name other languages
        supported = sorted(set(load_model().labels))
        raise BadInput(f"language.keep={cfg.keep}: unsupported {sorted(unknown)}; supported: {supported}")

    def judge(doc: Document, language: str, probability: float) -> Outcome:
        if keep and language not in keep:
            return Outcome(None, REASON, detail=language)
        if probability < cfg.min_probability:
            return Outcome(None, DOUBT, detail=language)
        return Outcome(dataclasses.replace(doc, language=language, scores=(*doc.scores, ("language", probability))))

    def named_language(doc: Document) -> str:  # 'en' for 'EN' and 'en-US'
        tag = TAG.fullmatch(doc.language.strip().lower()) if cfg.known == "trust" else None
        return tag[1] if tag and tag[1] != UNKNOWN else ""

    def stage(docs: Sequence[Document]) -> list[Outcome]:
        named = [(doc, named_language(doc)) for doc in docs]
        found = iter(identify([doc.text[: cfg.head_chars or None] for doc, language in named if not language]))
        return [judge(doc, *((language, 1.0) if language else next(found))) for doc, language in named]

    return stage
