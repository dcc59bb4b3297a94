"""The order of a program, as compilers print asynchronous collectives."""

import dataclasses
import json

import pytest
from hlo_samples import LOOP, LOOP_CALL, facts_of

from jaxscale import schema
from jaxscale.tools.preflight.hlo_schedule import ScheduleItem

GATHER = "replica_groups=[2,4]<=[8], dimensions={0}"
OPERANDS = "  %l = f32[4,5] custom-call()\n  %r = f32[5,6] custom-call()\n"
DOT = "f32[4,6] dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
WORK = ScheduleItem("work", flops={"f32": 240.0})
SPARSECORE = f"""\
%offloaded (x: f32[16]) -> f32[64] {{
  %x = f32[16]{{0}} parameter(0)
  %t = (f32[16]{{0}}) tuple(%x)
  %y = f32[16]{{0}} get-tuple-element(%t), index=0
  ROOT %g = f32[64]{{0}} all-gather(%y), channel_id=1, {GATHER}
}}, execution_thread="sparsecore"
"""
FUSIONS = f"""\
%start (x: bf16[16]) -> bf16[16] {{
  %x = bf16[16]{{0}} parameter(0)
  %g = bf16[64]{{0}} all-gather(%x), channel_id=7, {GATHER}, backend_config={{"async_collective_fusion_config":{{}}}}
  ROOT %s = bf16[16]{{0}} custom-call(%x, %g), custom_call_target="AsyncCollectiveStart"
}}
%between (x: bf16[16], l: f32[4,5], r: f32[5,6]) -> f32[4,6] {{
  %x = bf16[16]{{0}} parameter(0)
  %l = f32[4,5] parameter(1)
  %r = f32[5,6] parameter(2)
  %g = bf16[64]{{0}} all-gather(%x), channel_id=7, {GATHER}, backend_config={{"async_collective_fusion_config":{{}}}}
  ROOT %d = {DOT}
}}
%end (x: bf16[16]) -> bf16[64] {{
  %x = bf16[16]{{0}} parameter(0)
  %g = bf16[64]{{0}} all-gather(%x), channel_id=7, {GATHER}, backend_config={{"async_collective_fusion_config":{{}}}}
  ROOT %s = bf16[64]{{0}} custom-call(%x, %g), custom_call_target="AsyncCollectiveDone"
}}
"""
STARTED, ENDED = ScheduleItem("start", 0), ScheduleItem("done", 0)
BETWEEN_SLICES = (
    'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
    '_xla_host_transfer_rendezvous="ppermute.18_0",_xla_megascale_target="{1,2}x{0:3}",'
    '_xla_megascale_transfer_type="ONE_TO_ONE"}'
)


