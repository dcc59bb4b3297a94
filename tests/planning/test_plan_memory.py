"""The estimate of a device's memory against what the compiler said, of shipped configs."""

import math
import pathlib

import jax
import pytest

from jaxscale.core.models.moe_balance import is_balance_param
from jaxscale.core.optim.groups import dotted
from jaxscale.program.budget import resolve_budget
from jaxscale.program.memory import host_bytes, memory_need, padding_bytes, shard_bytes
from jaxscale.program.residuals import residuals_by_stack, tiled_bytes
from jaxscale.settings.config_file import load_config
from jaxscale.tools.planning.placeholder_devices import open_machine
from jaxscale.tools.planning.plan import PlanOptions, make_plan
from jaxscale.tools.planning.topology import open_topology
from jaxscale.tools.preflight.preflight import ahead_program

ROOT = pathlib.Path(__file__).parent.parent.parent
ONE_OF_EACH = {f"mesh.{axis}": 1 for axis in ("data", "expert", "tensor")}
CONFIGS = sorted(file for file in (ROOT / "configs").glob("*.py"))
GIB = 2**30


# (config, topology, settings, GiB of the compiler): docs/scale.json, jax 0.12.0.1, libtpu 0.0.51, 2026-11-24; of GPUs
# jax 0.10.2, 2026-11-21. The factors of program/memory.py were fitted to what was compiled of these on
# 2026-11-21, all of them with remat, before weights were fetched ahead.
CASES = [
    ("13b", "v5p:8x8x8", {}, 6.68),
    ("13b", "4*v6e:16x16", {"mesh.data": "4"}, 5.05),
    ("1b", "v5e:4x4", {"train.num_microbatches": "8"}, 4.01),
    ("70b", "v5p:8x8x8", {}, 16.56),
    ("70b", "4*v6e:16x16", {"mesh.data": "4"}, 12.36),
    ("70b", "a100:32x8", {"train.num_microbatches": "2", "mesh.tensor": "8"}, 39.5),
    ("7b", "v5p:2x2x4", {"train.num_microbatches": "16"}, 17.28),
    ("7b", "v5e:16x16", {}, 7.2),
    ("7b", "v6e:16x16", {}, 7.82),
    ("7b", "tpu7x:2x2x4", {}, 59.7),
    ("7b", "h100:1x8", {"train.num_microbatches": "32"}, 32.1),
    ("7b", "h100:8x8", {"train.num_microbatches": "4"}, 15.5),
    ("7b", "v6e:8x8", {"train.num_microbatches": "2"}, 17.33),
]
# Compiled in the same way, and not understood: the estimate is 2.35 (docs/plan.md).
MISSED = [
    ("7b", "v5p:8x8x16", {}, 3.27),
]
LONG = {"context.attention": "gather"}  # rows on several chips: jax 0.12.0.1, libtpu 0.0.51, 2026-11-24
# The others: jaxscale preflight, or the step of jaxscale bench statistics, jax 0.10.2, libtpu 0.0.42.1, 2026-11-22.
HELD_OUT = [
    ("1b", "v5e:2x4", {"train.num_microbatches": "16"}, 5.474),  # docs/statistics.md
    ("gpt2_124m", "v5e:2x2", {"train.num_microbatches": "64"}, 3770.0 / 1024),  # without remat
    ("175b", "v5p:8x8x8", {}, 28_465_545_056 / GIB),
    ("llama3_8b", "v5p:2x2x2", {}, 45.85),  # docs/scale.json
    ("qwen3_8b", "v5p:2x2x2", {}, 47.6),  # docs/scale.json
    ("gemma3_4b", "v5p:2x2x2", {}, 28.13),  # docs/scale.json
    ("ladder", "v5e:2x2", {}, 13_525_504 / GIB),  # without remat, float32
    ("auto:depth=12", "v5e:2x4", {"optim.name": "adamw"}, 11_778_607_104 / GIB),  # without remat
    ("auto:depth=12", "v5e:2x4", {}, 10.8),  # with Muon: jax 0.12.0.1, libtpu 0.0.51, 2026-11-26
    ("llama3_8b", "v5p:4x4x4", LONG | {"seq_len": "131072", "batch_tokens": "8 rows", "mesh.context": "8"}, 11.5),
    ("llama3_8b", "v5p:4x4x4", LONG | {"seq_len": "1048576", "batch_tokens": "1 rows", "mesh.context": "64"}, 19.6),
]
# The quick start when its programs were looked at, until 2026-11-25.
THEN = {"train.num_microbatches": "2", "model.compute_dtype": "float32", "optim.name": "adamw", "seq_len": "256"}
THEN |= {"batch_tokens": "8 rows"}
# Without remat. From the buffer assignments of these program/residuals.py was written; no further number was
# fitted.
WITHOUT_REMAT = [
    ("quickstart", "v5e:2x2", THEN, 51.76 / 1024),
    ("masked_lm", "v5e:2x2", {}, 65.76 / 1024),
    ("span_corruption", "v5e:2x2", {}, 100.36 / 1024),
    ("gpt2_124m", "v5e:2x4", {}, 6369.2 / 1024),
]
# Compiled when the estimate was done. Programs of a few hundred MiB: what is allocated in HBM and in VMEM. The peak
# that the compiler tells has only a part of VMEM in it: 168 and 305 MiB, which the estimate is 35% and 31% above; of
# auto at depth 4 with AdamW on v5e:2x2, estimated at 355 MiB, it is 246.6; what was allocated there was not looked at.
ON_CHIP = [
    ("quickstart", "v5e:2x2", THEN | {"batch_tokens": "64 rows"}, (114.05 + 111.94) / 1024),
    ("span_corruption", "v5e:2x2", {"batch_tokens": "64 rows"}, (315.93 + 111.99) / 1024),
]
# In stages and with shared rows, no number fitted to any: jaxscale preflight, jax 0.12.0.1, libtpu 0.0.51, 2026-11-24.
STAGED = [
    (
        "7b",
        "v5p:4x4x4",
        {"mesh.pipeline": 4, "mesh.fsdp": 16, "train.num_microbatches": 8, "batch_tokens": "256 rows"},
        16_865_368_320 / GIB,
    ),
    (
        "7b",
        "v5p:4x4x4",
        {
            "mesh.pipeline": 8,
            "mesh.fsdp": 4,
            "mesh.tensor": 2,
            "pipeline.chunks": 4,
            "train.num_microbatches": 16,
            "batch_tokens": "128 rows",
        },
        6_440_841_984 / GIB,
    ),
    (
        "llama3_8b",
        "v5p:4x4x4",
        {
            "mesh.pipeline": 4,
            "mesh.fsdp": 4,
            "mesh.context": 4,
            "seq_len": 32_768,
            "train.num_microbatches": 8,
            "batch_tokens": "32 rows",
        },
        20_021_284_096 / GIB,
    ),
    (
        "llama3_8b",
        "v5p:4x4x4",
        {"mesh.context": 8, "seq_len": 131_072, "batch_tokens": "8 rows"},
        12_397_616_896 / GIB,
    ),
    (
        "llama3_8b",
        "v5p:4x4x4",
        {"mesh.context": 8, "seq_len": 131_072, "batch_tokens": "8 rows", "context.attention": "ring"},
        11_832_126_720 / GIB,
    ),
    (
        "llama3_8b",
        "v5p:4x4x4",
        {"mesh.context": 64, "seq_len": 1_048_576, "batch_tokens": "1 row", "context.attention": "ring"},
        11_850_505_984 / GIB,
    ),
    (
        "405b",
        "v5p:8x8x16",
        {"mesh.pipeline": 8, "mesh.fsdp": 16, "train.num_microbatches": 64},
        65_341_345_536 / GIB,
    ),
]
FOUR = {"mesh.pipeline": 4, "mesh.fsdp": 16}  # 16 rows of each microbatch on 16 chips of a stage
TWO = {"batch_tokens": "4096 rows", "train.reduce_dtype": "bfloat16"}  # slices, with stages or copies in them
# Schedules, and what crosses between slices: docs/scale.md, jax 0.12.0.1, libtpu 0.0.51, 2026-11-24; fitted to none.
LAYOUTS = [
    ("7b", "v5p:4x4x4", FOUR | {"train.num_microbatches": 16, "batch_tokens": "256 rows"}, 13.2),
    (
        "7b",
        "v5p:4x4x4",
        FOUR | {"train.num_microbatches": 16, "batch_tokens": "256 rows", "pipeline.chunks": 2},
        12.9,
    ),
    (
        "7b",
        "v5p:4x4x4",
        FOUR | {"train.num_microbatches": 8, "batch_tokens": "128 rows", "pipeline.schedule": "gpipe"},
        13.7,
    ),
    (
        "7b",
        "v5p:4x4x4",
        FOUR | {"train.num_microbatches": 32, "batch_tokens": "512 rows", "pipeline.schedule": "gpipe"},
        20.5,
    ),
    ("7b", "v5p:4x4x4", {"seq_len": 131_072, "batch_tokens": "64 rows"}, 57.0),  # whole rows
    ("7b", "2*v6e:16x16", TWO | {"mesh.data": 2, "train.num_microbatches": 8}, 3.5),
    ("7b", "2*v6e:16x16", TWO | {"mesh.pipeline": 2, "train.num_microbatches": 16}, 21.3),
    (
        "7b",
        "2*v6e:16x16",
        TWO | {"mesh.pipeline": 2, "train.num_microbatches": 16, "pipeline.head": "whole"},
        22.5,
    ),
]
# Rings whose own arrays decide, by the same compiler. The estimate of a ring was completed after the first, from its
# shapes, and not after the second.
SMALL = {"mesh.context": 8, "seq_len": 131_072, "batch_tokens": "1 row", "context.attention": "ring"}
SMALL |= {"model.num_layers": 2, "model.vocab_size": 8192, "model.embed_dim": 1024, "model.mlp_dim": 2048}
RINGS = [
    ("llama3_8b", "v5p:2x2x2", SMALL, 2.24105429649353),
    ("llama3_8b", "v5p:2x2x2", SMALL | {"model.num_kv_heads": 32}, 3.7778584957122803),
]
COMPARED = [*CASES, *HELD_OUT, *WITHOUT_REMAT, *STAGED, *LAYOUTS, *RINGS]
# MiB of what the loops over the layers carry for the backward pass, of each stack, in the same buffer assignments.
LOOPS = {
    "quickstart": {"blocks": 19.0},
    "masked_lm": {"blocks": 27.0},
    "span_corruption": {"encoder_blocks": 26.0, "decoder_blocks": 9.625},
    "gpt2_124m": {"blocks": 4250.25},
}
# MiB of the arguments of these programs: parameters, moments and a batch of a few KiB.
ARGUMENTS = {"quickstart": 13.355, "masked_lm": 12.881, "span_corruption": 27.653, "gpt2_124m": 194.92}


