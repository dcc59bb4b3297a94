"""The order of a compiled program: products, and where each collective starts and is waited for.

XLA:TPU and XLA:GPU print scheduled programs in the order in which one core runs them. A collective between its start
and its end runs beside what stands between; any other holds the core up.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxscale.ahead.hlo_costs import PALLAS, custom_target, kernel_flops, product_flops
from jaxscale.ahead.hlo_text import FUSIONS, Computation, Instruction, Module
from jaxscale.ahead.hlo_trips import branch_shares, count_trips

KERNEL = "kernel"  # the type under which FLOPs of Pallas kernels are counted
SYNCHRONOUS = re.compile(r'"is_sync":\s*true')
FUSION_ENDS = {"AsyncCollectiveStart": "start", "AsyncCollectiveDone": "done"}


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing that the program does, in its place."""

    what: Literal["work", "start", "done", "blocking", "runs"]
    collective: int = -1  # its number, for start, done and blocking
    flops: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of work, by operand type
    times: float = 1.0  # of runs: trips of a loop, or the part of its runs that take a branch
    items: tuple["Item", ...] = ()  # of runs


def item_from_json(values: Mapping[str, Any]) -> Item:
    """The inverse of dataclasses.asdict and JSON."""
    return Item(**{**values, "items": tuple(map(item_from_json, values["items"]))})


def read_schedule(module: Module, numbers: Mapping[tuple[str, str], int]) -> tuple[tuple[Item, ...], dict[int, str]]:
    """(the program in its order, the computation in which each collective stands); nothing of a text that has no order.

    Args: numbers: of the collectives, by the names of the computation and the instruction that start them.
    """
    if not module.is_scheduled:
        return (), {}
    reader = Reader(module, numbers)
    return reader.items(module.entry), reader.places


class Reader:
    """Reads the schedule of one computation after the other, each once."""

    def __init__(self, module: Module, numbers: Mapping[tuple[str, str], int]) -> None:
        self.module, self.numbers = module, numbers
        self.read: dict[str, tuple[Item, ...]] = {}
        self.products: dict[str, dict[str, float]] = {}
        self.places: dict[int, str] = {}

    def items(self, name: str) -> tuple[Item, ...]:
        """What a computation does, in order. Work that stands together is one item."""
        if name not in self.read:
            found: list[Item] = []
            running = Running()
            for instruction in self.module.computations[name].instructions.values():
                for item in self.of_instruction(self.module.computations[name], instruction, running):
                    if item.what == "work" and found and found[-1].what == "work":
                        total = collections.Counter(found[-1].flops)
                        total.update(item.flops)
                        found[-1] = Item("work", flops=dict(total))
                    else:
                        found.append(item)
            self.read[name] = tuple(found)
        return self.read[name]

    def of_instruction(self, computation: Computation, instruction: Instruction, running: "Running") -> list[Item]:
        """What one instruction adds."""
        opcode, called = instruction.opcode, instruction.called
        if opcode == "while":
            trips = count_trips(self.module, computation, instruction)
            body = instruction.attribute(r"\bbody=%?([\w.\-]+)")
            return [Item("runs", times=1.0 if trips is None else trips, items=self.items(body))] if body else []
        if opcode == "conditional":
            shares = branch_shares(self.module, instruction).items()
            return [Item("runs", times=share, items=self.items(name)) for name, share in shares if share]
        if opcode == "call":
            return [item for name in called for item in self.items(name)]
        if opcode.endswith(("-update", "-done")):
            return running.go_on(instruction)
        flops = self.flops(computation, instruction)
        work = [Item("work", flops=flops)] if flops else []
        found = self.collectives(computation, instruction)
        self.places |= dict.fromkeys(found, computation.name)
        if end := self.fusion_end(instruction):
            which, channel = end
            if which == "done":
                return [*work, *running.end(channel)]
            running.open[channel].append(found)
            return [*work, *(Item("start", number) for number in found)]
        if SYNCHRONOUS.search(instruction.attributes):  # XLA:GPU runs the start to its end; its -done is of nothing
            return [*work, *(Item("blocking", number) for number in found)]
        if opcode == "send":  # between slices: over when the other side's part is received
            return running.start(receiver(computation, instruction) or instruction, found)
        if opcode.endswith("-start"):
            return running.start(instruction, found)
        return [*work, *(Item("blocking", number) for number in found)]

    def collectives(self, computation: Computation, instruction: Instruction) -> list[int]:
        """Numbers of the collectives that an instruction is or calls."""
        number = self.numbers.get((computation.name, instruction.name))
        if number is not None:
            return [number]
        inner = (self.module.computations[name] for name in instruction.called if name in self.module.computations)
        return [number for one in inner for each in one.instructions.values() for number in self.collectives(one, each)]

    def fusion_end(self, instruction: Instruction) -> tuple[str, str] | None:
        """('start' or 'done', channel) of a fusion that is an end of one of XLA:TPU's asynchronous fusions."""
        for name in instruction.called if instruction.opcode in FUSIONS else ():
            inner = self.module.computations[name].instructions.values()
            ends = [FUSION_ENDS.get(custom_target(one)) for one in inner if one.opcode == "custom-call"]
            channels = [one.attribute(r"channel_id=(\d+)") for one in inner if "channel_id=" in one.attributes]
            if any(ends) and channels:
                return next(filter(None, ends)), channels[0] or ""
        return None

    def flops(self, computation: Computation, instruction: Instruction) -> dict[str, float]:
        """FLOPs of an instruction, and of what it calls, by operand type."""
        found: dict[str, float] = collections.defaultdict(int)
        if product := product_flops(instruction, computation):
            found[product[0]] += product[1]
        if instruction.opcode == "custom-call" and custom_target(instruction).startswith(PALLAS):
            found[KERNEL] += kernel_flops(instruction, computation)
        for name in instruction.called if instruction.opcode in FUSIONS else ():
            if name not in self.products:
                inner = self.module.computations[name]
                self.products[name] = collections.defaultdict(int)
                for one in inner.instructions.values():
                    for dtype, flops in self.flops(inner, one).items():
                        self.products[name][dtype] += flops
            for dtype, flops in self.products[name].items():
                found[dtype] += flops
        return {dtype: flops for dtype, flops in found.items() if flops}


