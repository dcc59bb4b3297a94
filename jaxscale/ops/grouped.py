"""Products of rows with the matrix of their own group by a kernel that visits no other: rows come sorted by group.

E groups  R rows  C contracted size  O output size
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from jaxscale.hardware import Device, compute_capability
from jaxscale.ops.gradient import custom_vjp
from jaxscale.ops.grouped_hopper import hopper_of_weights, hopper_project
from jaxscale.ops.project import PRODUCT
from jaxscale.ops.slots import ON_CPU, ON_GPU, LayRows, Weigh, in_slots, project_rows, weigh
from jaxscale.units import divisors

LANES = 128  # of a TPU's tile: sizes of a kernel's blocks are multiples
# Bytes of fast memory for a kernel's blocks: Mixtral's step compiled with them for v5p (libtpu 0.0.51, 2026-11-24).
KERNEL_BYTES = 12 << 20
HOPPER = 9.0  # compute capability

# (x_RC, w_ECO, counts_E) -> y_RO in x's dtype, and the gradient of w in w's own. Rows behind the last group have no
# meaning, and none in the gradients. turned=True: w lies in memory as [E, O, C].
GroupedProject = Callable[..., jax.Array]


class Products(NamedTuple):
    """The three products of a kernel, float32 or narrower as it sums them."""

    forward: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (x_RC, w_ECO, counts_E) -> y_RO
    back: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (dy_RO, w_ECO, counts_E) -> dx_RC
    of_weights: Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]  # (x_RC, dy_RO, counts_E, dtype) -> dw_ECO

    @property
    def turned(self) -> "Products":
        """The products of weights that lie in memory as [E, O, C]: they are read so, and their gradients written so."""
        of_weights = lambda x_RC, dy_RO, counts_E, dtype: self.of_weights(dy_RO, x_RC, counts_E, dtype)
        return Products(self.back, self.forward, of_weights)


def grouped_project(
    products: Products, x_RC: jax.Array, w_ECO: jax.Array, counts_E: jax.Array, *, turned: bool = False
) -> jax.Array:
    """A GroupedProject of these products."""
    if turned:
        products, w_ECO = products.turned, w_ECO.swapaxes(1, 2)
    return checkpoint_name(_project(products, x_RC, w_ECO, counts_E), PRODUCT)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _project(products: Products, x_RC, w_ECO, counts_E):
    return products.forward(x_RC, w_ECO.astype(x_RC.dtype), counts_E)


def _forward(products, x_RC, w_ECO, counts_E):
    return _project(products, x_RC, w_ECO, counts_E), (x_RC, w_ECO, counts_E)


def _backward(products, saved, dy_RO):
    x_RC, w_ECO, counts_E = saved
    dx_RC = products.back(dy_RO, w_ECO.astype(x_RC.dtype), counts_E)
    return dx_RC, products.of_weights(x_RC, dy_RO, counts_E, w_ECO.dtype), None


_project.defvjp(_forward, _backward)


def kernel_products(*, interpret: bool = False) -> Products:
    """Those of JAX's Pallas kernels for TPUs, which visit no group without rows. interpret: on a CPU, for tests."""

    def forward(x_RC, w_ECO, counts_E):
        x_RC, rows = whole_tiles(x_RC), len(x_RC)
        tiles = tiling(x_RC.shape[0], x_RC.shape[1], w_ECO.shape[2], x_RC.dtype.itemsize)
        return gmm(x_RC, w_ECO, counts_E, x_RC.dtype, tiles, interpret=interpret)[:rows]

    def back(dy_RO, w_ECO, counts_E):
        dy_RO, rows = whole_tiles(dy_RO), len(dy_RO)
        tiles = tiling(dy_RO.shape[0], dy_RO.shape[1], w_ECO.shape[1], dy_RO.dtype.itemsize)
        return gmm(dy_RO, w_ECO, counts_E, dy_RO.dtype, tiles, transpose_rhs=True, interpret=interpret)[:rows]

    def of_weights(x_RC, dy_RO, counts_E, dtype):
        x_RC, dy_RO = whole_tiles(x_RC), whole_tiles(dy_RO)
        tiles = tiling(x_RC.shape[0], x_RC.shape[1], dy_RO.shape[1], x_RC.dtype.itemsize)
        return tgmm(x_RC.swapaxes(0, 1), dy_RO, counts_E, dtype, tiles, interpret=interpret)  # 0 where no rows are

    return Products(forward, back, of_weights)


