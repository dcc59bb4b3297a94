"""The bounds of a step's time, on facts and a chip whose figures divide without a remainder."""

import dataclasses

import pytest

from jaxscale.ahead.hlo import Collective, HloFacts
from jaxscale.ahead.roofline import roofline
from jaxscale.hardware import Chip

CHIP = Chip(
    "made up", 100.0, 1000, 10.0, "this test", ici_bandwidth=6.0, ici_dims=3, dcn_bandwidth=0.5, fp8_flops=200.0
)


def collective(axes, wire, times=1, dcn=0.0):
    """A collective of which only the bytes and the axes matter."""
    return Collective("all-gather", axes, dcn > 0, 4, 8, wire, times, dcn_bytes=dcn)


def facts(*collectives, **flops):
    """A step of 40 bytes of memory traffic."""
    return HloFacts(list(collectives), sum(flops.values()), 40.0, 0, dot_flops_by_type=flops)


def test_each_resource_is_busy_for_its_work_over_its_speed():
    step = facts(collective(("fsdp",), 12.0, times=2), collective(("data",), 5.0, dcn=2.0), bf16=300.0)
    bound = roofline(step, CHIP, 2, model_flops_per_device=250.0)
    assert (bound.compute_s, bound.hbm_s) == (3.0, 4.0)
    assert bound.links_s == {"ici:fsdp": 4.0, "ici:data": 0.5, "dcn:data": 4.0}
    assert bound.overlapped_s == 4.5  # the ICI, whose links all axes share
    assert bound.serial_s == 3.0 + 4.0 + 4.5 + 4.0
    assert bound.mfu_ceiling == pytest.approx(250 / (100 * 4.5))
    assert bound.unpriced == ()


def test_an_axis_along_one_dimension_of_the_torus_has_its_links_only():
    step = facts(collective(("fsdp",), 6.0), collective(("fsdp", "tensor"), 6.0), collective((), 0.0), bf16=100.0)
    bound = roofline(step, CHIP, 1, 100.0, link_shares={"fsdp": 2 / 3, "tensor": 1 / 3, "data": 1.0})
    assert bound.links_s == pytest.approx({"ici:fsdp": 1.5, "ici:fsdp+tensor": 1.0})


def test_axes_on_different_links_of_a_chip_overlap_and_all_bytes_still_pass_its_links():
    shares = {"fsdp": 2 / 3, "tensor": 1 / 3}
    apart = roofline(
        facts(collective(("fsdp",), 40.0), collective(("tensor",), 20.0), bf16=100.0), CHIP, 1, 1.0, shares
    )
    assert apart.links_s == pytest.approx({"ici:fsdp": 10.0, "ici:tensor": 10.0})
    assert (apart.overlapped_s, apart.serial_s) == pytest.approx((10.0, 1.0 + 4.0 + 20.0))
    shared = facts(collective(("fsdp",), 40.0), collective(("fsdp", "tensor"), 60.0), bf16=100.0)
    assert roofline(shared, CHIP, 1, 1.0, shares).overlapped_s == pytest.approx(40 / 6 + 10)


@pytest.mark.parametrize(("dtype", "seconds"), [("bf16", 4.0), ("f32", 4.0), ("f8e4m3fn", 2.0), ("s8", 4.0)])
def test_products_run_at_the_peak_of_their_type(dtype, seconds):
    assert roofline(facts(**{dtype: 400.0}), CHIP, 1, 400.0).compute_s == seconds  # int8: the table has no figure


def test_kernels_count_beside_products():
    step = dataclasses.replace(facts(bf16=100.0), kernel_flops=50.0)
    assert roofline(step, CHIP, 1, 100.0).compute_s == 1.5


def test_what_has_no_price_is_told_and_in_no_time():
    step = facts(collective(("data",), 5.0, dcn=5.0), bf16=100.0)
    step = dataclasses.replace(step, silent_kernels=3, unknown_trips=2, host_bytes=1e9)
    bound = roofline(step, dataclasses.replace(CHIP, dcn_bandwidth=None), 2, 100.0)
    assert bound.links_s == {} and bound.overlapped_s == 4.0
    told = "; ".join(bound.unpriced)
    assert all(part in told for part in ("3 kernel runs", "2 loops", "1e+09 bytes", "dcn:data: no bandwidth"))


def test_bytes_between_gpu_hosts_go_through_the_network_without_slices():
    gpu = dataclasses.replace(CHIP, ici_dims=0)
    assert roofline(facts(collective(("fsdp",), 7.0, dcn=1.0)), gpu, 1, 1.0).links_s == {
        "ici:fsdp": 1.0,
        "dcn:fsdp": 2.0,
    }
