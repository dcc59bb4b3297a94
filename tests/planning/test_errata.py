"""What is often said with a wrong figure, computed by our own functions. docs/plan.md has the table in words."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
import tiny
import tokenizers

from jaxscale.build import make_program
from jaxscale.core.config import LossScaleConfig
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.optim.config import OptimConfig
from jaxscale.core.optim.optimizer import optim_schedule
from jaxscale.core.state import adjust_loss_scale, init_loss_scale
from jaxscale.kernels.attention.blockwise import make_attend
from jaxscale.kernels.hardware import CHIPS
from jaxscale.program.budget import resolve_budget
from jaxscale.program.memory import memory_lower_bound
from jaxscale.runtime.data.cache import raw_dtype
from jaxscale.runtime.data.config import DataConfig
from jaxscale.tools.planning import cost, scaling
from jaxscale.tools.planning.communication import communication_time
from jaxscale.tools.planning.placeholder_devices import open_machine
from jaxscale.tools.planning.plan import PlanOptions, make_plan
from jaxscale.tools.planning.propose import find_shape, shape_params
from jaxscale.tools.planning.published_mfu import ROWS, published_mfu
from jaxscale.tools.planning.speed import recomputed_flops

A100 = CHIPS["NVIDIA A100-SXM4-80GB"]
GB = 1e9


# Bytes of a parameter in the usual mixed precision; jaxscale keeps float32 all through, 4 + 4 + 8, which is 16 as well.
WEIGHTS, GRADS, MASTER, MOMENTS = 2, 2, 4, 8


def device_days(flops, mfu):
    """Days of one A100."""
    return flops / (A100.peak_flops * mfu) / cost.DAY


def sized(params):
    """A run whose model has about so many parameters."""
    cfg = tiny.config()
    model = LlamaConfig(**find_shape(params))
    return dataclasses.replace(cfg, model=model), shape_params(find_shape(params))


def test_the_state_of_70b_is_840_gb_and_only_with_a_float32_copy_1_12_tb():
    assert 70e9 * (WEIGHTS + GRADS + MOMENTS) == 840 * GB
    assert 70e9 * (WEIGHTS + GRADS + MASTER + MOMENTS) == 1120 * GB
    cfg, params = sized(70e9)
    assert memory_lower_bound(cfg, 1).state == 16 * params == pytest.approx(1120 * GB, rel=0.06)


def test_copy_and_moments_are_12_bytes_and_all_is_16_however_it_is_divided():
    assert MASTER + MOMENTS == 12 and WEIGHTS + GRADS + MASTER + MOMENTS == 16
    cfg, params = sized(7e9)
    state = memory_lower_bound(cfg, 1).state
    assert state == 16 * params == pytest.approx(112 * GB, rel=0.06)
    assert state > 80 * GB  # data parallelism alone does not hold 7B on 80 GB
    assert math.ceil(175e9 * (WEIGHTS + MOMENTS) / (80 * GB)) == 22  # GPT-3 without gradients, in A100s


def test_70b_over_tensor_8_and_pipeline_4_is_35_gb_a_device():
    cfg, params = sized(70e9)
    assert memory_lower_bound(cfg, 32).state == pytest.approx(params / 70e9 * 35.0 * GB, rel=1e-6)
    part = 70e9 / 32
    zero1 = part * (WEIGHTS + GRADS + (MASTER + MOMENTS) / 8)  # only the optimizer is shared
    zero3 = part * (WEIGHTS + GRADS + MASTER + MOMENTS) / 8
    assert zero1 == pytest.approx(12.0 * GB, rel=0.01)  # what is often called ZeRO-3 there
    assert zero3 == pytest.approx(4.4 * GB, rel=0.01)


@pytest.mark.parametrize(
    ("flops", "params", "tokens"),
    [(6e23, 70.7e9, 1.41e12), (1e24, 91.3e9, 1.83e12), (3.14e23, 51e9, 1.02e12)],
)
def test_the_compute_optimal_size_of_a_budget(flops, params, tokens):
    best = scaling.optimal_alternative(flops)
    assert (best.params, best.tokens) == (pytest.approx(params, rel=0.005), pytest.approx(tokens, rel=0.005))


def test_tokens_take_few_bytes_a_second():
    rate = 300e12 * 256 / scaling.train_flops(70e9, 1)
    assert rate == pytest.approx(183e3, rel=0.005)
    assert rate * cost.bytes_per_token_id(32_000) / 1e6 == pytest.approx(0.37, rel=0.02)  # MB/s of uint16
    assert 300e12 / A100.peak_flops == pytest.approx(0.96, abs=0.005)  # a share that nobody reaches
    assert max(row.high for row in ROWS if row.chip == A100.name) < 0.6


@pytest.mark.parametrize(
    ("flops", "at_all", "at_40"),
    [(3.1e23, 11_500, 28_750), (8.4e23, 31_161, 77_900), (1.4e26, 5.19e6, 13.0e6), (3e25, 1.11e6, 2.8e6)],
)
def test_gpu_days_at_the_whole_peak_are_two_and_a_half_times_more_at_40_percent(flops, at_all, at_40):
    assert device_days(flops, 1.0) == pytest.approx(at_all, rel=0.005)
    assert device_days(flops, 0.4) == pytest.approx(at_40, rel=0.01)


def test_40_gb_of_text_are_8_to_10_billion_tokens():
    assert [round(40 * GB / size / 1e9) for size in (5, 4)] == [8, 10]  # bytes of English a token


def test_2000_gpus_for_three_months_are_4_3_million_hours():
    assert 2000 * 90 * cost.DAY / cost.HOUR == pytest.approx(4.3e6, rel=0.01)


def test_7b_on_1t_tokens_costs_a_fifth_to_two_fifths_of_a_million():
    hours = device_days(scaling.train_flops(7e9, 1e12), 0.4) * 24
    assert hours == pytest.approx(93e3, rel=0.01) and hours / 512 == pytest.approx(183, rel=0.005)
    assert (2 * hours, 4 * hours) == (pytest.approx(0.19e6, rel=0.02), pytest.approx(0.37e6, rel=0.02))
    tenth = device_days(scaling.train_flops(7e9, 100e9), 0.4) * 24
    assert (2 * tenth, 4 * tenth) == (pytest.approx(19e3, rel=0.02), pytest.approx(37e3, rel=0.02))
    per_hour = 20_480 / 512
    assert per_hour == 40 and 512 * 12 * per_hour == pytest.approx(246e3, rel=0.002)


def test_7b_on_1t_tokens_is_seven_times_compute_optimal():
    assert 1e12 / scaling.optimal_tokens(7e9) == pytest.approx(7.1, abs=0.05)  # over-trained


def test_computing_the_forward_pass_again_costs_a_third_more():
    model = LlamaConfig(vocab_size=32_768, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=32, head_dim=128,
                        mlp_dim=11_008, remat="full")  # fmt: skip
    share = recomputed_flops(model, 4096) / model.flops_per_token(4096)
    assert 0.25 < share < 1 / 3  # the last product of each block and the output projection are not done twice
    assert (scaling.train_flops(1, 1) + 2) / scaling.train_flops(1, 1) == pytest.approx(1.333, abs=0.001)  # 8ND, 6ND


def test_tensor_parallelism_does_not_multiply_the_batch():
    """1,024 rows are 1 row x 8 data-parallel x 128 accumulated, whatever tensor parallelism there is beside them."""
    for tensor in (1, 2):
        settings = {"mesh.tensor": tensor, "batch_tokens": "1024 rows", "train.num_microbatches": 128}
        plan = make_plan(tiny.config(settings), open_machine(f"v5e:{2 * tensor}x4"), PlanOptions())
        assert (plan.work.rows, plan.work.rows_per_pass, plan.work.num_microbatches) == (1024, 1, 128)
        assert plan.machine.num_devices == 8 * tensor


def test_a_rate_begins_above_0_and_stays_at_its_least_behind_the_end():
    rate = optim_schedule(OptimConfig(peak_lr=1e-3, min_lr=1e-4), warmup_steps=10, total_steps=100)
    assert float(rate(0)) == pytest.approx(1e-4) and float(rate(99)) == pytest.approx(1e-4)
    assert [float(rate(step)) for step in (100, 150, 1000)] == [pytest.approx(1e-4)] * 3


def test_a_loss_scale_does_not_double_after_every_good_step():
    cfg = LossScaleConfig()
    state = init_loss_scale(cfg, "float16")
    assert cfg.growth_interval == 2000
    assert float(adjust_loss_scale(cfg, state, jnp.asarray(True)).value) == float(state.value)
    grown = adjust_loss_scale(cfg, state._replace(good_steps=jnp.asarray(1999)), jnp.asarray(True))
    assert float(grown.value) == 2 * float(state.value)
    assert float(init_loss_scale(cfg, "bfloat16").value) == 1.0  # and bfloat16 needs none


def test_what_data_parallelism_sends_does_not_depend_on_the_batch():
    machine = open_machine("h100:8x8")

    def sent(rows):
        cfg = tiny.config({"rules": "zero1", "batch_tokens": f"{rows} rows", "model.embed_dim": 64})
        return communication_time(make_program(cfg, resolve_budget(cfg, None), machine.devices), machine).total_s

    assert sent(64) == sent(640) > 0


def test_4_million_tokens_are_no_whole_rows_of_2048():
    assert 4_000_000 / 2048 == 1953.125
    with pytest.raises(ValueError, match="must be a multiple of seq_len"):
        tiny.config({"seq_len": 2048, "batch_tokens": 4_000_000})
    assert tiny.config({"seq_len": 2048, "batch_tokens": 4_194_304}).rows_per_step == 2048


def test_how_far_short_types_reach():
    assert float(jnp.finfo(jnp.float8_e4m3fn).max) == 448 and float(jnp.finfo(jnp.float8_e5m2).max) == 57_344
    largest = float(jnp.finfo(jnp.bfloat16).max)
    assert largest == pytest.approx(3.39e38, rel=0.001)
    assert jnp.isinf(jax.jit(lambda x: x * 2)(jnp.asarray(largest, jnp.bfloat16)))  # it does not stay at its largest


def test_links_are_told_in_one_direction():
    assert A100.ici_bandwidth == 600e9 / 2  # NVLink's 600 GB/s are both
    assert A100.dcn_bandwidth == 200e9 / 8  # HDR's 200 Gb/s


def test_the_largest_id_decides_the_type_of_a_token_file():
    for vocab_size, size in ((65_536, 2), (65_537, 4)):
        assert cost.bytes_per_token_id(vocab_size) == size
        assert raw_dtype(DataConfig(), vocab_size) == {2: "uint16", 4: "uint32"}[size]


def test_a_range_is_never_one_number():
    for chip in CHIPS.values():
        low, high = published_mfu(chip)[0]
        assert 0.1 <= low < high < 0.75
    source = published_mfu(CHIPS["NVIDIA H100 80GB HBM3"])[1]
    assert "16,384" in source and "8,192" in source  # 43% is of the smaller one


def test_no_published_run_reached_90_percent():
    assert max(row.high for row in ROWS) == 0.715 and max(row.high for row in ROWS if row.mixture) == 0.549


def test_the_output_projection_is_no_part_of_attention():
    """Attention has queries, keys and values, and no weight; what mixes heads is a product of its own behind it."""
    assert "attention.wo" in LlamaConfig(**find_shape(7e9)).matrices()
    q, k, v = (jnp.ones((1, 4, 2, 8), jnp.float32) for _ in range(3))
    out = make_attend()(q, k, v, jnp.ones((1, 4), jnp.int32))
    assert out.shape == q.shape and jnp.allclose(out, v)  # a mean of the values of each head, and nothing behind it


def test_text_that_is_cut_by_characters_gives_other_tokens_than_the_whole():
    pairs = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])
    tokenizer = tokenizers.Tokenizer(pairs)
    text, at = "abab", 3
    pieces = [tokenizer.encode(piece).ids for piece in (text[:at], text[at:])]
    assert tokenizer.encode(text).ids == [2, 2] and sum(pieces, []) == [2, 0, 1]
