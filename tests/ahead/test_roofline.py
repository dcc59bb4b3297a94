"""The bounds of a step's time, on facts and a chip whose figures divide without a remainder."""

import dataclasses

import pytest

from jaxscale.core.axes.pipeline_schedules import ScheduleSize
from jaxscale.kernels.hardware import Chip
from jaxscale.tools.planning.links import DCN, Phase
from jaxscale.tools.preflight.hlo import Collective, HloFacts
from jaxscale.tools.preflight.hlo_schedule import ScheduleItem
from jaxscale.tools.preflight.roofline import Timeline, roofline

CHIP = Chip(
    "made up", 100.0, 1000, 10.0, "this test", ici_bandwidth=6.0, ici_dims=3, dcn_bandwidth=0.5, fp8_flops=200.0
)


def collective(axes, *stages, times=1):
    """A collective of which only the axes and the stages matter: ('x', bytes) with one of three dimensions' links."""
    stages = tuple(Phase(along, 4, 1.0 if along == DCN else len(along) / 3, sent) for along, sent in stages)
    return Collective("all-gather", axes, False, 4, 8, sum(one.nbytes for one in stages), times, stages=stages)


def facts(*collectives, schedule=(), **flops):
    """A step of 40 bytes of memory traffic."""
    return HloFacts(list(collectives), sum(flops.values()), 40.0, 0, dot_flops_by_type=flops, schedule=schedule)


def work(seconds):
    return ScheduleItem("work", flops={"bf16": 100.0 * seconds})


def start(number):
    return ScheduleItem("start", number)


def done(number):
    return ScheduleItem("done", number)


def blocking(number):
    return ScheduleItem("blocking", number)


def runs(times, *items):
    return ScheduleItem("runs", times=times, items=items)


def test_each_resource_is_busy_for_its_work_over_its_speed():
    step = facts(collective(("fsdp",), ("x", 12.0), times=2), collective(("data",), ("y", 3.0), (DCN, 2.0)), bf16=300.0)
    bound = roofline(step, CHIP, model_flops_per_device=250.0)
    assert (bound.compute_s, bound.hbm_s) == (3.0, 4.0)
    assert bound.links_s == {"ici:fsdp:x": 12.0, "ici:data:y": 1.5, "dcn:data": 4.0}
    assert bound.overlapped_s == bound.at_least_s == 12.0  # the program has no order: all may hide
    assert bound.serial_s == 3.0 + 4.0 + 12.0 + 1.5 + 4.0
    assert bound.mfu_ceiling == pytest.approx(250 / (100 * 12.0))
    assert (bound.unpriced, bound.exposed_s) == ((), {})


def test_axes_on_one_dimension_share_its_links_and_stages_over_two_keep_both_busy():
    step = facts(collective(("fsdp",), ("x", 6.0)), collective(("tensor",), ("x", 2.0), ("xy", 8.0)), bf16=100.0)
    bound = roofline(step, CHIP, 100.0)
    assert bound.links_s == {"ici:fsdp:x": 3.0, "ici:tensor:x": 1.0, "ici:tensor:xy": 2.0}
    assert bound.overlapped_s == 3.0 + 1.0 + 2.0


ONE = collective(("fsdp",), ("x", 4.0))  # 2 s
TWO = collective(("fsdp",), ("x", 4.0), ("y", 6.0))  # 2 s, then 3 s


@pytest.mark.parametrize(
    ("items", "collectives", "seconds", "exposed"),
    [
        ([blocking(0), work(5)], [ONE], 7, {"x": 2}),
        ([start(0), work(5), done(0)], [ONE], 5, {}),
        ([start(0), work(1), done(0), work(4)], [ONE], 6, {"x": 1}),
        ([start(0), work(5), done(0)], [TWO], 5, {}),
        ([start(0), work(4), done(0)], [TWO], 5, {"x": 0.4, "y": 0.6}),  # one second, by the stages' parts
        ([start(0), start(1), work(2), done(0), done(1)], [ONE, ONE], 4, {"x": 2}),  # not both behind the same work
        ([start(0), start(1), work(3), done(0), done(1)], [ONE, collective((), ("y", 6.0))], 3, {}),  # other links
        ([start(0), work(1), blocking(1)], [ONE, ONE], 4, {"x": 3}),  # waits for the links, then sends
        ([work(1), start(0)], [ONE], 3, {}),  # nobody waits, and the step is not over before
    ],
)
def test_a_collective_hides_behind_the_work_between_its_start_and_its_end(items, collectives, seconds, exposed):
    played = Timeline(collectives, CHIP, items)
    assert played.seconds == pytest.approx(seconds)
    told = {link.split(":")[-1]: waited for link, waited in played.exposed.items() if waited}
    assert told == pytest.approx(exposed)


def test_a_loop_is_its_first_run_and_all_others_alike():
    body = (start(0), work(1), done(0), work(3))
    played = Timeline([ONE], CHIP, [runs(10, *body)])
    assert played.seconds == pytest.approx(50) and sum(played.exposed.values()) == pytest.approx(10)
    (one,) = played.collectives
    assert (one.runs, one.link_s, one.cover_s, one.is_blocking) == pytest.approx((10, 20, 10, False))
    ahead = (done(0), start(0), work(3))  # what the last run started is waited for in this one
    played = Timeline([ONE], CHIP, [start(0), runs(10, *ahead), done(0)])
    assert played.seconds == pytest.approx(2 + 30) and played.collectives[0].runs == 11


