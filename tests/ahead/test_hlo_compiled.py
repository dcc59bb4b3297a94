"""What is read from programs that XLA compiled: for this machine, and for TPUs and GPUs that are not here."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxscale.core.axes.pipeline_schedules import ScheduleSize
from jaxscale.kernels.attention import windowed_or_full
from jaxscale.kernels.config import WindowLayers
from jaxscale.tools.planning.links import make_torus
from jaxscale.tools.planning.topology import link_domains, open_topology
from jaxscale.tools.preflight.hlo import read_hlo
from jaxscale.tools.preflight.roofline import roofline
from jaxscale.tools.preflight.step_report import collective_rows


def make_step(mesh, num_layers, width):
    """A scanned, rematerialised stack of square layers, cut along fsdp, and what it is called with."""

    def loss(weights, x):
        layer = lambda h, w: (jnp.tanh(h @ w.astype(jnp.bfloat16)), None)
        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype(jnp.float32) ** 2).mean()

    placed = NamedSharding(mesh, P(None, "fsdp"))

    def step(weights, x):
        grads = jax.lax.with_sharding_constraint(jax.grad(loss)(weights, x), placed)
        return weights - 0.1 * grads

    rows = NamedSharding(mesh, P(("data", "fsdp")))
    weights = jax.ShapeDtypeStruct((num_layers, width, width), jnp.float32, sharding=placed)
    x = jax.ShapeDtypeStruct((8 * mesh.size, width), jnp.bfloat16, sharding=rows)
    return jax.jit(step, donate_argnums=0, out_shardings=placed), weights, x


def make_mesh(devices, **shape):
    """A mesh of Auto axes."""
    return Mesh(
        np.array(devices).reshape(tuple(shape.values())), tuple(shape), axis_types=(AxisType.Auto,) * len(shape)
    )


def test_a_program_compiled_for_this_machine_has_the_products_of_its_shapes():
    mesh = make_mesh(jax.devices()[:8], data=2, fsdp=4)
    step, weights, x = make_step(mesh, num_layers=5, width=64)
    facts = read_hlo(step.lower(weights, x).compile().as_text(), mesh.shape)
    product = 2 * 8 * 64 * 64
    assert facts.dot_flops in [5 * 3 * product, 5 * 4 * product]  # forward once or twice, and two gradients
    assert facts.unknown_trips == 0 and facts.hbm_bytes > 5 * 64 * 64 * 4 / 4
    gathers = [
        c for c in facts.collectives if c.kind == "all-gather" and c.axes == ("fsdp",) and c.result_bytes >= 64 * 64 * 2
    ]
    assert sum(c.times for c in gathers) >= 5  # each layer is gathered, none with the whole stack
    assert max(c.result_bytes for c in gathers) <= 64 * 64 * 4
    assert any("data" in c.axes and c.kind == "all-reduce" for c in facts.collectives)


needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: jaxscale[tpu]")
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs jax's CUDA plugin: jaxscale[cuda12]"
)
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize("name", ["v5e:2x4", "v5p:2x2x2", "v6e:2x4"])
def test_a_tpu_program_gathers_a_layer_at_a_time_and_its_bytes_are_those_of_its_shapes(name):
    topology = open_topology(name)
    mesh = make_mesh(topology.devices, data=1, fsdp=8)
    step, weights, x = make_step(mesh, num_layers=6, width=512)
    facts = read_hlo(step.lower(weights, x).compile().as_text(), mesh.shape)
    product = 2 * 8 * 512 * 512
    assert facts.dot_flops in [6 * 3 * product, 6 * 4 * product]
    assert facts.unknown_trips == 0
    moved = {kind: sum(c.wire_bytes * c.times for c in facts.collectives if c.kind == kind) for kind in KINDS}
    # This stack leaves the choice to the compiler, and for v5p it takes an all-reduce: twice a reduce-scatter's bytes.
    reductions = 2 if name.startswith("v5p") and moved["all-reduce"] > 1000 else 1
    layer = 512 * 512 * 2
    assert sum(moved.values()) == pytest.approx((2 + reductions) * 6 * layer * 7 / 8, rel=0.02), moved
    assert all(c.result_bytes <= layer for c in facts.collectives)
    assert {c.axes for c in facts.collectives} == {("fsdp",)} and not any(c.crosses_slices for c in facts.collectives)


@pytest.mark.aot
@needs_libtpu
def test_between_slices_only_a_slice_s_share_of_the_gradients_moves():
    topology = open_topology("2*v5e:2x2")
    mesh = make_mesh(topology.devices, data=2, fsdp=4)
    step, weights, x = make_step(mesh, num_layers=6, width=512)
    facts = read_hlo(step.lower(weights, x).compile().as_text(), mesh.shape, link_domains(list(mesh.devices.flat)))
    crossing = [c for c in facts.collectives if c.crosses_slices]
    assert {(c.kind, c.axes, c.group_size) for c in crossing} == {("all-reduce", ("data",), 2)}
    share = 6 * 512 * 512 * 2 / 4  # of each device, in bfloat16
    assert sum(c.dcn_bytes * c.times for c in crossing) == pytest.approx(share, rel=0.01)
    assert {c.axes for c in facts.collectives if not c.crosses_slices} == {("fsdp",)}


@pytest.mark.aot
@needs_cuda
def test_a_gpu_program_s_bytes_are_those_of_its_shapes_and_part_of_them_leaves_the_host():
    topology = open_topology("h100:2x8")
    mesh = make_mesh(topology.devices, data=1, fsdp=16)
    step, weights, x = make_step(mesh, num_layers=6, width=512)
    facts = read_hlo(step.lower(weights, x).compile().as_text(), mesh.shape, link_domains(list(mesh.devices.flat)))
    assert facts.dot_flops in [6 * 3 * 2 * 8 * 512 * 512, 6 * 4 * 2 * 8 * 512 * 512]
    assert facts.unknown_trips == 0
    layer = 512 * 512 * 2
    for kind, passes in (("all-gather", 2), ("reduce-scatter", 1)):
        found = [c for c in facts.collectives if c.kind == kind]
        assert sum(c.wire_bytes * c.times for c in found) == pytest.approx(passes * 6 * layer * 15 / 16, rel=0.02)
        assert sum(c.dcn_bytes * c.times for c in found) == pytest.approx(passes * 6 * layer / 16, rel=0.02)


@pytest.mark.aot
@needs_cuda
def test_attention_in_cudnn_counts_as_its_products():
    place = SingleDeviceSharding(open_topology("h100:1").devices[0])
    attend = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn").sum()
    q = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16, sharding=place)
    k = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16, sharding=place)
    text = jax.jit(jax.grad(attend, argnums=(0, 1, 2))).lower(q, k, k).compile().as_text()
    facts = read_hlo(text, {"data": 1})
    assert facts.dot_flops == 7 * 2 * 2 * 4 * (256 * 257 // 2) * 64


@pytest.mark.parametrize("flags", [[1, 1, 0, 1, 1], [0, 1, 0, 0, 0]], ids=str)
def test_each_kind_of_attention_counts_as_often_as_it_runs(flags):
    """Forward and backward: each product of a layer that is run, and none of the kind that it is not."""
    near, far = (lambda x, w: x @ (w @ w)), (lambda x, w: x @ w)
    attend = windowed_or_full(near, far, WindowLayers(sum(flags), len(flags)))

    def loss(x, w):
        step = lambda x, local: (attend(x, w, local=local), None)
        return jax.lax.scan(step, x, jnp.asarray(flags, bool))[0].sum()

    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    facts = read_hlo(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, w).compile().as_text(), {"data": 1})
    small, square = 2 * 4 * 8 * 8, 2 * 8 * 8 * 8
    num_near, num_far = sum(flags), len(flags) - sum(flags)
    # near: x @ (w @ w) forward; both inputs' gradients of both products backward. far: one product, two gradients.
    assert facts.dot_flops == num_near * (3 * small + 3 * square) + num_far * 3 * small


def make_pipeline(mesh, parts, width, rows, dtype):
    """One layer a stage in lockstep 1F1B, compiled: a branch inside the backward one, an exchange at the end."""
    stages = mesh.shape["pipeline"]
    ticks = parts + 2 * stages - 2
    up = [(stage, stage + 1) for stage in range(stages - 1)]
    down = [(target, source) for source, target in up]
    inside = lambda part: (part >= 0) & (part < parts)

    def step(w, x):
        stage, whole = jax.lax.axis_index("pipeline"), jax.lax.all_gather(w, "fsdp", axis=0, tiled=True)

        def backward(g, h):
            dw, dh = jax.vjp(lambda w, h: jnp.tanh(h @ w), whole, h)[1](g)
            return dw, jax.lax.cond(dh.sum() > 0, lambda dh: dh @ whole, lambda dh: dh, dh)

        def tick(carried, t):
            h, g, dw = carried
            with jax.named_scope(f"taken_{parts}_of_{ticks}"):
                result = jax.lax.cond(inside(t - stage), lambda h: jnp.tanh(h @ whole), lambda h: h, h)
            part = t - 2 * (stages - 1) + stage
            with jax.named_scope(f"taken_{parts}_of_{ticks}"):
                more, g = jax.lax.cond(inside(part), backward, lambda g, h: (jnp.zeros_like(dw), g), g, h)
            return (jax.lax.ppermute(result, "pipeline", up), jax.lax.ppermute(g, "pipeline", down), dw + more), None

        (h, _, dw), _ = jax.lax.scan(tick, (x, x, jnp.zeros_like(whole)), jnp.arange(ticks))
        h = jax.lax.all_to_all(h, "pipeline", 0, 1, tiled=True)
        return jax.lax.psum_scatter(dw, "fsdp", scatter_dimension=0, tiled=True), h

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P("fsdp"), P()), out_specs=(P("fsdp"), P()), check_vma=False)
    of = lambda shape, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    return jax.jit(mapped).lower(of((width, width), P("fsdp")), of((rows, width), P())).compile().as_text()


def test_stages_of_a_pipeline_count_as_often_as_they_run_and_their_messages_in_every_tick():
    """4 stages x 8 microbatches in 14 ticks: each runs 8 forward and 8 backward, whatever branches lie inside these."""
    mesh = make_mesh(jax.devices()[:8], pipeline=4, fsdp=2)
    facts = read_hlo(make_pipeline(mesh, 8, 64, 8, jnp.float32), mesh.shape)
    assert facts.dot_flops == 8 * (1 + 3 + 1) * 2 * 8 * 64 * 64
    message, matrix = 8 * 64 * 4, 64 * 64 * 4
    assert sorted((one.kind, one.axes, one.times, one.wire_bytes) for one in facts.collectives) == [
        ("all-gather", ("fsdp",), 1, matrix / 2),
        ("all-to-all", ("pipeline",), 1, message * 3 / 4),
        ("collective-permute", ("pipeline",), 14, message),
        ("collective-permute", ("pipeline",), 14, message),
        ("reduce-scatter", ("fsdp",), 1, matrix / 2),
    ]


@pytest.mark.aot
@needs_libtpu
def test_messages_of_a_tpu_pipeline_run_beside_products_and_the_roofline_has_its_bubble():
    topology = open_topology("v5p:2x2x2")
    mesh = make_mesh(topology.devices, pipeline=4, fsdp=2)
    places = list(mesh.devices.flat)
    text = make_pipeline(mesh, 8, 2048, 2048, jnp.bfloat16)
    facts = read_hlo(text, mesh.shape, link_domains(places), make_torus(places, topology.chip))
    assert facts.dot_flops == 8 * (1 + 3 + 1) * 2 * 2048**3
    bound = roofline(facts, topology.chip, facts.dot_flops, ScheduleSize("1f1b", 4, 1, 8))
    assert bound.bubble_s == pytest.approx(3 / 8 * bound.compute_s)
    rows = [row for row in collective_rows(facts, bound.played) if row.kind == "collective-permute"]
    assert [(row.axes, row.times, row.sent_bytes, row.is_blocking) for row in rows] == [
        ("pipeline", 14, 2 * 2048**2, False)
    ] * 2
    assert max(row.cover_s for row in rows) > 0