@pytest.mark.cases(15)
@pytest.mark.parametrize(("name", "topology", "overrides", "gib"), COMPARED, ids=lambda value: str(value))
def test_memory_is_within_15_percent_of_the_compilers(name, topology, overrides, gib):
    assert abs(told_error(name, topology, overrides, gib)) < 0.15


@pytest.mark.xfail(strict=True, reason="docs/plan.md names them; whoever mends the estimate takes them over")
@pytest.mark.parametrize(("name", "topology", "overrides", "gib"), MISSED, ids=lambda value: str(value))
def test_these_are_known_to_be_planned_too_small(name, topology, overrides, gib):
    assert abs(told_error(name, topology, overrides, gib)) < 0.15


@pytest.mark.parametrize(("name", "topology", "overrides", "gib"), ON_CHIP, ids=lambda value: str(value))
def test_memory_of_small_programs_is_that_of_both_memories(name, topology, overrides, gib):
    assert abs(told_error(name, topology, overrides, gib)) < 0.15


@pytest.mark.parametrize(("name", "topology", "overrides", "gib"), WITHOUT_REMAT, ids=lambda value: str(value))
def test_what_is_kept_without_remat_is_what_the_compilers_loops_carry(name, topology, overrides, gib):
    program = ahead_program(load_config(str(ROOT / "configs" / f"{name}.py"), overrides), open_machine(topology))
    kept = {stack: layers * of_layer / 2**20 for stack, (layers, of_layer) in residuals_by_stack(program).items()}
    assert kept == pytest.approx(LOOPS[name], rel=0.05)
    state = (program.abstract_state.params, program.abstract_state.opt_state)
    assert shard_bytes(state) < 0.93 * 2**20 * ARGUMENTS[name]
    assert shard_bytes(state) + padding_bytes(state) == pytest.approx(2**20 * ARGUMENTS[name], rel=0.01)


