"""What published runs reached: each share is its source's own figures divided, and plans give published hours back."""

import functools
import re

import pytest
import tiny

from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.kernels.hardware import CHIPS
from jaxscale.settings import config_file
from jaxscale.tools.planning import cost
from jaxscale.tools.planning.placeholder_devices import open_machine
from jaxscale.tools.planning.plan import PlanOptions, make_plan
from jaxscale.tools.planning.published_mfu import ASSUMED, ROWS, published_mfu, published_rows
from jaxscale.tools.planning.scaling import train_flops

CHIP = {chip.name: chip for chip in CHIPS.values()}
PEAKS = {chip.name: chip.peak_flops * chip.devices_per_chip for chip in CHIPS.values()}
# TFLOP/s a chip, as the rows' sources give them: the lowest and the highest.
TERA = {
    ("TPU v5e", "16B, 256 to 8,192 chips"): (108, 120),
    ("TPU v5e", "32B, 256 to 8,192 chips"): (119, 132),
    ("TPU v5e", "64B, 256 to 8,192 chips"): (99, 118),
    ("TPU v5e", "128B, 256 to 8,192 chips"): (91, 110),
    ("TPU v4", "22B, 64 to 512 chips"): (146, 156),
    ("TPU v4", "52B, 192 and 384 chips"): (154, 162),
    ("TPU v5p", "32B, 64 and 128 chips"): (319, 328),
    ("TPU v5p", "64B, 64 and 128 chips"): (309, 323),
    ("TPU v5p", "128B, 128 to 512 chips"): (274, 316),
    ("TPU v5p", "256B, 512 and 1,024 chips"): (289, 308),
    ("TPU v5p", "512B, 512 and 1,024 chips"): (282, 294),
    ("TPU v5p", "1024B, 1,024 to 4,096 chips"): (237, 297),
    ("TPU v5p", "Llama 3.1 405B, 512 chips"): (314.530, 314.530),
    ("TPU v5p", "Mixtral 8x7B, 64 chips"): (251.94, 251.94),
    ("TPU v5p", "Llama 4 Scout, 128 to 512 chips"): (225.491, 225.491),
    ("TPU v5p", "Llama 4 Maverick, 128 chips"): (160.005, 160.005),
    ("TPU v5p", "DeepSeek-V3, 512 chips"): (152.415, 152.415),
    ("TPU v6e", "Llama 3.1 8B, 8 to 256 chips"): (407.225, 419.701),
    ("TPU v6e", "Llama 2 70B, 256 chips"): (402.274, 402.274),
    ("TPU v6e", "Llama 3.1 70B, 32 to 256 chips"): (422.091, 462.297),
    ("TPU v6e", "GPT-3 175B, 256 chips"): (384.891, 384.891),
    ("TPU v6e", "Llama 3.1 405B, 512 chips"): (392.454, 392.454),
    ("TPU v6e", "Gemma 3 12B, 256 chips"): (349.442, 349.442),
    ("TPU v6e", "Gemma 3 12B, 512 and 1,024 chips"): (304.788, 328.139),
    ("TPU v6e", "Mixtral 8x7B, 256 chips"): (302.311, 302.311),
    ("TPU v6e", "Mixtral 8x22B, 256 chips"): (332.463, 332.463),
    ("TPU7x", "Llama 3.1 70B, 64 and 256 chips"): (1199.67, 1207.05),
    ("TPU7x", "Llama 3.1 70B, rows of 131,072, 256 chips"): (897.94, 897.94),
    ("TPU7x", "Llama 3.1 405B, 256 chips"): (1261.40, 1261.40),
    ("TPU7x", "Gemma 4 2B, 4B and 31B, 64 chips"): (892.84, 1057.76),
    ("TPU7x", "Gemma 4 26B, 64 and 256 chips"): (592.31, 592.41),
    ("TPU7x", "DeepSeek-V3, 128 and 256 chips"): (607.53, 612.66),
    ("TPU7x", "Qwen3 235B-A22B, 256 chips"): (629.79, 629.79),
    ("TPU7x", "gpt-oss-120b, 64 and 256 chips"): (329.90, 330.25),
    ("H100 SXM", "Mixtral 8x7B"): (468, 468),
    ("H100 SXM", "gpt-oss-120b, 64 cards"): (153, 153),
}
# GPU-hours: arXiv:2302.13971, table 15; arXiv:2307.09288, table 2. Tokens: their tables 2 and 1. Shapes: the first's
# table 2; of the 34B, that of Code Llama 34B (arXiv:2308.12950), which was made of it.
SHAPES = {
    "7B": dict(num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=32, mlp_dim=11_008),
    "13B": dict(num_layers=40, embed_dim=5120, num_heads=40, num_kv_heads=40, mlp_dim=13_824),
    "33B": dict(num_layers=60, embed_dim=6656, num_heads=52, num_kv_heads=52, mlp_dim=17_920),
    "34B": dict(num_layers=48, embed_dim=8192, num_heads=64, num_kv_heads=8, mlp_dim=22_016),
    "65B": dict(num_layers=80, embed_dim=8192, num_heads=64, num_kv_heads=64, mlp_dim=22_016),
    "70B": dict(num_layers=80, embed_dim=8192, num_heads=64, num_kv_heads=8, mlp_dim=28_672),
}
HOURS = {
    "LLaMA 7B": (1.0e12, 82_432),
    "LLaMA 13B": (1.0e12, 135_168),
    "LLaMA 33B": (1.4e12, 530_432),
    "LLaMA 65B, 2,048 cards": (1.4e12, 1_022_362),
    "Llama 2 7B": (2.0e12, 184_320),
    "Llama 2 13B": (2.0e12, 368_640),
    "Llama 2 34B": (2.0e12, 1_038_336),
    "Llama 2 70B": (2.0e12, 1_720_320),
}


