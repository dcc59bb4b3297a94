"""Pipeline schedules as tables of integers: what each stage does at each tick, made and proved before anything runs.

A model's layers fall into P * V chunks, one after the other; stage s holds chunks s, P + s, 2 P + s, ... At a tick
every stage takes one microbatch forward through a chunk, then one backward, or leaves either out. All stages go through
a tick together: while some go forward the others would only wait. What a stage hands on is there at the next tick.

So 1F1B (arXiv:1806.03377), interleaved 1F1B (arXiv:2104.04473) and GPipe (arXiv:1811.06965) are one program with three
tables, and all take M V + P - 1 forward and as many backward passes of a chunk, of which M V are work.

Zero bubble (arXiv:2401.10241) is 1F1B in which the backward passes of the first P - 1 such ticks leave the gradients of
weights out; stage s has s of them. A stage that idles in the last P - 1 ticks, stage s in s of them, then goes back
again through what it left, for those. That computes the chunk's layers once more, but no longer than the stages take
that still go back: a tick costs what its busiest stage does.

P stages  V chunks of a stage  M microbatches  t ticks  C chunks of the model, P * V
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

IDLE = -1


class Passes(NamedTuple):
    """Forward or backward passes: int32[t, P] each."""

    microbatch: np.ndarray  # or IDLE
    chunk: np.ndarray  # of the stage's own; 0 where it is idle
    slot: np.ndarray  # where the inputs of the chunk's layers are kept meanwhile


class Backward(NamedTuple):
    """Backward passes, as Passes has them, and what becomes of the gradient that each begins with: int32[t, P] each."""

    microbatch: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray
    held: np.ndarray  # where it is held; IDLE: it comes from the stage behind
    keep: np.ndarray  # where it is held on, as this pass leaves the gradients of weights to another; IDLE: it does not


class Pass(NamedTuple):
    """One of Passes."""

    microbatch: int
    chunk: int
    slot: int


class BackwardPass(NamedTuple):
    """One of Backward."""

    microbatch: int
    chunk: int
    slot: int
    held: int
    keep: int


class Costs(NamedTuple):
    """Time of the parts of a chunk's passes, a backward one being all but the first."""

    forward: float = 1.0
    again: float = 1.0  # its layers, computed again
    to_inputs: float = 1.0
    to_weights: float = 1.0


EQUAL = Costs()  # as products are: two numbers of operations for each weight and token


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The tables. The loss of a microbatch is taken at the tick at which its last chunk has gone forward."""

    name: str
    num_stages: int
    num_chunks: int  # of a stage
    num_microbatches: int
    forward: Passes
    backward: Backward
    num_slots: int
    num_held: int  # gradients of the last chunk's result that wait for its backward pass, one included that is due
    num_later: int = 0  # gradients that are held on for those of weights

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
        return np.where(self.of_weights[:, 0], IDLE, first_chunk(self.backward))

    @property
    def of_inputs(self) -> np.ndarray:
        """bool[t, P]: the backward passes that leave the gradients of weights out."""
        return self.backward.keep != IDLE

    @property
    def of_weights(self) -> np.ndarray:
        """bool[t, P]: those that go back again for these; their gradients of inputs are of no use."""
        return self.backward.held >= self.num_held

    @property
    def bubble(self) -> float:
        """Part of the time in which a stage idles, or does what it does again, where the parts of passes are EQUAL."""
        return lost_time(self, EQUAL)

    def __str__(self) -> str:
        chunks = f" of {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        later = f", weights of at most {self.num_later} get theirs in a second pass" if self.num_later else ""
        return (
            f"{self.name}, {self.num_stages} stages{chunks}, {self.num_microbatches} microbatches: bubble "
            f"{self.bubble:.1%}, at most {self.num_slots} passes of a stage wait for their gradients{later}"
        )


def first_chunk(passes: Passes | Backward) -> np.ndarray:
    """int32[t]: the microbatch of the model's first chunk, or IDLE."""
    return np.where(passes.chunk[:, 0] == 0, passes.microbatch[:, 0], IDLE)


def ideal_bubble(num_stages: int, num_chunks: int, num_microbatches: int) -> float:
    """(P - 1) / (V M + P - 1), as arXiv:2104.04473 has it relative to all of the time."""
    return (num_stages - 1) / (num_chunks * num_microbatches + num_stages - 1)


