"""No device waits for one that has taken another branch: the stages of a pipeline do different things at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from branches import waiting
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxscale import schema
from jaxscale.build import make_program
from jaxscale.config import RunConfig
from jaxscale.program.budget import resolve_budget

STAGES = {"model.remat": "full", "train.num_microbatches": 2, "mesh.pipeline": 2, "mesh.context": 2, "mesh.fsdp": 1}
LONGER = {"seq_len": 32, "batch_tokens": 16 * 32}
LAYOUTS = {
    "windows, uneven, tensor": (tiny.RELATIVE, {"mesh.tensor": 2} | LONGER),
    "a whole head, fsdp": (tiny.LLAMA, {"pipeline.head": "whole", "mesh.fsdp": 2}),
    "chunks, dropout": (tiny.GPT2 | {"dropout": 0.1}, {"model.num_layers": 5, "pipeline.chunks": 2}),
    "heads for positions": (tiny.LLAMA, {"context.attention": "ulysses", "mesh.fsdp": 2, "pipeline.schedule": "gpipe"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_waits_for_nobody_in_another_branch(name):
    model, changes = LAYOUTS[name]
    cfg = schema.from_dict(RunConfig, schema.merge(tiny.VALUES | {"model": model}, STAGES | changes))
    program = make_program(cfg, resolve_budget(cfg, None), jax.devices()[: 4 if "chunks" in name else 8])
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    assert waiting(traced.jaxpr.jaxpr) == []


stage_is_first = lambda: lax.axis_index("pipeline") == 0
ppermute_next = lambda x: lax.ppermute(x, "context", [(0, 1), (1, 0)])


def chosen_by_a_sum(x):
    first = lax.psum(stage_is_first().astype(jnp.int32), "pipeline") > 1
    return lax.cond(first, lambda x: lax.psum(x, "pipeline"), lambda x: x, x)


def chosen_in_a_later_turn(x):
    turn = lambda odd, _: (odd ^ stage_is_first(), lax.cond(odd, lambda x: lax.psum(x, "pipeline"), lambda x: x, x))
    return lax.scan(turn, jnp.bool(False), length=2)[1].sum()


HAND_MADE = {
    "a permutation over another axis": (
        lambda x: lax.cond(stage_is_first(), ppermute_next, lambda x: x, x),
        ["ppermute over ('context',) in a branch that differs along ('pipeline',)"],
    ),
    "a sum over the same axis, one call further in": (
        lambda x: lax.cond(stage_is_first(), jax.jit(lambda x: lax.psum(x, ("pipeline", "context"))), lambda x: x, x),
        ["psum over ('context', 'pipeline') in a branch that differs along ('pipeline',)"],
    ),
    "in a later turn": (
        chosen_in_a_later_turn, ["psum over ('pipeline',) in a branch that differs along ('pipeline',)"],
    ),
    "a loop that devices leave one after the other": (
        lambda x: lax.while_loop(lambda x: x[0] < 3, lambda x: x + lax.pmax(x, "context"), x),
        ["pmax over ('context',) in a branch that differs along ('context',)"],
    ),
    "a sum over another axis": (
        lambda x: lax.cond(stage_is_first(), lambda x: lax.psum(x, "context"), lambda x: x, x), [],
    ),
    "chosen alike": (chosen_by_a_sum, []),
}  # fmt: skip


@pytest.mark.parametrize("name", HAND_MADE)
def test_what_waits_is_found(name):
    run, found = HAND_MADE[name]
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("pipeline", "context"))
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("context"), out_specs=P(), check_vma=False)
    assert [str(one) for one in waiting(jax.make_jaxpr(mapped(run))(jnp.zeros(4)).jaxpr)] == found
