"""Grouped matmuls, which multiply each row by the matrix of its group. Rows are sorted by group.

E groups  R rows  C contracted size  O output size
"""

import functools
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from jaxscale.kernels.config import Choice
from jaxscale.kernels.gradient import custom_vjp
from jaxscale.kernels.hardware import Device, compute_capability
from jaxscale.kernels.matmul import slots
from jaxscale.kernels.matmul.project import PRODUCT
from jaxscale.kernels.matmul.slots import ExpertKernels
from jaxscale.units import divisors

LANES = 128  # lanes of a TPU tile, and divisor of block sizes
# VMEM limit for the blocks of a kernel, with which Mixtral's step compiles for v5p (libtpu 0.0.51, 2026-11-24).
KERNEL_BYTES = 12 << 20
HOPPER_KERNELS = (  # imported on Hopper GPUs only
    "jaxscale.kernels.matmul.grouped_hopper:hopper_project",
    "jaxscale.kernels.matmul.grouped_hopper:hopper_weight_grad",
)
HOPPER = 9.0  # compute capability


class GroupedMatmuls(NamedTuple):
    """Grouped matmuls of the forward and backward pass. Accumulation and result dtypes depend on the kernel."""

    forward: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (x_RC, w_ECO, counts_E) -> y_RO
    input_grad: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (dy_RO, w_ECO, counts_E) -> dx_RC
    weight_grad: Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]  # (x_RC, dy_RO, counts_E, dtype) -> dw_ECO

    @property
    def transposed(self) -> "GroupedMatmuls":
        """The matmuls for weights and weight gradients with the memory layout [E, O, C]."""
        weight_grad = lambda x_RC, dy_RO, counts_E, dtype: self.weight_grad(dy_RO, x_RC, counts_E, dtype)
        return GroupedMatmuls(self.input_grad, self.forward, weight_grad)


def grouped_project(
    matmuls: GroupedMatmuls, x_RC: jax.Array, w_ECO: jax.Array, counts_E: jax.Array, *, transposed: bool = False
) -> jax.Array:
    """Implements GroupedProject with `matmuls`. Returns y_RO."""
    if transposed:
        matmuls, w_ECO = matmuls.transposed, w_ECO.swapaxes(1, 2)
    return checkpoint_name(_project(matmuls, x_RC, w_ECO, counts_E), PRODUCT)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _project(matmuls: GroupedMatmuls, x_RC, w_ECO, counts_E):
    return matmuls.forward(x_RC, w_ECO.astype(x_RC.dtype), counts_E)


def _forward(matmuls, x_RC, w_ECO, counts_E):
    return _project(matmuls, x_RC, w_ECO, counts_E), (x_RC, w_ECO, counts_E)


def _backward(matmuls, saved, dy_RO):
    x_RC, w_ECO, counts_E = saved
    dx_RC = matmuls.input_grad(dy_RO, w_ECO.astype(x_RC.dtype), counts_E)
    return dx_RC, matmuls.weight_grad(x_RC, dy_RO, counts_E, w_ECO.dtype), None


_project.defvjp(_forward, _backward)


def megablox_matmuls(*, interpret: bool = False) -> GroupedMatmuls:
    """Returns JAX's Megablox kernels for TPUs, which skip empty groups. interpret: run on a CPU, for tests."""

    def forward(x_RC, w_ECO, counts_E):
        x_RC, rows = pad_rows(x_RC), len(x_RC)
        tiles = tiling(x_RC.shape[0], x_RC.shape[1], w_ECO.shape[2], x_RC.dtype.itemsize)
        return gmm(x_RC, w_ECO, counts_E, x_RC.dtype, tiles, interpret=interpret)[:rows]

    def input_grad(dy_RO, w_ECO, counts_E):
        dy_RO, rows = pad_rows(dy_RO), len(dy_RO)
        tiles = tiling(dy_RO.shape[0], dy_RO.shape[1], w_ECO.shape[1], dy_RO.dtype.itemsize)
        return gmm(dy_RO, w_ECO, counts_E, dy_RO.dtype, tiles, transpose_rhs=True, interpret=interpret)[:rows]

    def weight_grad(x_RC, dy_RO, counts_E, dtype):
        x_RC, dy_RO = pad_rows(x_RC), pad_rows(dy_RO)
        tiles = tiling(x_RC.shape[0], x_RC.shape[1], dy_RO.shape[1], x_RC.dtype.itemsize)
        return tgmm(x_RC.swapaxes(0, 1), dy_RO, counts_E, dtype, tiles, interpret=interpret)  # 0 for empty groups

    return GroupedMatmuls(forward, input_grad, weight_grad)


