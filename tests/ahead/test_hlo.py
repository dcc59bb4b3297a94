"""Collectives as compiled programs spell them, on texts whose answers are known."""

import pytest
from hlo_samples import LOOP, LOOP_CALL, facts_of, only_collective

from jaxscale.tools.preflight.hlo_groups import parse_groups
from jaxscale.tools.preflight.hlo_text import parse_module, parse_shapes, tuple_parts


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("fsdp",), 4),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "fsdp"), 8),
        ("{}", ("data", "fsdp"), 8),
        ("[2,4]<=[8]", ("fsdp",), 4),
        ("[4,2]<=[2,4]T(1,0)", ("data",), 2),
        ("[1,8]<=[8]", ("data", "fsdp"), 8),
        ("[8,1]<=[8]", (), 1),
        ("mesh['data'=2,'fsdp'=4] {'fsdp'}", ("fsdp",), 4),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ("data",), 2),  # XLA's own names for our axes
        ("mesh['axis_0'=8] {'axis_0':(1)2}", ("data",), 2),  # the major half of an axis
        ("mesh['axis_0'=8] {'axis_0':(2)4}", ("fsdp",), 4),
        ("mesh['a'=2,'b'=4] {'a','b'}", ("data", "fsdp"), 8),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("data",), 2),
    ],
)
def test_groups_in_every_spelling_span_the_same_mesh_axes(groups, axes, size):
    found = only_collective(
        f"  ROOT %a = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add"
    )
    assert (found.axes, found.group_size, found.kind) == (axes, size, "all-reduce")


def test_groups_that_nobody_knows_are_an_error():
    with pytest.raises(ValueError, match="unknown replica groups"):
        parse_groups(", replica_groups=spiral(8)", 8)


@pytest.mark.parametrize(
    ("line", "kind", "result", "wire"),
    [
        ("bf16[64]{0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}", "all-gather", 128, 96),
        ("f32[4]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8], to_apply=%add", "reduce-scatter", 16, 48),
        ("f32[16]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add", "all-reduce", 64, 96),
        ("(f32[16]{0}, bf16[8]{0}) all-reduce(%p, %q), replica_groups=[2,4]<=[8]", "all-reduce", 80, 120),
        ("f32[16]{0} all-to-all(%p), replica_groups=[2,4]<=[8], dimensions={0}", "all-to-all", 64, 48),
        (
            "f32[16]{0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
            "collective-permute",
            64,
            64,
        ),
        ("f32[16]{0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}", "collective-permute", 64, 0),
        (  # asynchronous ones print operands and results as their type
            "(bf16[16]{0}, bf16[64]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={0}",
            "all-gather",
            128,
            96,
        ),
        (
            "((bf16[16]{0}, f32[4]{0}), (bf16[64]{0}, f32[16]{0})) all-gather-start(%p, %q), replica_groups=[2,4]<=[8]",
            "all-gather",
            192,
            144,
        ),
        ("((f32[16]{0}), f32[4]{0}) reduce-scatter-start(%p), replica_groups=[2,4]<=[8]", "reduce-scatter", 16, 48),
        ("f32[16]{0} all-reduce-start(%p), replica_groups=[2,4]<=[8], to_apply=%add", "all-reduce", 64, 96),
        (
            "(f32[8]{0}, f32[8]{0}) all-reduce-start(%p, %q), replica_groups=[2,4]<=[8], to_apply=%add",
            "all-reduce",
            64,
            96,
        ),
        ("((f32[16]{0}), f32[16]{0}) all-reduce-start(%p), replica_groups=[2,4]<=[8]", "all-reduce", 64, 96),
        (
            "(f32[16]{0:T(8)S(1)}, f32[16]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), "
            "source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            64,
            64,
        ),
    ],
)
def test_a_collective_has_the_bytes_of_its_result_and_of_the_wire(line, kind, result, wire):
    found = only_collective(f"  ROOT %c = {line}")
    assert (found.kind, found.result_bytes, found.wire_bytes, found.times) == (kind, result, wire, 1)


def test_only_the_start_of_an_asynchronous_collective_counts():
    body = """\
  %s = (f32[4]{0}, f32[16]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %d = f32[16]{0} all-gather-done(%s)"""
    assert only_collective(body).times == 1


def test_two_collectives_on_one_channel_both_count():
    line = "bf16[64]{0} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}"
    assert len(facts_of(f"  %a = {line}\n  ROOT %b = {line}").collectives) == 2


ASYNC_COMPUTATION = """\
%async_computation (x: f32[16]) -> f32[4] {
  %x = f32[16]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
}, execution_thread="parallel"
"""


