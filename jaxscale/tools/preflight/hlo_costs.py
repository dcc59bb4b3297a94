"""Cost of one run of an HLO instruction from its shapes: matmul FLOPs, and bytes by memory space.

Bytes are estimated from operands and results. Values inside a fusion cost nothing. A fusion that slices an operand
(such as one layer of a stack) reads only the slice. A fusion that updates an operand in place writes only the update.
Caches and the padding of TPU tiles are not modelled.
"""

import collections
import math
import re

from jaxscale.tools.preflight.hlo_text import FUSIONS, ArrayShape, Computation, Instruction, Module

CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
# cuDNN's fused attention has 2 matmuls in forward, and 5 in backward (recomputed scores and four gradients).
CUDNN_FORWARD, CUDNN_BACKWARD = "__cudnn$fmha", "Backward"
# Matmuls of each splash attention kernel of JAX. The backward kernels recompute the scores.
SPLASH = {"fwd": 2, "dkv": 4, "dq": 3}
SPLASH_FUSED_BACKWARD = 5
HBM, HOST = 0, 5
PALLAS = ("tpu_custom_call", "mosaic_gpu")
FREE_OPCODES = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "optimization-barrier", "add-dependency", "domain", "async-start", "call-start",
    "custom-call-start",
}  # fmt: skip
MARKERS = ("AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast", "Sharding", "AsyncCollective", "SliceId")
SLICERS = ("dynamic-slice", "slice", "gather")
PASS_THROUGH = ("bitcast", "copy", "convert", "reshape", "transpose")


def matmul_flops(instruction: Instruction, computation: Computation) -> tuple[str, float] | None:
    """Returns (operand type, FLOPs) of a dot, convolution or library matmul, and None for other instructions."""
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


def convolution_flops(instruction: Instruction, left: ArrayShape, right: ArrayShape) -> tuple[str, float]:
    """Returns (operand type, FLOPs) of a convolution. Excludes kernel taps on padding and between elements.

    XLA:TPU prints matmuls as convolutions. For batched matmuls, most taps are between elements, because of strides and
    dilations. FLOPs that include them would be up to 128 times too large.
    """
    labels = instruction.attribute(r"dim_labels=(\S+?)(?:,|$)") or ""
    left_labels, other_labels = labels.split("_")
    right_labels, out_labels = other_labels.split("->")
    out = dict(zip(out_labels, instruction.shapes[0].dims))
    flops = 2.0 * out["b"] * out["f"] * dict(zip(right_labels, right.dims))["i"]
    window = instruction.attribute(r"window=\{([^}]*)\}") or ""
    spatial = sum(label.isdigit() for label in out_labels)
    values = {key: value.split("x") for key, value in re.findall(r"(\w+)=(\S+)", window)}
    value = lambda key, dim, default: values[key][dim] if key in values else default
    for dim in range(spatial):
        whole = lambda key, dim=dim: int(value(key, dim, 1))
        padding = int(str(value("pad", dim, "0_0")).split("_")[0])
        inputs, outputs = left.dims[left_labels.index(str(dim))], out[str(dim)]
        dilations = (whole("lhs_dilate"), whole("rhs_dilate"))
        flops *= valid_taps(whole("size"), whole("stride"), padding, dilations, inputs, outputs)
    return left.dtype, flops


def valid_taps(size: int, stride: int, padding: int, dilations: tuple[int, int], inputs: int, outputs: int) -> int:
    """Returns the number of (output, kernel tap) pairs of one spatial dimension that read an input element."""
    left_dilation, right_dilation = dilations
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


def cudnn_flops(instruction: Instruction, target: str, operands: list[ArrayShape]) -> tuple[str, float] | None:
    """Returns (operand type, FLOPs) of cuDNN's fused attention. Considers its mask, but not document masks."""
    arrays = [shape for shape in operands if len(shape.dims) == 4]
    if len(arrays) < 3:
        return None
    (B, T, N, H), (_, S, *_) = arrays[0].dims, arrays[1].dims
    attended = T * S
    if instruction.attribute(r'"mask_type":\s*"\w*(CAUSAL)"'):
        window = min(S, int(instruction.attribute(r'"sliding_window_length":\s*(\d+)') or 0) or S)
        attended = T * window - window * (window - 1) // 2
    return arrays[0].dtype, 2.0 * B * N * attended * H * (5 if CUDNN_BACKWARD in target else 2)


