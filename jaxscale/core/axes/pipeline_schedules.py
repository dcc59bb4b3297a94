"""Pipeline schedules as integer tables, which list the passes of each stage at each tick. They are checked before use.

The layers of a model are split into P * V consecutive chunks. Stage s runs chunks s, P + s, 2 P + s, ... At each tick
every stage runs at most one forward pass of a chunk, then at most one backward pass. All stages run a tick together,
and the next stage reads a result at the next tick.

So 1F1B (arXiv:1806.03377), interleaved 1F1B (arXiv:2104.04473) and GPipe (arXiv:1811.06965) are one program with three
tables. Each has M V + P - 1 ticks with forward and M V + P - 1 with backward passes. A stage works in M V of each.

Zero bubble (arXiv:2401.10241) is 1F1B in which the passes of the first P - 1 backward ticks skip the weight gradients.
Stage s has s such passes. In the last P - 1 ticks, where stage s would idle s times, it runs a second backward pass for
each skipped weight gradient. The second pass recomputes the layers of the chunk, but takes no longer than the backward
pass of the busy stages, which determines the length of the tick.

P stages  V chunks per stage  M microbatches  t ticks  C chunks of the model, P * V
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

IDLE = -1


class Passes(NamedTuple):
    """Forward passes of all stages. Each field is int32[t, P]."""

    microbatch: np.ndarray  # index of the microbatch, or IDLE
    chunk: np.ndarray  # index of the chunk within the stage; 0 if the stage is idle
    slot: np.ndarray  # index of the buffer that saves the inputs of the chunk's layers


class Backward(NamedTuple):
    """Backward passes of all stages, and the buffers of their output cotangents. Each field is int32[t, P]."""

    microbatch: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray
    pending: np.ndarray  # index of the buffer from which the cotangent is read; IDLE: it comes from the next stage
    defer_to: np.ndarray  # index of the buffer that saves it if weight gradients are deferred to a second pass, or IDLE


class Pass(NamedTuple):
    """One entry of Passes."""

    microbatch: int
    chunk: int
    slot: int


class BackwardPass(NamedTuple):
    """One entry of Backward."""

    microbatch: int
    chunk: int
    slot: int
    pending: int
    defer_to: int


class Costs(NamedTuple):
    """Relative durations of the parts of a chunk's passes. The backward pass has all parts except `forward`."""

    forward: float = 1.0
    recompute: float = 1.0  # recomputation of the forward pass
    input_grads: float = 1.0
    weight_grads: float = 1.0


EQUAL_COSTS = Costs()  # for matmuls: each part takes 2 FLOPs per weight and token
COMMUNICATION_COSTS = Costs(weight_grads=0.0)  # for collectives in layers: weight gradients need none