def make_schedule(name: str, num_stages: int, num_chunks: int, num_microbatches: int) -> Schedule:
    """The tables of "1f1b", "zero_bubble" or "gpipe", proved.

    With several chunks the microbatches come in groups of P: M % P == 0.
    """
    P, V, M = num_stages, num_chunks, num_microbatches
    assert V == 1 or M % P == 0, f"{M} microbatches are no multiple of {P} stages"
    start = M * V + P - 1 if name == "gpipe" else P * V - 1  # when the first gradient may, or can, go back
    num_held = M if name == "gpipe" else 1
    ticks = start + last_tick(P, V, M) + 1
    none, zeros = (lambda: np.full((ticks, P), IDLE, np.int32)), (lambda: np.zeros((ticks, P), np.int32))
    forward = Passes(none(), zeros(), zeros())
    backward = Backward(none(), zeros(), zeros(), none(), none())
    for m in range(M):
        for chunk in range(P * V):
            v, s = divmod(chunk, P)
            there, back = tick_of(m, chunk, P, V), start + tick_of(m, P * V - 1 - chunk, P, V)
            for passes, t in ((forward, there), (backward, back)):
                assert passes.microbatch[t, s] == IDLE, f"stage {s} has two passes at tick {t}"
                passes.microbatch[t, s], passes.chunk[t, s] = m, v
        backward.held[start + tick_of(m, 0, P, V), -1] = m % num_held  # as of the last chunk
    num_later = leave_for_later(backward, start, num_held) if name == "zero_bubble" else 0
    schedule = Schedule(name, P, V, M, forward, backward, fill_slots(forward, backward), num_held, num_later)
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


def leave_for_later(backward: Backward, start: int, num_held: int) -> int:
    """Takes gradients of weights out of the passes of the P - 1 ticks from start on, and puts passes for them into the
    last ticks, where their stages idle. Returns how many a stage leaves at most.
    """
    ticks, P = backward.microbatch.shape
    most = 0
    for s in range(P):
        left = [t for t in range(start, start + P - 1) if backward.microbatch[t, s] != IDLE]
        for i, t in enumerate(left):
            again = ticks - len(left) + i
            assert backward.microbatch[again, s] == IDLE, f"stage {s} does not idle at tick {again}"
            backward.keep[t, s] = backward.held[again, s] = num_held + i
            for field in (backward.microbatch, backward.chunk):
                field[again, s] = field[t, s]
        most = max(most, len(left))
    return most


def fill_slots(forward: Passes, backward: Backward) -> int:
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
                key = backward.microbatch[t, s], backward.chunk[t, s]
                backward.slot[t, s] = held[key]
                if backward.keep[t, s] == IDLE:
                    free.append(held.pop(key))
            most = max(most, len(held) + len(free))
    return most


def check_schedule(schedule: Schedule) -> None:
    """Asserts what the program relies on.

    Each microbatch goes forward through each chunk once, and gets each gradient of inputs and of weights once; what a
    stage hands on is read at the very next tick; neither a slot nor a place of a gradient is written while it holds
    what a backward pass will read; the microbatches' gradients of inputs, and so of the two ends of the model, are in
    their order, and those of weights too that were not left for later.
    """
    P, V, M = schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
    there = ticks_by_pass(schedule.forward, P)
    back = ticks_by_pass(schedule.backward, P, but=schedule.of_weights)
    weights = ticks_by_pass(schedule.backward, P, but=schedule.of_inputs)
    wanted = {(m, chunk) for m in range(M) for chunk in range(P * V)}
    assert set(there) == set(back) == set(weights) == wanted, "a pass is missing"
    assert all(there[m, chunk] == there[m, chunk - 1] + 1 for m, chunk in wanted if chunk), "a result is not handed on"
    assert all(back[m, chunk] + 1 == back[m, chunk - 1] for m, chunk in wanted if chunk), "a gradient is not handed on"
    assert all(back[m, P * V - 1] >= there[m, P * V - 1] for m in range(M)), "a gradient comes before its loss"
    assert all(back[m, chunk] > back[m - 1, chunk] for m, chunk in wanted if m), "microbatches overtake each other"
    most = max(sum(there[m, P * V - 1] <= t <= back[m, P * V - 1] for m in range(M)) for t in range(schedule.num_ticks))
    assert most <= schedule.num_held, "too few gradients are held"
    assert (schedule.backward.held < schedule.num_held + schedule.num_later).all(), "a gradient is held nowhere"
    for s in range(P):
        check_places(schedule, s)


