"""Products run while collectives are on their way, read from programs that are scheduled for TPU slices not at hand."""

import functools
import importlib.util

import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.kernels.compiler_options import TABLE
from jaxscale.program.budget import resolve_budget
from jaxscale.tools.planning.links import make_torus
from jaxscale.tools.planning.topology import link_domains, open_topology
from jaxscale.tools.preflight.hlo import read_hlo
from jaxscale.tools.preflight.roofline import roofline
from jaxscale.tools.preflight.step_report import collective_rows

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: jaxscale[tpu]"),
]

MODEL = {
    "model.num_layers": 4, "model.embed_dim": 2048, "model.num_heads": 16, "model.num_kv_heads": 16,
    "model.head_dim": 128, "model.mlp_dim": 5632, "model.vocab_size": 8192, "model.compute_dtype": "bfloat16",
    "model.attention": "auto", "model.remat": "full", "seq_len": 2048, "train.reduce_dtype": "bfloat16",
}  # fmt: skip
LARGE = 2**20  # bytes sent: every matrix is above, norms and scalars are below


@functools.cache
def rows(topology, settings=()):
    """The collectives of a step that carry matrices, each with what runs beside it."""
    place = open_topology(topology)
    cfg = tiny.config(MODEL | {"batch_tokens": f"{4 * len(place.devices)} rows"} | dict(settings))
    program = make_program(cfg, resolve_budget(cfg, None), place.devices)
    text = program.train_step.lower(program.abstract_state, program.abstract_batch).compile().as_text()
    devices = list(program.mesh.devices.flat)
    facts = read_hlo(text, dict(program.mesh.shape), link_domains(devices), make_torus(devices, place.chip))
    found = collective_rows(facts, roofline(facts, place.chip, 0.0).played)
    return [row for row in found if row.sent_bytes > LARGE]


def sent(found):
    return sum(row.sent_bytes * row.times for row in found)


@pytest.mark.parametrize("topology", ["v5p:2x2x4", "v6e:4x4"])
def test_sparse_cores_take_every_gather_and_scatter_of_weights(topology):
    found = rows(topology)
    assert {row.kind for row in found} == {"all-gather", "reduce-scatter"}
    assert not [row for row in found if row.is_blocking]
    in_loops = [row for row in found if row.times > 1]
    covered = [row for row in in_loops if row.cover_s > row.link_s]
    assert sent(covered) > 0.6 * sent(in_loops)


@pytest.mark.parametrize("topology", ["v5p:2x2x4", "v6e:4x4"])
def test_without_the_table_nothing_runs_beside_a_collective(topology):
    off = tuple((f"compiler.{row.name}", False) for row in TABLE if "TPU v5" in row.devices and row.value is True)
    found = rows(topology, off)
    assert sent(row for row in found if row.is_blocking) > 0.95 * sent(found)


def test_layers_of_which_some_have_a_window_compile():
    mixed = (("model.attention_window", 512), ("model.global_every", 2))  # libtpu 0.0.51 ends if told to fetch ahead
    assert not [row for row in rows("v5p:2x2x4", mixed) if row.is_blocking]


def test_one_half_of_the_rows_is_multiplied_while_the_positions_of_the_other_travel():
    mesh = (("mesh.fsdp", 4), ("mesh.tensor", 4))
    of_streams = [row for row in rows("v5p:2x2x4", mesh) if row.axes == "tensor" and row.times > 1]
    assert of_streams and not [row for row in of_streams if row.is_blocking]
    assert sent(row for row in of_streams if row.cover_s > row.link_s) >= 0.5 * sent(of_streams)
