"""The learned filter: what it learns, what it keeps, and that it is the same for any number of processes."""

import json

import numpy as np
import pytest
from gcs_emulator import Emulator

from jaxscale import schema
from jaxscale.api import corpora
from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.classifier import (
    COLUMN,
    TOO_LOW,
    make_classifier,
    ngram_indices,
    read_model,
    train_classifier,
)
from jaxscale.tools.corpus.curate.config import ClassifierConfig
from jaxscale.tools.corpus.curate.hashes import word_hashes
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.corpus.prepare.engine import make_plan, prepare
from jaxscale.tools.corpus.prepare.local import LocalExecutor
from jaxscale.tools.corpus.prepare.progress import PrepareProgress
from jaxscale.tools.corpus.prepare.tally import Tally

SMALL = dict(bits=12, epochs=3)
CFG = ClassifierConfig(good=("g",), bad=("b",), **SMALL)


def made_up(words, count, seed):
    """Texts of 30 words, each from the list and from a dozen that all lists share."""
    rng = np.random.default_rng(seed)
    return [
        " ".join(rng.choice([*words.split(), *"the of and to in a is was it for on as".split()], 30))
        for _ in range(count)
    ]


GOOD, BAD = made_up("theorem proof lemma integral", 120, 0), made_up("click buy cheap offer", 120, 1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("classifier") / "classifier.weights"
    content, facts = train_classifier(GOOD, BAD, CFG)
    path.write_bytes(content)
    return str(path), facts


def test_held_out_examples_are_told_apart_and_the_order_of_examples_does_not_matter(weights):
    path, facts = weights
    assert facts["accuracy"] > 0.95 and facts["auc"] > 0.99 and min(facts["held_out"]) > 3
    with open(path, "rb") as file:
        assert train_classifier(GOOD[::-1] + GOOD[:9], BAD[::-1], CFG)[0] == file.read()
    least, good, bad = facts["kept"][9]
    assert least == 0.5 and good + 1 - bad == pytest.approx(2 * facts["accuracy"])


def test_a_score_is_the_logistic_function_of_the_mean_weight_and_a_threshold_drops_by_it(weights):
    path, _ = weights
    (values, bias, *_), text = read_model(path), "A proof of the lemma, and cheap!"
    places = ngram_indices(word_hashes(text), 2, 1000, 1 << 12)
    assert len(places) == 7 + 6
    expected = 1 / (1 + np.exp(-(values[places].mean() + bias)))
    documents = [Document(text), Document(GOOD[0]), Document(BAD[0]), Document("")]
    kept = make_classifier(ClassifierConfig(weights=path))(documents)
    scores = [dict(outcome.document.scores)[COLUMN] for outcome in kept]
    assert scores[0] == round(float(expected), 4) and scores[1] > 0.5 > scores[2]
    outcomes = make_classifier(ClassifierConfig(weights=path, min_score=0.5))(documents[1:3])
    assert [outcome.reason for outcome in outcomes] == ["", TOO_LOW] and outcomes[1].detail == f"{scores[2]:.4f}"
    tally = Tally()
    tally.record("classifier", documents[1:3], outcomes)
    places = sorted(int(key[3]) for key in tally.counts if key[0] == "score")
    assert places == sorted(min(19, int(score * 20)) for score in scores[1:3])


@pytest.mark.slow
def test_examples_are_trained_on_and_their_weights_give_the_same_set_in_any_number_of_processes(tmp_path, monkeypatch):
    for name, texts in (("good", GOOD), ("bad", BAD), ("raw", [*GOOD[:40], *BAD[:40]])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    learned = {"good": (f"{tmp_path}/good.jsonl",), "bad": (f"{tmp_path}/bad.jsonl",), "min_score": 0.5, **SMALL}
    values = {"sources": {"text": {"files": f"{tmp_path}/raw.jsonl"}}, "stages": ("classifier",)}
    values |= {"classifier": learned, "tokenizer": {"name": "bytes"}, "block_bytes": 4096}
    recipe = lambda **more: schema.from_dict(PrepareConfig, schema.merge(values, more))
    given = {
        "classifier.good": (),
        "classifier.bad": (),
        "classifier.weights": f"{tmp_path}/trained/classifier.weights",
    }
    for name, workers, more in (("trained", 1, {}), ("given", 2, given)):
        with LocalExecutor(workers) as executor, open(tmp_path / f"{name} said", "w") as stream:
            prepare(make_plan(recipe(**more)), tmp_path / name, executor, PrepareProgress(stream))
    trained, again = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("trained", "given"))
    assert trained["fingerprint"] == again["fingerprint"] and 35 <= trained["num_documents"] <= 45
    assert (
        "balanced accuracy at threshold 0.5" in (tmp_path / "trained said").read_text()
        and trained["recipe"]["classifier"]["weights"] == ""
    )
    report = (tmp_path / "trained" / "report.html").read_text()
    assert "documents above each threshold" in report and "bad examples" in report and TOO_LOW in report
    with Emulator() as gcs:  # what was learned goes to a bucket with the set
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.endpoint)
        corpora.prepare(recipe(), "gs://b/set", work_dir=str(tmp_path / "trained"))
        assert gcs.get("b", "set/classifier.weights") == (tmp_path / "trained/classifier.weights").read_bytes()
    key = make_plan(recipe()).key
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "another"}) + "\n")
    assert make_plan(recipe()).key != key


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda content: b"PK\x03\x04" + content, "is neither a file written by prepare"),
        (lambda content: content[:-4], "is incomplete"),
        (lambda content: content.replace(b'"bits": 12', b'"bits": 13'), "is incomplete"),
        (lambda content: content[:-4] + b"\x00\x00\xc0\x7f", "has non-finite values"),
    ],
)
def test_weights_that_are_damaged_are_refused(weights, tmp_path, change, told):
    with open(weights[0], "rb") as file:
        (tmp_path / "classifier.weights").write_bytes(change(file.read()))
    with pytest.raises(ValueError, match=told):
        make_classifier(ClassifierConfig(weights=str(tmp_path / "classifier.weights")))


