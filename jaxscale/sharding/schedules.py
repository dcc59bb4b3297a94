"""Pipeline schedules as tables of integers: what each stage does at each tick, made and proved before anything runs.

A model's layers fall into P * V chunks, one after the other; stage s holds chunks s, P + s, 2 P + s, ... At a tick
every stage takes one microbatch forward through a chunk, then one backward, or leaves either out. All stages go through
a tick together: while some go forward the others would only wait. What a stage hands on is there at the next tick.

So 1F1B (arXiv:1806.03377), interleaved 1F1B (arXiv:2104.04473) and GPipe (arXiv:1811.06965) are one program with three
tables, and all take M V + P - 1 forward and as many backward passes of a chunk, of which M V are work.

P stages  V chunks of a stage  M microbatches  t ticks  C chunks of the model, P * V
"""

import dataclasses
from typing import NamedTuple

import numpy as np

IDLE = -1


class Passes(NamedTuple):
    """Forward or backward passes: int32[t, P] each."""

    microbatch: np.ndarray  # or IDLE
    chunk: np.ndarray  # of the stage's own; 0 where it is idle
    slot: np.ndarray  # where the inputs of the chunk's layers are kept meanwhile


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The tables. The loss of a microbatch is taken at the tick at which its last chunk has gone forward."""

    name: str
    num_stages: int
    num_chunks: int  # of a stage
    num_microbatches: int
    forward: Passes
    backward: Passes
    num_slots: int
    num_held: int  # gradients of the last chunk's result that wait for its backward pass, one included that is due

    @property
    def num_ticks(self) -> int:
        """All ticks."""
        return len(self.forward.microbatch)

    @property
    def enters(self) -> np.ndarray:
        """int32[t]: the microbatch that is embedded for the first chunk, or IDLE."""
        return first_chunk(self.forward)

    @property
    def leaves(self) -> np.ndarray:
        """int32[t]: the microbatch whose loss is taken, or IDLE."""
        last = (self.forward.chunk[:, -1] == self.num_chunks - 1) & (self.forward.microbatch[:, -1] != IDLE)
        return np.where(last, self.forward.microbatch[:, -1], IDLE)

    @property
    def returns(self) -> np.ndarray:
        """int32[t]: the microbatch whose gradient has come back to the embedding, or IDLE."""
        return first_chunk(self.backward)

    @property
    def bubble(self) -> float:
        """Part of the ticks' time in which a stage idles; forward and backward passes idle equally often."""
        work = self.num_microbatches * self.num_chunks
        return 1 - work / int(np.any(self.forward.microbatch != IDLE, axis=1).sum())

    def __str__(self) -> str:
        chunks = f" of {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        return (
            f"{self.name}, {self.num_stages} stages{chunks}, {self.num_microbatches} microbatches: bubble "
            f"{self.bubble:.1%}, at most {self.num_slots} passes of a stage wait for their gradients"
        )


def first_chunk(passes: Passes) -> np.ndarray:
    """int32[t]: the microbatch of the model's first chunk, or IDLE."""
    return np.where(passes.chunk[:, 0] == 0, passes.microbatch[:, 0], IDLE)


def ideal_bubble(num_stages: int, num_chunks: int, num_microbatches: int) -> float:
    """(P - 1) / (V M + P - 1), as arXiv:2104.04473 has it relative to all of the time."""
    return (num_stages - 1) / (num_chunks * num_microbatches + num_stages - 1)


def make_schedule(name: str, num_stages: int, num_chunks: int, num_microbatches: int) -> Schedule:
    """The tables of "1f1b" or "gpipe", proved. With several chunks the microbatches come in groups of P: M % P == 0."""
    P, V, M = num_stages, num_chunks, num_microbatches
    assert V == 1 or M % P == 0, f"{M} microbatches are no multiple of {P} stages"
    start = {"1f1b": P * V - 1, "gpipe": M * V + P - 1}[name]  # when the first gradient can, or may, go back
    ticks = start + last_tick(P, V, M) + 1
    make = lambda: Passes(np.full((ticks, P), IDLE, np.int32), *(np.zeros((ticks, P), np.int32) for _ in range(2)))
    forward, backward = make(), make()
    for m in range(M):
        for chunk in range(P * V):
            v, s = divmod(chunk, P)
            there, back = tick_of(m, chunk, P, V), start + tick_of(m, P * V - 1 - chunk, P, V)
            for passes, t in ((forward, there), (backward, back)):
                assert passes.microbatch[t, s] == IDLE, f"stage {s} has two passes at tick {t}"
                passes.microbatch[t, s], passes.chunk[t, s] = m, v
    num_slots = fill_slots(forward, backward)
    held = 1 if name == "1f1b" else M
    schedule = Schedule(name, P, V, M, forward, backward, num_slots, held)
    check_schedule(schedule)
    return schedule


def tick_of(microbatch: int, chunk: int, num_stages: int, num_chunks: int) -> int:
    """When a microbatch goes forward through a chunk of the model: each chunk one tick after the one before it.

    P microbatches go through the first chunk of a stage, then through its second, and so on. The backward passes are
    the same with the chunks counted from the end.
    """
    group, place = divmod(microbatch, num_stages)
    v, s = divmod(chunk, num_stages)
    return (group * num_chunks + v) * num_stages + place + s