@dataclasses.dataclass(frozen=True)
class ScheduleSize:
    """Numbers of ticks and buffers of a schedule, in closed form. make_schedule() asserts that its tables agree."""

    name: str = "1f1b"
    num_stages: int = 1
    num_chunks: int = 1  # per stage
    num_microbatches: int = 1

    @property
    def chunk_runs(self) -> int:
        """Number of forward passes per stage and step."""
        return self.num_chunks * self.num_microbatches

    @property
    def num_ticks(self) -> int:
        """Number of ticks. Forward passes take place in M V + P - 1 of them, and backward passes in M V + P - 1."""
        if self.name == "gpipe":
            return 2 * (self.chunk_runs + self.num_stages - 1)
        return self.chunk_runs + self.num_stages * (self.num_chunks + 1) - 2

    @property
    def num_slots(self) -> int:
        """Maximum number of forward passes whose inputs a stage has to save at the same time."""
        most = self.num_stages * (self.num_chunks + 1) - 1
        return self.chunk_runs if self.name == "gpipe" else min(self.chunk_runs, most)

    @property
    def num_pending(self) -> int:
        """Number of buffers for cotangents of the last chunk, from the loss to the backward pass."""
        return self.num_microbatches if self.name == "gpipe" else 1

    @property
    def num_deferred(self) -> int:
        """Number of buffers for cotangents of passes whose weight gradients are deferred."""
        return min(self.num_stages - 1, self.num_microbatches) if self.name == "zero_bubble" else 0

    def slowdown(self, costs: Costs = EQUAL_COSTS) -> float:
        """Returns the time of a step divided by the time of one stage's passes. The pipeline idles for P - 1 ticks."""
        lost = (self.num_stages - 1) * (sum(costs) - (costs.weight_grads if self.num_deferred else 0.0))
        return 1 + lost / (self.chunk_runs * sum(costs))

    @property
    def bubble(self) -> float:
        """Fraction of the step time in which a stage idles or repeats work, for EQUAL_COSTS. Without deferred
        gradients, this is (P - 1) / (V M + P - 1), the bubble of arXiv:2104.04473 relative to the total time."""
        return 1 - 1 / self.slowdown()


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Schedule(ScheduleSize):
    """The tables of a schedule. The loss of a microbatch is computed at the tick of its last forward pass."""

    forward: Passes
    backward: Backward

    @property
    def embed_microbatch(self) -> np.ndarray:
        """Microbatch to embed for the first chunk, or IDLE; int32[t]."""
        return first_chunk(self.forward)

    @property
    def loss_microbatch(self) -> np.ndarray:
        """Microbatch whose loss is computed, or IDLE; int32[t]."""
        last = (self.forward.chunk[:, -1] == self.num_chunks - 1) & (self.forward.microbatch[:, -1] != IDLE)
        return np.where(last, self.forward.microbatch[:, -1], IDLE)

    @property
    def embed_grad_microbatch(self) -> np.ndarray:
        """Microbatch whose gradient reaches the embedding, or IDLE; int32[t]."""
        return np.where(self.weights_only[:, 0], IDLE, first_chunk(self.backward))

    @property
    def inputs_only(self) -> np.ndarray:
        """Mask of backward passes that skip the weight gradients, bool[t, P]."""
        return self.backward.defer_to != IDLE

    @property
    def weights_only(self) -> np.ndarray:
        """Mask of second backward passes, which compute only deferred weight gradients, bool[t, P]."""
        return self.backward.pending >= self.num_pending

    def __str__(self) -> str:
        chunks = f" of {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        later = f", at most {self.num_deferred} defer weight gradients to a second pass" if self.num_deferred else ""
        return (
            f"{self.name}, {self.num_stages} stages{chunks}, {self.num_microbatches} microbatches: bubble "
            f"{self.bubble:.1%}, at most {self.num_slots} passes per stage wait for their backward pass{later}"
        )


def first_chunk(passes: Passes | Backward) -> np.ndarray:
    """Returns int32[t], the microbatch that the model's first chunk processes, or IDLE."""
    return np.where(passes.chunk[:, 0] == 0, passes.microbatch[:, 0], IDLE)


def make_schedule(name: str, num_stages: int, num_chunks: int, num_microbatches: int) -> Schedule:
    """Returns the tables of "1f1b", "zero_bubble" or "gpipe", after checks.

    If a stage has several chunks, microbatches are processed in groups of P, so M must be a multiple of P.
    """
    P, V, M = num_stages, num_chunks, num_microbatches
    size = ScheduleSize(name, P, V, M)
    assert V == 1 or M % P == 0, f"{M} microbatches are not a multiple of {P} stages"
    start = M * V + P - 1 if name == "gpipe" else P * V - 1  # tick of the first backward pass
    ticks = start + tick_of(M - 1, P * V - 1, P, V) + 1  # the last microbatch runs through the last chunk
    idle, zeros = (lambda: np.full((ticks, P), IDLE, np.int32)), (lambda: np.zeros((ticks, P), np.int32))
    forward = Passes(idle(), zeros(), zeros())
    backward = Backward(idle(), zeros(), zeros(), idle(), idle())
    for m in range(M):
        for chunk in range(P * V):
            v, s = divmod(chunk, P)
            forward_tick, backward_tick = tick_of(m, chunk, P, V), start + tick_of(m, P * V - 1 - chunk, P, V)
            for passes, t in ((forward, forward_tick), (backward, backward_tick)):
                assert passes.microbatch[t, s] == IDLE, f"stage {s} has two passes at tick {t}"
                passes.microbatch[t, s], passes.chunk[t, s] = m, v
        backward.pending[start + tick_of(m, 0, P, V), -1] = m % size.num_pending  # cotangents of the last chunk
    num_deferred = defer_weight_grads(backward, start, size.num_pending) if name == "zero_bubble" else 0
    found = ticks, fill_slots(forward, backward), num_deferred
    assert found == (size.num_ticks, size.num_slots, size.num_deferred), f"{size} has {found}"
    schedule = Schedule(name, P, V, M, forward=forward, backward=backward)
    check_schedule(schedule)
    return schedule


