"""Tests of resolve_plan: one plan for all uses of a model, with a reason for each choice."""

import jax
import pytest
import tiny

from jaxscale.build import parallel_settings
from jaxscale.core.config import MeshConfig, PipelineConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.core.plan import UNSHARDED, ParallelSettings, resolve_plan, without_stages
from jaxscale.system.exits import BadInput

STAGES = {"mesh.pipeline": 2, "model.num_layers": 4, "model.remat": "full", "train.num_microbatches": 4}


def plan_of(settings, devices=8, **changes):
    cfg = tiny.config(settings)
    mesh = make_mesh(cfg.mesh, jax.devices()[:devices])
    return cfg, resolve_plan(cfg.model, mesh, parallel_settings(cfg)._replace(**changes))


def test_evaluation_and_sampling_have_the_plan_of_training_unless_there_are_stages():
    program = tiny.program({"mesh.tensor": 2}, 8)
    assert program.model.unstaged is program.model and program.plan is program.model.plan


def test_without_stages_only_axes_and_microbatches_change():
    cfg, plan = plan_of(STAGES | {"batch_tokens": 8 * 16, "seq_len": 16})
    unstaged = without_stages(cfg.model, plan)
    assert plan.pipeline.size == 2 and plan.stage_schedule is not None
    assert unstaged.pipeline.size == 1 and unstaged.stage_schedule is None
    assert (plan.batch_axes.num_shards, unstaged.batch_axes.num_shards) == (4, 8)
    assert (plan.num_microbatches, unstaged.num_microbatches) == (4, 1)  # 8 rows for 8 shards
    same = ("attention", "context_exchange", "expert_exchange", "compiler_options", "scan_layers")
    assert all(getattr(plan, name) == getattr(unstaged, name) for name in same)
    assert without_stages(cfg.model, unstaged) is unstaged


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"mesh.context": 2, "seq_len": 32},
            "context: keys and values are gathered (gather): keys and values of a layer",
        ),
        ({"mesh.context": 2, "seq_len": 32, "context.attention": "ulysses"}, "(ulysses): set by context.attention"),
        (
            {"mesh.expert": 2, "model.experts": dict(number=4, chosen=2, mlp_dim=16), "expert.exchange": "send"},
            "expert: tokens are sent to their experts (send): set by expert.exchange",
        ),
    ],
)
def test_each_open_choice_is_a_line_with_its_reason(settings, words):
    _, plan = plan_of(settings)
    assert [words in line for line in plan.describe()] == [True]


def test_a_plan_of_one_device_leaves_nothing_open():
    assert UNSHARDED.describe() == plan_of({}, devices=1)[1].describe() == []


def test_options_of_the_environment_and_of_the_user_are_kept():
    cfg, plan = plan_of({}, compiler={"xla_a": 1})
    assert plan.compiler_options.values["xla_a"] == 1
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    assert resolve_plan(cfg.model, mesh).compiler_options.values == {}  # inference compiles with XLA's defaults


def test_a_model_that_stages_do_not_support_is_refused_by_name():
    cfg = tiny.config({})
    mesh = make_mesh(MeshConfig(pipeline=2), jax.devices()[:2])
    with pytest.raises(BadInput, match="mesh.pipeline=2 cannot be combined with .*remat"):
        resolve_plan(cfg.model, mesh, ParallelSettings(pipeline=PipelineConfig()))
    assert resolve_plan(cfg.model, mesh).pipeline.size == 1  # inference shards rows and weights instead