def kernel_flops(instruction: Instruction, computation: Computation) -> float | None:
    """Returns the FLOPs of a Pallas kernel, 0 if they are unknown, and None for other instructions.

    FLOPs come from the declared cost estimate, or for splash attention from the shapes. In a scope `rows_N_of_M`
    (kernels/matmul/expert_all_to_all.py), only N of M rows are multiplied.
    """
    target = custom_target(instruction) if instruction.opcode == "custom-call" else ""
    if not target.startswith(PALLAS):
        return None
    rows = re.search(r"\brows_(\d+)_of_(\d+)", instruction.attributes)
    fraction = int(rows[1]) / int(rows[2]) if rows else 1.0
    if "hopper_" in instruction.attributes and target.startswith("mosaic_gpu"):
        # kernels/matmul/grouped_hopper.py: (groups, rows [R, C], matrices or rows) -> [..., O]
        dims = operand_shapes(instruction, computation)[1].dims
        return fraction * 2.0 * math.prod(dims) * instruction.shapes[0].dims[-1]
    if match := re.search(r'"cost_estimate":\{[^}]*?"flops":"?(\d+)', instruction.attributes):
        return fraction * float(match[1])
    name = re.search(r"splash_m[hq]a_(fwd|dkv|dq)", f"{instruction.name} {instruction.attributes}")
    return splash_flops(name[1], instruction, computation) if name else 0.0


