"""The likelihood of a span is that of its tokens read alone, whatever its row, the mesh or the batch."""

import made_model
import numpy as np
import pytest
from token_losses import make_token_losses

from jaxscale.api.inference import make_generator, open_model
from jaxscale.core.batch import Batch
from jaxscale.core.config import MeshConfig
from jaxscale.runtime.eval.scorer import Scorer, TokenSpan, pack_spans, row_length
from jaxscale.runtime.sampling.config import GREEDY

QUIET = dict(say=lambda line: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    made_model.make_workdir(folder, scale=3.0)
    return str(folder)


@pytest.fixture(scope="module")
def model(folder):
    return open_model(folder, **QUIET)


def make_spans(count, seed=0, longest=24):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest + 1, count)
    return [TokenSpan(rng.integers(0, 257, n, dtype=np.int32), int(rng.integers(1, n))) for n in lengths]


def nats_alone(losses, span, length=24):
    """The sum of one span's losses, read in a row of its own."""
    ids, n = span.ids, len(span.ids) - 1
    row = lambda values, dtype=np.int32: np.pad(np.asarray(values, dtype), (0, length - n))[None]
    weights = row(np.arange(1, n + 1) >= span.first, np.float32)
    batch = Batch(row(ids[:-1]), row(ids[1:]), row(np.arange(n)), row(np.ones(n)), weights)
    return float(np.asarray(losses(batch)).sum())


@pytest.mark.slow
def test_a_span_scores_as_if_it_were_alone(model):
    spans, losses = make_spans(9), make_token_losses(model)
    scores = Scorer.of(model.sharded, 256).score(model.params, spans)
    np.testing.assert_allclose(scores.nats, [nats_alone(losses, span) for span in spans], rtol=1e-5)  # other sums
    assert scores.tokens.tolist() == [len(span.ids) - span.first for span in spans]


@pytest.mark.parametrize(
    "mesh, batch_tokens",
    [
        pytest.param({"data": 8}, 64, marks=pytest.mark.soak),
        ({"fsdp": 4, "tensor": 2}, 1024),
        pytest.param({"data": 2, "tensor": 2}, 1, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_numbers_depend_neither_on_the_mesh_nor_on_the_batch(folder, model, mesh, batch_tokens):
    spans = make_spans(40)
    wanted = Scorer.of(model.sharded, 4096).score(model.params, spans)
    other = open_model(folder, mesh=MeshConfig(**mesh), **QUIET)
    found = Scorer.of(other.sharded, batch_tokens).score(other.params, spans)
    np.testing.assert_allclose(found.nats, wanted.nats, rtol=1e-5)  # float32 sums taken in another order
    assert found.likeliest.tolist() == wanted.likeliest.tolist()


@pytest.mark.slow
def test_what_greedy_decoding_writes_is_the_likeliest_and_nothing_else_is(model):
    prompt = [72, 101, 108]
    generator = make_generator(model, batch=1, longest=16)
    text = [int(step[0]) for step in generator.generate([prompt], GREEDY, 5)]
    assert len(text) == 5
    changed = [*text[:4], (text[4] + 1) % 256]
    spans = [TokenSpan(np.array(prompt + ids, np.int32), 3) for ids in (text, changed, text[:2])]
    assert Scorer.of(model.sharded, 64).score(model.params, spans).likeliest.tolist() == [True, False, True]


def test_every_scored_token_is_in_one_place_and_rows_are_full(model):
    spans = make_spans(200) + [TokenSpan(np.array([5], np.int32), 1)]  # the last has nothing to score
    packed = pack_spans(spans)
    assert packed.row_tokens == 32 and sum(span.num_positions for span in spans) / (32 * len(packed.rows)) > 0.95
    seen = np.zeros(len(spans), int)
    for batch, owners_BT in packed.batches(rows=8, multiple=1):
        assert batch.tokens.shape == owners_BT.shape == (8, 32)
        assert ((owners_BT >= 0) == (batch.weights > 0)).all()
        seen += np.bincount(owners_BT[owners_BT >= 0], minlength=len(spans))
    assert seen.tolist() == [len(span.ids) - span.first for span in spans]
    scores = Scorer.of(model.sharded, 256).score(model.params, spans[-1:])
    assert scores.nats.tolist() == [0.0] and scores.tokens.tolist() == [0]


def test_one_program_serves_all_batches_and_parameters(model):
    scorer = Scorer.of(model.sharded, 64)
    for seed in (1, 2):
        scorer.score(model.params, make_spans(30, seed), row_length(24))
    assert scorer.step.__wrapped__._cache_size() == 1


def test_equal_spans_are_read_once_and_are_equal_to_the_bit(model):
    spans = make_spans(30)
    again = [TokenSpan(span.ids.copy(), span.first) for span in spans]
    packed = pack_spans([*spans, *again, TokenSpan(spans[0].ids, 2 if spans[0].first == 1 else 1)])
    assert len(packed.spans) == 31
    scores = Scorer.of(model.sharded, 256).score(model.params, [*spans, *again])
    assert (scores.nats[:30] == scores.nats[30:]).all() and (scores.tokens[:30] == scores.tokens[30:]).all()


def test_rows_have_few_lengths():
    assert [row_length(n) for n in (1, 32, 33, 200)] == [32, 32, 64, 256]
    assert row_length(200, longest=220) == 220 and row_length(20, longest=16) == 20
