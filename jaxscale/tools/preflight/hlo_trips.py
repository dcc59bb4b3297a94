"""Number of runs of each computation in a step, including loop trips that XLA's cost analysis ignores."""

import re

from jaxscale.tools.preflight.hlo_text import FUSIONS, Computation, Instruction, Module

IDENTITY_OPS = {"copy", "bitcast", "convert", "copy-start", "copy-done", "reshape", "optimization-barrier"}
MAX_DEPTH = 64  # longest chain of operands to follow; chains in real programs are under 10

# A value `carried value + constant` in a loop: (index of the carried value or None, constant).
Linear = tuple[int | None, int]


def count_runs(module: Module) -> tuple[dict[str, int], set[str], int]:
    """Returns (runs of each computation, computations in fusions, number of loops with unknown trip counts)."""
    runs = dict.fromkeys(module.computations, 0)
    runs[module.entry] = 1
    fused: set[str] = set()
    unknown = 0
    for name in reversed(module.computations):  # callers are printed after callees
        for instruction in module.computations[name].instructions.values() if runs[name] else ():
            times = runs[name]
            if instruction.opcode == "while":
                trips = count_trips(module, module.computations[name], instruction)
                unknown += trips is None
                times *= 1 if trips is None else trips
            if instruction.opcode.endswith(("-done", "-update")):  # counted at the start
                continue
            shares = branch_shares(module, instruction)
            for called in instruction.called:
                if called in runs:
                    runs[called] += round(times * shares.get(called, 1))
                    if instruction.opcode in FUSIONS or name in fused:
                        fused.add(called)
    return runs, fused, unknown


def branch_shares(module: Module, instruction: Instruction) -> dict[str, float]:
    """Returns {branch: fraction of the runs of a conditional that take it}, or {} for other instructions.

    The fraction is known for conditionals with two branches in a scope `taken_N_of_M` (windowed attention, pipeline
    ticks). For other conditionals, even inside such a branch, the branch with the most instructions is assumed to run,
    which gives an upper bound.
    """
    if instruction.opcode != "conditional":
        return {}
    branches = instruction.called
    share = re.search(r'op_name="[^"]*\btaken_(\d+)_of_(\d+)(?![^"]*/cond/)', instruction.attributes)
    if share is None or len(branches) != 2:
        size = lambda name: sum(len(one.instructions) for one in reachable(module, name))
        largest = max(branches, key=size)
        return {name: float(name == largest) for name in branches}
    if_true = instruction.attribute(r"\btrue_computation=%?([\w.\-]+)") or branches[1]
    fraction = int(share[1]) / int(share[2])
    return {name: fraction if name == if_true else 1 - fraction for name in branches}


def reachable(module: Module, name: str) -> list[Computation]:
    """Returns a computation and all computations that it calls, directly or indirectly."""
    found, pending = {}, [name]
    while pending:
        current = module.computations.get(pending.pop())
        if current is not None and current.name not in found:
            found[current.name] = current
            pending += [called for one in current.instructions.values() for called in one.called]
    return list(found.values())


def count_trips(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """Returns a loop's trip count from XLA's metadata, a scope `usually_N_trips` or its condition, else None."""
    for pattern in (r'"known_trip_count":\{"n":"(\d+)"', r'op_name="[^"]*\busually_(\d+)_trips\b[^"/]*/while"'):
        if trips := loop.attribute(pattern):
            return int(trips)
    called = lambda key: module.computations.get(loop.attribute(rf"\b{key}=%?([\w.\-]+)") or "")
    body, condition = called("body"), called("condition")
    if body is None or condition is None:
        return None
    if (test := follow_compare(module, condition)) is None:
        return None
    (index, shift), (limit_index, limit), direction = test
    if index is None:  # the constant is on the left
        (index, shift), (limit_index, limit) = (limit_index, limit), (index, shift)
        direction = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}.get(direction, direction)
    if index is None or body.root.opcode != "tuple" or index >= len(body.root.operands):
        return None
    start = initial_value(module, caller, loop, index)
    if limit_index is not None:  # a carried limit must be a constant that the body does not change
        is_forwarded = linear(module, body, body.root.operands[limit_index]) == (limit_index, 0)
        begin = initial_value(module, caller, loop, limit_index) if is_forwarded else None
        if begin is None:
            return None
        limit += begin
    step = linear(module, body, body.root.operands[index])
    if start is None or step is None or step[0] != index or step[1] == 0:
        return None
    stride, start, limit = step[1], start + shift, limit + (direction in ("LE",)) - (direction in ("GE",))
    if direction == "NE":
        return (limit - start) // stride if (limit - start) % stride == 0 else None
    if (direction in ("LT", "LE")) != (stride > 0) or direction == "EQ":
        return None
    return max(0, -(-(limit - start) // stride))


def follow_compare(module: Module, condition: Computation) -> tuple[Linear, Linear, str] | None:
    """Returns (left side, right side, direction) of the comparison in a loop's condition, or None."""
    root, arguments = condition.root, None
    if root.opcode in ("fusion", "call") and len(root.called) == 1:
        arguments = [linear(module, condition, operand) for operand in root.operands]
        condition = module.computations[root.called[0]]
        root = condition.root
    direction = root.attribute(r"direction=(\w+)")
    if root.opcode != "compare" or direction is None:
        return None
    left, right = (linear(module, condition, operand, arguments) for operand in root.operands[:2])
    return None if left is None or right is None else (left, right, direction)


def initial_value(module: Module, caller: Computation, loop: Instruction, index: int) -> int | None:
    """Returns the initial value of one of the values that a loop carries, or None if it is not constant."""
    before = caller.instructions.get(loop.operands[0])
    if before is None or before.opcode != "tuple" or index >= len(before.operands):
        return None
    value = linear(module, caller, before.operands[index])
    return value[1] if value and value[0] is None else None


def linear(
    module: Module,
    computation: Computation,
    name: str,
    arguments: list[Linear | None] | None = None,
    depth: int = MAX_DEPTH,
) -> Linear | None:
    """Returns a value as (index of a carried value, constant to add), or None. arguments: inputs of a fusion."""
    instruction = computation.instructions.get(name)
    if instruction is None or depth == 0:
        return None
    resolve = lambda operand: linear(module, computation, operand, arguments, depth - 1)
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "constant":
        match = re.fullmatch(r"\s*(-?\d+)\s*", instruction.operands_text)
        return (None, int(match[1])) if match else None
    if opcode == "parameter" and arguments is not None:
        number = int(instruction.operands_text)
        return arguments[number] if number < len(arguments) else None
    if opcode == "get-tuple-element":
        source = computation.instructions.get(operands[0])
        index = int(instruction.attribute(r"index=(\d+)") or 0)
        if source is not None and source.opcode == "parameter" and arguments is None:
            return index, 0
        return resolve(source.operands[index]) if source is not None and source.opcode == "tuple" else None
    if opcode in IDENTITY_OPS:
        return resolve(operands[0])
    if opcode in ("add", "subtract"):
        left, right = resolve(operands[0]), resolve(operands[1])
        if left is None or right is None:
            return None
        if opcode == "subtract":
            return (left[0], left[1] - right[1]) if right[0] is None else None
        if left[0] is not None and right[0] is not None:
            return None
        return (right[0] if left[0] is None else left[0], left[1] + right[1])
    if opcode in ("fusion", "call") and len(instruction.called) == 1:
        inner = module.computations[instruction.called[0]]
        return linear(module, inner, inner.root.name, [resolve(operand) for operand in operands], depth - 1)
    return None
