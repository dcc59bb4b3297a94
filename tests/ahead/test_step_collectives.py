"""What the training step moves between chips, read from programs compiled for TPU slices that are not here.

L layers  D embed  F mlp
"""

import functools
import importlib.util

import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.program.budget import resolve_budget
from jaxscale.tools.planning.topology import link_domains, open_topology
from jaxscale.tools.preflight.hlo import KINDS, read_hlo

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: jaxscale[tpu]"),
]

L, D, F, VOCAB = 4, 2048, 4096, 4096
SMALL = 64 * 1024  # bytes: norms and scalars are below, every matrix is above
LAYER_BYTES = 2 * F * D  # the largest weight of a layer in bfloat16
MODEL = {
    "model.num_layers": L, "model.embed_dim": D, "model.num_heads": 16, "model.num_kv_heads": 16, "model.head_dim": 128,
    "model.mlp_dim": F, "model.vocab_size": VOCAB, "model.compute_dtype": "bfloat16", "model.attention": "auto",
    "model.remat": "full", "seq_len": 512,
}  # fmt: skip
ONE_DEVICE = {"mesh.fsdp": 1}


@functools.cache
def collectives(topology, settings):
    """All collectives of the step that carry more than norms and scalars."""
    place = open_topology(topology)
    cfg = tiny.config(MODEL | {"batch_tokens": f"{4 * len(place.devices)} rows"} | dict(settings))
    program = make_program(cfg, resolve_budget(cfg, None), place.devices)
    compiled = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    facts = read_hlo(compiled.as_text(), program.mesh.shape, link_domains(list(program.mesh.devices.flat)))
    assert facts.unknown_trips == 0
    return [c for c in facts.collectives if c.result_bytes > SMALL or c.wire_bytes > SMALL]


def moved(found, *kinds):
    """Bytes that each chip sends for these kinds in a step."""
    return sum(c.wire_bytes * c.times for c in found if c.kind in kinds)


def test_nothing_moves_on_one_chip():
    assert collectives("v5e:1x1", tuple(ONE_DEVICE.items())) == []


@pytest.mark.parametrize("topology", ["v5e:4x4", "v5p:2x2x4", "v6e:4x4"])
def test_fsdp_gathers_a_layer_at_a_time_and_reduce_scatters_its_gradient(topology):
    found = collectives(topology, (("train.reduce_dtype", "bfloat16"),))
    assert {axes for c in found for axes in c.axes} == {"fsdp"}
    assert max(c.result_bytes for c in found) <= LAYER_BYTES * 1.1  # never the stack, and a little padding
    assert moved(found, "all-reduce") < 2 * SMALL  # of all norms together
    weights = 2 * (L * (4 * D * D + 3 * D * F) + 2 * VOCAB * D)  # bytes in bfloat16
    # each layer twice (forward, and again for the backward pass), the tables once; a chip holds 1/16 already
    gathers = 2 * 2 * L * (4 * D * D + 3 * D * F) + 2 * 2 * VOCAB * D
    assert moved(found, "all-gather") == pytest.approx(gathers * 15 / 16, rel=0.02)
    scatters = moved(found, "reduce-scatter", "collective-permute")
    assert scatters == pytest.approx(weights * 15 / 16, rel=0.05)


@pytest.mark.parametrize("topology", ["v5e:4x4", "v5p:2x2x2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"model.vocab_size": 151_936},  # Qwen: 1,187 tiles across, a prime
        {"model.vocab_size": 262_208},  # Gemma 3: no whole number of tiles
        {"model.num_heads": 4, "model.num_kv_heads": 4, "model.head_dim": 256},  # Gemma 3's keys: half a tile of heads
    ],
    ids=str,
)
def test_no_gradient_is_summed_whole_for_its_shape(topology, settings):
    found = collectives(topology, (*settings.items(), ("train.reduce_dtype", "bfloat16")))
    assert moved(found, "all-reduce") < 2 * SMALL  # of all norms together


def test_sums_in_float32_cost_twice_the_bytes_of_bfloat16():
    narrow, wide = (
        moved(collectives("v5e:4x4", (("train.reduce_dtype", dtype),)), "reduce-scatter")
        for dtype in ("bfloat16", "float32")
    )
    assert wide == pytest.approx(2 * narrow, rel=0.05)


@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("full", 3)])
def test_tensor_parallelism_costs_two_sums_a_layer_and_direction(remat, again):
    """A sum is a reduce-scatter and a gather: between products a chip holds its own positions of the residual stream.

    Full remat does three of the four of a layer again; what its MLP adds nobody asks for.
    """
    settings = (("mesh.fsdp", 1), ("mesh.tensor", 4), ("mesh.data", -1), ("model.remat", remat))
    found = [c for c in collectives("v5e:2x4", settings) if c.axes == ("tensor",)]
    assert {c.kind for c in found} == {"all-gather", "reduce-scatter"} and {c.dtype for c in found} == {"bf16"}
    stream = 4 * 8 * 512 // 2 * D * 2  # bytes of the residual stream of one data shard, in bfloat16
    halves = (2 * 4 + again) * L + 4  # of a sum; at the ends the embedding is scattered, the last hidden state gathered
    assert moved(found, *KINDS) == pytest.approx(halves * stream * 3 / 4, rel=0.01)


def test_the_data_axis_sums_gradients_once_a_step_however_many_microbatches():
    base = (("mesh.fsdp", 1), ("mesh.data", -1), ("rules", "zero1"))
    once = collectives("v5e:2x4", base)
    often = collectives("v5e:2x4", (*base, ("train.num_microbatches", 4)))
    assert moved(often, "all-reduce", "reduce-scatter") == pytest.approx(
        moved(once, "all-reduce", "reduce-scatter"), rel=0.02
    )
    assert moved(once, "all-reduce", "reduce-scatter") > 0
