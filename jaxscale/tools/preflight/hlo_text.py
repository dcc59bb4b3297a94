"""Parser for the text of compiled programs, into computations and instructions."""

import dataclasses
import functools
import math
import re

from jaxscale.system.exits import BadInput

SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\](?:\{([^}]*)\})?")
HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->\s.*\{\s*$")
INSTRUCTION = re.compile(r"\s+(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)")
OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
NAME = re.compile(r"%([\w.\-]+)")
END = re.compile(r"\}(?:, execution_thread=\"[^\"]*\")?\s*")
BITS = re.compile(r"(?:bf|f|s|u|c)(\d+)")
FUSIONS = ("fusion", "fusion-start")  # opcodes; XLA:GPU runs some slice copies as fusion-start


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayShape:
    """Element type, sizes and memory space (0 HBM, 1 on-chip, 5 host) of an array."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def nbytes(self) -> float:
        """Size in bytes, without the padding of TPU tiles."""
        bits = 8 if self.dtype == "pred" else int(match[1]) if (match := BITS.match(self.dtype)) else 0
        return math.prod(self.dims) * bits / 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction, printed as `%name = TYPE opcode(operands), attributes`."""

    name: str
    opcode: str
    type_text: str
    operands_text: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        return tuple(NAME.findall(self.operands_text))

    @functools.cached_property
    def shapes(self) -> tuple[ArrayShape, ...]:
        """All arrays of the result, including arrays nested in tuples."""
        return parse_shapes(self.type_text)

    @functools.cached_property
    def elements(self) -> tuple[tuple[ArrayShape, ...], ...]:
        """The arrays of each member of a tuple result. An array result is its only member."""
        return tuple(parse_shapes(part) for part in tuple_parts(self.type_text))

    def attribute(self, pattern: str) -> str | None:
        """Searches the attributes for a regular expression. Returns its first group, or None without a match."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    @property
    def called(self) -> list[str]:
        """Names of called computations, excluding reducers."""
        found = re.findall(
            r"\b(?:calls|true_computation|false_computation|condition|body)=%?([\w.\-]+)", self.attributes
        )
        if self.opcode in ("call", "async-start", "call-start"):
            found += re.findall(r"\bto_apply=%?([\w.\-]+)", self.attributes)
        lists = r"\b(?:branch|called)_computations" if self.opcode.endswith("-start") else r"\bbranch_computations"
        for names in re.findall(lists + r"=\{([^}]*)\}", self.attributes):
            found += [name.strip().lstrip("%") for name in names.split(",")]
        return found


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation with its instructions in printed order, operands first."""

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        """The returned instruction."""
        marked = [instruction for instruction in self.instructions.values() if instruction.is_root]
        return marked[0] if marked else list(self.instructions.values())[-1]

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that use each instruction, by name."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        return {int(i.operands_text): i for i in self.instructions.values() if i.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Module:
    """A whole program. Computations are in printed order, with callees before callers."""

    computations: dict[str, Computation]
    entry: str
    num_partitions: int | None
    is_scheduled: bool  # True if instructions are in execution order


def parse_module(text: str) -> Module:
    """Parses the text of a compiled program, `compiled.as_text()`. Raises BadInput without an ENTRY computation."""
    computations: dict[str, Computation] = {}
    entry, name, lines = None, None, []
    for line in text.splitlines():
        if name is None:
            if match := HEADER.match(line):
                name, lines = match[2], []
                entry = name if match[1] else entry
        elif END.fullmatch(line):
            found = [parse_instruction(line) for line in lines]
            computations[name] = Computation(name, {i.name: i for i in found if i is not None})
            name = None
        elif INSTRUCTION.match(line) or not lines:
            lines.append(line)
        else:
            lines[-1] += line  # metadata of Pallas kernels spans several lines
    if entry is None:
        raise BadInput("the text has no ENTRY computation; pass the text of a compiled program")
    header = text[: text.find("\n")]
    partitions = re.search(r"\bnum_partitions=(\d+)", header)
    return Module(computations, entry, int(partitions[1]) if partitions else None, "is_scheduled=true" in header)


def parse_instruction(line: str) -> Instruction | None:
    """Parses ` ROOT %name = TYPE opcode(operands), attributes`. Returns None for other lines."""
    start = INSTRUCTION.match(line)
    if not start:
        return None
    is_root, name, definition = bool(start[1]), start[2], start[3]
    end = closing_bracket(definition, 0) + 1 if definition.startswith("(") else definition.find(" ")
    match = OPCODE.match(definition, end)
    if end <= 0 or not match:
        return None
    close = closing_bracket(definition, match.end() - 1)
    operands, attributes = definition[match.end() : close], definition[close + 1 :]
    return Instruction(name, match[1], definition[:end], operands, attributes, is_root)


def closing_bracket(text: str, start: int) -> int:
    """Returns the index of the bracket that closes the bracket at `start`."""
    depth = 0
    for match in re.finditer(r"[()\[\]{}]", text[start:]):
        depth += 1 if match[0] in "([{" else -1
        if depth == 0:
            return start + match.start()
    return len(text)


def tuple_parts(text: str) -> list[str]:
    """Returns the members of a printed tuple type. For an array type, returns the type itself."""
    if not text.startswith("("):
        return [text]
    parts, depth, start = [], 0, 1
    for match in re.finditer(r"[()\[\]{},]", text):
        if match[0] in "([{":
            depth += 1
        elif match[0] != ",":
            depth -= 1
        if depth == 1 and match[0] == "," or depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
        if depth == 0:
            break
    return [part for part in parts if part.strip()]


@functools.lru_cache(maxsize=65536)
def parse_shapes(text: str) -> tuple[ArrayShape, ...]:
    """Returns all arrays in a printed type. Omits tokens and opaque handles, which have no bytes."""
    found = []
    for dtype, dims, layout in SHAPE.findall(text):
        if dtype == "pred" or BITS.fullmatch(dtype) or re.match(r"f\d+e\d", dtype):
            space = re.search(r"S\((\d+)\)", layout)
            sizes = tuple(int(size) for size in dims.replace("<=", "").split(",") if size)
            found.append(ArrayShape(dtype, sizes, int(space[1]) if space else 0))
    return tuple(found)
