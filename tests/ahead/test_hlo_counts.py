"""Loops, products and memory traffic of compiled programs, on texts whose answers are known."""

import pytest
from hlo_samples import LOOP, LOOP_CALL, facts_of

DOT = "%dot = f32[4,6] dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
WORK = f"%l = f32[4,5] constant(0)\n  %r = f32[5,6] constant(0)\n  {DOT}"


@pytest.mark.parametrize(
    ("start", "limit", "stride", "direction", "trips"),
    [
        (0, 32, 1, "LT", 32),
        (0, 7, 2, "LT", 4),  # unrolled by two
        (3, 32, 1, "LE", 30),
        (31, 0, -1, "GE", 32),
        (32, 0, -1, "GT", 32),
        (0, 6, 2, "NE", 3),
        (5, 5, 1, "LT", 0),
    ],
)
def test_trips_are_read_off_the_condition_the_start_and_the_step(start, limit, stride, direction, trips):
    loop = LOOP.format(limit=limit, start=start, stride=stride, direction=direction, work=WORK)
    facts = facts_of(LOOP_CALL.format(start=start), before=loop)
    assert (facts.dot_flops, facts.unknown_trips) == (trips * 2 * 4 * 5 * 6, 0)


def test_a_count_that_xla_noted_is_taken():
    loop = LOOP.format(limit=32, start=0, stride=1, direction="LT", work=WORK)
    call = LOOP_CALL.format(start=0) + ', backend_config={"known_trip_count":{"n":"9"},"other":1}'
    assert facts_of(call, before=loop).dot_flops == 9 * 240


def test_a_limit_that_the_loop_carries_and_a_wrapped_comparison_are_followed():
    before = """\
%wrapped (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %less = pred[] compare(%b, %a), direction=LT
}
%grow (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %k = s32[] constant(1)
  ROOT %sum = s32[] add(%a, %k)
}
%cond (c: (s32[], s32[])) -> pred[] {
  %c = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=1
  ROOT %less = pred[] fusion(%n, %i), kind=kLoop, calls=%wrapped
}
%body (c: (s32[], s32[])) -> (s32[], s32[]) {
  %c = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=1
  WORK
  %next = s32[] fusion(%i), kind=kLoop, calls=%grow
  ROOT %out = (s32[], s32[]) tuple(%next, %n)
}
""".replace("WORK", WORK)
    body = """\
  %zero = s32[] constant(0)
  %many = s32[] constant(11)
  %init = (s32[], s32[]) tuple(%zero, %many)
  ROOT %loop = (s32[], s32[]) while(%init), condition=%cond, body=%body"""
    assert facts_of(body, before=before).dot_flops == 11 * 240


def test_a_loop_that_cannot_be_read_counts_once_and_is_told():
    loop = LOOP.format(limit=32, start=0, stride=1, direction="LT", work=WORK)
    call = LOOP_CALL.format(start=0).replace("%begin = s32[] constant(0)", "%begin = s32[] custom-call()")
    facts = facts_of(call, before=loop)
    assert (facts.dot_flops, facts.unknown_trips) == (240, 1)


@pytest.mark.parametrize(
    ("left", "right", "result", "attributes", "flops"),
    [
        ("bf16[8,5]", "bf16[5,6]", "f32[8,6]", "dim_labels=bf_io->bf", 2 * 8 * 5 * 6),
        # Batched products as XLA:TPU prints them: most taps fall in the holes of the dilation (scores of 4 x 32 heads).
        (
            "bf16[4,16,32,8]",
            "bf16[4,16,32,8]",
            "f32[4,32,16,16]",
            "window={size=4x32 stride=3x31 lhs_dilate=4x32}, dim_labels=0b1f_0o1i->01bf",
            2 * 4 * 32 * 16 * 16 * 8,
        ),
        # A projection to heads: the kernel is as large as the output, and one tap meets the only input element.
        (
            "bf16[4,16,24,1]",
            "bf16[24,32,8,1]",
            "bf16[4,16,32,8]",
            "window={size=1x32 pad=0_0x31_31 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f",
            2 * 4 * 16 * 24 * 32 * 8,
        ),
        # A projection from heads: every tap meets data.
        (
            "bf16[4,16,32,8]",
            "bf16[24,32,8]",
            "bf16[4,16,24,1]",
            "window={size=1x32}, dim_labels=0b1f_o1i0->0bf1",
            2 * 4 * 16 * 24 * 32 * 8,
        ),
        # A true convolution with padding: 3 taps at 8 places, but for the two at the edges.
        (
            "f32[2,8,5]",
            "f32[3,5,6]",
            "f32[2,8,6]",
            "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
            2 * 2 * 5 * 6 * 22,
        ),
    ],
)
def test_a_product_printed_as_a_convolution_counts_only_taps_that_meet_data(left, right, result, attributes, flops):
    operands = f"  %l = {left} custom-call()\n  %r = {right} custom-call()\n"
    body = f"{operands}  ROOT %c = {result} convolution(%l, %r), {attributes}"
    assert facts_of(body).dot_flops == flops


