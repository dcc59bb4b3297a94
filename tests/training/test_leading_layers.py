"""Stages of a model whose first layers are of another kind: the first stage has them, and no number changes."""

import jax
import numpy as np
import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.core.axes.pipeline_axis import make_pipeline_axis
from jaxscale.core.axes.pipeline_schedules import IDLE, ScheduleSize, split_layers
from jaxscale.core.config import PipelineConfig
from jaxscale.core.models.config import EXPERT_COUNTS, EXPERT_ROUNDS
from jaxscale.program.budget import resolve_budget
from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.speed import idle_ratio

LOSSES = {"router_z_loss": 1e-2, "balance_loss": 1e-1, "row_balance_loss": 1e-1}
MODEL = tiny.LLAMA | dict(
    num_layers=5,
    remat="full",
    experts=dict(number=4, chosen=2, mlp_dim=8, first_dense=2, bias=True, score="sigmoid"),
)
BASE = {
    "model": MODEL, "optim.name": "sgd", "optim.b1": 1e-30, "train.num_microbatches": 4, "train.aux_losses": LOSSES,
    "mesh.fsdp": 1, "monitor.statistics_every_steps": 0,
}  # fmt: skip
WINDOWS = {"model.attention_window": 5, "model.global_every": 2, "model.local_rope_base": 100.0}


def make(settings, devices):
    cfg = tiny.config(BASE | settings)
    return make_program(cfg, resolve_budget(cfg, None), jax.devices()[:devices])


def two_steps(settings, devices):
    """(metrics of the second step, gradients and parameters after it)"""
    program = make(settings, devices)
    state = program.init()
    for n in range(2):
        state, metrics = program.train_step(state, tiny.on_mesh(program, tiny.packed_batch(n)))
    return tiny.host(metrics), tiny.host((state.opt_state, state.params))


@pytest.fixture(scope="module")
def plain():
    """Without stages, on devices that have other rows: with one device XLA compiles other sums."""
    return two_steps({"mesh.data": 2}, 2)


@pytest.mark.soak
def test_with_a_whole_head_losses_have_the_bits_of_no_stages(plain):
    metrics, after = two_steps({"mesh.data": 2, "mesh.pipeline": 2, "pipeline.head": "whole"}, 4)
    for name in (EXPERT_COUNTS, "loss", "real_tokens"):
        np.testing.assert_array_equal(metrics[name], plain[0][name])
    for right, got in zip(jax.tree.leaves(plain[1]), jax.tree.leaves(after), strict=True):
        # Stages of unequal depth are compiled with branches, and rounded otherwise.
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-6 * max(np.abs(right).max(), 1e-30))


# Stages that divide the residual stream, and not the vocabulary.
THREE = {"mesh.pipeline": 3, "model.embed_dim": 24, "pipeline.head": "whole"}
RUNS = {
    "more dense layers than a stage's share": (THREE | {"mesh.tensor": 2}, 6),
    "experts sent": ({"mesh.pipeline": 2, "mesh.expert": 2, "mesh.fsdp": 2, "expert.exchange": "send"}, 8),
    "zero bubble": (THREE | {"pipeline.schedule": "zero_bubble", "mesh.fsdp": 2}, 6),
    "gpipe": ({"mesh.pipeline": 2, "pipeline.schedule": "gpipe", "rules": "zero1", "mesh.fsdp": 2}, 4),
    "chunks": ({"mesh.pipeline": 2, "pipeline.chunks": 2, "model.num_layers": 7, "mesh.context": 2}, 4),
    "windows, adapters": ({"mesh.pipeline": 2, "lora.rank": 4, "lora.targets": (r"wq$",)} | WINDOWS, 2),
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("run", RUNS)
def test_losses_gradients_and_balance_are_those_of_one_device(run):
    settings, devices = RUNS[run]
    alone = {name: value for name, value in settings.items() if name.startswith(("model.", "lora."))}
    (one, one_after), (many, after) = two_steps(alone, 1), two_steps(settings, devices)
    assert many.keys() == one.keys() | ({EXPERT_ROUNDS} if "expert.exchange" in settings else set())
    np.testing.assert_array_equal(many[EXPERT_COUNTS], one[EXPERT_COUNTS])
    for name in (*LOSSES, "loss", "objective", "grad_norm", "router_entropy"):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-5, err_msg=name)
    for right, got in zip(jax.tree.leaves(one_after), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-5 * max(np.abs(right).max(), 1e-2))


def test_the_first_of_61_layers_are_three_of_the_first_stage_and_all_stages_are_alike():
    layers = split_layers(58, 16, 1, leading_layers=3.0)
    sizes = (layers != IDLE).sum(axis=(1, 2))
    assert sizes.tolist() == [1, *[4] * 12, *[3] * 3] and (layers[0, 0, 0], layers.max()) == (0, 57)
    assert make_pipeline_axis(16, PipelineConfig(), 58, 0.0, leading_layers=3.0).saved_inputs(3) == 4
    few = make_pipeline_axis(32, PipelineConfig(), 58, 0.0, 3.0)  # 61 layers of 32 stages: the first has 4, others 2
    assert few.layer_slots == 2 and few.chunk_work == 4.0
    schedule = ScheduleSize("1f1b", 32, 1, 64)
    assert idle_ratio(few, schedule, head=0.0) == pytest.approx(4 * 32 / 61 * schedule.slowdown() - 1)


def test_a_plan_counts_what_the_program_has():
    program = make({"mesh.pipeline": 2}, 2)
    pipeline = program.plan.pipeline
    assert pipeline.layers.max() + 1 == 3 and not pipeline.has_local_layers
    dense, sparse = 3 * 16 * 32, 3 * 16 * 16 + 16 * 4
    attention = 2 * 16 * 32 + 2 * 16 * 16
    assert pipeline.leading_layers == pytest.approx(2 * (attention + dense) / (attention + sparse))
    up = program.abstract_state.params["dense_blocks"]["mlp"]["up"]
    assert up.sharding.shard_shape(up.shape) == (2, 8, 32)  # at rest the stages share it


def test_each_chunk_needs_a_layer_of_the_last_kind():
    with pytest.raises(BadInput, match=r"num_layers=5 \(of which 3 have experts\) with pipeline.chunks=2, .* of 4 chu"):
        make({"mesh.pipeline": 2, "pipeline.chunks": 2}, 2)