def test_examples_that_are_too_few_or_on_both_sides_are_refused_or_left_out():
    with pytest.raises(ValueError, match="classifier.bad has 19 distinct texts, excluding texts in both"):
        train_classifier(GOOD, [*BAD[:19], *BAD[:19], *GOOD[:30]], CFG)
    assert train_classifier(GOOD, [*BAD, GOOD[0]], CFG)[1]["in_both"] == 1
    for values, told in (
        ({"weights": "w", "good": ("g",)}, "set either weights, to use a trained model, or good and bad"),
        ({"held_out": 0.0}, "held_out=0.0 is the fraction for evaluation, and must be between 0 and 1"),
        ({"bits": 40}, "bits=40 must be from 10 to 24"),
    ):
        with pytest.raises(ValueError, match=told):
            ClassifierConfig(**values)
    with pytest.raises(ValueError, match="stages has 'classifier' without a model"):
        schema.from_dict(PrepareConfig, {"sources": {"text": {"files": "a"}}, "stages": ("classifier",)})


def test_a_fasttext_model_scores_by_its_label(tmp_path):
    fasttext = pytest.importorskip("fasttext", reason="fastText is not installed", exc_type=ImportError)
    if not hasattr(fasttext, "train_supervised"):
        pytest.skip("this package of fastText only predicts")
    lines = [f"__label__hq {text}" for text in GOOD] + [f"__label__cc {text}" for text in BAD]
    (tmp_path / "train.txt").write_text("\n".join(lines))
    model = fasttext.train_supervised(str(tmp_path / "train.txt"), lr=0.02, dim=8, thread=1, epoch=50, verbose=0)
    model.save_model(str(tmp_path / "model.bin"))
    stage = make_classifier(ClassifierConfig(weights=str(tmp_path / "model.bin"), min_score=0.5))
    kept, dropped = stage([Document(GOOD[0].replace(" ", "\n", 3)), Document(BAD[0])])
    labels, values = model.predict(GOOD[0], k=2)
    assert dict(kept.document.scores)[COLUMN] == round(dict(zip(labels, values))["__label__hq"], 4)
    assert dropped.reason == TOO_LOW
    with pytest.raises(ValueError, match="has no label good; use __label__cc, __label__hq"):
        make_classifier(ClassifierConfig(weights=str(tmp_path / "model.bin"), label="good"))
