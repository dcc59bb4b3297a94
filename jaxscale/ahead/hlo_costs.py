"""What one run of an instruction costs: FLOPs of matrix products, and bytes through each memory, from shapes alone.

Bytes are an estimate from operands and results. What a fusion keeps to itself costs nothing. A fusion that slices an
operand (one layer of a stack) reads the slice; one that updates an operand in place writes the update. Caches are not
modelled, nor the padding of TPU tiles.
"""

import collections
import math
import re

from jaxscale.ahead.hlo_text import FUSIONS, Computation, Instruction, Module, Shape

CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
# cuDNN's fused attention: 2 products forward, 5 backward (scores again, and four gradients).
CUDNN_FORWARD, CUDNN_BACKWARD = "__cudnn$fmha", "Backward"
# JAX's splash attention: products of each kernel (the backward ones compute the scores again), by its printed name.
SPLASH = {"fwd": 2, "dkv": 4, "dq": 3}
SPLASH_FUSED_BACKWARD = 5
HBM, HOST = 0, 5
PALLAS = ("tpu_custom_call", "mosaic_gpu")
NOTHING = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "optimization-barrier", "add-dependency", "domain", "async-start", "call-start",
    "custom-call-start",
}  # fmt: skip
MARKERS = ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "Sharding", "AsyncCollective", "SliceId")
SLICERS = ("dynamic-slice", "slice", "gather")
THROUGH = ("bitcast", "copy", "convert", "reshape", "transpose")


def product_flops(instruction: Instruction, computation: Computation) -> tuple[str, float] | None:
    """(operand type, FLOPs) of one run of a dot, a convolution or a library's product; None for anything else."""
    opcode = instruction.opcode
    if opcode == "convolution":
        return convolution_flops(instruction, *operand_shapes(instruction, computation)[:2])
    target = custom_target(instruction) if opcode == "custom-call" else ""
    if target.startswith(CUDNN_FORWARD):
        return cudnn_flops(instruction, target, operand_shapes(instruction, computation))
    if opcode in ("dot", "ragged-dot"):
        contracted = r"lhs_contracting_dims=\{([\d,]*)\}"
    elif target.startswith(CUBLAS):
        contracted = r'"lhs_contracting_dimensions":\[([^\]]*)\]'
    else:
        return None
    left = operand_shapes(instruction, computation)[0]
    inner = math.prod(left.dims[int(dim)] for dim in re.findall(r"\d+", instruction.attribute(contracted) or ""))
    return left.dtype, 2.0 * math.prod(instruction.shapes[0].dims) * inner


def convolution_flops(instruction: Instruction, left: Shape, right: Shape) -> tuple[str, float]:
    """FLOPs of a convolution, counting only the taps that meet data.

    XLA:TPU prints matrix products as convolutions, and batched ones with strides and dilations under which most
    taps fall between the elements: counting every tap makes them up to 128 times too large.
    """
    labels = instruction.attribute(r"dim_labels=(\S+?)(?:,|$)") or ""
    left_labels, rest = labels.split("_")
    right_labels, out_labels = rest.split("->")
    out = dict(zip(out_labels, instruction.shapes[0].dims))
    flops = 2.0 * out["b"] * out["f"] * dict(zip(right_labels, right.dims))["i"]
    window = instruction.attribute(r"window=\{([^}]*)\}") or ""
    spatial = sum(label.isdigit() for label in out_labels)
    values = {key: value.split("x") for key, value in re.findall(r"(\w+)=(\S+)", window)}
    part = lambda key, dim, default: values[key][dim] if key in values else default
    for dim in range(spatial):
        flops *= valid_taps(
            size=int(part("size", dim, "1")),
            stride=int(part("stride", dim, "1")),
            padding=int(str(part("pad", dim, "0_0")).split("_")[0]),
            left_dilation=int(part("lhs_dilate", dim, "1")),
            right_dilation=int(part("rhs_dilate", dim, "1")),
            inputs=left.dims[left_labels.index(str(dim))],
            outputs=out[str(dim)],
        )
    return left.dtype, flops


