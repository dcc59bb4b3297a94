"""Validation loss and bits per byte are what pencil and paper say, in all and by source.

B batch  T position
"""

import math

import numpy as np
import pytest
import tiny

from jaxscale.runtime.eval.config import EvalConfig
from jaxscale.runtime.eval.perplexity import evaluate, make_eval_step, position_ranges, summarise


def nats_are_tokens(params, batch):
    """A loss that can be added up by hand: the token itself; where nothing is weighed, not a number."""
    return np.where(batch.weights > 0, params * batch.tokens, np.nan).astype(np.float32)


def small_batch():
    """Two rows of three tokens; one target weighs nothing."""
    batch = tiny.packed_batch(0, rows=2, seq_len=4)
    return batch._replace(
        tokens=np.array([[1, 2, 3], [4, 5, 6]], np.int32),
        positions=np.array([[0, 1, 0], [0, 1, 2]], np.int32),
        weights=np.array([[1, 1, 0], [1, 1, 1]], np.float32),
    )


SOURCES_BT = np.array([[0, 0, 0], [0, 1, 1]], np.int32)
BYTES_BT = np.array([[1, 4, 7], [2, 3, 1]], np.int32)


def test_sums_are_by_source_and_leave_out_what_weighs_nothing():
    sums = make_eval_step(nats_are_tokens, 2)(np.float32(1), small_batch(), SOURCES_BT, BYTES_BT)
    np.testing.assert_array_equal(sums.sources, [[1 + 2 + 4, 5 + 6], [3, 2], [1 + 4 + 2, 3 + 1]])


def test_metrics_are_those_of_pencil_and_paper():
    step = make_eval_step(nats_are_tokens, 2)
    found = evaluate(step, np.float32(1), [(small_batch(), SOURCES_BT, BYTES_BT)] * 3, ("web", "code"))
    ln2 = math.log(2)
    expected = {
        "validation/loss": 18 / 5, "validation/bits_per_byte": 18 / ln2 / 11,
        "validation/web/loss": 7 / 3, "validation/web/bits_per_byte": 7 / ln2 / 7,
        "validation/code/loss": 11 / 2, "validation/code/bits_per_byte": 11 / ln2 / 4,
        "validation_by_position/1-1/loss": 5 / 2, "validation_by_position/2-2/loss": 7 / 2,
        "validation_by_position/3-3/loss": 6.0,
    }  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("seq_len", [2, 3, 16, 1000, 131_072])
def test_each_position_of_a_row_is_in_one_range_that_doubles(seq_len):
    ranges = position_ranges(seq_len)
    assert [number for first, last in ranges for number in range(first, last + 1)] == list(range(1, seq_len + 1))
    assert all(last == 2 * (first - 1) for first, last in ranges[1:-1]) and len(ranges) <= 18


def test_a_position_counts_from_the_beginning_of_its_document():
    batch = tiny.packed_batch(3)
    ones = lambda params, batch: np.where(batch.weights > 0, 1.0 + batch.positions, np.nan).astype(np.float32)
    zeros_BT = np.zeros((tiny.ROWS, tiny.SEQ_LEN), np.int32)
    found = evaluate(make_eval_step(ones, 1), None, [(batch, zeros_BT, zeros_BT)], ("text",))
    read = (1 + batch.positions)[batch.weights > 0]
    for first, last in position_ranges(tiny.SEQ_LEN):
        inside = read[(first <= read) & (read <= last)]
        told = found.get(f"validation_by_position/{first}-{last}/loss")
        assert told == (pytest.approx(inside.mean(), rel=1e-6) if inside.size else None)
    assert (batch.positions == 0).sum() > tiny.ROWS  # several documents begin in a row


def test_one_source_is_told_once_and_unknown_bytes_not_at_all():
    assert set(summarise(np.array([[8.0], [4.0], [2.0]]), ("text",))) == {"validation/loss", "validation/bits_per_byte"}
    assert summarise(np.array([[8.0], [4.0], [0.0]]), ("text",)) == {"validation/loss": 2.0}


def test_a_source_without_tokens_is_left_out():
    found = summarise(np.array([[8.0, 0.0], [4.0, 0.0], [2.0, 0.0]]), ("web", "code"))
    assert "validation/code/loss" not in found and found["validation/web/loss"] == 2.0


def test_uniform_guessing_over_bytes_is_eight_bits_a_byte():
    tokens = 1000
    found = summarise(np.array([[tokens * math.log(256)], [tokens], [tokens]]), ("text",))
    assert found["validation/bits_per_byte"] == pytest.approx(8.0)


@pytest.mark.soak
def test_losses_of_a_model_are_those_that_training_sees():
    program = tiny.program()
    state, batch = program.init(), tiny.packed_batch(0)
    step = make_eval_step(program.model.token_losses, 1)
    zeros_BT = np.zeros((tiny.ROWS, tiny.SEQ_LEN), np.int32)
    found = evaluate(step, state.params, [(tiny.on_mesh(program, batch), zeros_BT, zeros_BT + 1)], ("text",))
    _, metrics = program.train_step(state, tiny.on_mesh(program, batch))
    assert found["validation/loss"] == pytest.approx(float(metrics["loss"]), rel=1e-6)


@pytest.mark.parametrize("settings", [{"every_steps": -1}, {"num_rows": -1}])
def test_negative_amounts_are_refused(settings):
    with pytest.raises(ValueError, match="must be at least 0"):
        EvalConfig(**settings)
