"""Every token of a text counts once, with the context that the windows promise; errors are those of the formulas."""

import json
import math

import made_model
import numpy as np
import pytest
from token_losses import make_token_losses

from jaxscale.api.inference import open_model
from jaxscale.core.batch import Batch
from jaxscale.runtime.eval.bits_per_byte import (
    DocumentSums,
    EvalReading,
    document_spans,
    exp_error,
    mean_error,
    ratio_error,
    summarise_text,
    text_windows,
)
from jaxscale.runtime.eval.config import TextEval
from jaxscale.runtime.eval.named import open_evaluators
from jaxscale.runtime.eval.scorer import Scorer
from jaxscale.runtime.text.tokenizer.load import load_tokenizer
from jaxscale.system.exits import BadInput


@pytest.mark.parametrize("num_ids", [1, 2, 4, 5, 11, 40])
@pytest.mark.parametrize("num_start, context, stride", [(1, 4, 4), (1, 4, 2), (1, 4, 1), (2, 6, 3), (1, 64, 32)])
def test_each_token_is_scored_once_with_the_context_that_is_promised(num_ids, num_start, context, stride):
    windows = list(text_windows(num_ids, num_start, context, stride))
    scored = [place for _, first, end in windows for place in range(first, end)]
    assert scored == list(range(num_start, num_ids))
    for number, (begin, first, end) in enumerate(windows):
        assert begin < first and end - 1 - begin <= context  # what is read
        if number:
            assert first - begin >= context - stride + 1 and end - 1 - begin == context


def test_plain_windows_are_those_of_lm_eval():
    """The example in its documentation: ten tokens, a context of four."""
    spans = document_spans(np.arange(10), [99], context=4, stride=4)
    read = [(span.ids[:-1].tolist(), span.ids[span.first :].tolist()) for span in spans]
    assert read == [([99, 0, 1, 2], [0, 1, 2, 3]), ([3, 4, 5, 6], [4, 5, 6, 7]), ([5, 6, 7, 8], [8, 9])]


def test_errors_are_those_of_the_formulas():
    values = [1.0, 4.0, 2.0, 9.0]
    assert mean_error(values) == (4.0, pytest.approx(np.std(values, ddof=1) / 2))
    assert mean_error([3.0]) == (3.0, None)
    ratio, error = ratio_error(values, [2.0] * 4)  # of equal size: a mean
    assert (ratio, error) == (2.0, pytest.approx(mean_error(np.array(values) / 2)[1]))
    assert ratio_error([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]) == (2.0, 0.0)  # all documents alike
    assert exp_error(math.log(5.0), 0.1) == (pytest.approx(5.0), pytest.approx(0.5))
    assert exp_error(1e4, 1.0) == (math.inf, None) and exp_error(0.0, None) == (1.0, None)


def test_the_error_of_a_ratio_is_how_far_samples_lie_apart():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        size = rng.integers(1, 50, 60)
        found.append(ratio_error(size * rng.normal(2.0, 0.5, 60), size))
    ratios, errors = zip(*found)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.15)  # 400 samples of 60 documents


def test_sums_of_documents_become_the_metrics():
    metrics = summarise_text([DocumentSums(2.0, 2, 4), DocumentSums(6.0, 6, 12)])
    assert metrics["loss"] == 1.0 and metrics["perplexity"] == pytest.approx(math.e)
    assert metrics["bits_per_byte"] == pytest.approx(0.5 / math.log(2))
    assert max(metrics["loss_stderr"], metrics["bits_per_byte_stderr"]) < 1e-12
    assert (metrics["documents"], metrics["tokens"], metrics["bytes"]) == (2, 8, 16)
    assert not any(name.endswith("stderr") for name in summarise_text([DocumentSums(2.0, 2, 4)]))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    made_model.make_workdir(folder, scale=3.0)
    return open_model(str(folder), say=lambda line: None)


