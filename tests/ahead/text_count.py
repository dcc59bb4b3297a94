"""Bytes on wires, counted from a compiled program's text by regular expressions: nothing of jaxscale is used here.

It stands beside jaxscale/tools/preflight/hlo*.py, which reads the same texts with a parser, so that neither errs alone.
"""

import collections
import math
import re

import numpy as np

HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", re.M)
COLLECTIVE = re.compile(r"= (.*?) (all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(?:-start)?\(")
CALLED = r"(?:calls|to_apply|body|called_computations|true_computation|false_computation|branch_computations)"
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}


def count_bytes(text, mesh_shape, places):
    """{(kind, size of a group, torus dimensions of its members): bytes that one device sends in a step}.

    The size is 0 for permutes. What fusions of v5e print again is counted once.
    places: (slice, x, y, z) of each device in the mesh's order.
    """
    bodies = computations(text)
    found = collections.Counter()
    for name, times in runs(bodies, re.search(r"^ENTRY %?([\w.\-]+)", text, re.M)[1]).items():
        for line in bodies[name].splitlines():
            if (
                not (match := COLLECTIVE.search(line))
                or "async_collective_fusion_config" in line
                and "CollectiveStart" not in bodies[name]
            ):
                continue
            types, kind = match.groups()
            size = sum(array_bytes(*array) for array in arrays(types, kind, line))
            pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
            rows = (
                [row.split(",") for row in re.findall(r"\{([\d,]+)", pairs[1])] if pairs else groups(line, mesh_shape)
            )
            group = max((sorted(set(map(int, row))) for row in rows), key=len)
            if len(group) == 1:
                continue
            dims = "".join(
                d for d, values in zip("sxyz", zip(*(places[member] for member in group))) if len(set(values)) > 1
            )
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind, size = "reduce-scatter", size / len(group)
            factor = {"reduce-scatter": len(group) - 1, "collective-permute": 1, "all-reduce": 2 - 2 / len(group)}
            found[kind, 0 if pairs else len(group), dims] += times * size * factor.get(kind, 1 - 1 / len(group))
    return dict(found)


def computations(text):
    """{name: its lines}."""
    starts = list(HEADER.finditer(text))
    ends = [start.start() for start in starts[1:]] + [len(text)]
    return {start[2]: text[start.end() : end] for start, end in zip(starts, ends)}


def runs(bodies, entry):
    """{computation: its runs}. Loops count up by one."""
    found, waiting = collections.Counter(), [(entry, 1)]
    while waiting:
        name, times = waiting.pop()
        found[name] += times
        for line in bodies[name].splitlines():
            if re.search(
                r" [a-z\-]+-(?:done|update)\(| (?:reduce|reduce-window|all-reduce|sort|scatter|map|reduce-scatter)\(",
                line,
            ):
                continue
            trips = 1
            if loop := re.search(r" while\(%?([\w.\-]+)\).*condition=%?([\w.\-]+)", line):
                trips = end_of(bodies[loop[2]]) - start_of(bodies[name], loop[1], bodies[loop[2]])
            for called in re.findall(CALLED + r"=\{?%?([\w.\-]+)", line):
                if called in bodies:
                    waiting.append((called, times * trips))
    return found


def end_of(condition):
    """The only constant of a loop's condition."""
    (number,) = set(re.findall(r"s32\[\]\S* constant\((\d+)\)", condition))
    return int(number)


def start_of(body, init, condition):
    """What the counter, the only number that the condition reads, is at first."""
    (index,) = re.findall(r"s32\[\]\S* get-tuple-element\(.*?index=(\d+)", condition)
    line = lambda name: re.search(rf"%{re.escape(name)} = (.*)", body)[1]
    while not (names := re.search(r" tuple\((.*?)\)", line(init))):
        (init,) = re.findall(r" copy\(%([\w.\-]+)\)", line(init))
    value = line(re.findall(r"%([\w.\-]+)", names[1])[int(index)])
    while not (number := re.search(r" constant\((\d+)\)", value)):
        value = line(re.search(r" copy\(%([\w.\-]+)\)", value)[1])
    return int(number[1])


def arrays(types, kind, line):
    """(dtype, dims) of the arrays that a collective makes: a start prints operands, results and handles."""
    found = re.findall(r"\b(bf16|pred|[fsu]\d+)\[([\d,]*)\]", types)
    if "-start(" not in line or kind == "all-reduce":
        return found
    found = [array for array in found if array[0] != "u32" or array[1]]
    return found[len(found) // 2 :]


def array_bytes(dtype, dims):
    return BYTES[dtype] * math.prod(int(dim) for dim in dims.split(",") if dim)


def groups(line, mesh_shape):
    """Rows of device numbers, from any of three spellings."""
    if axes := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=(\S+))? ?\{(.*?)\}", line):
        assert ":(" not in axes[3], line[:300]
        sizes = dict((name, int(size)) for name, size in re.findall(r"'(\w+)'=(\d+)", axes[1]))
        used = re.findall(r"'(\w+)'", axes[3])
        ids = np.arange(math.prod(sizes.values()))
        if order := re.match(r"\(\[([\d,]+)\]T\(([\d,]+)\)\)", axes[2] or ""):
            source, permutation = (tuple(map(int, order[n].split(","))) for n in (1, 2))
            ids = ids.reshape(source).transpose(permutation)
        else:
            assert "device_ids=(" not in line, line[:300]
        ids = ids.reshape(tuple(sizes.values()))
        last = [list(sizes).index(name) for name in used]
        return (
            np.moveaxis(ids, last, range(-len(last), 0)).reshape(-1, math.prod(sizes[name] for name in used)).tolist()
        )
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape, source = (tuple(map(int, iota[n].split(","))) for n in (1, 2))
        ids = np.arange(math.prod(source)).reshape(source)
        return (ids.transpose(tuple(map(int, iota[3].split(",")))) if iota[3] else ids).reshape(shape).tolist()
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    return (
        [row.split(",") for row in re.findall(r"\{([\d,]+)\}", listed[1])]
        if listed
        else [range(math.prod(mesh_shape.values()))]
    )