def hopper_products() -> Products:
    """Those of our kernels for NVIDIA's Hopper cards, of rows of 16 bits."""
    return Products(hopper_project, functools.partial(hopper_project, turned=True), hopper_of_weights)


def whole_tiles(x_RC: jax.Array) -> jax.Array:
    """The rows filled up to whole tiles, with rows of no group."""
    return jnp.pad(x_RC, ((0, -len(x_RC) % LANES), (0, 0)))


def tiling(rows: int, contracted: int, width: int, item_bytes: int) -> tuple[int, int, int]:
    """Blocks (of rows, contracted, output) of a kernel: large ones read a group's matrix less often."""
    size = lambda length, most: max((d for d in divisors(length) if d % LANES == 0 and d <= most), default=length)
    block_r, block_c, block_o = size(rows, 512), size(contracted, 1024), size(width, 1024)
    while (bytes_of(block_r, block_c, block_o, item_bytes) > KERNEL_BYTES) and block_o % (2 * LANES) == 0:
        block_o //= 2
    return block_r, block_c, block_o


def bytes_of(block_r: int, block_c: int, block_o: int, item_bytes: int) -> int:
    """Of a kernel's blocks: what it reads and writes twice, for the next is on its way, and a float32 sum."""
    moved = block_r * block_c + block_c * block_o + block_r * block_o
    return 2 * item_bytes * moved + 4 * max(block_r, block_c) * block_o


def all_rows(run: Callable, weights: Any, x_RD: jax.Array, weight_R: jax.Array, counts_E: jax.Array) -> jax.Array:
    """A LayRows of products that take all rows as they lie."""
    return run(weights, x_RD, weight_R, counts_E)


def weighed(activate: Callable, gate_RF: jax.Array, up_RF: jax.Array, weight_R: jax.Array) -> jax.Array:
    """activate(gate, up) times the rows' weights."""
    return (activate(gate_RF, up_RF) * weight_R[:, None]).astype(gate_RF.dtype)


class ExpertKernels(NamedTuple):
    """How a platform takes rows through their experts."""

    project: GroupedProject = project_rows  # on rows as lay_rows lays them
    lay_rows: LayRows = functools.partial(in_slots, ON_CPU)
    weigh: Weigh = weigh
    as_bits: bool = True  # whether rows are moved to experts and back as integers, which is fast on a CPU
    why_slots: str = ""  # what kept a GPU from kernels


def choose_expert_kernels(platform: str, device: Device | None, dtype: Any) -> ExpertKernels:
    """Kernels for "tpu", and in 16 bits for Hopper cards; elsewhere slots, since XLA has no form there that leaves out
    what no row asks for."""
    if platform == "cpu":
        return ExpertKernels()
    if platform == "tpu":
        products = kernel_products()
    elif platform == "gpu" and is_hopper(device) and jnp.dtype(dtype).itemsize == 2:
        products = hopper_products()
    else:
        why = "the kernels are for Hopper cards, and for bfloat16 and float16"
        return ExpertKernels(lay_rows=functools.partial(in_slots, ON_GPU), as_bits=False, why_slots=why)
    return ExpertKernels(functools.partial(grouped_project, products), all_rows, weighed, as_bits=False)


def is_hopper(device: Device | None) -> bool:
    """Whether it is an NVIDIA card of that generation, such as an H100 or H200."""
    return compute_capability(device) == HOPPER
