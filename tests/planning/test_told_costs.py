"""Durations and costs that are often told, by the plan's own functions: the second table of docs/plan.md."""

import pathlib

import pytest

from jaxscale.kernels.hardware import CHIPS
from jaxscale.tools.planning import cost
from jaxscale.tools.planning.published_mfu import published_mfu, published_rows
from jaxscale.tools.planning.scaling import optimal_tokens, train_flops

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
V100, A100, H100 = (CHIPS[kind] for kind in ("Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"))
GPT3_FLOPS = 3.14e23  # arXiv:2005.14165, table D.1


def hours(flops, chip, mfu, goodput=cost.GOODPUT):
    """Hours of one chip."""
    return flops / (chip.peak_flops * mfu * goodput) / cost.HOUR


def days(flops, chip, number):
    """(fewest, most) days of so many chips, at what such chips reached."""
    return [hours(flops, chip, mfu) / number / 24 for mfu in reversed(published_mfu(chip)[0])]


def told(line):
    """Whether the page says so."""
    return line in PAGE


def test_gpt_2_in_a_week_on_32_cards():
    tokens = 32 * 7 * cost.DAY * V100.peak_flops * 0.4 * cost.GOODPUT / train_flops(1.5e9, 1)
    assert tokens == pytest.approx(97e9, rel=0.01)
    assert tokens > 9 * 10e9  # 40 GB of text are 8 to 10 billion tokens


def test_gpt_3_in_a_month_on_10_000_cards():
    assert hours(GPT3_FLOPS, V100, 0.4) / 10_000 / 24 == pytest.approx(8.1, abs=0.05)
    assert GPT3_FLOPS / (10_000 * 30 * cost.DAY * V100.peak_flops * cost.GOODPUT) == pytest.approx(0.11, abs=0.005)
    assert told("8 days on 10,000 V100s at 40% MFU; a month would mean an MFU of 11%")


def test_llama_2_on_2_000_cards():
    assert [round(total / 2000 / 24) for total in (1_720_320, 3_311_616)] == [36, 69]
    assert told("the A100-hours above are 36 days for 70B, and 69 days for all sizes")
    for dollars, low, high in ((1_720_320, 3.4, 6.9), (3_311_616, 6.6, 13.2)):
        assert (2e-6 * dollars, 4e-6 * dollars) == (pytest.approx(low, abs=0.05), pytest.approx(high, abs=0.05))
    assert told("$3.4M to $6.9M, and $6.6M to $13.2M")
    price = A100.price.dollars_per_hour
    assert [round(price * total / 1e6, 1) for total in (1_720_320, 3_311_616)] == [4.8, 9.2]
    assert told(f"$4.8M at ${price:.2f} per A100-hour, and $9.2M for all sizes")


def test_25_000_a100_do_not_make_what_is_told_of_gpt_4():
    most = 25_000 * 180 * cost.DAY * A100.peak_flops * published_mfu(A100)[0].high * cost.GOODPUT
    assert most == pytest.approx(5.9e25, rel=0.01) and most < 1.4e26 / 2


@pytest.mark.parametrize(
    ("params", "tokens", "chip", "number", "low", "high", "line"),
    [
        (7e9, 1e12, A100, 512, 6, 10, "6 to 10 days on 512 A100s for 1T tokens"),
        (70e9, 2e12, A100, 2048, 31, 49, "31 to 49 days on 2,048 A100s for 2T tokens"),
        (1e12, 20e12, H100, 10_000, 325, 410, "11 to 14 months on 10,000 H100s"),
    ],
)
def test_how_long_sizes_take(params, tokens, chip, number, low, high, line):
    assert [round(one) for one in days(train_flops(params, tokens), chip, number)] == [low, high]
    assert tokens in (1e12, 2e12, optimal_tokens(params))
    assert told(line)


def test_what_a_table_of_hours_by_size_means_in_tokens():
    tokens = [
        total * cost.HOUR * A100.peak_flops * 0.4 / train_flops(params, 1)
        for params, total in ((1e9, 1e4), (7e9, 1e5), (70e9, 1e6), (175e9, 1e7))
    ]
    assert tokens == [pytest.approx(one, rel=0.01) for one in (749e9, 1.07e12, 1.07e12, 4.28e12)]
    assert hours(GPT3_FLOPS, A100, 0.4, 1.0) == pytest.approx(0.7e6, rel=0.01)


def test_what_gpt_3_costs():
    assert 355 * 365 * 24 * 1.5 == pytest.approx(4.6e6, rel=0.02)
    low, high = (hours(GPT3_FLOPS, A100, mfu) for mfu in reversed(published_mfu(A100)[0]))
    assert (low, high) == (pytest.approx(573e3, rel=0.001), pytest.approx(895e3, rel=0.001))
    price = A100.price.dollars_per_hour
    assert (price * low, price * high) == (pytest.approx(1.6e6, rel=0.01), pytest.approx(2.5e6, rel=0.01))
    assert told("573,000 to 895,000 A100-hours at $2.79 cost $1.6M to $2.5M")


def test_the_table_of_what_was_reached_is_that_of_the_code():
    names = {chip.name: chip for chip in CHIPS.values()}
    for line in PAGE.partition("| chip | dense models |")[2].partition("Each share")[0].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] in names:
            for cell, mixture in zip(cells[1:], (False, True), strict=True):
                found, source = published_mfu(names[cells[0]], mixture)
                assert ("no published MFU" in source) == (cell == "none known")
                assert cell in ("none known", f"{found.low:.1%} to {found.high:.1%}")
            del names[cells[0]]
    assert all(
        not published_rows(chip) or chip.architecture for chip in names.values()
    )  # the rest has no run of its own