def test_products_inside_fusions_and_in_libraries_count_by_operand_type():
    before = """\
%gemm (a: s8[8,5], b: s8[5,6]) -> s32[8,6] {
  %a = s8[8,5] parameter(0)
  %b = s8[5,6] parameter(1)
  ROOT %d = s32[8,6] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    body = """\
  %f = s32[8,6] fusion(%p, %p), kind=kCustom, calls=%gemm
  %x = bf16[8,5] custom-call()
  %g = (bf16[8,6], s8[1024]) custom-call(%x, %x), custom_call_target="__cublas$gemm", backend_config={\
"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %q = bf16[2,16,4,8] custom-call()
  %k = bf16[2,32,2,8] custom-call()
  %o = (bf16[2,16,4,8], u8[0]) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax"
  %b = (bf16[2,16,4,8], u8[0]) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmaxBackward"
"""
    facts = facts_of(body, before=before)
    assert facts.dot_flops_by_type == {"s8": 480, "bf16": 480 + (2 + 5) * 2 * 2 * 4 * 16 * 32 * 8}


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        ('"mask_type": "NO_MASK", "sliding_window_length": 0', 16 * 16),
        ('"mask_type": "PADDING_CAUSAL", "sliding_window_length": 0', 16 * 17 // 2),
        ('"mask_type":"CAUSAL","sliding_window_length":4', 1 + 2 + 3 + 13 * 4),
        ('"mask_type":"CAUSAL","sliding_window_length":40', 16 * 17 // 2),
    ],
)
def test_cudnn_computes_what_its_mask_leaves(mask, seen):
    body = f"""\
  %q = bf16[2,16,4,8] custom-call()
  %o = (bf16[2,16,4,8], u8[0]) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", \
backend_config={{"cudnn_fmha_backend_config": {{{mask}}}}}
"""
    assert facts_of(body).dot_flops == 2 * 2 * 2 * 4 * seen * 8


@pytest.mark.parametrize(
    ("name", "trips", "unknown"),
    [
        ("jit(f)/transpose(jvp(usually_0_trips))/while", 0, 0),
        ("jit(f)/usually_3_trips/while", 3, 0),
        ("jit(f)/usually_3_trips/while/body/while", 1, 1),  # another loop, inside
    ],
)
def test_a_loop_whose_length_is_in_the_data_says_how_long_it_usually_is(name, trips, unknown):
    before = """\
%body (t: (f32[4,4], pred[])) -> (f32[4,4], pred[]) {
  %t = (f32[4,4], pred[]) parameter(0)
  %x = f32[4,4] get-tuple-element(%t), index=0
  %y = f32[4,4] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %b = pred[] get-tuple-element(%t), index=1
  ROOT %r = (f32[4,4], pred[]) tuple(%y, %b)
}
%condition (t: (f32[4,4], pred[])) -> pred[] {
  %t = (f32[4,4], pred[]) parameter(0)
  ROOT %b = pred[] get-tuple-element(%t), index=1
}
"""
    body = f"""\
  %x = f32[4,4] custom-call()
  %b = pred[] custom-call()
  %i = (f32[4,4], pred[]) tuple(%x, %b)
  %w = (f32[4,4], pred[]) while(%i), condition=%condition, body=%body, metadata={{op_name="{name}"}}
"""
    facts = facts_of(body, before=before)
    assert (facts.dot_flops, facts.unknown_trips) == (trips * 2 * 4 * 4 * 4, unknown)


SPLASH = """\
  %l = f32[2,3] constant(0)
  %r = f32[3,2] constant(0)
  %next = s8[1,{table}] constant({{...}})
  %mask = s8[1,{table}] constant({{...}})
  %q = bf16[2,4,1024,128] custom-call()
  %k = bf16[2,2,1024,128] custom-call()
  %out = {results} custom-call(%next, %mask, %q, %k, %k), custom_call_target="tpu_custom_call", \
frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q{of}\\": {q}, \\"block_kv{of}\\": {kv}, \\"block_kv_compute\\": 128}}"
}}}}, metadata={{op_name="jit(f)/splash_{name}_segmented_no_residuals/pallas_call"}}
  %after = f32[2,2] dot(%l, %r), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"""
HEADS = "bf16[2,4,1024,128]"
TWO, THREE = f"({HEADS}, {HEADS})", f"(bf16[2,4,4,1024,128], {HEADS}, {HEADS})"


@pytest.mark.parametrize(
    ("name", "of", "q", "kv", "table", "results", "products", "visited"),
    [
        ("mha_fwd", "", 256, 256, "4,4", HEADS, 2, 10 / 16),
        ("mha_fwd", "", 256, 256, "4,2", HEADS, 2, 7 / 16),  # a window of two blocks
        ("mha_fwd", "", 512, 256, "2,4", HEADS, 2, 6 / 8),
        ("mha_fwd", "", 256, 512, "4,2", HEADS, 2, 6 / 8),
        ("mqa_dkv", "_dkv", 256, 256, "4,4", TWO, 4, 10 / 16),
        ("mha_dkv", "_dkv", 512, 256, "2,4", TWO, 4, 6 / 8),
        ("mha_dkv", "_dkv", 256, 256, "2,4", TWO, 4, 7 / 16),
        ("mha_dkv", "_dkv", 256, 256, "4,4", THREE, 5, 10 / 16),  # with the queries' gradient
        ("mha_dq", "_dq", 256, 256, "4,4", HEADS, 3, 10 / 16),
    ],
)
def test_splash_attention_counts_the_blocks_that_it_visits(name, of, q, kv, table, results, products, visited):
    facts = facts_of(SPLASH.format(name=name, of=of, q=q, kv=kv, table=table, results=results))
    assert facts.kernel_flops == products * 2 * 2 * 4 * 1024 * 1024 * 128 * visited
    assert facts.silent_kernels == 0
    assert facts.dot_flops == 24  # the kernel's metadata is printed over several lines, and what follows is still read


@pytest.mark.parametrize(("name", "of", "results", "products", "visited"), [
    ("mha_fwd", "", HEADS, 2, 3), ("mha_dq", "_dq", HEADS, 3, 5), ("mha_dkv", "_dkv", TWO, 4, 6),
])  # fmt: skip
def test_where_queries_are_some_of_a_row_the_scope_tells_the_blocks_that_are_visited(
    name, of, results, products, visited
):
    text = SPLASH.format(name=name, of=of, q=256, kv=256, table="4,4", results=results)
    facts = facts_of(text.replace("jit(f)/", "jit(f)/jvp(visits_3_5_6)/"))
    assert facts.kernel_flops == products * 2 * 2 * 4 * 1024 * 1024 * 128 * visited / 16


def test_a_kernel_that_says_what_it_needs_is_believed_and_a_silent_one_is_told():
    kernel = (
        '  %k = f32[8] custom-call(%p), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{CONFIG}}'
    )
    said = facts_of(kernel.replace("CONFIG", '"body":"x","cost_estimate":{"flops":"77","bytes_accessed":"1"}'))
    assert (said.kernel_flops, said.silent_kernels) == (77, 0)
    scope = ', metadata={op_name="jit(f)/transpose(jvp(rows_30_of_40))/pallas_call"}, backend_config'
    cost = '"body":"x","cost_estimate":{"flops":"80"}'
    assert facts_of(kernel.replace(", backend_config", scope).replace("CONFIG", cost)).kernel_flops == 60
    silent = facts_of(kernel.replace("CONFIG", '"body":"x"'))
    assert (silent.kernel_flops, silent.silent_kernels) == (0, 1)


@pytest.mark.parametrize(("result", "last"), [("bf16[96,32]", "bf16[4,64,32]"), ("f32[4,64,32]", "bf16[96,32]")])
def test_a_grouped_product_for_hopper_cards_has_the_flops_of_its_rows(result, last):
    kernel = f"""\
  %t = s32[4,4] parameter(0)
  %x = bf16[96,64] parameter(1)
  %w = {last} parameter(2)
  %y = {result} custom-call(%t, %x, %w), custom_call_target="mosaic_gpu_v2", metadata={{op_name="f/NAME/mpmd_map"}}"""
    facts = facts_of(kernel.replace("NAME", "hopper_project_kernel"))
    assert (facts.kernel_flops, facts.silent_kernels) == (2 * 96 * 64 * 32, 0)
    assert facts_of(kernel.replace("NAME", "another")).silent_kernels == 1


@pytest.mark.parametrize(
    ("line", "hbm", "host"),
    [
        ("%y = f32[16] add(%a, %a)", 64 + 64, 0),
        ("%y = f32[16]{0:T(8)S(1)} negate(%a)", 64, 0),  # the result stays on the chip
        ("%y = (f32[16]{0:S(1)}, f32[16]{0}, u32[]{:S(2)}) copy-start(%a)", 64, 0),
        ("%y = (f32[16]{0}, f32[16]{0:S(5)}, u32[]{:S(2)}) copy-start(%h)", 64, 64),  # from the host
        ("%y = ((f32[16]{0}), f32[4]{0:S(1)}, s32[]) slice-start(%a), slice={[0:4]}", 16, 0),
        ("%y = f32[16] bitcast(%a)", 0, 0),
        ('%y = f32[16] custom-call(), custom_call_target="AllocateBuffer"', 0, 0),
        ("%y = f32[4] dynamic-slice(%a, %i), dynamic_slice_sizes={4}", 32, 0),
        ("%y = f32[16] dynamic-update-slice(%a, %u, %i)", 32, 0),
        ("%y = f32[4] fusion(%a, %i), kind=kLoop, calls=%sliced", 4 + 16 + 16, 0),  # one layer of a stack
        ("%y = f32[16] fusion(%a, %u, %i), kind=kLoop, calls=%updated", 4 + 16 + 16, 0),
        ("%y = ((f32[16], s32[]), f32[4], u32[]) fusion-start(%a, %i), kind=kLoop, calls=%sliced", 4 + 16 + 16, 0),
        ("%y = f32[4] fusion(%a, %i), kind=kLoop, calls=%slices_inside", 4 + 16 + 16, 0),
        ("%y = f32[16] fusion(%a, %u, %i), kind=kLoop, calls=%updates_inside", 4 + 16 + 16, 0),
    ],
)
def test_memory_traffic_is_what_an_instruction_reads_and_writes(line, hbm, host):
    before = """\
