"""The chip table: what every row must hold."""

import re

import pytest

from jaxscale.hardware import CHIPS, find_chip
from jaxscale.planning.machine import open_machine
from jaxscale.system.exits import BadInput


@pytest.mark.parametrize("kind", CHIPS)
def test_a_row_has_its_sources_and_figures_of_the_right_size(kind):
    chip = find_chip(kind)
    assert chip.source and (chip.ici_bandwidth is None) == (not chip.links_source)
    assert 1e13 < chip.peak_flops < 5e15 and 1e9 < chip.hbm_bytes < 1e12  # FLOP/s and bytes, not TFLOP/s and GiB
    for faster, slower in [
        (chip.hbm_bandwidth, chip.ici_bandwidth),
        (chip.ici_bandwidth, chip.dcn_bandwidth),
        (chip.fp8_flops, chip.peak_flops / 1.001),
        (chip.int8_flops, chip.peak_flops / 1.001),
    ]:
        assert faster is None or slower is None or faster > slower


@pytest.mark.parametrize("kind", CHIPS)
def test_what_a_chip_costs_and_draws_has_a_date_and_a_source(kind):
    chip = find_chip(kind)
    assert (chip.watts is None) == (not chip.watts_source)
    assert chip.watts is None or 50 < chip.watts < 2000
    if chip.price is not None:
        assert 0.1 < chip.price.dollars_per_hour < 20 and chip.price.source
        assert re.fullmatch(r"20\d\d(-\d\d-\d\d)?", chip.price.date)
    for slower, faster in [(chip.fp32_flops, chip.fp16_flops), (chip.fp16_flops, chip.int8_flops)]:
        assert slower is None or faster is None or slower < faster
    if not chip.bfloat16:
        assert chip.peak_flops == chip.fp16_flops


def test_every_chip_that_is_promised_is_there():
    names = {chip.name for chip in CHIPS.values()}
    assert {"V100", "T4", "A100 40GB", "A100 80GB", "H100 SXM", "H200 SXM", "B200 SXM"} <= names
    assert {"TPU v3", "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x", "GB200", "A10G", "P100"} <= names


# cloud.google.com/tpu/docs, page of the version: VM types and slices.
@pytest.mark.parametrize(
    ("topology", "hosts"),
    [
        ("v5e:1x1", 1), ("v5e:2x2", 1), ("v5e-8", 1), ("v5e:2x4", 1), ("v5e-16", 4), ("v5e-256", 64),
        ("v6e:1x1", 1), ("v6e-4", 1), ("v6e-8", 1), ("v6e-16", 4), ("v6e-256", 64), ("2*v6e-8", 2),
        ("v3-8", 1), ("v3-32", 4), ("v4-8", 1), ("v4-16", 2), ("v5p-8", 1), ("v5p-16", 2), ("v5p-256", 32),
        ("tpu7x-8", 1), ("tpu7x-16", 2), ("h100:8", 1), ("gb200:18x4", 18), ("a10g:4", 1), ("p100:1", 1), ("t4:2", 1),
    ],
)  # fmt: skip
def test_slices_have_the_hosts_that_the_cloud_gives_them(topology, hosts):
    machine = open_machine(topology)
    assert machine.num_hosts == hosts == len({device.process_index for device in machine.devices})


def test_a_gb200_tray_has_four_gpus():
    with pytest.raises(BadInput, match="a host holds 1 to 4 cards, .* write gb200:2x4"):
        open_machine("gb200:8")


def test_an_unknown_chip_has_no_row():
    assert find_chip("TPU v99") is None
