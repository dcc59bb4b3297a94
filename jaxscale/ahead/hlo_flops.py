"""Multiplications and additions of a program's matrix products, from shapes alone."""

import math
import re

from jaxscale.ahead.hlo_text import Computation, Instruction, Shape

CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8")
# cuDNN's fused attention: 2 products forward, 5 backward (scores again, and four gradients), over all T x S positions.
CUDNN_FORWARD, CUDNN_BACKWARD = "__cudnn$fmha", "Backward"
# JAX's splash attention: products of each kernel (the backward ones compute the scores again), by its printed name.
SPLASH = {"fwd": 2, "dkv": 4, "dq": 3}
SPLASH_FUSED_BACKWARD = 5


def product_flops(instruction: Instruction, computation: Computation) -> tuple[str, float] | None:
    """(operand type, FLOPs) of one run of a dot, a convolution or a library's product; None for anything else."""
    opcode = instruction.opcode
    if opcode in ("dot", "ragged-dot"):
        operands = operand_shapes(instruction, computation)
        contracted = sizes(instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
        inner = math.prod(operands[0].dims[dim] for dim in contracted)
        return operands[0].dtype, 2.0 * math.prod(instruction.shapes[0].dims) * inner
    if opcode == "convolution":
        return convolution_flops(instruction, *operand_shapes(instruction, computation)[:2])
    if opcode == "custom-call":
        target = custom_target(instruction)
        if target.startswith(CUBLAS):
            operands = operand_shapes(instruction, computation)
            contracted = sizes(instruction, r'"lhs_contracting_dimensions":\[([^\]]*)\]')
            inner = math.prod(operands[0].dims[dim] for dim in contracted)
            return operands[0].dtype, 2.0 * math.prod(instruction.shapes[0].dims) * inner
        if target.startswith(CUDNN_FORWARD):
            return cudnn_flops(target, operand_shapes(instruction, computation))
    return None


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


def cudnn_flops(target: str, operands: list[Shape]) -> tuple[str, float] | None:
    """FLOPs of cuDNN's fused attention over every position, masked or not (as the plain form computes them)."""
    arrays = [shape for shape in operands if len(shape.dims) == 4]
    if len(arrays) < 3:
        return None
    (B, T, N, H), (_, S, *_) = arrays[0].dims, arrays[1].dims
    return arrays[0].dtype, 2.0 * B * N * T * S * H * (5 if CUDNN_BACKWARD in target else 2)


def kernel_flops(instruction: Instruction, computation: Computation) -> float:
    """FLOPs of a Pallas kernel: as it declares them, or splash attention's from its shapes; 0 if neither is known."""
    if match := re.search(r'"cost_estimate":\{[^}]*?"flops":"?(\d+)', instruction.attributes):
        return float(match[1])
    name = re.search(r"splash_m[hq]a_(fwd|dkv|dq)", f"{instruction.name} {instruction.attributes}")
    return splash_flops(name[1], instruction, computation) if name else 0.0


def splash_flops(kernel: str, instruction: Instruction, computation: Computation) -> float:
    """FLOPs of one splash attention kernel over the blocks that it visits.

    Which those are is a table that the text leaves out; its shape, (blocks of queries, blocks of keys visited at most),
    tells them for a causal mask, with or without a window, which is what this project uses.
    """
    shapes = operand_shapes(instruction, computation)
    table = next((shape.dims for shape in shapes if shape.dtype.startswith("s") and len(shape.dims) == 3), None)
    arrays = [shape for shape in shapes if len(shape.dims) >= 3 and shape.dtype[0] in "bf"]
    if table is None or len(arrays) < 2:
        return 0.0
    blocks, widest = max(table[1:]), min(table[1:])
    visited = sum(min(block + 1, widest) for block in range(blocks)) / blocks**2
    fused = kernel == "dkv" and r"use_fused_bwd_kernel\": true" in instruction.attributes
    products = SPLASH_FUSED_BACKWARD if fused else SPLASH[kernel]
    return 2.0 * products * math.prod(arrays[0].dims) * arrays[1].dims[-2] * visited


def custom_target(instruction: Instruction) -> str:
    """What a custom call calls."""
    return instruction.attribute(r'custom_call_target="([^"]*)"') or "?"


def operand_shapes(instruction: Instruction, computation: Computation) -> list[Shape]:
    """The first array of each operand."""
    found = [computation.instructions[name].shapes for name in instruction.operands if name in computation.instructions]
    return [shapes[0] for shapes in found if shapes]


def sizes(instruction: Instruction, pattern: str) -> list[int]:
    """The numbers of a braced attribute."""
    return [int(number) for number in re.findall(r"\d+", instruction.attribute(pattern) or "")]