def test_a_collective_wrapped_in_an_asynchronous_computation_counts_once():
    body = """\
  %s = ((f32[16]{0}), f32[4]{0}) async-start(%p), calls=%async_computation
  %u = ((f32[16]{0}), f32[4]{0}) async-update(%s), calls=%async_computation
  ROOT %d = f32[4]{0} async-done(%u), calls=%async_computation"""
    found = only_collective(body, before=ASYNC_COMPUTATION)
    assert (found.kind, found.times, found.wire_bytes) == ("reduce-scatter", 1, 48)


FUSED_SCATTER = """\
%all-reduce-scatter.1 (input: bf16[64,8]) -> bf16[16,8] {{
  %input = bf16[64,8]{{1,0}} parameter(0)
  %ar = (bf16[64,8]{{1,0}}, bf16[64]{{0}}) all-reduce(%input, %input), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}
  %zero = u32[] constant(0)
  %g0 = bf16[64,8]{{1,0}} get-tuple-element(%ar), index=0
  %g1 = bf16[64]{{0}} get-tuple-element(%ar), index=1
  %d1 = bf16[16]{{0}} dynamic-slice(%g1, %zero), dynamic_slice_sizes={{16}}
  {use}
  ROOT %d0 = bf16[16,8]{{1,0}} dynamic-slice(%g0, %zero, %zero), dynamic_slice_sizes={{16,8}}
}}
"""


@pytest.mark.parametrize(
    ("use", "kind", "result", "wire"),
    [
        ("", "reduce-scatter", (1024 + 128) / 4, (1024 + 128) * 3 / 4),
        ("%more = bf16[64,8]{1,0} negate(%g0)", "all-reduce", 1024 + 128, 2 * (1024 + 128) * 3 / 4),
    ],
    ids=["all of it is sliced", "one use needs it whole"],
)
def test_a_fused_all_reduce_and_slice_counts_as_what_moves(use, kind, result, wire):
    body = "  ROOT %f = bf16[16,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1"
    found = only_collective(body, before=FUSED_SCATTER.format(use=use))
    assert (found.kind, found.result_bytes, found.wire_bytes) == (kind, result, wire)


def test_an_asynchronous_fusion_counts_where_it_starts_however_often_it_goes_on():
    gather = (
        "bf16[64]{0} all-gather(%x), channel_id=7, replica_groups=[2,4]<=[8], "
        'backend_config={"async_collective_fusion_config":{"flag_start":"2"}}'
    )
    before = f"""\
%start (x: bf16[16]) -> bf16[16] {{
  %x = bf16[16]{{0}} parameter(0)
  %g = {gather}
  ROOT %s = bf16[16]{{0}} custom-call(%x, %g), custom_call_target="AsyncCollectiveStart"
}}
%step (x: bf16[16]) -> bf16[16] {{
  %x = bf16[16]{{0}} parameter(0)
  ROOT %g = {gather}
}}
{LOOP.format(limit=5, start=0, stride=1, direction="LT", work="%w = bf16[16] fusion(%c), kind=kOutput, calls=%step")}
"""
    body = f"""\
  %a = bf16[16]{{0}} fusion(%p), kind=kCustom, calls=%start
{LOOP_CALL.format(start=0)}
  ROOT %b = bf16[16]{{0}} fusion(%p), kind=kCustom, calls=%step"""
    found = only_collective(body, before=before)
    assert (found.times, found.result_bytes) == (1, 128)


def test_asynchronous_fusions_that_share_a_channel_all_count():
    start = """\
%start{n} (x: bf16[16]) -> bf16[16] {{
  %x = bf16[16]{{0}} parameter(0)
  %g = bf16[64]{{0}} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], \
backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}
  ROOT %s = bf16[16]{{0}} custom-call(%x, %g), custom_call_target="AsyncCollectiveStart"
}}
"""
    body = """\
  %a = bf16[16]{0} fusion(%p), kind=kCustom, calls=%start1
  ROOT %b = bf16[16]{0} fusion(%a), kind=kCustom, calls=%start2"""
    found = facts_of(body, before=start.format(n=1) + start.format(n=2)).collectives
    assert [(c.times, c.result_bytes) for c in found] == [(1, 128), (1, 128)]


