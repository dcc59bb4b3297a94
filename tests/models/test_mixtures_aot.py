"""A mixture whose rows are sent to their experts, compiled for TPUs that are not here."""

import functools
import importlib.util

import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.program.budget import resolve_budget
from jaxscale.tools.planning.links import make_torus
from jaxscale.tools.planning.topology import link_domains, open_topology
from jaxscale.tools.preflight.hlo import read_hlo

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: jaxscale[tpu]"),
]

MODEL = {
    "model.num_layers": 4, "model.embed_dim": 512, "model.num_heads": 4, "model.num_kv_heads": 4,
    "model.head_dim": 128, "model.vocab_size": 8192, "model.compute_dtype": "bfloat16", "model.attention": "auto",
    "model.remat": "full", "model.experts": dict(number=8, chosen=2, mlp_dim=1024), "seq_len": 1024,
    "batch_tokens": "16 rows", "mesh.expert": 4, "mesh.fsdp": 2,
}  # fmt: skip


@functools.cache
def facts_of(exchange):
    place = open_topology("v5p:2x2x2")
    cfg = tiny.config(MODEL | {"expert.exchange": exchange})
    program = make_program(cfg, resolve_budget(cfg, None), place.devices)
    done = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    devices = list(program.mesh.devices.flat)
    return read_hlo(done.as_text(), dict(program.mesh.shape), link_domains(devices), make_torus(devices, place.chip))


@pytest.mark.parametrize(("exchange", "kind"), [("send", "all-to-all"), ("gather", "all-gather")])
def test_a_step_compiles_and_sends_over_the_axis_what_it_says(exchange, kind):
    facts = facts_of(exchange)
    kinds = {one.kind for one in facts.collectives if "expert" in one.axes}
    assert kind in kinds and ("all-to-all" in kinds) == (exchange == "send")


def test_rows_that_are_sent_are_multiplied_as_often_as_rows_that_stay():
    """The empty rows of a round are not: a fifth, which kernels declare."""
    assert facts_of("send").kernel_flops == pytest.approx(facts_of("gather").kernel_flops, rel=1e-3)
