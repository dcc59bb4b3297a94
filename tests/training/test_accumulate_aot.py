"""Microbatches compiled for TPUs that are not here: two of them take the memory of one at a time."""

import importlib.util

import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.program.budget import resolve_budget
from jaxscale.tools.planning.topology import open_topology

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: jaxscale[tpu]"),
]

MODEL = {
    "model.num_layers": 8, "model.embed_dim": 1024, "model.num_heads": 8, "model.num_kv_heads": 8,
    "model.head_dim": 128, "model.mlp_dim": 2816, "model.vocab_size": 8192, "model.compute_dtype": "bfloat16",
    "model.attention": "auto", "model.remat": "minimal", "seq_len": 2048,
}  # fmt: skip


def temporaries(microbatches):
    """Bytes of them, with one row a device and microbatch."""
    place = open_topology("v5p:2x2x2")
    rows = {"train.num_microbatches": microbatches, "batch_tokens": f"{8 * microbatches} rows"}
    cfg = tiny.config(MODEL | rows)
    program = make_program(cfg, resolve_budget(cfg, None), place.devices)
    done = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    return done.memory_analysis().temp_size_in_bytes


def test_two_microbatches_take_no_more_memory_than_four():
    two, four = temporaries(2), temporaries(4)
    assert two < 1.1 * four, f"{two / 2**20:.0f} MiB for two, {four / 2**20:.0f} for four"