@pytest.mark.parametrize(
    ("shape", "itemsize", "num_bytes"),
    [
        ((12, 96, 12, 64), 4, 4718592),
        ((264, 64), 4, 98304),
        ((4, 64, 4, 64), 4, 524288),
        ((256, 64), 4, 65536),
    ],
)
def test_tiles_are_filled_in_the_order_of_axes_that_takes_the_least(shape, itemsize, num_bytes):
    assert tiled_bytes(shape, itemsize, tpu=True) == num_bytes  # arguments in the same buffer assignments
    assert tiled_bytes(shape, itemsize, tpu=False) == itemsize * math.prod(shape)


def told_error(name, topology, overrides, gib):
    """The estimate over the compiler's figure, less 1, and prints both."""
    file, _, argument = name.partition(":")
    cfg = load_config(str(ROOT / "configs" / f"{file}.py") + (argument and f":{argument}"), overrides)
    need = memory_need(ahead_program(cfg, open_machine(topology)))
    error = need.total / GIB / gib - 1
    print(f"{name} on {topology}: {need.total / GIB:.3g} GiB by the estimate, {gib:.3g} by the compiler: {error:+.0%}")
    return error


@pytest.mark.parametrize("topology", ["v5p:2x2x2", "2*v6e:4x4", "v5e:4x4", "v5e:2x4", "tpu7x:2x2x1", "v4:4x4x4"])
def test_a_stand_in_lays_the_state_out_as_libtpus_devices_do(topology):
    pytest.importorskip("libtpu")
    cfg = load_config(str(ROOT / "configs" / "1b.py"), {"batch_tokens": "512 rows"})
    ours, theirs = (ahead_program(cfg, opened) for opened in (open_machine(topology), open_topology(topology)))
    assert memory_need(ours) == memory_need(theirs)
    place = lambda program: [(d.coords, d.core_on_chip, d.slice_index) for d in program.mesh.devices.flat]
    assert [one[:2] for one in place(ours)] == [(tuple(d.coords), d.core_on_chip) for d in theirs.mesh.devices.flat]
    assert open_machine(topology).num_hosts == open_topology(topology).num_hosts


