"""Drawings of pipeline schedules, and what a simulated step measures of them: the very tables that the program scans.

Time goes to the right, with a row for each stage. A pass is numbered by its microbatch; nobody goes on before all have
done their pass of a tick.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from generators.svg import Ink, figure, rectangle, sentence, text
from generators.words import table
from jaxscale.core.axes.pipeline_schedules import EQUAL_COSTS, IDLE, Backward, Costs, Passes, Schedule, make_schedule
from jaxscale.tools.planning.schedule_times import bubble_fraction, pass_seconds, simulated_seconds

BACKWARD = sum(EQUAL_COSTS) - EQUAL_COSTS.forward  # a backward pass, in forward passes
SHOWN = {
    "1f1b": ("1f1b", 4, 1, 8),
    "interleaved": ("1f1b", 4, 2, 8),
    "zero_bubble": ("zero_bubble", 4, 1, 8),
    "gpipe": ("gpipe", 4, 1, 8),
}
TITLES = {"1f1b": "1F1B", "interleaved": "Interleaved 1F1B", "zero_bubble": "Zero bubble", "gpipe": "GPipe"}
COMPARED = [(P, V, M) for P in (4, 8, 16) for V, M in ((1, 16), (2, 16), (1, 64), (4, 64))]
LEFT, UNIT, ROW, GAP, TOP = 62, 15.6, 28, 4, 20  # pixels; UNIT: of a stage's forward pass
INKS = {
    "forward": (Ink("#2b69ad", "#fff"), Ink("#8dbdec", "#000")),  # of the first chunk, and of the second
    "backward": (Ink("#a84a12", "#fff"), Ink("#f2b176", "#000")),
    "of inputs": (Ink("#f6d7b8", "#000"),) * 2,
    "of weights": (Ink("#5b6b1f", "#fff"),) * 2,
}
KEY = {"of inputs": "backward, without weight gradients", "of weights": "backward again, for weight gradients"}


class Turn(NamedTuple):
    """The half of a tick in which stages go forward, or that in which they go back."""

    tick: int
    kind: str  # "forward" or "backward"
    passes: Passes | Backward
    begin: float
    end: float


def turns(schedule: Schedule) -> Iterator[Turn]:
    """What takes time, in order; a half in which no stage has a pass takes none."""
    time, costs = 0.0, chunk_costs(schedule)
    halves = (
        ("forward", schedule.forward, pass_seconds(schedule, Costs(costs.forward, 0.0, 0.0, 0.0))),
        ("backward", schedule.backward, pass_seconds(schedule, costs._replace(forward=0.0))),
    )
    for tick in range(schedule.num_ticks):
        for kind, passes, work in halves:
            if length := float(work[tick].max()):
                yield Turn(tick, kind, passes, time, time + length)
                time += length


def chunk_costs(schedule: Schedule) -> Costs:
    """Of a chunk, a forward pass of a stage's layers taking 1."""
    return Costs(*(part / schedule.num_chunks for part in EQUAL_COSTS))


def took(schedule: Schedule) -> float:
    """Simulated time of a step."""
    return simulated_seconds(schedule, chunk_costs(schedule))


def kind_of(schedule: Schedule, turn: Turn, stage: int) -> str:
    """The kind of a stage's pass, one of INKS."""
    kinds = {"of inputs": schedule.inputs_only, "of weights": schedule.weights_only}
    of_its_own = (kind for kind, which in kinds.items() if turn.kind == "backward" and which[turn.tick, stage])
    return next(of_its_own, turn.kind)


def timeline(name: str) -> str:
    """The drawing of one of SHOWN, and a sentence below it."""
    schedule = make_schedule(*SHOWN[name])
    P, V, M = schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
    chunks = f" of {V} chunks" if V > 1 else ""
    title = f"{TITLES[name]}: {P} stages{chunks}, {M} microbatches"
    marks = list(drawn_passes(schedule))
    lost = "is idle or repeats a pass for" if schedule.num_deferred else "is idle for"
    width = LEFT + max(took(make_schedule(*shown)) for shown in SHOWN.values()) * UNIT + 2
    bottom = TOP + P * (ROW + GAP)
    caption = sentence(
        f"{title}. The step has {schedule.num_ticks} ticks and takes as long as {took(schedule):g} forward passes of a "
        f"stage. A stage {lost} {bubble_fraction(schedule, chunk_costs(schedule)):.1%} of this time, and saves the "
        f"inputs of at most {schedule.num_slots} passes. The loss is omitted."
    )
    return figure(title, orders(schedule), caption, (width, bottom + 24), marks + list(key(schedule, bottom + 8)))


