"""The chip table: what every row must hold."""

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


def test_an_unknown_chip_has_no_row():
    assert find_chip("TPU v99") is None
