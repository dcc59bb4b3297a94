"""The pipeline and context axes by arithmetic, against hand-worked cases and schedules that are played tick by tick."""

import dataclasses
import pathlib
import re

import pytest

from jaxscale.core.axes.pipeline_axis import make_pipeline_axis
from jaxscale.core.axes.pipeline_schedules import EQUAL_COSTS, Costs, ScheduleSize, make_schedule
from jaxscale.core.config import PipelineConfig
from jaxscale.program.memory import attention_bytes, hop_bytes, memory_need
from jaxscale.settings.config_file import load_config
from jaxscale.tools.planning import cautions
from jaxscale.tools.planning.collectives import step_collectives
from jaxscale.tools.planning.communication import communication_time, slice_crossing
from jaxscale.tools.planning.memory import memory_rows
from jaxscale.tools.planning.placeholder_devices import open_machine
from jaxscale.tools.planning.plan import PlanOptions, make_plan
from jaxscale.tools.planning.plan_text import plan_lines
from jaxscale.tools.planning.schedule_times import (
    bubble_formula,
    bubble_fraction,
    idle_time,
    pass_seconds,
    recomputed_time,
    simulated_seconds,
)
from jaxscale.tools.planning.speed import estimate_step, idle_ratio
from jaxscale.tools.preflight.preflight import ahead_program

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs" / "llama3_8b.py")
BLOCK, TABLES, NORM = 218_112_000, 2 * 128_256 * 4096, 4096  # parameters of Llama 3 8B: 32 blocks, two tables, a norm
MIB = 2**20


def opened(machine="v5p:4x4x4", **settings):
    place = open_machine(machine)
    cfg = load_config(CONFIG, {name.replace("__", "."): value for name, value in settings.items()})
    return ahead_program(cfg, place), place


def played(size, parts):
    """(ticks, with some forward, with some backward, most inputs that a stage keeps) of lockstep 1F1B, tick by tick.

    A tick's forward comes first: its input is kept before the backward of the same tick lets go of another.
    """
    forward = {(tick, stage): tick - stage for tick in range(3 * (size + parts)) for stage in range(size)}
    backward = {(tick, stage): tick - 2 * (size - 1) + stage for tick, stage in forward}
    inside = lambda table: {place: part for place, part in table.items() if 0 <= part < parts}
    forward, backward = inside(forward), inside(backward)
    ended = {(stage, part): tick for (tick, stage), part in backward.items()}
    lives = [(stage, tick, ended[stage, part]) for (tick, stage), part in forward.items()]
    kept = max(
        sum(begin <= tick <= end for other, begin, end in lives if other == stage)
        for stage in range(size)
        for tick in range(3 * (size + parts))
    )
    ticks = [{tick for tick, _ in table} for table in (forward, backward)]
    return max(ticks[1]) + 1, len(ticks[0]), len(ticks[1]), kept


@pytest.mark.parametrize(("size", "parts"), [(2, 1), (2, 8), (4, 3), (4, 4), (4, 16), (8, 9)])
def test_ticks_slots_and_bubble_are_those_of_the_schedule_as_it_runs(size, parts):
    schedule = ScheduleSize("1f1b", size, 1, parts)
    ticks, some_forward, some_backward, kept = played(size, parts)
    assert (schedule.num_ticks, schedule.num_slots) == (ticks, kept)
    assert some_forward == some_backward == schedule.slowdown() * schedule.chunk_runs
    assert schedule.bubble == pytest.approx(1 - parts / some_forward)


@pytest.mark.parametrize(
    ("size", "chunks", "parts"), [(4, 2, 8), (4, 5, 8), (8, 4, 32), (2, 2, 2), (2, 4, 16), (3, 1, 7)]
)
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "gpipe"])
def test_formulas_hold_for_the_tables_that_run(name, size, chunks, parts):
    table = make_schedule(name, size, chunks, parts)
    pending = {index for index in table.backward.pending.ravel().tolist() if index >= 0}
    assert len(table.forward.microbatch) == table.num_ticks
    assert len({*table.forward.slot.ravel().tolist()}) == table.num_slots
    assert len(pending) == table.num_pending + table.num_deferred
    assert bubble_fraction(table, EQUAL_COSTS) == pytest.approx(table.bubble)
    costs = Costs(1.0, 1.25, 1.5, 0.75)
    alone, whole = chunks * parts * sum(costs), simulated_seconds(table, costs)
    assert whole == pytest.approx(table.slowdown(costs) * alone)
    of_last = pass_seconds(table, costs)[:, -1].sum()
    assert of_last == pytest.approx((1 + recomputed_time(table, costs)) * alone)
    assert whole == pytest.approx((1 + idle_time(table, costs)) * of_last)