def drawn_passes(schedule: Schedule) -> Iterator[str]:
    """A mark for each pass and each idle turn of each stage, with numbers of ticks above and of stages beside them."""
    for s in range(schedule.num_stages):
        yield text(LEFT - 8, TOP + s * (ROW + GAP) + ROW / 2, f"stage {s}", anchor="end", size=12)
    yield text(LEFT - 8, TOP - 9, "tick", anchor="end", size=8.5)
    ticks: set[int] = set()
    for turn in turns(schedule):
        left, width = LEFT + turn.begin * UNIT, (turn.end - turn.begin) * UNIT
        if turn.tick not in ticks:
            ticks.add(turn.tick)
            yield text(left + 1, TOP - 9, f"{turn.tick}", anchor="start", size=8.5)
        for s in range(schedule.num_stages):
            m, v = (int(of[turn.tick, s]) for of in turn.passes[:2])
            place = (left, TOP + s * (ROW + GAP), width, ROW)
            where = f"stage {s}, tick {turn.tick}"
            if m == IDLE:
                yield rectangle(place, None, "", "idle", f"{where}: idle")
                continue
            kind = kind_of(schedule, turn, s)
            told = f"{where}: microbatch {m} {kind} through chunk {v}, slot {turn.passes.slot[turn.tick, s]}"
            yield rectangle(place, INKS[kind][v % 2], f"{m}", f"pass {kind}", told)


def key(schedule: Schedule, y: float) -> Iterator[str]:
    """What the colours mean."""
    x = LEFT
    for kind, inks in INKS.items():
        if kind in KEY and not schedule.num_deferred:
            continue
        for v in range(schedule.num_chunks):
            word = f"{kind}, chunk {v}" if schedule.num_chunks > 1 else KEY.get(kind, kind)
            yield rectangle((x, y, 14, 12), inks[v % 2], "", "key", "")
            yield text(x + 19, y + 6, word, anchor="start", size=11)
            x += 34 + 6.2 * len(word)
    yield rectangle((x, y, 14, 12), None, "", "key", "")
    yield text(x + 19, y + 6, "idle", anchor="start", size=11)


def orders(schedule: Schedule) -> str:
    """In words, what each stage does one after the other: for those who do not see the drawing."""
    told = []
    for s in range(schedule.num_stages):
        parts = []
        for turn in turns(schedule):
            m, v = (int(of[turn.tick, s]) for of in turn.passes[:2])
            chunk = f" chunk {v}" if schedule.num_chunks > 1 else ""
            parts.append("idle" if m == IDLE else f"{kind_of(schedule, turn, s)} {m}{chunk}")
        told.append(f"Stage {s}: {', '.join(parts)}.")
    return " ".join(told)


def bubbles() -> str:
    """Bubbles as the simulator measures them beside the formula, and what a stage keeps, for several sizes."""
    rows = []
    for P, V, M in COMPARED:
        schedule, zero, gpipe = (make_schedule(name, P, V, M) for name in ("1f1b", "zero_bubble", "gpipe"))
        assert np.isclose(schedule.bubble, gpipe.bubble), "both idle equally often"
        assert schedule.num_slots == zero.num_slots, "both keep as much"
        idle, turns_of = P - 1, V * M + P - 1
        rows.append([
            f"{P}, {V}, {M}", f"{bubble_fraction(schedule, EQUAL_COSTS):.1%}",
            f"{idle}/{turns_of} = {schedule.bubble:.1%}", f"{bubble_fraction(zero, EQUAL_COSTS):.1%}",
            f"{schedule.num_slots} ({schedule.num_slots / V:g})", f"{gpipe.num_slots} ({gpipe.num_slots / V:g})",
        ])  # fmt: skip
    head = ["P, V, M", "bubble", "(P-1) / (VM+P-1)", "zero bubble", "saved inputs, 1F1B", "saved inputs, GPipe"]
    return table(head, rows)


def told() -> str:
    """What a run says of the first schedule."""
    return str(make_schedule(*SHOWN["1f1b"]))


def redone_turns() -> int:
    """Backward passes that all stages of the drawn zero bubble begin twice."""
    return int(make_schedule(*SHOWN["zero_bubble"]).inputs_only.sum())


def bubble(*sizes) -> str:
    """Of a schedule of this name and sizes."""
    return f"{make_schedule(*sizes).bubble:.1%}"
