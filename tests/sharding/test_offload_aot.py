"""On a TPU slice the compiler places what is offloaded in the host's memory, and the device is the emptier for it."""

import functools

import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.program.budget import resolve_budget
from jaxscale.program.memory import memory_need
from jaxscale.tools.planning.topology import open_topology
from jaxscale.tools.preflight.compiled import read_memory

# Larger than the 128 MiB of a v5e's on-chip memory, where a small program's temporaries would be, and not be counted.
# So many layers that the two or three whose arrays are under way at a time do not decide.
LAYERS, WIDTH, ROWS, LENGTH = 16, 2048, 4, 2048
MODEL = {"model.num_layers": LAYERS, "model.embed_dim": WIDTH, "model.mlp_dim": 8192, "model.head_dim": 128,
         "model.num_heads": 16, "model.num_kv_heads": 16, "model.vocab_size": 512, "model.compute_dtype": "bfloat16",
         "seq_len": LENGTH, "batch_tokens": f"{8 * ROWS} rows", "model.remat": "full"}  # fmt: skip


@functools.cache
def compiled(**changes):
    """(memory analysis of the step for 8 chips, what the estimator says)."""
    pytest.importorskip("libtpu", reason="compiling for TPU needs libtpu: pip install jaxscale[tpu]")
    cfg = tiny.config(MODEL | {name.replace("__", "."): value for name, value in changes.items()})
    program = make_program(cfg, resolve_budget(cfg, 10**12), open_topology("v5e:2x4").devices)
    step = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    return step.memory_analysis(), memory_need(program)


@pytest.mark.aot
def test_moments_on_the_host_leave_the_device():
    (plain, need), (offloaded, need_offloaded) = compiled(), compiled(optim__offload_moments=True)
    moved = need.moments - need_offloaded.moments
    assert moved > 0.99 * need.moments  # but for the step count
    assert plain.host_argument_size_in_bytes == 0
    assert offloaded.host_argument_size_in_bytes == pytest.approx(moved, rel=0.01)  # tiles are padded
    assert offloaded.host_alias_size_in_bytes == offloaded.host_argument_size_in_bytes  # renewed where they stand
    gone = plain.argument_size_in_bytes - offloaded.argument_size_in_bytes
    assert gone == pytest.approx(moved, rel=0.01)
    assert offloaded.temp_size_in_bytes - plain.temp_size_in_bytes < gone / 2  # those of one layer visit at a time
    assert read_memory(offloaded, "tpu").peak <= offloaded.argument_size_in_bytes + offloaded.temp_size_in_bytes


@pytest.mark.aot
def test_parameters_on_the_host_leave_the_device():
    (plain, need), (offloaded, need_offloaded) = compiled(), compiled(optim__offload_params=True)
    assert need_offloaded.params == 0 and need_offloaded.grads == need.grads
    assert offloaded.host_argument_size_in_bytes == pytest.approx(need.params, rel=0.01)  # tiles are padded
    assert offloaded.host_alias_size_in_bytes == offloaded.host_argument_size_in_bytes  # renewed where they stand
    gone = plain.argument_size_in_bytes - offloaded.argument_size_in_bytes
    assert gone == pytest.approx(need.params, rel=0.01)
    assert offloaded.temp_size_in_bytes - plain.temp_size_in_bytes < gone / 2  # those of one layer visit at a time
    assert read_memory(offloaded, "tpu").peak <= offloaded.argument_size_in_bytes + offloaded.temp_size_in_bytes


@pytest.mark.aot
def test_offloaded_activations_leave_the_device():
    (plain, _), (offloaded, _) = compiled(), compiled(model__remat_offload=("block_input",))
    stream = LAYERS * ROWS * LENGTH * WIDTH * 2  # bytes of bfloat16 on each chip
    assert plain.host_temp_size_in_bytes == 0
    assert offloaded.host_temp_size_in_bytes >= stream
    assert plain.temp_size_in_bytes - offloaded.temp_size_in_bytes > 0.7 * stream  # less what is under way