def receiver(computation: Computation, send: Instruction) -> Instruction | None:
    """The recv of the same transfer between slices, by the name under which the two meet."""
    rendezvous = r'_xla_host_transfer_rendezvous="([^"]*)"'
    if (name := send.attribute(rendezvous)) is None:
        return None
    receives = (one for one in computation.instructions.values() if one.opcode == "recv")
    return next((one for one in receives if one.attribute(rendezvous) == name), None)


class Running:
    """The collectives of one computation that were started and are not yet waited for."""

    def __init__(self) -> None:
        self.of: dict[str, list[int]] = {}  # by the name of the start, or of what went on with it
        self.waiting: set[str] = set()  # starts that were given no data yet
        self.open: collections.defaultdict[str, list[list[int]]] = collections.defaultdict(list)  # fusions, by channel

    def start(self, instruction: Instruction, found: list[int]) -> list[Item]:
        """A start. XLA:TPU's custom-call-start gets its data by an update, and runs from there on."""
        self.of[instruction.name] = found
        if instruction.opcode == "custom-call-start" and not instruction.operands:
            self.waiting.add(instruction.name)
            return []
        return [Item("start", number) for number in found]

    def go_on(self, instruction: Instruction) -> list[Item]:
        """An update or an end of what was started."""
        before = next((name for name in instruction.operands if name in self.of), None)
        if before is None:
            return []
        found = self.of[before]
        if instruction.opcode.endswith("-done"):
            return [Item("done", number) for number in found]
        self.of[instruction.name] = found
        if before in self.waiting:
            self.waiting.discard(before)
            return [Item("start", number) for number in found]
        return []

    def end(self, channel: str) -> list[Item]:
        """The end of the fusion that started first on a channel."""
        found = self.open[channel].pop(0) if self.open[channel] else []
        return [Item("done", number) for number in found]