def hopper_matmuls() -> GroupedMatmuls:
    """Returns the kernels of grouped_hopper.py for NVIDIA Hopper GPUs and 16-bit rows."""
    project, weight_grad = map(pkgutil.resolve_name, HOPPER_KERNELS)
    return GroupedMatmuls(project, functools.partial(project, transposed=True), weight_grad)


def pad_rows(x_RC: jax.Array) -> jax.Array:
    """Pads rows to whole tiles. Padding belongs to no group."""
    return jnp.pad(x_RC, ((0, -len(x_RC) % LANES), (0, 0)))


def tiling(rows: int, contracted: int, width: int, item_bytes: int) -> tuple[int, int, int]:
    """Returns block sizes (rows, contracted, output). With larger blocks, a kernel reads matrices less often."""
    size = lambda length, limit: max((d for d in divisors(length) if d % LANES == 0 and d <= limit), default=length)
    block_r, block_c, block_o = size(rows, 512), size(contracted, 1024), size(width, 1024)
    while (block_bytes(block_r, block_c, block_o, item_bytes) > KERNEL_BYTES) and block_o % (2 * LANES) == 0:
        block_o //= 2
    return block_r, block_c, block_o


def block_bytes(block_r: int, block_c: int, block_o: int, item_bytes: int) -> int:
    """Returns the VMEM bytes of a kernel for double-buffered operands and result, and a float32 accumulator."""
    elements = block_r * block_c + block_c * block_o + block_r * block_o
    return 2 * item_bytes * elements + 4 * max(block_r, block_c) * block_o


def run_grouped(run: Callable, weights: Any, x_RD: jax.Array, weight_R: jax.Array, counts_E: jax.Array) -> jax.Array:
    """Implements MapExperts for grouped matmuls, which process all rows at once. Returns y_RD."""
    return run(weights, x_RD, weight_R, counts_E)


def weighted_activation(activate: Callable, gate_RF: jax.Array, up_RF: jax.Array, weight_R: jax.Array) -> jax.Array:
    """Returns activate(gate, up) * weight."""
    return (activate(gate_RF, up_RF) * weight_R[:, None]).astype(gate_RF.dtype)


def resolve_expert_kernels(platform: str, device: Device | None, dtype: Any) -> tuple[ExpertKernels, Choice]:
    """Returns (kernels, choice). Choice.reason is the reason why a GPU does not use grouped kernels, or "".

    TPUs, and Hopper GPUs with 16-bit dtypes, use grouped kernels. Other devices use slots (slots.py), because XLA's
    grouped matmuls do not skip the matrices of other groups there.
    """
    if platform == "cpu":
        return ExpertKernels(), Choice(name="slots")
    if platform == "tpu":
        name, matmuls = "megablox", megablox_matmuls()
    elif platform == "gpu" and is_hopper(device) and jnp.dtype(dtype).itemsize == 2:
        name, matmuls = "hopper", hopper_matmuls()
    else:
        reason = "grouped kernels need a Hopper GPU, and bfloat16 or float16"
        run = functools.partial(slots.run_in_slots, slots.ON_GPU)
        return ExpertKernels(map_experts=run, as_bits=False), Choice(name="slots", reason=reason)
    project = functools.partial(grouped_project, matmuls)
    return ExpertKernels(project, run_grouped, weighted_activation, as_bits=False), Choice(name=name)


def is_hopper(device: Device | None) -> bool:
    """Returns True for an NVIDIA Hopper GPU, such as an H100 or H200."""
    return compute_capability(device) == HOPPER
