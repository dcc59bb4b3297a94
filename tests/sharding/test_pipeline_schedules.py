"""The tables of pipeline schedules: complete, in order, without a wait, and with the bubble that papers promise."""

import dataclasses

import numpy as np
import pytest

from jaxscale.core.axes.pipeline_schedules import (
    EQUAL_COSTS,
    IDLE,
    Costs,
    ScheduleSize,
    check_schedule,
    make_schedule,
    split_layers,
)
from jaxscale.tools.planning.schedule_times import bubble_fraction, simulated_seconds

SIZES = [
    (P, V, M) for P in (1, 2, 3, 4, 8) for V in (1, 2, 4) for M in (1, 2, 4, 6, 8, 32) if V == 1 or M % P == 0
]  # fmt: skip


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_every_schedule_has_the_ideal_bubble(name):
    for P, V, M in SIZES:
        schedule = make_schedule(name, P, V, M)  # which proves it: check_schedule
        assert bubble_fraction(schedule, EQUAL_COSTS) == pytest.approx((P - 1) / (V * M + P - 1), abs=1e-12), (P, V, M)
        assert simulated_seconds(schedule, Costs(1.0, 0.0, 1.0, 1.0)) == 3.0 * (M * V + P - 1)


def test_a_zero_bubble_saves_the_gradients_of_weights_in_the_turns_that_are_lost():
    again, input_grads, weight_grads = 1.25, 1.5, 0.75
    costs = Costs(1.0, again, input_grads, weight_grads)
    for P, V, M in SIZES:
        schedule, other = make_schedule("zero_bubble", P, V, M), make_schedule("1f1b", P, V, M)
        lost = (P - 1) * (1.0 + again + input_grads)
        assert simulated_seconds(schedule, costs) == M * V * sum(costs) + lost, (P, V, M)
        assert bubble_fraction(schedule, costs) == pytest.approx(lost / (M * V * sum(costs) + lost), abs=1e-12)
        assert schedule.bubble == pytest.approx(3 * (P - 1) / (4 * M * V + 3 * (P - 1)), abs=1e-12)
        assert simulated_seconds(other, costs) == (M * V + P - 1) * sum(costs)
        assert schedule.num_ticks == other.num_ticks and schedule.num_slots == other.num_slots
        assert schedule.num_deferred == min(P - 1, M)
        for name in ("embed_microbatch", "loss_microbatch", "embed_grad_microbatch"):
            np.testing.assert_array_equal(getattr(schedule, name), getattr(other, name))
        left = [min(s, M) for s in range(P)]
        assert schedule.inputs_only.sum(0).tolist() == schedule.weights_only.sum(0).tolist() == left
        assert ((schedule.backward.microbatch != IDLE) & ~schedule.inputs_only).sum(0).tolist() == [M * V] * P


def test_the_bubble_of_the_documents_is_theirs():
    assert ScheduleSize("1f1b", 8, 4, 32).bubble == pytest.approx(0.052, abs=5e-4)
    assert ScheduleSize("gpipe", 4, 1, 8).bubble == pytest.approx(3 / 11)  # GPipe's formula, arXiv:1811.06965


def test_what_1f1b_keeps_does_not_grow_with_the_microbatches_and_gpipe_keeps_all():
    slots = lambda name, M: make_schedule(name, 4, 1, M).num_slots
    assert [slots("1f1b", M) for M in (8, 16, 64)] == [7, 7, 7]
    assert [slots("gpipe", M) for M in (8, 16, 64)] == [8, 16, 64]
    for P, V in ((4, 2), (4, 4), (8, 4)):
        kept = {make_schedule("1f1b", P, V, M).num_slots for M in (4 * P, 8 * P)}
        assert len(kept) == 1 and kept.pop() <= 2 * P * V - 1


def spoilt(schedule, passes, field, t, s, value):
    """The schedule with one number of one table changed."""
    table = getattr(schedule, passes)
    array = getattr(table, field).copy()
    array[t, s] = value
    return dataclasses.replace(schedule, **{passes: table._replace(**{field: array})})


@pytest.mark.parametrize(
    ("passes", "field", "t", "s", "value", "told"),
    [
        ("forward", "microbatch", 3, 0, IDLE, "a pass is missing"),
        ("forward", "microbatch", 3, 0, 0, "microbatch 0 runs twice through chunk 0"),
        ("forward", "slot", 3, 0, 0, "stage 0 overwrites slot 0"),
        ("backward", "slot", 6, 0, 1, "stage 0 reads the wrong slot 1"),
        ("backward", "pending", 6, 1, 0, "stage 1 starts from the wrong cotangent"),
        ("backward", "pending", 6, 3, IDLE, "stage 3 starts from the wrong cotangent"),
        ("backward", "defer_to", 6, 3, 1, "a pass is missing"),  # that has the gradients of weights
        ("backward", "microbatch", 13, 3, IDLE, "a pass is missing"),  # the last of those
        ("backward", "defer_to", 3, 3, IDLE, "microbatch 0 runs twice through chunk 3"),
        ("backward", "defer_to", 5, 3, 2, "a cotangent is overwritten"),
        ("backward", "pending", 12, 3, 3, "stage 3 reads the wrong cotangent 3"),
        ("backward", "pending", 12, 3, 4, "a cotangent has no buffer"),
        ("backward", "pending", 11, 3, 0, "microbatch 0 runs twice through chunk 3"),
    ],
)
def test_a_wrong_table_is_no_schedule(passes, field, t, s, value, told):
    schedule = make_schedule("zero_bubble", 4, 1, 8)
    check_schedule(schedule)
    with pytest.raises(AssertionError, match=told):
        check_schedule(spoilt(schedule, passes, field, t, s, value))


def test_a_slot_is_not_written_before_the_second_pass_that_reads_it():
    schedule = make_schedule("zero_bubble", 4, 1, 8)
    early = schedule.forward.slot[3, 3]  # of microbatch 0, which goes back at once and again at the end
    with pytest.raises(AssertionError, match=f"stage 3 overwrites slot {early} at tick 5"):
        check_schedule(spoilt(schedule, "forward", "slot", 5, 3, early))


@pytest.mark.parametrize(
    ("layers", "P", "V"), [(61, 4, 1), (94, 8, 1), (126, 16, 1), (126, 8, 4), (8, 8, 1), (7, 2, 3)]
)
def test_layers_of_any_depth_are_cut_evenly_and_in_order(layers, P, V):
    cut = split_layers(layers, P, V)
    sizes = (cut != IDLE).sum(-1)
    assert sizes.min() >= 1 and sizes.max() - sizes.min() <= 1
    in_order = cut.swapaxes(0, 1).reshape(-1)
    np.testing.assert_array_equal(in_order[in_order != IDLE], np.arange(layers))


def test_a_stage_with_the_whole_head_has_fewer_layers():
    head = 128_256 * 4096 / 218_112_000  # Llama 3 8B's output projection, in layers
    assert (split_layers(32, 8, 1, head) != IDLE).sum(-1).reshape(-1).tolist() == [5, 5, 4, 4, 4, 4, 4, 2]
