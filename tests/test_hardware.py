"""The chip table: what every row must hold."""

import re

import pytest

from jaxscale.hardware import CHIPS, find_chip


@pytest.mark.parametrize("kind", CHIPS)
def test_a_row_has_its_sources_and_figures_of_the_right_size(kind):
    chip = find_chip(kind)
    assert chip.source and (chip.ici_bandwidth is None) == (not chip.links_source)
    assert 5e13 < chip.peak_flops < 5e15 and 1e9 < chip.hbm_bytes < 1e12  # FLOP/s and bytes, not TFLOP/s and GiB
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
    assert {"TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x"} <= names


def test_an_unknown_chip_has_no_row():
    assert find_chip("TPU v99") is None