def model_of(run):
    """The settings of a run's model."""
    size = re.search(r"\d+B", run)[0]
    return dict(name="llama", vocab_size=32_000, head_dim=128, **SHAPES[size])


def row_of(run):
    """The row of an A100's run."""
    return next(row for row in ROWS if (row.chip, row.run) == ("A100 80GB", run))


@functools.cache
def planned(run, mfu=None):
    """The plan of one of these runs on 2,048 A100s."""
    rows = 2048 if run.startswith("LLaMA") else 1024  # of 2,048 and 4,096 tokens: 4M a step
    seq_len = 4_194_304 // rows
    settings = {"seq_len": seq_len, "batch_tokens": f"{rows} rows", "train_tokens": int(HOURS[run][0])}
    settings |= {f"model.{name}": value for name, value in model_of(run).items()}
    settings |= {
        "rules": "zero3",
        "mesh.data": 4,
        "mesh.fsdp": -1,
        "model.compute_dtype": "bfloat16",
        "model.attention": "auto",
    }
    cfg = tiny.config(settings | {"train.num_microbatches": 1, "optim.warmup_tokens": "2000 steps"})
    return make_plan(cfg, open_machine(f"a100:{rows // 8}x8"), PlanOptions(mfu=mfu))


def test_every_share_is_its_sources_figure_over_the_peak():
    assert set(TERA) <= {(row.chip, row.run) for row in ROWS}
    for row in ROWS:
        if (row.chip, row.run) in TERA:
            shares = [1e12 * tera / PEAKS[row.chip] for tera in TERA[row.chip, row.run]]
            within = (
                0.0006 if any(tera % 1 for tera in TERA[row.chip, row.run]) else 0.0035
            )  # whole TFLOP/s: half of one
            assert (row.low, row.high) == tuple(pytest.approx(share, abs=within) for share in shares), row


@pytest.mark.parametrize("run", HOURS)
def test_a_share_by_gpu_hours_is_6nd_over_them(run):
    tokens, hours = HOURS[run]
    params = LlamaConfig(**{name: value for name, value in model_of(run).items() if name != "name"}).num_params
    share = train_flops(params, tokens) / (hours * cost.HOUR * PEAKS["A100 80GB"])
    assert row_of(run).low == row_of(run).high == pytest.approx(share, abs=0.0016)
    if "65B" in run:  # and by the tokens a second and card that the paper gives
        assert row_of(run).low == pytest.approx(6 * params * 380 / PEAKS["A100 80GB"], abs=0.002)


