"""What a trace says of collectives and the products beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.tools.qualify import overlap
from jaxscale.tools.qualify.overlap import (
    Roles,
    TraceEvent,
    common,
    length,
    overlap_figures,
    read_overlap,
    roles_of,
    union,
)

ROLES = Roles(
    frozenset({"dot.1"}), frozenset({"all-gather.1", "ag-start", "ag-done", "lone-done"}),
    {"ag-done": "ag-start", "lone-done": "elsewhere"},
)  # fmt: skip
ASYNC = """HloModule step, is_scheduled=true, num_partitions=2

%fused (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %q = f32[8,8]{1,0} parameter(1)
  ROOT %dot.2 = f32[8,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[4,8], y: f32[8,8]) -> f32[8,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %y = f32[8,8]{1,0} parameter(1)
  %all-gather-start.1 = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%x), replica_groups={{0,1}}
  %fusion.1 = f32[8,8]{1,0} fusion(f32[8,8]{1,0} %y, f32[8,8]{1,0} %y), kind=kOutput, calls=%fused
  %all-gather-done.1 = f32[8,8]{1,0} all-gather-done((f32[4,8]{1,0}, f32[8,8]{1,0}) %all-gather-start.1)
  ROOT %add.1 = f32[8,8]{1,0} add(f32[8,8]{1,0} %fusion.1, f32[8,8]{1,0} %all-gather-done.1)
}
"""


def ns(device, op, begin, end):
    return TraceEvent(device, op, begin * 1e9, end * 1e9)


@pytest.mark.parametrize(("target", "product"), [("tpu_custom_call", True), ("mosaic_gpu_v2", True), ("TopK", False)])
def test_a_kernel_is_a_product(target, product):
    call = f'  %k = f32[8,8]{{1,0}} custom-call(%y), custom_call_target="{target}"\n  ROOT %add.1'
    assert ("k" in roles_of(ASYNC.replace("  ROOT %add.1", call)).products) == product


def test_roles_are_read_from_the_programs_text():
    assert roles_of(ASYNC) == Roles(
        frozenset({"fusion.1"}), frozenset({"all-gather-start.1", "all-gather-done.1"}),
        {"all-gather-done.1": "all-gather-start.1"},
    )  # fmt: skip


def test_a_blocking_collective_is_covered_by_nothing_and_one_that_is_under_way_by_products():
    blocking = [ns("a", "all-gather.1", 0, 4), ns("a", "dot.1", 4, 10)]
    found = read_overlap(blocking, ROLES)
    assert (found.busy, found.collective, found.covered) == (10, 4, 0) and found.exposed == (("all-gather.1", 4),)
    hidden = [ns("a", "ag-start", 0, 1), ns("a", "dot.1", 1, 7), ns("a", "ag-done", 7, 8)]
    found = read_overlap(hidden, ROLES)
    assert (found.busy, found.collective, found.covered) == (8, 8, 6) and found.exposed == (("ag-start", 2),)
    both = read_overlap([*hidden, *[event._replace(device="b") for event in blocking]], ROLES)
    assert (both.collective, both.covered) == (12, 6)  # a device's products hide nothing of another's


def test_an_end_without_its_start_is_told():
    found = read_overlap([ns("a", "lone-done", 0, 1), ns("a", "dot.1", 0, 2)], ROLES)
    assert found.untold == ("1 asynchronous collectives that start in a different computation",)
    assert found.collective == 1


def test_spans_are_joined_and_crossed_as_sets():
    rng = np.random.default_rng(0)
    for _ in range(50):
        left, right = (sorted((int(b), int(b + n)) for b, n in rng.integers(1, 20, (6, 2))) for _ in range(2))
        cells = lambda spans: {cell for begin, end in spans for cell in range(begin, end)}
        assert cells(union(left)) == cells(left) and length(union(left)) == len(cells(left))
        assert cells(common(union(left), union(right))) == cells(left) & cells(right)


@pytest.mark.slow
def test_a_real_step_is_traced_on_every_device():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = NamedSharding(mesh, P("x"))

    def body(x_BD, w_DF):
        return jax.lax.psum(x_BD @ jax.lax.all_gather(w_DF, "x", tiled=True), "x")

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P()))
    args = [jax.device_put(jnp.ones((64, 64)), rows)] * 2
    program = f.lower(*args).compile()
    jax.block_until_ready(program(*args))
    run = lambda: jax.block_until_ready(program(*args))
    roles, events = roles_of(program.as_text()), overlap.trace(run)
    assert roles.products and len(roles.collectives) == 2
    seen = {(event.device, event.op) for event in events}
    assert {device for device, op in seen if op in roles.collectives} == {f"cpu {n}" for n in range(8)}
    figures, notes = overlap_figures(program.as_text(), run)
    assert [figure.value for figure in figures] == [pytest.approx(0.5, abs=0.5)] * 2
    assert not [note for note in notes if "not in the trace" in note]


def test_a_step_without_collectives_has_nothing_to_hide():
    program = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
    assert overlap_figures(program.as_text(), lambda: None) == ([], ["overlap: the step has no collectives to hide"])