def check_places(schedule: Schedule, stage: int) -> None:
    """Asserts that a stage reads what it means to: the slots of inputs, and the places of held gradients."""
    last = schedule.num_stages - 1, schedule.num_chunks - 1
    slots: dict[int, tuple[int, int]] = {}
    held: dict[int, tuple[int, int]] = {}
    for t in range(schedule.num_ticks):
        there = Pass(*(int(of[t, stage]) for of in schedule.forward))
        back = BackwardPass(*(int(of[t, stage]) for of in schedule.backward))
        if there.microbatch != IDLE:
            assert there.slot not in slots, f"stage {stage} overwrites slot {there.slot} at tick {t}"
            slots[there.slot] = there.microbatch, there.chunk
            if (stage, there.chunk) == last:
                place = there.microbatch % schedule.num_held
                assert place not in held, f"stage {stage} overwrites gradient {place} at tick {t}"
                held[place] = there.microbatch, there.chunk
        if back.microbatch == IDLE:
            continue
        key, again = (back.microbatch, back.chunk), bool(schedule.of_weights[t, stage])
        assert again or (back.held != IDLE) == ((stage, back.chunk) == last), (
            f"stage {stage} begins wrongly at tick {t}"
        )
        if back.held != IDLE:
            read = held.pop(back.held, None)  # not inside assert, which -O leaves out
            assert read == key, f"stage {stage} reads gradient {back.held} wrongly"
        assert slots.get(back.slot) == key, f"stage {stage} reads slot {back.slot} wrongly"
        if back.keep == IDLE:
            del slots[back.slot]
        else:
            assert back.keep not in held and back.keep >= schedule.num_held and not again, "a gradient is overwritten"
            held[back.keep] = key
    assert not slots and not held, f"stage {stage} leaves something out"


def ticks_by_pass(passes: Passes | Backward, num_stages: int, but: Any = False) -> dict[tuple[int, int], int]:
    """{(microbatch, chunk of the model): tick}. but: passes that do not count."""
    found = {}
    for t, s in np.argwhere((passes.microbatch != IDLE) & ~np.asarray(but)):
        key = int(passes.microbatch[t, s]), int(passes.chunk[t, s]) * num_stages + int(s)
        assert key not in found, f"microbatch {key[0]} goes twice through chunk {key[1]}"
        found[key] = int(t)
    return found


def pass_seconds(schedule: Schedule, costs: Costs) -> np.ndarray:
    """float[t, P]: how long a stage works in a tick, the parts of a chunk's passes taking so long."""
    forward, back = (passes.microbatch != IDLE for passes in (schedule.forward, schedule.backward))
    of_weights = back & ~schedule.of_inputs
    return forward * costs.forward + back * (costs.again + costs.to_inputs) + of_weights * costs.to_weights


def simulated_seconds(schedule: Schedule, costs: Costs = EQUAL, head: float = 0.0) -> float:
    """The time of a step, and so of the loss of a microbatch, head: ticks are in lockstep, each as long as what its
    busiest stage does."""
    return float(pass_seconds(schedule, costs).max(axis=1).sum()) + schedule.num_microbatches * head


def lost_time(schedule: Schedule, costs: Costs) -> float:
    """Part of the simulated time that is more than each pass of a stage, once, takes; the head is left out."""
    return 1 - schedule.num_microbatches * schedule.num_chunks * sum(costs) / simulated_seconds(schedule, costs)


def split_layers(
    num_layers: int, num_stages: int, num_chunks: int, head_layers: float = 0.0, first_layers: float = 0.0
) -> np.ndarray:
    """int32[P, V, layers of a chunk]: the layers of each chunk of each stage; IDLE fills up shorter chunks.

    Chunks are as equal as can be, and none is empty. head_layers: what the last one does besides, in layers' work.
    first_layers: what the first one does.
    """
    C = num_stages * num_chunks
    assert num_layers >= C, f"{num_layers} layers are too few for {C} chunks"
    sizes = np.ones(C, int)
    load = sizes.astype(float)
    load[0] += first_layers
    load[-1] += head_layers
    for _ in range(num_layers - C):
        least = int(np.argmin(load))
        sizes[least] += 1
        load[least] += 1
    begins = np.cumsum(sizes) - sizes
    place = np.arange(sizes.max())
    layers = np.where(place < sizes[:, None], begins[:, None] + place, IDLE)
    return layers.reshape(num_chunks, num_stages, -1).swapaxes(0, 1).astype(np.int32)
