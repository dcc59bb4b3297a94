"""The reader of compiled programs against a count by other means, on real programs for TPU slices."""

import collections
import importlib.util

import pytest
import tiny
from test_step_collectives import MODEL
from text_count import count_bytes

from jaxscale.build import make_program
from jaxscale.program.budget import resolve_budget
from jaxscale.tools.planning.links import make_torus
from jaxscale.tools.planning.topology import link_domains, open_topology
from jaxscale.tools.preflight.hlo import read_hlo

OFFLOAD = "compiler.xla_tpu_enable_sparse_core_collective_offload_"
ON_TENSORCORES = {OFFLOAD + "all_gather": False, OFFLOAD + "reduce_scatter": False}  # one dimension after the other


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
    ("name", "settings"),
    [
        ("v5p:2x2x4", {}),
        ("v5p:2x2x4", ON_TENSORCORES),
        ("v5p:2x2x4", {"mesh.fsdp": 4, "mesh.tensor": 4}),
        ("v5e:4x4", {"train.num_microbatches": 2}),
        ("v6e:4x4", {"mesh.fsdp": 4, "mesh.data": 4}),
    ],
    ids=["v5p", "v5p tensorcores", "v5p tensor", "v5e", "v6e data"],
)
def test_two_counts_of_a_program_agree(name, settings):
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
    assert {"all-gather", "reduce-scatter"} <= {kind for kind, _, _ in counted} and facts.schedule
