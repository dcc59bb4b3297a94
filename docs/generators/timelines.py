"""Drawings of pipeline schedules, and what a simulated step measures of them: the very tables that the program scans.

Time goes to the right, with a row for each stage. A pass is numbered by its microbatch; nobody goes on before all have
done their pass of a tick.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from generators.svg import Ink, figure, rectangle, sentence, text
from generators.words import table
from jaxscale.sharding.schedules import IDLE, Passes, Schedule, ideal_bubble, make_schedule, simulated_seconds

RECOMPUTED, TO_INPUTS, TO_WEIGHTS = 1.0, 1.0, 1.0  # what a backward pass consists of, in forward passes of products
FORWARD, BACKWARD = 1.0, RECOMPUTED + TO_INPUTS + TO_WEIGHTS  # of all layers of a stage
SHOWN = {"1f1b": ("1f1b", 4, 1, 8), "interleaved": ("1f1b", 4, 2, 8), "gpipe": ("gpipe", 4, 1, 8)}
TITLES = {"1f1b": "1F1B", "interleaved": "Interleaved 1F1B", "gpipe": "GPipe"}
COMPARED = [(P, V, M) for P in (4, 8, 16) for V, M in ((1, 16), (2, 16), (1, 64), (4, 64))]
LEFT, UNIT, ROW, GAP, TOP = 62, 15.6, 28, 4, 20  # pixels; UNIT: of a stage's forward pass
INKS = {
    "forward": (Ink("#2b69ad", "#fff"), Ink("#8dbdec", "#000")),  # of the first chunk, and of the second
    "backward": (Ink("#a84a12", "#fff"), Ink("#f2b176", "#000")),
}


class Turn(NamedTuple):
    """The half of a tick in which stages go forward, or that in which they go back."""

    tick: int
    kind: str  # "forward" or "backward"
    passes: Passes
    begin: float
    end: float


def turns(schedule: Schedule, forward: float, backward: float) -> Iterator[Turn]:
    """What takes time, in order; a half in which no stage has a pass takes none."""
    time = 0.0
    for tick in range(schedule.num_ticks):
        for kind, passes, took in (
            ("forward", schedule.forward, forward),
            ("backward", schedule.backward, backward),
        ):
            if (passes.microbatch[tick] != IDLE).any():
                yield Turn(tick, kind, passes, time, time + took)
                time += took


def chunk_seconds(schedule: Schedule) -> tuple[float, float]:
    """(forward, backward) pass of a chunk, those of a stage's layers being FORWARD and BACKWARD."""
    return FORWARD / schedule.num_chunks, BACKWARD / schedule.num_chunks


def took(schedule: Schedule) -> float:
    """Simulated time of a step."""
    return simulated_seconds(schedule, *chunk_seconds(schedule))


def measured_bubble(schedule: Schedule) -> float:
    """Part of the simulated time in which a stage has no pass."""
    return 1 - schedule.num_microbatches * (FORWARD + BACKWARD) / took(schedule)


def timeline(name: str) -> str:
    """The drawing of one of SHOWN, and a sentence below it."""
    schedule = make_schedule(*SHOWN[name])
    P, V, M = schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
    chunks = f" of {V} chunks" if V > 1 else ""
    title = f"{TITLES[name]}: {P} stages{chunks}, {M} microbatches"
    marks = list(drawn_passes(schedule))
    width = LEFT + max(took(make_schedule(*shown)) for shown in SHOWN.values()) * UNIT + 2
    bottom = TOP + P * (ROW + GAP)
    caption = sentence(
        f"{title}. {schedule.num_ticks} ticks; the step takes as long as {took(schedule):g} forward passes of a stage, "
        f"and a stage stands still for {measured_bubble(schedule):.1%} of it. It keeps the inputs of at most "
        f"{schedule.num_slots} passes."
    )
    return figure(title, orders(schedule), caption, (width, bottom + 24), marks + list(key(V, bottom + 8)))


def drawn_passes(schedule: Schedule) -> Iterator[str]:
    """A mark for each pass and each idle turn of each stage, with numbers of ticks above and of stages beside them."""
    for s in range(schedule.num_stages):
        yield text(LEFT - 8, TOP + s * (ROW + GAP) + ROW / 2, f"stage {s}", anchor="end", size=12)
    yield text(LEFT - 8, TOP - 9, "tick", anchor="end", size=8.5)
    ticks: set[int] = set()
    for turn in turns(schedule, *chunk_seconds(schedule)):
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
            told = f"{where}: microbatch {m} {turn.kind} through chunk {v}, slot {turn.passes.slot[turn.tick, s]}"
            yield rectangle(place, INKS[turn.kind][v % 2], f"{m}", f"pass {turn.kind}", told)


def key(num_chunks: int, y: float) -> Iterator[str]:
    """What the colours mean."""
    x = LEFT
    for kind, inks in INKS.items():
        for v in range(num_chunks):
            word = f"{kind}, chunk {v}" if num_chunks > 1 else kind
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
        for turn in turns(schedule, *chunk_seconds(schedule)):
            m, v = (int(of[turn.tick, s]) for of in turn.passes[:2])
            chunk = f" chunk {v}" if schedule.num_chunks > 1 else ""
            parts.append("idle" if m == IDLE else f"{turn.kind} {m}{chunk}")
        told.append(f"Stage {s}: {', '.join(parts)}.")
    return " ".join(told)


def bubbles() -> str:
    """Bubbles as the simulator measures them beside the formula, and what a stage keeps, for several sizes."""
    rows = []
    for P, V, M in COMPARED:
        schedule, gpipe = make_schedule("1f1b", P, V, M), make_schedule("gpipe", P, V, M)
        assert np.isclose(measured_bubble(schedule), measured_bubble(gpipe)), "both idle equally often"
        idle, turns_of = P - 1, V * M + P - 1
        rows.append([
            f"{P}, {V}, {M}", f"{measured_bubble(schedule):.1%}", f"{idle}/{turns_of} = {ideal_bubble(P, V, M):.1%}",
            f"{schedule.num_slots} ({schedule.num_slots / V:g})", f"{gpipe.num_slots} ({gpipe.num_slots / V:g})",
        ])  # fmt: skip
    head = ["P, V, M", "bubble, simulated", "(P-1) / (VM+P-1)", "1F1B keeps", "GPipe keeps"]
    return table(head, rows)


def told() -> str:
    """What a run says of the first schedule."""
    return str(make_schedule(*SHOWN["1f1b"]))


def split_backward() -> float:
    """Work of a microbatch whose gradients of weights are taken in a pass of their own, which computes the layers once
    more, over that of one whose are not: under full recomputation."""
    return 1 + RECOMPUTED / (FORWARD + BACKWARD)