def test_a_branch_counts_as_often_as_it_is_taken():
    played = Timeline([ONE], CHIP, [runs(0.25, blocking(0), work(2)), runs(0.75, work(4))])
    assert played.seconds == pytest.approx(0.25 * 4 + 0.75 * 4)
    assert (played.collectives[0].runs, played.blocking["ici:fsdp:x"]) == pytest.approx((0.25, 0.5))


def test_the_step_takes_its_products_and_what_they_wait_for():
    items = (runs(2, start(0), work(1), done(0)), blocking(1), work(1))
    step = facts(dataclasses.replace(ONE, times=2), ONE, schedule=items, bf16=300.0)
    bound = roofline(step, CHIP, 300.0)
    assert (bound.at_least_s, bound.overlapped_s, bound.mfu_ceiling) == pytest.approx((7.0, 6.0, 3 / 7))
    assert bound.exposed_s == pytest.approx({"ici:fsdp:x": 4.0}) and bound.blocking_s == {"ici:fsdp:x": 2.0}


@pytest.mark.parametrize(("dtype", "seconds"), [("bf16", 4.0), ("f32", 4.0), ("f8e4m3fn", 2.0), ("s8", 4.0)])
def test_products_run_at_the_peak_of_their_type(dtype, seconds):
    assert roofline(facts(**{dtype: 400.0}), CHIP, 400.0).compute_s == seconds  # int8: the table has no figure


def test_kernels_count_beside_products():
    step = dataclasses.replace(facts(bf16=100.0), kernel_flops=50.0)
    assert roofline(step, CHIP, 100.0).compute_s == 1.5


def test_what_has_no_price_is_told_and_in_no_time():
    step = facts(collective(("data",), (DCN, 5.0)), bf16=100.0, schedule=(work(1), blocking(0)))
    step = dataclasses.replace(step, silent_kernels=3, unknown_trips=2, host_bytes=1e9)
    bound = roofline(step, dataclasses.replace(CHIP, dcn_bandwidth=None), 100.0)
    assert bound.links_s == {} and bound.at_least_s == 4.0
    told = "; ".join(bound.unpriced)
    assert all(part in told for part in ("3 kernel runs", "2 loops", "1e+09 bytes", "dcn:data: bandwidth"))


def test_a_stage_waits_while_the_pipeline_fills_and_empties_and_the_ceiling_knows_it():
    collectives = [collective((axes,), ("x", 4.0)) for axes in ("tensor", "fsdp")]  # 2 s each
    step = facts(*collectives, schedule=(blocking(0), blocking(1), work(10)), bf16=1000.0)
    bound = roofline(step, CHIP, 1000.0, ScheduleSize("1f1b", 4, 1, 6), head=0.2)
    bubble = 3 / 6 * (0.8 * 10 + 2)  # products but the output projection's, and what tensor says within a stage
    assert (bound.bubble_s, bound.bubble) == (pytest.approx(bubble), "33.3% = (P-1)/(VM+P-1) = 3/9")
    assert (bound.compute_s, bound.at_least_s) == pytest.approx((10, 14 + bubble))
    assert bound.mfu_ceiling == pytest.approx(10 / (14 + bubble))
    assert bound.overlapped_s == pytest.approx(10 + bubble)
    whole = roofline(step, CHIP, 1000.0, ScheduleSize("1f1b", 4, 1, 6), head=0.2, shards_head=False)
    assert whole.bubble_s == pytest.approx(3 / 6 * (0.5 * 10 + 2))  # 0.8 of 1.6
    assert roofline(step, CHIP, 1000.0).bubble_s == 0


def test_products_that_a_stage_takes_twice_are_no_waiting():
    collectives = [collective((axes,), ("x", 4.0)) for axes in ("tensor", "fsdp")]  # 2 s each
    step = facts(*collectives, schedule=(blocking(0), blocking(1), work(10)), bf16=1000.0)
    bound = roofline(step, CHIP, 1000.0, ScheduleSize("zero_bubble", 4, 1, 6))
    # Of the last stage: 6 x 4 parts of passes and 3 x 2 of them again, while 3 forward passes of others go by.
    waits = 3 / (6 * 4 + 3 * 2) * 10 + 3 / (6 * 3 + 3 * 2) * 2  # tensor says nothing for gradients of weights
    assert (bound.bubble_s, bound.bubble) == (
        pytest.approx(waits),
        "27.3% = 3(P-1)/(4VM+3(P-1)) = 9/33 (recomputation included)",
    )
    half = roofline(step, CHIP, 1000.0, ScheduleSize("zero_bubble", 4, 1, 6), head=0.5)
    assert half.bubble_s == pytest.approx(3 / 30 * 10 * (0.5 * 30 / 24) / (0.5 * 30 / 24 + 0.5) + 3 / 24 * 2)