@pytest.mark.slow
def test_text_of_several_files_and_sources_is_what_the_losses_add_up_to(model, tmp_path):
    (tmp_path / "a.txt").write_text("a short text of one line")
    records = [{"text": "of several"}, {"text": ""}, {"text": "lines, é"}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    files = {"plain": str(tmp_path / "*.txt"), "lines": str(tmp_path / "b.jsonl")}
    reading = EvalReading.of(load_tokenizer("bytes"), context=32)
    (one,) = open_evaluators({"both": TextEval(files=files)}, reading)
    metrics = one.metrics(Scorer.of(model.sharded, 128), model.params)
    losses = make_token_losses(model)

    def nats(text, length=40):
        ids = np.array([256, *text.encode()], np.int32)
        row = lambda values, dtype=np.int32: np.pad(np.asarray(values, dtype), (0, length - len(ids) + 1))[None]
        ones = np.ones(len(ids) - 1)
        batch = Batch(row(ids[:-1]), row(ids[1:]), row(np.arange(len(ones))), row(ones), row(ones, np.float32))
        return float(np.asarray(losses(batch)).sum())

    texts = ["a short text of one line", "of several", "lines, é"]
    wanted = [nats(text) for text in texts]
    sizes = [len(text.encode()) for text in texts]
    assert metrics["evals/both/loss"] == pytest.approx(sum(wanted) / sum(sizes), rel=1e-5)
    assert metrics["evals/both/bits_per_byte"] == pytest.approx(sum(wanted) / sum(sizes) / math.log(2), rel=1e-5)
    assert metrics["evals/both/lines/loss"] == pytest.approx(sum(wanted[1:]) / sum(sizes[1:]), rel=1e-5)
    assert metrics["evals/both/plain/documents"] == 1 and "evals/both/plain/loss_stderr" not in metrics
    assert metrics["evals/both/left_out"] == 1  # the empty one


@pytest.mark.slow
def test_a_longer_stride_gives_a_long_text_less_context(model, tmp_path):
    (tmp_path / "long.txt").write_text("abcdefghij" * 30)
    reading = EvalReading.of(load_tokenizer("bytes"), context=16)
    scorer, found = Scorer.of(model.sharded, 128), {}
    for stride in (1, 8, 16):
        settings = TextEval(files=str(tmp_path / "long.txt"), stride=stride)
        found[stride] = open_evaluators({"x": settings}, reading)[0].metrics(scorer, model.params)
    assert {metrics["evals/x/tokens"] for metrics in found.values()} == {300}
    assert len({metrics["evals/x/loss"] for metrics in found.values()}) == 3
    with pytest.raises(ValueError, match="evals.x.files: stride=17 must be at most the context of 16 tokens"):
        open_evaluators({"x": TextEval(files=str(tmp_path / "long.txt"), stride=17)}, reading)


@pytest.mark.slow
def test_text_that_is_held_is_the_same_and_may_go_away(model, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("some text to hold")
    reading, scorer = EvalReading.of(load_tokenizer("bytes"), context=16), Scorer.of(model.sharded, 64)
    evals = {"x": TextEval(files=str(file))}
    (held,), (read,) = open_evaluators(evals, reading), open_evaluators(evals, reading, hold=False)
    wanted = read.metrics(scorer, model.params)
    file.write_text("some text to held")
    (other,) = open_evaluators(evals, reading)
    file.unlink()
    assert held.metrics(scorer, model.params) == wanted
    assert held.fingerprint != other.fingerprint and read.fingerprint == ""
    with pytest.raises(BadInput, match="a.txt cannot be read"):
        read.metrics(scorer, model.params)


LEFT_OUT = r".*empty.txt \(left out: 1 .*UTF-8.*\)$"


def test_a_source_without_text_is_named_with_what_was_left_out(model, tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"\xff\xfe")
    reading = EvalReading.of(load_tokenizer("bytes"), context=16)
    evals = {"x": TextEval(files=str(tmp_path / "empty.txt"))}
    with pytest.raises(ValueError, match=f"evals.x.files: no text to evaluate in {LEFT_OUT}"):
        open_evaluators(evals, reading)
    (one,) = open_evaluators(evals, reading, hold=False)
    with pytest.raises(ValueError, match=f"^no text to evaluate in {LEFT_OUT}"):
        one.metrics(Scorer.of(model.sharded, 64), model.params)