%sliced (a: f32[16], i: s32[]) -> f32[4] {
  %a = f32[16] parameter(0)
  %i = s32[] parameter(1)
  %s = f32[4] dynamic-slice(%a, %i), dynamic_slice_sizes={4}
  ROOT %n = f32[4] negate(%s)
}
%updated (a: f32[16], u: f32[4], i: s32[]) -> f32[16] {
  %a = f32[16] parameter(0)
  %u = f32[4] parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[16] dynamic-update-slice(%a, %u, %i)
}
%slices_inside (a: f32[16], i: s32[]) -> f32[4] {
  %a = f32[16] parameter(0)
  %i = s32[] parameter(1)
  %s = f32[4] fusion(%a, %i), kind=kLoop, calls=%sliced
  ROOT %n = f32[4] negate(%s)
}
%updates_inside (a: f32[16], u: f32[4], i: s32[]) -> f32[16] {
  %a = f32[16] parameter(0)
  %u = f32[4] parameter(1)
  %i = s32[] parameter(2)
  %s = f32[16] fusion(%a, %u, %i), kind=kLoop, calls=%updated
  ROOT %b = f32[16] bitcast(%s)
}
"""
    body = f"""\
  %a = f32[16] parameter(0)
  %h = f32[16]{{0:S(5)}} parameter(1)
  %u = f32[4] parameter(2)
  %i = s32[] parameter(3)
  {line}"""
    facts = facts_of(body, before=before)
    assert (facts.hbm_bytes, facts.host_bytes) == (hbm, host)