def test_what_is_offloaded_is_counted_in_the_hosts_memory():
    load = lambda **changes: load_config(str(ROOT / "configs" / "1b.py"), {"batch_tokens": "512 rows"} | changes)
    configs = load(), load(**{"optim.offload_moments": True})
    plain, offloaded = (ahead_program(cfg, open_machine("v5p:2x2x2")) for cfg in configs)
    in_host = host_bytes(offloaded.abstract_state)
    assert memory_need(plain).moments == in_host + memory_need(offloaded).moments and in_host > 1 << 30


@pytest.mark.cases(2)
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_parameters_flops_and_state_are_those_of_the_model(file):
    cfg = load_config(f"{file}:depth=4" if file.stem == "auto" else str(file), ONE_OF_EACH)
    plan = make_plan(cfg, open_machine("h200:1x1"), PlanOptions())
    program = ahead_program(cfg, open_machine("h200:1x1"))
    named = jax.tree_util.tree_leaves_with_path(program.abstract_state.params)
    leaves = [leaf for path, leaf in named if not is_balance_param(dotted(path))]
    assert plan.work.params == cfg.model.num_params == sum(leaf.size for leaf in leaves)
    assert plan.work.flops_per_token == cfg.flops_per_token
    rows = {row.kind: row.num_bytes for row in plan.device.memory}
    assert rows["parameters"] == 4 * sum(leaf.size for _, leaf in named)
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.abstract_state.opt_state))
    assert rows["moments"] == state
    if cfg.optim.name == "adamw":
        assert state == pytest.approx(8 * plan.work.params, abs=100)
    budget = resolve_budget(cfg, plan.data.data_tokens)
    assert (plan.work.total_steps, plan.work.tokens) == (budget.total_steps, budget.total_steps * budget.batch_tokens)
    assert sum(rows.values()) == plan.device.memory_bytes
