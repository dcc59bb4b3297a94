"""Bytes that one run of an instruction moves through each memory: an estimate from operands and results.

What a fusion keeps to itself costs nothing. A fusion that slices an operand (one layer of a stack) reads the slice; one
that updates an operand in place writes the update. Caches are not modelled, nor the padding of TPU tiles.
"""

import collections
import math

from jaxscale.ahead.hlo_flops import custom_target
from jaxscale.ahead.hlo_text import Computation, Instruction, Module, Shape

HBM, HOST = 0, 5
NOTHING = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "optimization-barrier", "add-dependency", "domain", "async-start",
}  # fmt: skip
MARKERS = ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "Sharding", "AsyncCollective", "SliceId")
SLICERS = ("dynamic-slice", "slice", "gather")
THROUGH = ("bitcast", "copy", "convert", "reshape", "transpose")


def instruction_traffic(module: Module, computation: Computation, instruction: Instruction) -> dict[int, float]:
    """Bytes by memory space: 0 the device's own, 1 on-chip, 5 the host's. Control flow and `-done` count none."""
    opcode = instruction.opcode
    moved: collections.Counter[int] = collections.Counter()
    if opcode in NOTHING or opcode.endswith(("-done", "-update")):
        return moved
    if opcode == "custom-call" and custom_target(instruction).startswith(MARKERS):
        return moved
    names = list(dict.fromkeys(instruction.operands))
    operands = [computation.instructions[name].shapes for name in names if name in computation.instructions]
    if opcode == "fusion" and len(instruction.called) == 1:
        inner = module.computations[instruction.called[0]]
        for number, parameter in inner.parameters.items():
            if number < len(instruction.operands):
                source = computation.instructions[instruction.operands[number]].shapes
                add(moved, source, read_share(module, inner, parameter))
        for shape, written in zip(instruction.shapes, written_bytes(module, inner, instruction.shapes)):
            moved[shape.space] += written
    elif opcode in ("copy-start", "slice-start"):  # (destination, source, context) or ((source), destination, context)
        destination = instruction.elements[0 if opcode == "copy-start" else 1]
        add(moved, destination)
        for shape in operands[0][:1]:
            moved[shape.space] += total(destination)
    elif opcode in SLICERS:
        add(moved, instruction.shapes)
        for shape in operands[0][:1]:
            moved[shape.space] += total(instruction.shapes)
    elif opcode in ("dynamic-update-slice", "scatter"):  # in place: the update is read and written
        update = operands[-1] if opcode == "scatter" else operands[1]
        moved[instruction.shapes[0].space] += 2 * total(update)
    elif opcode.endswith("-start") or opcode in ("send", "recv"):
        # Most print (operands, results) as their type; of an all-reduce and a send only one side is there.
        add(moved, instruction.shapes)
        if opcode == "all-reduce-start":
            for shapes in operands:
                add(moved, shapes)
    else:
        for shapes in [*operands, instruction.shapes]:
            add(moved, shapes)
    return moved


def add(moved: collections.Counter[int], shapes: tuple[Shape, ...], share: float | None = None) -> None:
    """Counts arrays whole, or `share` bytes of them."""
    for shape in shapes:
        moved[shape.space] += shape.nbytes if share is None else min(share, shape.nbytes)


def total(shapes: tuple[Shape, ...]) -> float:
    """Bytes of several arrays."""
    return math.fsum(shape.nbytes for shape in shapes)


def read_share(module: Module, inner: Computation, parameter: Instruction) -> float | None:
    """Bytes that a fusion reads of a parameter that it only slices or updates in place; None: all of it."""
    read, waiting = 0.0, [parameter]
    while waiting:
        current = waiting.pop()
        for user in inner.users[current.name]:
            if user.opcode == "bitcast":
                waiting.append(user)
            elif user.opcode in SLICERS and user.operands[0] == current.name:
                read += total(user.shapes)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == current.name:
                continue  # overwritten in part, not read
            elif user.opcode == "tuple":
                continue  # handed on
            elif user.opcode == "fusion" and len(user.called) == 1:  # XLA:TPU puts fusions inside fusions
                nested = module.computations[user.called[0]]
                places = [place for place, name in enumerate(user.operands) if name == current.name]
                shares = [read_share(module, nested, nested.parameters[place]) for place in places]
                if None in shares:
                    return None
                read += math.fsum(share for share in shares if share is not None)
            else:
                return None
    return read


def written_bytes(module: Module, inner: Computation, shapes: tuple[Shape, ...]) -> list[float]:
    """Bytes that a fusion writes of each of its results: of one updated in place, the update."""
    root = inner.root
    results = [inner.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(results) != len(shapes):
        return [shape.nbytes for shape in shapes]
    written = []
    for result, shape in zip(results, shapes):
        while result.opcode in THROUGH and result.operands and result.operands[0] in inner.instructions:
            result = inner.instructions[result.operands[0]]
        if result.opcode == "dynamic-update-slice":
            written.append(total(inner.instructions[result.operands[1]].shapes))
        elif result.opcode == "fusion" and len(result.called) == 1 and len(result.shapes) == 1:
            written.extend(written_bytes(module, module.computations[result.called[0]], (shape,)))
        else:
            written.append(0.0 if result.opcode == "parameter" else shape.nbytes)
    return written