def test_each_row_has_a_chip_of_the_table_and_a_public_source():
    for row in ROWS:
        assert row.chip in PEAKS and 0.1 < row.low <= row.high < 0.75, row
        assert re.search(r"arXiv:\d{4}\.\d{5}|github\.com/|docs\.nvidia\.com/", row.source), row
    assert len({(row.chip, row.run) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("chip", sorted(PEAKS))
@pytest.mark.parametrize("mixture", [False, True])
def test_a_range_is_of_the_chips_own_architecture_or_said_to_be_assumed(chip, mixture):
    found, source = published_mfu(CHIP[chip], mixture)
    assert 0.1 <= found.low < found.high < 0.75  # a range is never one number
    rows = published_rows(CHIP[chip], mixture)
    if not rows:
        assert source.startswith(
            f"no published MFU is known for {'mixtures of experts' if mixture else 'dense models'} on {chip}; "
        )
        assert found == ASSUMED and "10% to 60% is assumed" in source and "--mfu" in source
        return
    assert source.startswith(f"{found.low:.1%} to {found.high:.1%}: published for ")
    for row in rows:
        assert row.mixture == mixture
        assert row.chip == chip or CHIP[row.chip].architecture == CHIP[chip].architecture != ""
    assert (f"which has the architecture of {chip}" in source) == (rows[0].chip != chip)


@pytest.mark.parametrize("chip", ["T4", "V100", "P100", "L4", "A10G", "B200 SXM", "GB200", "TPU v3"])
def test_chips_without_published_runs_borrow_none(chip):
    assert not published_rows(CHIP[chip]) and "H100" not in published_mfu(CHIP[chip])[1]


def test_the_ranges_that_are_often_asked_for():
    percent = lambda chip: tuple(round(100 * share) for share in published_mfu(CHIP[chip])[0])
    assert percent("TPU v5p") == (52, 72) and percent("TPU v5e") == (46, 67)
    assert percent("TPU v6e") == (33, 50)  # 38% on one slice: 33% is of four
    assert percent("TPU7x") == (39, 55) and percent("H100 SXM") == (38, 48)


@pytest.mark.cases(2)
@pytest.mark.parametrize("run", HOURS)
def test_a_plan_gives_published_gpu_hours_back(run):
    """Within the range of its defaults; and at the run's own share to what attention adds and goodput takes.

    LLaMA's hours are tokens over tokens a second (1.4e12 / 380 of the 65B), with no lost time in them.
    """
    hours = HOURS[run][1]
    low, high = planned(run).money.chip_hours.times(cost.GOODPUT if run.startswith("LLaMA") else 1.0)
    assert low < hours < high and high / low < 1.6
    own, _ = planned(run, row_of(run).low).money.chip_hours
    assert 1.0 < own * cost.GOODPUT / hours < 1.09


def test_the_hours_of_the_llama_2_family():
    family = [run for run in HOURS if run.startswith("Llama 2")]
    assert sum(HOURS[run][1] for run in family) == 3_311_616
    low, high = (sum(planned(run).money.chip_hours[end] for run in family) for end in (0, 1))
    assert low < 3_311_616 < high


def test_a_mixture_is_planned_by_what_mixtures_reached():
    machine, configs = open_machine("v5p:4x4x4"), ("configs/llama3_8b.py", "configs/mixtral_8x7b.py")
    dense, sparse = (make_plan(config_file.load_config(one, {}), machine, PlanOptions()).time.speed for one in configs)
    assert dense.source.startswith(published_mfu(CHIP["TPU v5p"])[1]) and sparse.source.startswith(
        published_mfu(CHIP["TPU v5p"], True)[1]
    )
    assert sparse.mfu.low < dense.mfu.low