def splash_flops(kernel: str, instruction: Instruction, computation: Computation) -> float:
    """Returns the FLOPs of one splash attention kernel over the blocks that it visits.

    The program text omits the table of visited blocks. Programs of jaxscale record the number of visited blocks in the
    scope of the kernel (kernels/attention/splash.py). In other programs with a causal mask, the number follows from the
    block sizes in the kernel's metadata. For a window, the shape of the table gives an upper bound: (query blocks,
    visited key blocks), or transposed for gradients of keys and values.
    """
    shapes = operand_shapes(instruction, computation)
    table = next((shape.dims for shape in shapes if shape.dtype.startswith("s") and len(shape.dims) == 3), None)
    arrays = [shape for shape in shapes if len(shape.dims) >= 3 and shape.dtype[0] in "bf"]
    suffix = "" if kernel == "fwd" else f"_{kernel}"
    matches = (re.search(rf'block_{side}{suffix}\\?": (\d+)', instruction.attributes) for side in ("q", "kv"))
    sizes = [int(size[1]) for size in matches if size]
    if table is None or len(arrays) < 2 or len(sizes) < 2:
        return 0.0
    block_q, block_kv = sizes
    num_q, num_kv = arrays[0].dims[-2] // block_q, arrays[1].dims[-2] // block_kv
    if visits := re.search(r"visits_(\d+)_(\d+)_(\d+)", instruction.attributes):
        visited = int(visits[1 + ("fwd", "dq", "dkv").index(kernel)])
    elif kernel == "dkv":  # all query blocks from the first block that attends to these keys
        visited = sum(min(num_q - block * block_kv // block_q, table[-2]) for block in range(num_kv))
    else:
        visited = sum(min(-(-(block + 1) * block_q // block_kv), table[-1]) for block in range(num_q))
    fused = kernel == "dkv" and len(instruction.shapes) == 3  # gradients of keys, values and queries
    num_matmuls = SPLASH_FUSED_BACKWARD if fused else SPLASH[kernel]
    return 2.0 * num_matmuls * math.prod(arrays[0].dims) * arrays[1].dims[-2] * visited / (num_q * num_kv)


def custom_target(instruction: Instruction) -> str:
    """Returns the target of a custom call."""
    return instruction.attribute(r'custom_call_target="([^"]*)"') or "?"


def operand_shapes(instruction: Instruction, computation: Computation) -> list[ArrayShape]:
    """Returns the first array of each operand."""
    found = [computation.instructions[name].shapes for name in instruction.operands if name in computation.instructions]
    return [shapes[0] for shapes in found if shapes]


def instruction_traffic(module: Module, computation: Computation, instruction: Instruction) -> dict[int, float]:
    """Returns {memory space: bytes}. Spaces are 0 (HBM), 1 (on-chip) and 5 (host). Omits control flow and `-done`."""
    opcode = instruction.opcode
    traffic: dict[int, float] = collections.defaultdict(int)
    is_marker = opcode == "custom-call" and custom_target(instruction).startswith(MARKERS)
    if is_marker or opcode in FREE_OPCODES or opcode.endswith(("-done", "-update")):
        return traffic
    names = list(dict.fromkeys(instruction.operands))
    operands = [computation.instructions[name].shapes for name in names if name in computation.instructions]
    if opcode in FUSIONS and len(instruction.called) == 1:
        fused = module.computations[instruction.called[0]]
        for number, parameter in fused.parameters.items():
            if number < len(instruction.operands):
                source = computation.instructions[instruction.operands[number]].shapes
                add_traffic(traffic, source, read_bytes(module, fused, parameter))
        # fusion-start prints ((operands), results, context)
        results = instruction.shapes if opcode == "fusion" else instruction.elements[1]
        for shape, written in zip(results, written_bytes(module, fused, results)):
            traffic[shape.space] += written
    elif opcode in ("copy-start", "slice-start", *SLICERS):
        result = instruction.shapes
        if opcode not in SLICERS:  # (destination, source, context) or ((source), destination, context)
            result = instruction.elements[0 if opcode == "copy-start" else 1]
        add_traffic(traffic, result)
        for shape in operands[0][:1]:
            traffic[shape.space] += total_bytes(result)
    elif opcode in ("dynamic-update-slice", "scatter"):  # reads and writes only the update, in place
        update = operands[-1] if opcode == "scatter" else operands[1]
        traffic[instruction.shapes[0].space] += 2 * total_bytes(update)
    else:
        # Types of starts contain operands and results, except for all-reduce. Send and recv access one buffer.
        type_has_all = opcode.endswith("-start") and opcode != "all-reduce-start" or opcode in ("send", "recv")
        for shapes in [*([] if type_has_all else operands), instruction.shapes]:
            add_traffic(traffic, shapes)
    return traffic


def add_traffic(traffic: dict[int, float], shapes: tuple[ArrayShape, ...], limit: float | None = None) -> None:
    """Adds the bytes of each array to `traffic`. limit: largest number of bytes to add per array."""
    for shape in shapes:
        traffic[shape.space] += shape.nbytes if limit is None else min(limit, shape.nbytes)


def total_bytes(shapes: tuple[ArrayShape, ...]) -> float:
    """Returns the total bytes of several arrays."""
    return math.fsum(shape.nbytes for shape in shapes)


def read_bytes(module: Module, inner: Computation, parameter: Instruction) -> float | None:
    """Returns the bytes that a fusion reads from a parameter, or None if it reads all of them."""
    read, pending = 0.0, [parameter]
    while pending:
        current = pending.pop()
        for user in inner.users[current.name]:
            if user.opcode == "bitcast":
                pending.append(user)
            elif user.opcode in SLICERS and user.operands[0] == current.name:
                read += total_bytes(user.shapes)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == current.name or user.opcode == "tuple":
                continue  # partly overwritten without a read, or forwarded
            elif user.opcode == "fusion" and len(user.called) == 1:  # XLA:TPU nests fusions
                nested = module.computations[user.called[0]]
                positions = [i for i, name in enumerate(user.operands) if name == current.name]
                nested_bytes = [read_bytes(module, nested, nested.parameters[i]) for i in positions]
                if None in nested_bytes:
                    return None
                read += math.fsum(nbytes for nbytes in nested_bytes if nbytes is not None)
            else:
                return None
    return read


def written_bytes(module: Module, inner: Computation, shapes: tuple[ArrayShape, ...]) -> list[float]:
    """Returns the bytes that a fusion writes per result. An in-place update writes only the updated part."""
    root = inner.root
    results = [inner.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(results) != len(shapes):
        return [shape.nbytes for shape in shapes]
    written = []
    for result, shape in zip(results, shapes):
        while result.opcode in PASS_THROUGH and result.operands and result.operands[0] in inner.instructions:
            result = inner.instructions[result.operands[0]]
        if result.opcode == "dynamic-update-slice":
            written.append(total_bytes(inner.instructions[result.operands[1]].shapes))
        elif result.opcode == "fusion" and len(result.called) == 1 and len(result.shapes) == 1:
            written.extend(written_bytes(module, module.computations[result.called[0]], (shape,)))
        else:
            written.append(0.0 if result.opcode == "parameter" else shape.nbytes)
    return written
