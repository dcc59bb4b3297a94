"""Execution order of a compiled program: matmuls, and the start and end of each collective.

XLA:TPU and XLA:GPU print scheduled programs in the order in which one core runs them. An asynchronous collective
overlaps everything between its start and its end. A synchronous collective blocks the core.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from jaxscale.tools.preflight.hlo_costs import custom_target, kernel_flops, matmul_flops
from jaxscale.tools.preflight.hlo_text import FUSIONS, Computation, Instruction, Module
from jaxscale.tools.preflight.hlo_trips import branch_shares, count_trips

KERNEL = "kernel"  # dtype key for FLOPs of Pallas kernels
SYNCHRONOUS = re.compile(r'"is_sync":\s*true')
FUSION_ENDS = {"AsyncCollectiveStart": "start", "AsyncCollectiveDone": "done"}


@dataclasses.dataclass(frozen=True)
class ScheduleItem:
    """One entry of the schedule."""

    what: Literal["work", "start", "done", "blocking", "runs"]
    collective: int = -1  # for start, done and blocking: index of the collective
    flops: dict[str, float] = dataclasses.field(default_factory=dict)  # for work: {operand type: FLOPs}
    times: float = 1.0  # for runs: trips of a loop, or fraction of runs that take a branch
    items: tuple["ScheduleItem", ...] = ()  # for runs: the repeated items


class ScheduleReader:
    """Reads the schedules of a scheduled module's computations, each computation once."""

    def __init__(self, module: Module, numbers: Mapping[tuple[str, str], int]) -> None:
        self.module, self.numbers = module, numbers  # numbers: {(computation, instruction): collective}
        self.read: dict[str, tuple[ScheduleItem, ...]] = {}
        self.computations: dict[int, str] = {}  # {collective: its computation}

    def items(self, name: str) -> tuple[ScheduleItem, ...]:
        """Returns the schedule of a computation. Adjacent work items are merged."""
        if name not in self.read:
            found: list[ScheduleItem] = []
            pending = Pending()
            for instruction in self.module.computations[name].instructions.values():
                for item in self.instruction_items(self.module.computations[name], instruction, pending):
                    if item.what == "work" and found and found[-1].what == "work":
                        total = collections.Counter(found[-1].flops)
                        total.update(item.flops)
                        found[-1] = ScheduleItem("work", flops=dict(total))
                    else:
                        found.append(item)
            self.read[name] = tuple(found)
        return self.read[name]

    def instruction_items(
        self, computation: Computation, instruction: Instruction, pending: "Pending"
    ) -> list[ScheduleItem]:
        """Returns the items of one instruction."""
        opcode, called = instruction.opcode, instruction.called
        if opcode == "while":
            trips = count_trips(self.module, computation, instruction)
            body = instruction.attribute(r"\bbody=%?([\w.\-]+)")
            return [ScheduleItem("runs", times=1.0 if trips is None else trips, items=self.items(body))] if body else []
        if opcode == "conditional":
            shares = branch_shares(self.module, instruction).items()
            return [ScheduleItem("runs", times=share, items=self.items(name)) for name, share in shares if share]
        if opcode == "call":
            return [item for name in called for item in self.items(name)]
        if opcode.endswith(("-update", "-done")):
            return pending.update(instruction)
        flops = self.flops(computation, instruction)
        work = [ScheduleItem("work", flops=flops)] if flops else []
        found = self.collectives(computation, instruction)
        self.computations |= dict.fromkeys(found, computation.name)
        if end := self.fusion_end(instruction):
            end_kind, channel = end
            if end_kind == "done":
                return [*work, *pending.end(channel)]
            pending.open_fusions[channel].append(found)
            return [*work, *(ScheduleItem("start", number) for number in found)]
        if SYNCHRONOUS.search(instruction.attributes):  # XLA:GPU blocks at the start; -done does nothing
            return [*work, *(ScheduleItem("blocking", number) for number in found)]
        if opcode == "send":  # between slices, complete when the matching recv is complete
            rendezvous = r'_xla_host_transfer_rendezvous="([^"]*)"'
            name = instruction.attribute(rendezvous)
            receives = [one for one in computation.instructions.values() if one.opcode == "recv" and name]
            receiver = next((one for one in receives if one.attribute(rendezvous) == name), instruction)
            return pending.start(receiver, found)
        if opcode.endswith("-start"):
            return pending.start(instruction, found)
        return [*work, *(ScheduleItem("blocking", number) for number in found)]

    def collectives(self, computation: Computation, instruction: Instruction) -> list[int]:
        """Returns the indices of collectives in an instruction and its called computations."""
        number = self.numbers.get((computation.name, instruction.name))
        if number is not None:
            return [number]
        inner = (self.module.computations[name] for name in instruction.called if name in self.module.computations)
        return [number for one in inner for each in one.instructions.values() for number in self.collectives(one, each)]

    def fusion_end(self, instruction: Instruction) -> tuple[str, str] | None:
        """Returns ('start' or 'done', channel) if this is the start or end of an asynchronous fusion, else None."""
        for name in instruction.called if instruction.opcode in FUSIONS else ():
            inner = self.module.computations[name].instructions.values()
            ends = [FUSION_ENDS.get(custom_target(one)) for one in inner if one.opcode == "custom-call"]
            channels = [one.attribute(r"channel_id=(\d+)") for one in inner if "channel_id=" in one.attributes]
            if any(ends) and channels:
                return next(filter(None, ends)), channels[0] or ""
        return None

    def flops(self, computation: Computation, instruction: Instruction) -> dict[str, float]:
        """Returns {operand type: FLOPs} of an instruction and its called computations."""
        found: dict[str, float] = collections.defaultdict(int)
        if matmul := matmul_flops(instruction, computation):
            found[matmul[0]] += matmul[1]
        found[KERNEL] += kernel_flops(instruction, computation) or 0.0
        for name in instruction.called if instruction.opcode in FUSIONS else ():
            inner = self.module.computations[name]
            for one in inner.instructions.values():
                for dtype, flops in self.flops(inner, one).items():
                    found[dtype] += flops
        return {dtype: flops for dtype, flops in found.items() if flops}


class Pending:
    """Collectives of one computation that have started and not yet ended."""

    def __init__(self) -> None:
        # {name of the start or a later update: (collectives, False if the data is not available yet)}
        self.started: dict[str, tuple[list[int], bool]] = {}
        self.open_fusions: dict[str, list[list[int]]] = collections.defaultdict(list)  # {channel: collectives}

    def start(self, instruction: Instruction, found: list[int]) -> list[ScheduleItem]:
        """Starts collectives. XLA:TPU's custom-call-start without operands starts only at its first update."""
        has_data = instruction.opcode != "custom-call-start" or bool(instruction.operands)
        self.started[instruction.name] = found, has_data
        return [ScheduleItem("start", number) for number in found if has_data]

    def update(self, instruction: Instruction) -> list[ScheduleItem]:
        """Returns the schedule items for the `-update` or `-done` of an asynchronous instruction."""
        before = next((name for name in instruction.operands if name in self.started), None)
        if before is None:
            return []
        found, has_data = self.started[before]
        if instruction.opcode.endswith("-done"):
            return [ScheduleItem("done", number) for number in found]
        self.started[instruction.name] = self.started[before] = found, True
        return [ScheduleItem("start", number) for number in found if not has_data]

    def end(self, channel: str) -> list[ScheduleItem]:
        """Returns the schedule items for the end of the fusion that was opened first on a channel."""
        found = self.open_fusions[channel].pop(0) if self.open_fusions[channel] else []
        return [ScheduleItem("done", number) for number in found]
