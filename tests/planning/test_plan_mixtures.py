"""Mixtures of experts in plans: memory and bytes beside what the compiler made of the same steps, and what is said.

Compiled by jax 0.12.0.1 and libtpu 0.0.51 for chips that are not there, 2026-11-24 and 25; rows of 4,096 tokens, full
remat unless said.
"""

import collections
import functools
import pathlib
import re

import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.program.budget import resolve_budget
from jaxscale.program.memory import memory_need, rows_per_round
from jaxscale.settings.config_file import load_config
from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.collectives import step_collectives
from jaxscale.tools.planning.communication import communication_time
from jaxscale.tools.planning.placeholder_devices import open_machine
from jaxscale.tools.planning.plan import PlanOptions, make_plan
from jaxscale.tools.planning.plan_text import WIDTH, plan_lines
from jaxscale.tools.planning.scaling_ladder import read_ladder
from jaxscale.tools.planning.speed import estimate_step, recomputed_row_flops

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
CONFIG = str(CONFIGS / "mixtral_8x7b.py")
GIB = 2**30
MIXTRAL = {
    "model.num_layers": 4, "model.embed_dim": 2048, "model.num_heads": 16, "model.mlp_dim": 7168,
    "model.experts.mlp_dim": 7168, "batch_tokens": "16 rows",
}  # fmt: skip
FINE = {
    "model.num_layers": 4, "model.embed_dim": 2048, "model.num_kv_heads": 4, "model.qk_norm": True,
    "model.experts.number": 64, "model.experts.chosen": 8, "model.experts.mlp_dim": 768, "batch_tokens": "16 rows",
}  # fmt: skip
SEND, GATHER = {"expert.exchange": "send"}, {"expert.exchange": "gather"}
V5P = "v5p:2x2x2"
# (topology, settings, GiB of the compiler, MB that a device sends by (axis, kind)). docs/plan.md says which were in
# view as the formula was written.
COMPILED = [
    (V5P, MIXTRAL, 4.8, {("fsdp", "all-gather"): 5338.5, ("fsdp", "reduce-scatter"): 2783.8}),
    (
        "v6e:2x4",
        FINE | SEND | {"mesh.expert": 8},
        5.914,
        {("expert", "all-to-all"): 5875.5, ("expert", "all-gather"): 497.3, ("expert", "reduce-scatter"): 362.4},
    ),
    (
        V5P,
        MIXTRAL | GATHER | {"mesh.expert": 4},
        4.8,
        {
            ("fsdp", "all-gather"): 3050.6,
            ("expert", "all-gather"): 2287.9,
            ("expert", "reduce-scatter"): 2250.0,
            ("fsdp", "reduce-scatter"): 533.8,
        },
    ),
    (
        "v5e:2x4",
        MIXTRAL | {"batch_tokens": "8 rows"},
        4.280,
        {("fsdp", "all-gather"): 5338.5, ("fsdp", "reduce-scatter"): 2790.5},
    ),
    (
        V5P,
        MIXTRAL | {"mesh.tensor": 2},
        4.8,
        {
            ("fsdp", "all-gather"): 2288.1,
            ("fsdp", "reduce-scatter"): 1193.1,
            ("tensor", "all-reduce"): 872.4 + 738.2,  # as gathers and scatters
        },
    ),
    (
        V5P,
        MIXTRAL | {"mesh.data": 2},
        7.9,
        {("fsdp", "all-gather"): 4575.9, ("fsdp", "reduce-scatter"): 2386.1, ("data", "all-reduce"): 795.4},
    ),
    ("v6e:2x4", FINE, 4.5, {}),
    (V5P, MIXTRAL | SEND | {"mesh.expert": 4}, 5_200_790_661 / GIB, {}),  # the peak of its live ranges
    ("v5p:4x4x4", {"model.remat": "minimal"}, 90.9, {}),  # docs/explanation/mixtures.md
    ("v5p:4x4x4", SEND | {"mesh.expert": 8}, 22.0, {}),
    ("v5p:8x8x8", {"batch_tokens": "2048 rows"}, 12.2, {}),
    ("v5p:16x16x24", {"batch_tokens": "24576 rows", "mesh.data": 3}, 11.1, {}),
]


def opened(topology, settings, config="mixtral_8x7b"):
    cfg = load_config(str(CONFIGS / f"{config}.py"), {name: str(value) for name, value in settings.items()})
    place = open_machine(topology)
    return make_program(cfg, resolve_budget(cfg, None), place.devices)


def sent_megabytes(program):
    """{(axis, kind): MB that a device sends}"""
    found = collections.Counter()
    for one in step_collectives(program):
        size = program.mesh.shape[one.axis]
        if size > 1 and one.nbytes:
            found[one.axis, one.kind] += one.nbytes * (size - 1) / size * (1 + (one.kind == "all-reduce")) / 1e6
    return found


@pytest.mark.parametrize(("topology", "settings", "gib", "sent"), COMPILED, ids=lambda value: str(value)[:60])
def test_memory_is_within_6_percent_of_the_compilers_and_bytes_within_2(topology, settings, gib, sent):
    program = opened(topology, settings)
    assert memory_need(program).total / GIB == pytest.approx(gib, rel=0.06)
    if sent:
        assert sent_megabytes(program) == pytest.approx(sent, rel=0.02)