def tick_of(microbatch: int, chunk: int, num_stages: int, num_chunks: int) -> int:
    """Returns the tick of a microbatch's forward pass through a chunk: one tick after the previous chunk.

    P microbatches run through the first chunk of a stage, then through its second chunk, and so on. For a backward
    pass, count chunks from the end.
    """
    group, index = divmod(microbatch, num_stages)
    v, s = divmod(chunk, num_stages)
    return (group * num_chunks + v) * num_stages + index + s


def defer_weight_grads(backward: Backward, start: int, num_pending: int) -> int:
    """Moves the weight gradients of the P - 1 ticks that begin at `start` to second passes in the last ticks, in which
    stages would otherwise idle. Returns the maximum number of deferred passes per stage."""
    ticks, P = backward.microbatch.shape
    most = 0
    for s in range(P):
        deferred = [t for t in range(start, start + P - 1) if backward.microbatch[t, s] != IDLE]
        for i, t in enumerate(deferred):
            second = ticks - len(deferred) + i  # tick of the second pass
            assert backward.microbatch[second, s] == IDLE, f"stage {s} does not idle at tick {second}"
            backward.defer_to[t, s] = backward.pending[second, s] = num_pending + i
            for field in (backward.microbatch, backward.chunk):
                field[second, s] = field[t, s]
        most = max(most, len(deferred))
    return most


def fill_slots(forward: Passes, backward: Backward) -> int:
    """Assigns buffers for inputs (slots) in both tables, and reuses free buffers. Returns the number of buffers."""
    ticks, P = forward.microbatch.shape
    most = 0
    for s in range(P):
        free: list[int] = []
        in_use: dict[tuple[int, int], int] = {}
        for t in range(ticks):
            if forward.microbatch[t, s] != IDLE:
                slot = free.pop() if free else len(in_use)
                in_use[forward.microbatch[t, s], forward.chunk[t, s]] = forward.slot[t, s] = slot
            if backward.microbatch[t, s] != IDLE:
                key = backward.microbatch[t, s], backward.chunk[t, s]
                backward.slot[t, s] = in_use[key]
                if backward.defer_to[t, s] == IDLE:
                    free.append(in_use.pop(key))
            most = max(most, len(in_use) + len(free))
    return most


def check_schedule(schedule: Schedule) -> None:
    """Asserts the properties of a schedule on which the program relies.

    For each chunk, each microbatch has one forward pass, one input gradient and one weight gradient. The next stage
    reads a result at the next tick. No buffer is overwritten before a backward pass has read it. Input gradients, and
    weight gradients that are not deferred, are computed in the order of microbatches.
    """
    P, V, M = schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
    forward = ticks_by_pass(schedule.forward, P)
    backward = ticks_by_pass(schedule.backward, P, exclude=schedule.weights_only)
    weights = ticks_by_pass(schedule.backward, P, exclude=schedule.inputs_only)
    expected = {(m, chunk) for m in range(M) for chunk in range(P * V)}
    assert set(forward) == set(backward) == set(weights) == expected, "a pass is missing"
    assert all(forward[m, chunk] == forward[m, chunk - 1] + 1 for m, chunk in expected if chunk), "a result is lost"
    assert all(backward[m, chunk] + 1 == backward[m, chunk - 1] for m, chunk in expected if chunk), "a gradient is lost"
    assert all(backward[m, P * V - 1] >= forward[m, P * V - 1] for m in range(M)), "a gradient comes before its loss"
    assert all(backward[m, chunk] > backward[m - 1, chunk] for m, chunk in expected if m), (
        "microbatches overtake each other"
    )
    most = max(
        sum(forward[m, P * V - 1] <= t <= backward[m, P * V - 1] for m in range(M)) for t in range(schedule.num_ticks)
    )
    assert most <= schedule.num_pending, "too few buffers for pending cotangents"
    assert (schedule.backward.pending < schedule.num_pending + schedule.num_deferred).all(), "a cotangent has no buffer"
    for s in range(P):
        check_buffers(schedule, s)