@pytest.mark.parametrize(
    ("kind", "wire", "dcn"),
    [("all-gather", 56, 8), ("all-reduce", 112, 16), ("all-to-all", 56, 32)],
)
def test_what_crosses_slices_is_split_from_what_stays(kind, wire, dcn):
    line = f"  ROOT %c = f32[16]{{0}} {kind}(%p), replica_groups=[1,8]<=[8], dimensions={{0}}"
    found = only_collective(line, slice_of=[0] * 4 + [1] * 4)
    assert found.crosses_slices and (found.wire_bytes, found.dcn_bytes) == (wire, dcn)
    inside = only_collective(line.replace("[1,8]<=[8]", "[2,4]<=[8]"), slice_of=[0] * 4 + [1] * 4)
    assert not inside.crosses_slices and inside.dcn_bytes == 0


def test_a_program_compiled_by_slice_numbers_its_devices_within_the_slice():
    line = "  ROOT %c = f32[16]{0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}"
    found = only_collective(line, slice_of=[0] * 4 + [1] * 4, partitions=4)
    assert (found.axes, found.crosses_slices) == (("fsdp",), False)
    inner = only_collective(line, slice_of=[0, 0, 1, 1] * 2, partitions=4)  # slices along the inner axis
    assert (inner.axes, inner.crosses_slices) == (("data", "fsdp"), False)


def test_a_reduction_that_the_host_runs_between_slices_is_a_collective():
    body = """\
  %t = token[] after-all()
  %s = (bf16[64,8]{1,0}, u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true, frontend_attributes={\
_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{1,2}x{0:3}",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %d = token[] send-done(%s), channel_id=2, is_host_transfer=true"""
    found = only_collective(body, slice_of=[0] * 4 + [1] * 4, partitions=4)
    assert (found.kind, found.axes, found.group_size) == ("all-reduce", ("data",), 2)
    assert (found.wire_bytes, found.dcn_bytes, found.crosses_slices) == (1024, 1024, True)
    plain = body.replace("xla_megascale_runtime", "tf_rendezvous")
    assert not facts_of(plain).collectives


def test_types_are_read_with_their_memory_and_their_bytes():
    shapes = parse_shapes("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, /*index=1*/pred[7], f8e4m3fn[5], s4[6], token[], f32[])")
    assert [(shape.nbytes, shape.space) for shape in shapes] == [(12, 1), (7, 0), (5, 0), (3, 0), (4, 0)]
    assert tuple_parts("((f32[2]{0}, u32[]), s8[3])") == ["(f32[2]{0}, u32[])", " s8[3]"]


def test_a_text_that_is_no_program_or_not_of_this_mesh_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse_module("module @jit_f attributes {}")
    with pytest.raises(ValueError, match="16 partitions"):
        facts_of("  ROOT %c = f32[16]{0} copy(%p)", partitions=16)
    with pytest.raises(ValueError, match="refers to device 8"):
        facts_of("  ROOT %c = f32[16]{0} all-reduce(%p), replica_groups={{0,8}}")
    with pytest.raises(ValueError, match="slice_of has 4 devices"):
        facts_of("  ROOT %c = f32[16]{0} copy(%p)", slice_of=[0, 0, 1, 1])


SIX_AXES = {"pipeline": 4, "data": 1, "fsdp": 2, "context": 2, "tensor": 1}  # devices 0 to 15


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,4},{4,8},{8,12}}", ("pipeline",)),  # up
        ("{{12,8},{8,4},{4,0}}", ("pipeline",)),  # down
        ("{{0,4},{4,8},{8,12},{12,0}}", ("pipeline",)),  # chunks: from the last stage to the first again
        ("{{0,1},{1,0},{2,3},{3,2}}", ("context",)),  # a ring
        ("{{1,2},{3,4}}", ("pipeline", "fsdp", "context")),
    ],
)
def test_a_permute_is_of_the_axes_along_which_its_messages_go(pairs, axes):
    line = f"  ROOT %c = bf16[8,64]{{1,0}} collective-permute(%p), source_target_pairs={pairs}"
    found = only_collective(line, mesh=SIX_AXES, partitions=16)
    assert (found.axes, found.wire_bytes, found.dcn_bytes) == (axes, 1024, 0)


def test_a_permute_crosses_slices_whole_where_its_furthest_message_does():
    line = "  ROOT %c = bf16[8,64]{1,0} collective-permute(%p), source_target_pairs={{0,4},{4,8},{8,12}}"
    found = only_collective(line, mesh=SIX_AXES, partitions=16, slice_of=[0] * 8 + [1] * 8)
    assert (found.axes, found.crosses_slices, found.dcn_bytes) == (("pipeline",), True, 1024)
    assert [(stage.along, stage.nbytes) for stage in found.stages] == [("dcn", 1024)]