def last_tick(num_stages: int, num_chunks: int, num_microbatches: int) -> int:
    """When the last microbatch goes through the last chunk."""
    return tick_of(num_microbatches - 1, num_stages * num_chunks - 1, num_stages, num_chunks)


def fill_slots(forward: Passes, backward: Passes) -> int:
    """Numbers the slots in both tables, each used again as soon as it is free, and returns how many there are."""
    ticks, P = forward.microbatch.shape
    most = 0
    for s in range(P):
        free: list[int] = []
        held: dict[tuple[int, int], int] = {}
        for t in range(ticks):
            if forward.microbatch[t, s] != IDLE:
                slot = free.pop() if free else len(held)
                held[forward.microbatch[t, s], forward.chunk[t, s]] = forward.slot[t, s] = slot
            if backward.microbatch[t, s] != IDLE:
                slot = held.pop((backward.microbatch[t, s], backward.chunk[t, s]))
                backward.slot[t, s] = slot
                free.append(slot)
            most = max(most, len(held) + len(free))
    return most


def check_schedule(schedule: Schedule) -> None:
    """Asserts what the program relies on.

    Each microbatch goes once forward and once backward through each chunk; what a stage hands on is read at the very
    next tick; a slot is not written while it holds inputs that a backward pass will read; gradients are summed in the
    order of the microbatches.
    """
    P, V, M = schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
    there, back = ticks_by_pass(schedule.forward, P), ticks_by_pass(schedule.backward, P)
    wanted = {(m, chunk) for m in range(M) for chunk in range(P * V)}
    assert set(there) == set(back) == wanted, "a pass is missing"
    assert all(there[m, chunk] == there[m, chunk - 1] + 1 for m, chunk in wanted if chunk), "a result is not handed on"
    assert all(back[m, chunk] + 1 == back[m, chunk - 1] for m, chunk in wanted if chunk), "a gradient is not handed on"
    assert all(back[m, P * V - 1] >= there[m, P * V - 1] for m in range(M)), "a gradient comes before its loss"
    assert all(back[m, chunk] > back[m - 1, chunk] for m, chunk in wanted if m), "microbatches overtake each other"
    most = max(sum(there[m, P * V - 1] <= t <= back[m, P * V - 1] for m in range(M)) for t in range(schedule.num_ticks))
    assert most <= schedule.num_held, "too few gradients are held"
    for s in range(P):
        owner: dict[int, tuple[int, int]] = {}
        for t in range(schedule.num_ticks):
            if (m := int(schedule.forward.microbatch[t, s])) != IDLE:
                slot = int(schedule.forward.slot[t, s])
                assert slot not in owner, f"stage {s} overwrites slot {slot} at tick {t}"
                owner[slot] = m, int(schedule.forward.chunk[t, s])
            if (m := int(schedule.backward.microbatch[t, s])) != IDLE:
                read = int(schedule.backward.slot[t, s])
                assert owner.pop(read) == (m, int(schedule.backward.chunk[t, s])), (
                    f"stage {s} reads slot {read} wrongly"
                )


def ticks_by_pass(passes: Passes, num_stages: int) -> dict[tuple[int, int], int]:
    """{(microbatch, chunk of the model): tick}."""
    found = {}
    for t, s in np.argwhere(passes.microbatch != IDLE):
        key = int(passes.microbatch[t, s]), int(passes.chunk[t, s]) * num_stages + int(s)
        assert key not in found, f"microbatch {key[0]} goes twice through chunk {key[1]}"
        found[key] = int(t)
    return found


def simulated_seconds(schedule: Schedule, forward: float, backward: float, head: float = 0.0) -> float:
    """The time of a step whose passes of a chunk take so long, and so the loss of a microbatch: ticks are in lockstep,
    each as long as what its busiest stage does."""
    any_forward, any_backward = (
        int(np.any(passes.microbatch != IDLE, axis=1).sum()) for passes in (schedule.forward, schedule.backward)
    )
    return any_forward * forward + any_backward * backward + schedule.num_microbatches * head


def split_layers(num_layers: int, num_stages: int, num_chunks: int, head_layers: float = 0.0) -> np.ndarray:
    """int32[P, V, layers of a chunk]: the layers of each chunk of each stage; IDLE fills up shorter chunks.

    Chunks are as equal as can be, and none is empty. head_layers: what the last one does besides, in layers' work.
    """
    C = num_stages * num_chunks
    assert num_layers >= C, f"{num_layers} layers are too few for {C} chunks"
    sizes = np.ones(C, int)
    load = sizes + np.where(np.arange(C) == C - 1, head_layers, 0.0)
    for _ in range(num_layers - C):
        least = int(np.argmin(load))
        sizes[least] += 1
        load[least] += 1
    begins = np.cumsum(sizes) - sizes
    place = np.arange(sizes.max())
    layers = np.where(place < sizes[:, None], begins[:, None] + place, IDLE)
    return layers.reshape(num_chunks, num_stages, -1).swapaxes(0, 1).astype(np.int32)
