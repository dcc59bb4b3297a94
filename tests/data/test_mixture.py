"""Mixtures: the stated share in every window, no row of a source lost or met twice, and arithmetic both ways."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.runtime.data.config import check_mixture
from jaxscale.runtime.data.mixture import (
    RunBatches,
    pattern_of,
    plan_mixture,
    same_prefix,
    whole_counts,
    with_detours,
)
from jaxscale.units import BatchSizes

NAMES = ("web", "code", "math")
weights = st.lists(st.floats(0.01, 1), min_size=1, max_size=6)


def plan(mixture, max_epochs=None, sizes=(1000, 200, 60), total_steps=100, num_batches=None, rows_per_batch=8):
    return plan_mixture(
        mixture,
        max_epochs or {},
        RunBatches(BatchSizes.of(rows_per_batch), 16, total_steps, num_batches or total_steps),
        sizes=dict(zip(NAMES, sizes)),
    )


def stream(mixture, rows):
    return mixture.locate(np.arange(rows))


@given(weights, st.data())
@settings(max_examples=60, deadline=None)
def test_every_window_holds_each_share_to_within_two_rows(values, data):
    pattern = pattern_of(whole_counts(np.array(values) / sum(values)))
    L = len(pattern.sources_L)
    each = np.tile(pattern.sources_L, 3)[:, None] == np.arange(len(values))
    share = pattern.counts_G / L
    drift = np.concatenate([np.zeros((1, len(values))), np.cumsum(each - share, axis=0)])
    assert np.abs(drift).max() < 1 + 1e-9  # so that the difference of any two, which is a window, is below 2
    start = data.draw(st.integers(0, 2 * L))
    length = data.draw(st.integers(1, L))
    window = each[start : start + length].sum(axis=0)
    assert np.abs(window - share * length).max() <= 2
    assert np.abs(share - np.array(values) / sum(values)).max() < 1 / 1024


def test_usual_weights_are_met_exactly():
    for values in ([0.5, 0.5], [0.7, 0.2, 0.1], [0.82, 0.12, 0.06], [0.125, 0.875], [0.333, 0.333, 0.334]):
        counts = whole_counts(np.array(values))
        np.testing.assert_allclose(counts / counts.sum(), values, atol=1e-12)
    counts = whole_counts(np.array([0.9999, 0.0001]))
    assert counts[1] >= 1 and counts[1] / counts.sum() == pytest.approx(0.0001, rel=0.01)
    with pytest.raises(ValueError, match="less than 1/16384"):
        whole_counts(np.array([1 - 1e-6, 1e-6]))


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(0, 5), min_size=3, max_size=3)), min_size=1, max_size=4
    ),
    st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_sources_go_on_over_every_change_and_both_ways_of_reckoning_agree(stages, rows_per_batch):
    start, mixture = 0, {}
    for length, values in stages:
        if any(values):
            mixture[f"{start} steps"] = dict(zip(NAMES, map(float, values)))
            start += length
    if not mixture:
        return
    made = plan(mixture, rows_per_batch=rows_per_batch, total_steps=start)
    rows = start * rows_per_batch
    sources, turns = stream(made, rows)
    for source in range(3):
        places = np.flatnonzero(sources == source)
        np.testing.assert_array_equal(turns[places], np.arange(len(places)))  # none lost, none twice
        np.testing.assert_array_equal(made.find(source, np.arange(len(places))), places)
        assert made.rows_by_source(rows)[source] == len(places)
        for stop in (0, 1, rows // 2, rows):
            assert made.rows_by_source(stop)[source] == np.count_nonzero(sources[:stop] == source)


def test_a_capped_source_stops_at_its_cap_and_leaves_its_share_to_the_others():
    made = plan({"web": 0.6, "code": 0.2, "math": 0.2}, {"math": 1.5, "code": 0.6}, total_steps=200)
    sources, _ = stream(made, 1600)
    counts = np.bincount(sources, minlength=3)
    assert counts.tolist() == [1600 - 120 - 90, 120, 90]  # 0.6 of 200 rows, 1.5 of 60
    assert [line.split(" after")[0] for line in made.lines if "reached max_epochs" in line] == [
        "math reached max_epochs=1.5", "code reached max_epochs=0.6"
    ]  # fmt: skip
    last_math = np.flatnonzero(sources == 2)[-1]
    after = sources[last_math + 1 :][:100]
    assert 0.2 < (after == 1).mean() < 0.3  # 0.25 of what the two others share
    assert "epochs of each source in this run: web 1.39, code 0.6, math 1.5" in made.lines


def test_a_run_that_outlasts_all_its_sources_is_refused_before_it_begins():
    with pytest.raises(ValueError, match=r"limits data.mixture to .* tokens, but the run has .* tokens"):
        plan({"web": 0.5, "math": 0.5}, {"web": 0.1, "math": 2}, total_steps=100)
    plan({"web": 0.5, "math": 0.5}, {"web": 0.1, "math": 2}, total_steps=25)


@pytest.mark.parametrize("start", ["1280", "10 steps", "10%", "1280 tokens", "80 rows"])
def test_stages_start_at_amounts_of_training(start):
    made = plan({"0": {"web": 1.0}, start: {"math": 1.0}})
    assert [first for first, _ in made.record()] == [0, 80]


@pytest.mark.parametrize(
    ("mixture", "max_epochs", "message"),
    [
        (
            {"web": 1.0, "books": 1.0},
            {},
            "names 'books', which is not a source of the training data; the sources are web, code",
        ),
        ({"web": 1.0}, {"books": 1.0}, "data.max_epochs names 'books'"),
        ({"10 steps": {"web": 1.0}}, {}, "starts at batch 10; set the start of its first stage to '0'"),
        ({"0": {"web": 1.0}, "0%": {"web": 1.0}}, {}, "stages of data.mixture start at the same batch"),
        ({"0": {"web": 1.0}, "soon": {"web": 1.0}}, {}, "is not an amount of training"),
        ({"0": {"web": 1.0}, "web": 0.5}, {}, "do not mix the two"),
        ({"web": 0.0}, {}, "finite and at least 0, and one weight must be above 0"),
        ({"web": -1.0, "code": 2.0}, {}, "finite and at least 0, and one weight must be above 0"),
    ],
)
def test_what_is_wrong_with_a_mixture_is_one_line(mixture, max_epochs, message):
    with pytest.raises(ValueError, match=message):
        plan(mixture, max_epochs)


def test_caps_need_a_mixture_and_a_positive_number():
    for settings_ in (({}, {"web": 1.0}), ({"web": 1.0}, {"web": 0.0})):
        with pytest.raises(ValueError, match="max_epochs"):
            check_mixture(*settings_)


def test_only_what_lies_ahead_may_change():
    before = plan({"0": {"web": 1.0}, "50 steps": {"math": 1.0}}).record()
    later = plan({"0": {"web": 1.0}, "60 steps": {"code": 1.0}}).record()
    other = plan({"0": {"web": 1.0, "code": 1.0}}).record()
    for rows, same in ((0, True), (1, True), (400, True), (401, False)):
        assert same_prefix(before, later, rows) is same
    assert not same_prefix(before, other, 1) and same_prefix(before, other, 0)
    assert not same_prefix(None, before, 8) and same_prefix(None, None, 8)


def test_a_detour_is_a_stage_of_one_source_after_which_the_plan_goes_on():
    starts = [(0, {"a": 1.0, "b": 1.0}), (10, {"a": 3.0, "b": 1.0}), (20, {"b": 1.0})]
    found = with_detours(starts, [(4, 2, "b"), (9, 3, "a")])
    assert found == [
        (0, {"a": 1.0, "b": 1.0}), (4, {"b": 1.0}), (6, {"a": 1.0, "b": 1.0}), (9, {"a": 1.0}),
        (12, {"a": 3.0, "b": 1.0}), (20, {"b": 1.0}),
    ]  # fmt: skip
    assert with_detours(starts, [(8, 2, "b")])[2:] == [(10, {"a": 3.0, "b": 1.0}), (20, {"b": 1.0})]


def test_stages_begin_with_the_first_batch_at_or_after_their_tokens_where_batches_grow():
    sizes = BatchSizes.growing([(8, 24), (16, 54)], 32)  # which begin at rows 0, 8, 16, 24, 40, 56, 88, ...
    mixture = {"0": {"web": 1.0}, "50 rows": {"web": 0.5, "code": 0.5}, "50%": {"code": 1.0}}
    planned = plan(mixture, rows_per_batch=sizes, total_steps=13)
    assert [stage.first_row for stage in planned.stages] == [0, 56, 184]  # half of 312 rows are 156
    with pytest.raises(ValueError, match="start='4 steps' needs batch_tokens, which is unknown"):
        plan({"0": {"web": 1.0}, "4 steps": {"code": 1.0}}, rows_per_batch=sizes)