def valid_taps(
    *, size: int, stride: int, padding: int, left_dilation: int, right_dilation: int, inputs: int, outputs: int
) -> int:
    """How many (output, tap) pairs of one spatial dimension meet an input element rather than padding or a hole."""
    count, reach = 0, (inputs - 1) * left_dilation
    for tap in range(size):
        offset = tap * right_dilation - padding
        for output in range(outputs) if left_dilation > 1 else ():
            position = output * stride + offset
            count += 0 <= position <= reach and position % left_dilation == 0
        if left_dilation == 1:  # outputs with 0 <= output * stride + offset <= reach
            first = max(0, -(offset // stride))
            count += max(0, min(outputs - 1, (reach - offset) // stride) - first + 1)
    return count


def cudnn_flops(instruction: Instruction, target: str, operands: list[Shape]) -> tuple[str, float] | None:
    """FLOPs of cuDNN's fused attention over the positions that its own mask leaves. Packed documents leave fewer, by
    what is in the data; the kernel is counted as if each row held one."""
    arrays = [shape for shape in operands if len(shape.dims) == 4]
    if len(arrays) < 3:
        return None
    (B, T, N, H), (_, S, *_) = arrays[0].dims, arrays[1].dims
    seen = T * S
    if instruction.attribute(r'"mask_type":\s*"\w*(CAUSAL)"'):
        window = min(S, int(instruction.attribute(r'"sliding_window_length":\s*(\d+)') or 0) or S)
        seen = T * window - window * (window - 1) // 2
    return arrays[0].dtype, 2.0 * B * N * seen * H * (5 if CUDNN_BACKWARD in target else 2)


def kernel_flops(instruction: Instruction, computation: Computation) -> float:
    """FLOPs of a Pallas kernel: as it declares them, or splash attention's from its shapes; 0 if neither is known.

    In a scope `rows_N_of_M` (ops/expert_all_to_all.py) only N of the M declared rows are multiplied.
    """
    if "hopper_" in instruction.attributes and custom_target(instruction).startswith("mosaic_gpu"):
        return told_rows(instruction) * grouped_flops(instruction, computation)
    if match := re.search(r'"cost_estimate":\{[^}]*?"flops":"?(\d+)', instruction.attributes):
        return told_rows(instruction) * float(match[1])
    name = re.search(r"splash_m[hq]a_(fwd|dkv|dq)", f"{instruction.name} {instruction.attributes}")
    return splash_flops(name[1], instruction, computation) if name else 0.0


def told_rows(instruction: Instruction) -> float:
    """The share of its rows that a kernel multiplies, as its scope tells."""
    told = re.search(r"\brows_(\d+)_of_(\d+)", instruction.attributes)
    return int(told[1]) / int(told[2]) if told else 1.0


def grouped_flops(instruction: Instruction, computation: Computation) -> float:
    """FLOPs of a kernel of ops/grouped_hopper.py: (groups, rows [R, C], matrices or rows) -> [..., O]."""
    rows = operand_shapes(instruction, computation)[1]
    return 2.0 * math.prod(rows.dims) * instruction.shapes[0].dims[-1]


def splash_flops(kernel: str, instruction: Instruction, computation: Computation) -> float:
    """FLOPs of one splash attention kernel over the blocks that it visits.

    Which those are is a table that the text leaves out. The sizes of blocks, which the kernel's metadata has, tell them
    for a causal mask, and the table's shape how many at most a window leaves: (blocks of queries, blocks of keys
    visited), or for gradients of keys and values the other way about. Our own programs tell the number of blocks by the
    scope that the kernels are called in (ops/attention/splash_tables.py).
    """
    shapes = operand_shapes(instruction, computation)
    table = next((shape.dims for shape in shapes if shape.dtype.startswith("s") and len(shape.dims) == 3), None)
    arrays = [shape for shape in shapes if len(shape.dims) >= 3 and shape.dtype[0] in "bf"]
    suffix = "" if kernel == "fwd" else f"_{kernel}"
    found = (re.search(rf'block_{of}{suffix}\\?": (\d+)', instruction.attributes) for of in ("q", "kv"))
    sizes = [int(size[1]) for size in found if size]
    if table is None or len(arrays) < 2 or len(sizes) < 2:
        return 0.0
    of_q, of_kv = sizes
    num_q, num_kv = arrays[0].dims[-2] // of_q, arrays[1].dims[-2] // of_kv
    if told := re.search(r"visits_(\d+)_(\d+)_(\d+)", instruction.attributes):
        visited = int(told[1 + ("fwd", "dq", "dkv").index(kernel)])
    elif kernel == "dkv":  # every block of queries from the first that sees one of these keys
        visited = sum(min(num_q - block * of_kv // of_q, table[-2]) for block in range(num_kv))
    else:
        visited = sum(min(-(-(block + 1) * of_q // of_kv), table[-1]) for block in range(num_q))
    fused = kernel == "dkv" and len(instruction.shapes) == 3  # beside those of keys and values, the queries' gradient
    products = SPLASH_FUSED_BACKWARD if fused else SPLASH[kernel]
    return 2.0 * products * math.prod(arrays[0].dims) * arrays[1].dims[-2] * visited / (num_q * num_kv)


def custom_target(instruction: Instruction) -> str:
    """What a custom call calls."""
    return instruction.attribute(r'custom_call_target="([^"]*)"') or "?"


def operand_shapes(instruction: Instruction, computation: Computation) -> list[Shape]:
    """The first array of each operand."""
    found = [computation.instructions[name].shapes for name in instruction.operands if name in computation.instructions]
    return [shapes[0] for shapes in found if shapes]


def instruction_traffic(module: Module, computation: Computation, instruction: Instruction) -> dict[int, float]:
    """Bytes by memory space: 0 the device's own, 1 on-chip, 5 the host's. Control flow and `-done` count none."""
    opcode = instruction.opcode
    moved: dict[int, float] = collections.defaultdict(int)
    if opcode in NOTHING or opcode.endswith(("-done", "-update")):
        return moved
    if opcode == "custom-call" and custom_target(instruction).startswith(MARKERS):
        return moved
    names = list(dict.fromkeys(instruction.operands))
    operands = [computation.instructions[name].shapes for name in names if name in computation.instructions]
    if opcode in FUSIONS and len(instruction.called) == 1:
        inner = module.computations[instruction.called[0]]
        for number, parameter in inner.parameters.items():
            if number < len(instruction.operands):
                source = computation.instructions[instruction.operands[number]].shapes
                add(moved, source, read_share(module, inner, parameter))
        # fusion-start prints ((operands), results, context)
        results = instruction.shapes if opcode == "fusion" else instruction.elements[1]
        for shape, written in zip(results, written_bytes(module, inner, results)):
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


def add(moved: dict[int, float], shapes: tuple[Shape, ...], share: float | None = None) -> None:
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