@pytest.mark.parametrize(
    ("body", "before", "expected"),
    [
        (f"  %g = f32[64]{{0}} all-gather(%p), {GATHER}\n  %d = {DOT}", "", (ScheduleItem("blocking", 0), WORK)),
        (
            f"  %s = (f32[16]{{0}}, f32[64]{{0}}) all-gather-start(%p), {GATHER}\n  %d = {DOT}\n"
            "  %e = f32[64]{0} all-gather-done(%s)",
            "",
            (STARTED, WORK, ENDED),
        ),
        (
            f"  %s = (f32[16]{{0}}, f32[64]{{0}}) all-gather-start(%p), {GATHER}, "
            'backend_config={"collective_backend_config": {"is_sync": true}}\n'
            f"  %d = {DOT}\n"
            "  %e = f32[64]{0} all-gather-done(%s)",
            "",
            (ScheduleItem("blocking", 0), WORK),
        ),
        (
            f"  %s = ((f32[16]{{0}}), f32[64]{{0}}) call-start(%p), to_apply=%offloaded\n  %d = {DOT}\n"
            "  %e = f32[64]{0} call-done(%s)",
            SPARSECORE,
            (STARTED, WORK, ENDED),
        ),
        (  # is over when it is received
            f"  %t = token[] after-all()\n  %s = (f32[16]{{0}}, u32[], token[]) send(%p, %t), {BETWEEN_SLICES}\n"
            f"  %v = (f32[16]{{0}}, u32[], token[]) recv(%t), {BETWEEN_SLICES}\n"
            f"  %sd = token[] send-done(%s)\n  %d = {DOT}\n  %e = (f32[16]{{0}}, token[]) recv-done(%v)",
            "",
            (STARTED, WORK, ENDED),
        ),
        (  # has its data, and runs, from the update on
            "  %s = ((), (), (s32[8]{0})) custom-call-start(), called_computations={%offloaded}\n"
            f"  %d = {DOT}\n"
            "  %u = ((f32[16]{0}), f32[64]{0}, (s32[8]{0})) custom-call-update(%s, %p)\n"
            f"  %d2 = {DOT}\n"
            "  %e = f32[64]{0} custom-call-done(%u)",
            SPARSECORE,
            (WORK, STARTED, WORK, ENDED),
        ),
        (
            "  %a = bf16[16]{0} fusion(%p), kind=kCustom, calls=%start\n"
            "  %b = f32[4,6] fusion(%a, %l, %r), kind=kOutput, calls=%between\n"
            "  %c = bf16[64]{0} fusion(%a), kind=kCustom, calls=%end",
            FUSIONS,
            (STARTED, WORK, ENDED),
        ),
    ],
    ids=["blocking", "start and done", "synchronous start", "call", "between slices", "custom call", "fusions"],
)
def test_a_collective_starts_and_ends_where_the_program_says(body, before, expected):
    found = facts_of(OPERANDS + body, before=before)
    assert found.schedule == expected
    (one,) = found.collectives
    assert (one.times, one.wire_bytes > 0, one.computation) == (1, True, "main")


def test_loops_and_branches_keep_their_order_and_their_runs():
    body = f"%l = f32[4,5] constant(0)\n  %r = f32[5,6] constant(0)\n  %d = {DOT}\n"
    loop = LOOP.format(
        limit=7, start=0, stride=1, direction="LT", work=body + f"  %g = f32[16] all-gather(%x), {GATHER}"
    )
    found = facts_of(LOOP_CALL.format(start=0), before=loop)
    assert found.schedule == (ScheduleItem("runs", times=7, items=(WORK, ScheduleItem("blocking", 0))),)
    assert (found.collectives[0].times, found.collectives[0].computation) == (7, "body")


BRANCHES = f"""\
%short (x: f32[4]) -> f32[4] {{
  ROOT %x = f32[4] parameter(0)
}}
%long (x: f32[4]) -> f32[4] {{
  %x = f32[4] parameter(0)
{OPERANDS}  %d = {DOT}
  ROOT %y = f32[4] negate(%x)
}}
"""


@pytest.mark.parametrize(
    ("how", "flops"),
    [
        ("true_computation=%short, false_computation=%long", 240),  # the most that it can cost
        ("branch_computations={%long, %short, %short}", 240),
        ('true_computation=%short, false_computation=%long, metadata={op_name="jit/taken_1_of_4/cond"}', 0.75 * 240),
        ('true_computation=%long, false_computation=%short, metadata={op_name="jit/taken_3_of_4/cond"}', 0.75 * 240),
    ],
)
def test_one_branch_of_a_conditional_runs(how, flops):
    work = "%k = pred[] constant(true)\n  %y = f32[4] conditional(%k, %x, %x), " + how
    loop = LOOP.format(limit=8, start=0, stride=1, direction="LT", work=work)
    found = facts_of(LOOP_CALL.format(start=0), before=BRANCHES + loop)
    assert found.dot_flops == 8 * flops
    total = lambda items: sum(one.times * total(one.items) + sum(one.flops.values()) for one in items)
    assert total(found.schedule) == pytest.approx(found.dot_flops)


def test_a_schedule_is_kept_as_plain_data():
    item = ScheduleItem("runs", times=3, items=(WORK, ScheduleItem("start", 2)))
    assert schema.from_dict(ScheduleItem, json.loads(json.dumps(dataclasses.asdict(item)))) == item