def check_buffers(schedule: Schedule, stage: int) -> None:
    """Asserts that a stage reads saved inputs and pending cotangents of the correct microbatch and chunk."""
    last = schedule.num_stages - 1, schedule.num_chunks - 1
    slots: dict[int, tuple[int, int]] = {}
    pending: dict[int, tuple[int, int]] = {}
    for t in range(schedule.num_ticks):
        fwd = Pass(*(int(table[t, stage]) for table in schedule.forward))
        bwd = BackwardPass(*(int(table[t, stage]) for table in schedule.backward))
        if fwd.microbatch != IDLE:
            assert fwd.slot not in slots, f"stage {stage} overwrites slot {fwd.slot} at tick {t}"
            slots[fwd.slot] = fwd.microbatch, fwd.chunk
            if (stage, fwd.chunk) == last:
                index = fwd.microbatch % schedule.num_pending
                assert index not in pending, f"stage {stage} overwrites cotangent {index} at tick {t}"
                pending[index] = fwd.microbatch, fwd.chunk
        if bwd.microbatch == IDLE:
            continue
        key, second_pass = (bwd.microbatch, bwd.chunk), bool(schedule.weights_only[t, stage])
        assert second_pass or (bwd.pending != IDLE) == ((stage, bwd.chunk) == last), (
            f"stage {stage} starts from the wrong cotangent at tick {t}"
        )
        if bwd.pending != IDLE:
            read = pending.pop(bwd.pending, None)  # outside of the assert statement, which python -O removes
            assert read == key, f"stage {stage} reads the wrong cotangent {bwd.pending}"
        assert slots.get(bwd.slot) == key, f"stage {stage} reads the wrong slot {bwd.slot}"
        if bwd.defer_to == IDLE:
            del slots[bwd.slot]
        else:
            assert bwd.defer_to not in pending and bwd.defer_to >= schedule.num_pending and not second_pass, (
                "a cotangent is overwritten"
            )
            pending[bwd.defer_to] = key
    assert not slots and not pending, f"stage {stage} leaves passes unfinished"


def ticks_by_pass(passes: Passes | Backward, num_stages: int, exclude: Any = False) -> dict[tuple[int, int], int]:
    """Returns {(microbatch, chunk of the model): tick}. exclude: mask of passes to exclude."""
    found = {}
    for t, s in np.argwhere((passes.microbatch != IDLE) & ~np.asarray(exclude)):
        key = int(passes.microbatch[t, s]), int(passes.chunk[t, s]) * num_stages + int(s)
        assert key not in found, f"microbatch {key[0]} runs twice through chunk {key[1]}"
        found[key] = int(t)
    return found


def split_layers(
    num_layers: int, num_stages: int, num_chunks: int, head_layers: float = 0.0, leading_layers: float = 0.0
) -> np.ndarray:
    """Returns int32[P, V, layers of a chunk], the layer indices of each chunk, padded with IDLE.

    Chunks have similar costs, and no chunk is empty. head_layers, leading_layers: additional cost of the last and of
    the first chunk, in units of one layer.
    """
    C = num_stages * num_chunks
    assert num_layers >= C, f"{num_layers} layers are too few for {C} chunks"
    sizes = np.ones(C, int)
    load = sizes.astype(float)
    load[0] += leading_layers
    load[-1] += head_layers
    for _ in range(num_layers - C):
        least = int(np.argmin(load))
        sizes[least] += 1
        load[least] += 1
    starts = np.cumsum(sizes) - sizes
    offsets = np.arange(sizes.max())
    layers = np.where(offsets < sizes[:, None], starts[:, None] + offsets, IDLE)
    return layers.reshape(num_chunks, num_stages, -1).swapaxes(0, 1).astype(np.int32)