def test_deepseek_v3_on_512_chips_is_as_it_was_compiled():
    """50.7 GiB, and 53.8 s for which products wait for links (jax 0.12.0.1, libtpu 0.0.51, 2026-11-25)."""
    program = opened("v5p:8x8x8", {}, "deepseek_v3")
    assert memory_need(program).total / GIB == pytest.approx(50.7, rel=0.1)
    sent = sent_megabytes(program)
    assert sent["expert", "all-to-all"] == pytest.approx(5_029_682, rel=0.01)
    assert sent["fsdp", "all-gather"] == pytest.approx(927_980, rel=0.02)
    assert sent["fsdp", "reduce-scatter"] == pytest.approx(478_923, rel=0.02)
    assert communication_time(program, open_machine("v5p:8x8x8")).exposed_s(89.5) == pytest.approx(53.8, rel=0.1)


# Memory, and seconds for which products wait, in the same program as it was compiled (2026-11-25).
@pytest.mark.parametrize(("config", "gib", "exposed"), [("mixtral_8x7b", 21.7, 0.29), ("qwen3_30b_a3b", 14.6, 0.13)])
def test_experts_that_are_gathered_keep_products_waiting(config, gib, exposed):
    program, place = opened("v5p:4x4x4", {}, config), open_machine("v5p:4x4x4")
    assert memory_need(program).total / GIB == pytest.approx(gib, rel=0.06)
    waits = communication_time(program, place).exposed_s(estimate_step(program, place).compute_s)
    assert waits == pytest.approx(exposed, rel=0.4)


@pytest.mark.parametrize(
    ("config", "topology", "form"), [("mixtral_8x7b", "v5p:4x4x4", "send"), ("qwen3_30b_a3b", "v6e:8x8", "gather")]
)
def test_wide_experts_are_sent_rows_and_narrow_ones_are_gathered_as_the_plan_of_both_is_faster(config, topology, form):
    place = open_machine(topology)
    program = opened(topology, {"mesh.expert": 8}, config)
    assert program.plan.expert_exchange.name == form
    both = [opened(topology, {"mesh.expert": 8} | way, config) for way in (SEND, GATHER)]
    sent, gathered = (estimate_step(program, place).cost[0] for program in both)
    assert (form == "send") == (sent < gathered)


def test_rows_that_are_sent_are_those_of_one_round_five_times_and_memory_is_not_that_of_all_experts():
    program = opened(V5P, MIXTRAL | SEND | {"mesh.expert": 4})
    rows = 4 * 5120  # 8,192 tokens, each to 2 of 8 experts on 4 devices: 4,096 rows for each, and a quarter more
    assert rows_per_round(program, program.cfg.model.experts, parts=1) == rows
    sent = 4 * rows * (5 * 2048 * 2 + 3 * 4)
    assert sent_megabytes(program)["expert", "all-to-all"] == pytest.approx(sent * 3 / 4 / 1e6)
    many = MIXTRAL | {"model.experts.number": 64, "mesh.expert": 4}
    assert memory_need(opened(V5P, many | SEND)).activations < 0.7 * memory_need(opened(V5P, many | GATHER)).activations
    halves = opened(V5P, MIXTRAL | SEND | {"mesh.expert": 4, "train.num_microbatches": 2})
    assert sent_megabytes(halves)["expert", "all-to-all"] == pytest.approx(sent * 3 / 4 / 1e6)
    assert sent_megabytes(halves)["fsdp", "all-gather"] == 2 * sent_megabytes(program)["fsdp", "all-gather"]


def test_what_a_round_makes_is_not_kept_and_is_computed_again():
    program = opened(V5P, MIXTRAL | SEND | {"mesh.expert": 4, "model.remat": "minimal"})
    whole = opened(V5P, MIXTRAL | {"model.remat": "minimal"})
    of_experts = 2 * 2 * 7168 * 8192 * 2 * 4  # gate and up, two experts a token, four layers
    assert memory_need(whole).activations - memory_need(program).activations > 0.95 * of_experts
    assert recomputed_row_flops(program) == 2 * 2 * 2048 * 2 * 7168 * 4 and recomputed_row_flops(whole) == 0


@functools.cache
def told(**settings):
    cfg = load_config(CONFIG, {name.replace("__", "."): value for name, value in settings.items()})
    plan = make_plan(cfg, open_machine("v5p:4x4x4"), PlanOptions())
    return plan, " ".join(" ".join(plan_lines(plan)).split())


def test_the_plan_says_what_it_takes_for_granted_and_which_parameters_it_counts():
    plan, text = told(mesh__expert="8")
    assert max(map(len, plan_lines(plan))) <= WIDTH
    assert set(plan.time.speed.sent_bytes) == {"fsdp", "expert"}
    assert re.search(r"per device and step: expert [0-9.]+ GiB, fsdp [0-9.]+ GiB", text)
    assert "expert: tokens are sent to their experts (send): per device and microbatch a layer gathers" in text
    assert "routing: balanced: every expert has the same number of rows, and one all-to-all round with 1.25 x" in text
    for words in (
        "46,702,792,704 total, 12,879,925,248 active per token (for FLOPs and MFU)",
        "published optima are only for dense models",
        "the published rule and fit cover only dense models",
    ):
        assert text.count(words) == 1, words
    assert "compute-optimal" not in text
    _, at_home = told()
    assert "expert:" not in at_home and "Rows are not sent to other devices" in at_home


def test_a_law_of_dense_models_is_not_fitted_to_a_mixture():
    cfg = tiny.config({"model.experts": dict(number=4, chosen=2, mlp_dim=8)})
    with pytest.raises(BadInput, match="the run to forecast has model.experts.*use a dense model"):
        read_ladder([], cfg, resolve_budget(cfg, None))