def test_chunks_make_the_bubble_smaller_and_gpipe_keeps_the_inputs_of_all():
    schedule = ScheduleSize("1f1b", 8, 4, 32)
    assert bubble_formula(schedule) == "5.2% = (P-1)/(VM+P-1) = 7/135"
    assert (schedule.num_ticks, schedule.num_slots) == (166, 39)
    stages = make_pipeline_axis(8, PipelineConfig(chunks=4), 126, 0.0)
    assert (stages.chunk_work, stages.layer_slots) == (4, 16)
    gpipe = ScheduleSize("gpipe", 4, 1, 8)
    assert (gpipe.bubble, gpipe.num_ticks, gpipe.num_slots) == (pytest.approx(3 / 11), 22, 8)
    one = ScheduleSize(num_microbatches=8)
    assert (one.bubble, one.slowdown(), idle(1, 32, 8, 0.1)) == (0, 1, 0)


def idle(size, layers, parts, head_fraction, **settings):
    pipeline = make_pipeline_axis(size, PipelineConfig(**settings), layers, 0.0)
    return idle_ratio(pipeline, ScheduleSize("1f1b", size, 1, parts), head_fraction)


def test_a_stage_waits_for_the_bubble_for_layers_that_it_lacks_and_for_a_head_that_another_has_alone():
    assert idle(4, 32, 9, 0.0) == pytest.approx(3 / 9)
    assert idle(4, 30, 9, 0.0) == pytest.approx(32 / 30 * 12 / 9 - 1)
    assert idle(4, 32, 9, 0.5) == pytest.approx(0.5 * 3 / 9)
    assert idle(4, 32, 9, 0.5, head="whole") == pytest.approx(0.5 * 3 / 9 + 0.5 * 3)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_stage_holds_its_weights_a_float32_sum_of_gradients_and_the_inputs_of_its_layers(tensor):
    program, _ = opened(mesh__pipeline=4, mesh__tensor=tensor, train__num_microbatches=4)
    need = memory_need(program)
    rows = {row.kind: row for row in memory_rows(program, need)}
    norms = 8 * 2 * 4096 + NORM  # which every device of tensor has whole
    numbers = (8 * BLOCK + NORM + TABLES // 4 - norms) // tensor + norms
    assert rows["gathered weights"].num_bytes == 2 * numbers
    assert rows["gradients"].num_bytes == 4 * numbers
    hop = tensor * 8192 * 4096 * 2 // tensor  # so many rows of 8,192 tokens a microbatch and device
    assert rows["layer inputs"].num_bytes == 4 * 8 * hop and hop_bytes(program) == hop
    assert "4 of 4 microbatches in flight x 8 layers x 64.0 MiB" in rows["layer inputs"].source
    assert sum(row.num_bytes for row in rows.values()) == need.total


def test_memory_does_not_grow_with_the_microbatches_but_gpipes():
    need = lambda parts, schedule: (
        memory_need(
            opened(
                mesh__pipeline=4,
                train__num_microbatches=parts,
                batch_tokens=f"{16 * parts} rows",
                pipeline__schedule=schedule,
            )[0]
        ).total
    )
    assert need(8, "1f1b") == need(64, "1f1b")
    assert need(8, "zero_bubble") == need(64, "zero_bubble") == need(8, "1f1b") + 3 * 64 * MIB  # gradients held on
    more = need(64, "gpipe") - need(8, "gpipe")
    assert more == 56 * (8 + 1) * 64 * MIB  # inputs of 8 layers, and the gradient of the last stage's result


def test_a_whole_head_is_on_every_stage():
    of = lambda head: memory_need(opened(mesh__pipeline=4, train__num_microbatches=4, pipeline__head=head)[0])
    cut, whole = of("cut"), of("whole")
    more = TABLES * 3 // 4 + BLOCK  # the last stage, which has the head alone, has fewer layers, and another has 9
    assert (whole.grads - cut.grads, whole.weights - cut.weights) == (4 * more, 2 * more)


def test_activations_stay_where_rows_and_context_double_together():
    sizes = [
        memory_need(
            opened(
                mesh__context=context,
                seq_len=8192 * context,
                batch_tokens=f"{64 // context} rows",
                model__loss_chunk_tokens=512,
            )[0]
        ).activations
        for context in (1, 2, 4, 8)
    ]
    gathered = [0, 2 * 2 * 8192, 4 * 2 * 8192, 8 * 2 * 8192]  # positions, and as many gradients
    rest = [size - 2 * 1024 * 2 * positions for size, positions in zip(sizes, gathered)]
    assert rest[0] == rest[1] == rest[2] == rest[3]


def test_devices_that_share_rows_share_the_state_too():
    of = lambda context: opened(mesh__context=context, mesh__data=2, seq_len=65_536, batch_tokens="64 rows")[0]
    one, four = of(1), of(4)
    assert memory_need(one).state == memory_need(four).state
    small, large = sent(one), sent(four)
    params = one.cfg.model.num_params
    assert small["data", "all-reduce"] == large["data", "all-reduce"] == 4 * params / 32
    assert small["fsdp", "all-gather"] == large["fsdp", "all-gather"] == 2 * 2 * params
    keys = 4 * 65_536 * 1024 * 32 * 4  # of 4 rows, in 32 layers
    assert large["context", "all-gather"] == 2 * 2 * params / 8 + 2 * keys
    assert large["context", "reduce-scatter"] == 4 * params / 8 + keys


def test_keys_and_values_of_a_long_row_are_as_many_bytes_as_its_positions_and_heads_say():
    program, _ = opened(mesh__context=64, seq_len=131_072, batch_tokens="1 row")
    layer = 4 * 131_072 * 1024
    assert 64 * attention_bytes(program).keys == layer == 512 * MIB
    of = lambda way: {
        (one.kind, one.overlaps): one.nbytes / 32
        for one in step_collectives(
            opened(mesh__context=8, seq_len=131_072, batch_tokens="8 rows", context__attention=way)[0]
        )
        if one.axis == "context" and one.in_stage
    }
    assert of("gather") == of("auto") == {("all-gather", False): 2 * layer, ("reduce-scatter", False): layer}
    assert of("ulysses") == {("all-to-all", False): 3 * (layer + 4 * layer) / 8}
    assert of("ring") == {("collective-permute", True): (3 * 7 - 1 + 7 * 2 + 1) * layer / 8}  # gradients in float32


def test_layers_with_a_window_are_sent_its_keys_alone():
    place = open_machine("v5p:2x2x2")
    settings = {"mesh.context": 4, "seq_len": 32_768, "batch_tokens": "2 rows"}
    program = ahead_program(load_config(CONFIG.replace("llama3_8b", "gemma3_4b"), settings), place)
    model = program.cfg.model
    of = {one.kind: one.nbytes for one in step_collectives(program) if one.axis == "context" and one.in_stage}
    keys = 2 * model.key_width * 2  # bytes of a position
    near = program.plan.needs.window_layers.windowed  # of 34 layers, those with a window of 1,024 keys
    assert of["all-gather"] == pytest.approx((model.num_layers - near) * 2 * 32_768 * keys)
    assert of["collective-permute"] == pytest.approx(near * 3 * 2 * 1023 * keys)  # in front of each of two chunks


def sent(program):
    """{(axis, kind): bytes}."""
    found = {}
    for one in step_collectives(program):
        if one.nbytes and program.mesh.shape[one.axis] > 1:
            found[one.axis, one.kind] = found.get((one.axis, one.kind), 0) + one.nbytes
    return found


def test_weights_and_gradients_of_a_stage_travel_once_a_step_and_activations_in_every_tick():
    of = lambda parts: sent(
        opened(mesh__pipeline=4, mesh__data=2, train__num_microbatches=parts, batch_tokens=f"{16 * parts} rows")[0]
    )
    few, many = of(4), of(8)
    numbers = 8 * BLOCK + NORM + TABLES // 4
    assert few["fsdp", "all-gather"] == many["fsdp", "all-gather"] == 2 * numbers
    assert few["data", "all-reduce"] == many["data", "all-reduce"] == 4 * numbers / 8
    assert ("pipeline", "all-to-all") not in few  # each stage keeps its layers and its part of the vocabulary
    hop = 8192 * 4096 * 2
    assert few["pipeline", "collective-permute"] == 2 * (4 + 2 * 4 - 2) * hop
    assert many["pipeline", "all-reduce"] == 4 * 8 * hop
    uneven = sent(opened(mesh__pipeline=4, model__num_layers=30, train__num_microbatches=4)[0])  # 8 + 8 + 8 + 6
    assert uneven["pipeline", "all-to-all"] == (2 + 4) * numbers / 16


def test_stages_in_several_slices_send_between_them_what_travels_and_no_gradients():
    settings = dict(mesh__tensor=2, batch_tokens="256 rows", train__num_microbatches=4)
    staged, place = opened("2*v6e:8x8", mesh__pipeline=2, **settings)
    copies, _ = opened("2*v6e:8x8", mesh__data=2, **settings)
    dcn = [name for name in communication_time(staged, place).links_s if name.startswith("dcn")]
    assert dcn == ["dcn:pipeline"]
    axis, number, seconds = slice_crossing(copies, place)
    assert (axis, number) == ("data", 2)
    hop = 8192 * 4096 * 2 / 2  # one row of a microbatch and copy, and two where stages take the copies' place
    port = place.chip.dcn_bandwidth
    assert seconds == {
        "data": pytest.approx(4 * (32 * BLOCK + TABLES) / 2 / 32 / port, rel=0.01),
        "pipeline": pytest.approx(2 * (4 + 2 * 2 - 2) * 2 * hop / port),
    }
    assert slice_crossing(staged, place)[2] == pytest.approx(seconds, rel=0.01)
    said = cautions.wrong_axis_across_slices("data", 2, {"data": 3.0, "pipeline": 1.0})
    assert "multiply mesh.pipeline by 2" in said.way_out
    assert cautions.wrong_axis_across_slices("pipeline", 2, {"data": 3.0, "pipeline": 1.0}) is None


def test_the_step_is_longer_by_what_stages_wait():
    program, place = opened(mesh__pipeline=4, train__num_microbatches=4)
    piped, plain = estimate_step(program, place), estimate_step(*opened(train__num_microbatches=1))
    assert piped.compute_s == plain.compute_s and plain.idle_s == 0
    head = 6 * TABLES / 2 / (program.cfg.flops_per_token + 2 * 32 * (BLOCK + 8192 * 4096))  # near enough
    assert piped.idle_s == pytest.approx(0.75 * (1 - head) * piped.compute_s, rel=0.01)
    assert piped.cost[0] == piped.compute_s + piped.idle_s + piped.exposed_s


def test_few_microbatches_and_few_positions_are_told():
    few = ScheduleSize("1f1b", 4, 1, 7)
    said = lambda **changes: cautions.bubble_too_large(dataclasses.replace(few, **changes), 32)
    assert "30.0% = (P-1)/(VM+P-1) = 3/10" in said().why
    assert said(num_microbatches=8) is None
    assert "or pipeline.chunks=4" in said(num_microbatches=4).way_out
    assert "or pipeline.schedule=zero_bubble for a bubble of 24.3%" in said().way_out
    zero = said(name="zero_bubble")
    assert "24.3% = 3(P-1)/(4VM+3(P-1)) = 9/37" in zero.why and "schedule" not in zero.way_out
    assert cautions.too_few_positions(8, 8192, 1024) is None
    assert "mesh.context=8," in cautions.too_few_positions(16, 8192, 1024).way_out


def test_the_plan_says_the_bubble_and_what_a_stage_holds():
    cfg = load_config(CONFIG, {"mesh.pipeline": 4, "mesh.context": 2, "train.num_microbatches": 4})
    plan = make_plan(cfg, open_machine("v5p:4x4x4"), PlanOptions())
    text = "\n".join(plan_lines(plan))
    assert re.search(r"bubble +42.9% +\(P-1\)/\(VM\+P-1\) = 3/7 of the stages' time", text)
    assert re.search(r"pipeline idle \d+ ms", text) and "the bubble is 42.9%" in text
    assert "includes 128.0 MiB of remote keys and values (gather)" in text
    assert sum(row.num_bytes for row in plan.device.memory) == plan.device.memory_bytes


# MB that a chip sends in a step, as jaxscale preflight read them: jax 0.12.0.1, libtpu 0.0.51, v5p:4x4x4, 2026-11-24.
COMPILED = [
    (
        "7b",
        {"mesh.pipeline": 4, "train.num_microbatches": 8, "batch_tokens": "256 rows"},
        {
            ("fsdp", "all-gather"): 3161.5,
            ("fsdp", "reduce-scatter"): 6322.9,
            ("pipeline", "collective-permute"): 1879.0,
            ("pipeline", "all-reduce"): 3222.4,
        },
    ),
    (
        "7b",
        {
            "mesh.pipeline": 8,
            "mesh.tensor": 2,
            "pipeline.chunks": 4,
            "train.num_microbatches": 16,
            "batch_tokens": "128 rows",
        },
        {
            ("fsdp", "all-gather"): 632.3,
            ("fsdp", "reduce-scatter"): 1264.6,
            ("pipeline", "collective-permute"): 6845.1,
            ("pipeline", "all-reduce"): 5639.0,
            ("pipeline", "all-to-all"): 553.3,
            ("tensor", "all-reduce"): 13_958.6 + 11_811.2,  # as gathers and scatters
        },
    ),
    (
        "llama3_8b",
        {
            "mesh.pipeline": 4,
            "mesh.context": 4,
            "seq_len": 32_768,
            "train.num_microbatches": 8,
            "batch_tokens": "32 rows",
        },
        {
            ("fsdp", "all-gather"): 3011.2,
            ("fsdp", "reduce-scatter"): 6039.8,
            ("pipeline", "collective-permute"): 1879.0,
            ("pipeline", "all-reduce"): 3222.4,
            ("context", "all-gather"): 13_650.3,
            ("context", "reduce-scatter"): 7751.1 + 402.7 / 2,  # two of the gradients are summed whole
        },
    ),
]


@pytest.mark.parametrize(("name", "settings", "compiled"), COMPILED, ids=["stages", "chunks, tensor", "context"])
def test_a_pipeline_sends_what_it_does_as_compiled(name, settings, compiled):
    program = ahead_program(load_config(CONFIG.replace("llama3_8b", name), settings), open_machine("v5p:4x4x4"))
    found = {}
    for (axis, kind), nbytes in sent(program).items():
        others = (program.mesh.shape[axis] - 1) / program.mesh.shape[axis]
        times = {"all-reduce": 2 * others, "collective-permute": 1}.get(kind, others)
        found[axis, kind] = pytest.approx(times * nbytes / 1e6, rel=0.003)
    assert compiled == found


@pytest.mark.parametrize(
    ("name", "settings", "seconds"),
    [
        (*COMPILED[0][:2], 2.046),
        (*COMPILED[2][:2], 3.715),
        ("llama3_8b", {"mesh.context": 8, "seq_len": 131_072, "batch_tokens": "8 rows"}, 8.774),
    ],
    ids=["4,096", "32,768", "131,072"],
)
def test_products_take_as_long_as_those_of_the_compiled_step(name, settings, seconds):
    """At the peak of a v5p, by the same preflights; blocks of attention that are half masked are not planned."""
    place = open_machine("v5p:4x4x4")
    program = ahead_program(load_config(CONFIG.replace("llama3_8b", name), settings), place)
    assert estimate_step(program, place).compute_s == pytest.approx(seconds, rel=0.05)
