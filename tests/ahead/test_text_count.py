"""The reader of compiled programs against a count by other means, on real programs for TPU slices."""

import collections
import importlib.util

import pytest
import tiny
from test_step_collectives import MODEL
from text_count import count_bytes

from jaxscale.ahead.hlo import read_hlo
from jaxscale.build import make_program
from jaxscale.config import resolve_budget
from jaxscale.planning.links import make_torus
from jaxscale.planning.topology import link_domains, open_topology

OFFLOAD = "compiler.xla_tpu_enable_sparse_core_collective_offload_"
SPARSECORE = {OFFLOAD + "all_gather": True, OFFLOAD + "reduce_scatter": True}


def read_bytes(facts):
    """What the reader found, as count_bytes has it."""
    found = collections.Counter()
    for one in facts.collectives:
        dims = "".join(sorted({dim for stage in one.stages for dim in stage.along}))
        size = 0 if one.kind == "collective-permute" else one.group_size
        found[one.kind, size, dims] += one.wire_bytes * one.times
    return {key: nbytes for key, nbytes in found.items() if nbytes}


@pytest.mark.aot
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: jaxscale[tpu]")
@pytest.mark.parametrize(
    ("name", "settings", "kinds"),
    [
        ("v5p:2x2x4", {}, {("all-gather", 4, "z"), ("reduce-scatter", 2, "x")}),
        ("v5p:2x2x4", SPARSECORE, {("all-gather", 4, "z"), ("reduce-scatter", 2, "x")}),
        ("v5p:2x2x4", {"mesh.fsdp": 4, "mesh.tensor": 4}, {("all-gather", 4, "z")}),
        ("v5e:4x4", {"train.num_microbatches": 2}, {("all-gather", 16, "xy"), ("reduce-scatter", 4, "x")}),
        ("v6e:4x4", {"mesh.fsdp": 4, "mesh.data": 4} | SPARSECORE, {("all-gather", 4, "y")}),
    ],
    ids=["v5p", "v5p sparsecore", "v5p tensor", "v5e", "v6e data"],
)
def test_two_counts_of_a_program_agree(name, settings, kinds):
    place = open_topology(name)
    cfg = tiny.config(
        MODEL | {"batch_tokens": f"{4 * len(place.devices)} rows", "train.reduce_dtype": "bfloat16"} | settings
    )
    program = make_program(cfg, resolve_budget(cfg, None), place.devices)
    text = program.train_step.lower(program.abstract_state, program.abstract_batch).compile().as_text()
    devices = list(program.mesh.devices.flat)
    shape = dict(program.mesh.shape)
    facts = read_hlo(text, shape, link_domains(devices), make_torus(devices, place.chip))
    places = [(0, *device.coords) for device in devices]
    counted = count_bytes(text, shape, places)
    assert read_bytes(facts) == pytest.approx(counted, rel=1e-6)
    assert kinds <= set(counted) and facts.schedule
