"""Products of rows with the matrix of their own group, computed for no other: rows come sorted by group.

E groups  R rows  C contracted size  O output size  V visits: runs of a group's rows that are multiplied at a time
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from jaxscale.ops.project import PRODUCT, matmul_transposed, separate_on_cpu
from jaxscale.units import divisors

F32 = jnp.float32
LARGEST_RUN = 128  # rows: more leave more of a group's last run unused, fewer are slower on a CPU (2026-11-24)
LANES = 128  # of a TPU's tile: sizes of a kernel's blocks are multiples
# Bytes of fast memory for a kernel's blocks: Mixtral's step compiled with them for v5p (libtpu 0.0.51, 2026-11-24).
KERNEL_BYTES = 12 << 20

# (x_RC, w_ECO, counts_E) -> y_RO in x's dtype, and the gradient of w in w's own. Rows behind the last group have no
# meaning, and none in the gradients. turned=True: w lies in memory as [E, O, C].
GroupedProject = Callable[..., jax.Array]


class Products(NamedTuple):
    """The three products of a platform, float32 or narrower as it sums them."""

    forward: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (x_RC, w_ECO, counts_E) -> y_RO
    back: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (dy_RO, w_ECO, counts_E) -> dx_RC
    of_weights: Callable[[jax.Array, jax.Array, jax.Array, Any], jax.Array]  # (x_RC, dy_RO, counts_E, dtype) -> dw_ECO
    reads_turned: bool = False  # a weight that lies in memory as [E, O, C] is read so, and its gradient written so

    @property
    def turned(self) -> "Products":
        """The products of weights [E, O, C]."""
        of_weights = lambda x_RC, dy_RO, counts_E, dtype: self.of_weights(dy_RO, x_RC, counts_E, dtype)
        return Products(self.back, self.forward, of_weights)


def grouped_project(
    products: Products, x_RC: jax.Array, w_ECO: jax.Array, counts_E: jax.Array, *, turned: bool = False
) -> jax.Array:
    """A GroupedProject of these products."""
    if turned and products.reads_turned:
        products, w_ECO = products.turned, w_ECO.swapaxes(1, 2)
    return checkpoint_name(_project(products, x_RC, w_ECO, counts_E), PRODUCT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(products: Products, x_RC, w_ECO, counts_E):
    return products.forward(x_RC, w_ECO.astype(x_RC.dtype), counts_E)


def _forward(products, x_RC, w_ECO, counts_E):
    return _project(products, x_RC, w_ECO, counts_E), (x_RC, w_ECO, counts_E)


def _backward(products, saved, dy_RO):
    x_RC, w_ECO, counts_E = saved
    dx_RC = products.back(dy_RO, w_ECO.astype(x_RC.dtype), counts_E)
    return dx_RC, products.of_weights(x_RC, dy_RO, counts_E, w_ECO.dtype), None


_project.defvjp(_forward, _backward)


class Visits(NamedTuple):
    """Which rows are multiplied together, all of one group. Those behind the last one are never made."""

    group_V: jax.Array
    begin_V: jax.Array  # the first row
    total: jax.Array  # how many there are


def plan_visits(counts_E: jax.Array, rows: int, size: int) -> Visits:
    """Runs of up to `size` rows, in their order."""
    ends_E = jnp.cumsum(counts_E)
    runs_E = -(-counts_E // size)
    run_ends_E = jnp.cumsum(runs_E)
    number_V = jnp.arange(rows // size + len(counts_E), dtype=jnp.int32)
    group_V = jnp.searchsorted(run_ends_E, number_V, side="right").astype(jnp.int32)
    group_V = jnp.minimum(group_V, len(counts_E) - 1)
    first_E = (ends_E - counts_E) - (run_ends_E - runs_E) * size
    return Visits(group_V, (first_E[group_V] + number_V * size).astype(jnp.int32), run_ends_E[-1].astype(jnp.int32))


def run_length(rows: int, groups: int) -> int:
    """Rows of a visit: about half a group's share, a power of 2."""
    share = max(rows // (2 * groups), 8)
    return min(LARGEST_RUN, 1 << (share.bit_length() - 1))


def loop_forward(x_RC: jax.Array, w_ECO: jax.Array, counts_E: jax.Array) -> jax.Array:
    """One visit after the other: what a run writes past its group's end, the next one writes anew."""
    return visit_all(x_RC, w_ECO, counts_E, w_ECO.shape[2], functools.partial(jnp.matmul, preferred_element_type=F32))


def loop_back(dy_RO: jax.Array, w_ECO: jax.Array, counts_E: jax.Array) -> jax.Array:
    """The same with each matrix transposed."""
    return visit_all(dy_RO, w_ECO, counts_E, w_ECO.shape[1], matmul_transposed)


def visit_all(x_RC: jax.Array, w_ECO: jax.Array, counts_E: jax.Array, width: int, multiply: Callable) -> jax.Array:
    """multiply(rows, matrix of their group) for all rows, [R, width]."""
    rows, size = len(x_RC), run_length(len(x_RC), len(counts_E))
    visits = plan_visits(counts_E, rows, size)
    longer_RC = jnp.pad(x_RC, ((0, size), (0, 0)))

    def visit(number, y_RO):
        begin, w_CO = visits.begin_V[number], at(w_ECO, visits.group_V[number])
        y_rO = separate_on_cpu(multiply(lax.dynamic_slice_in_dim(longer_RC, begin, size), w_CO))
        return lax.dynamic_update_slice_in_dim(y_RO, y_rO.astype(y_RO.dtype), begin, 0)

    return lax.fori_loop(0, visits.total, visit, jnp.zeros((rows + size, width), x_RC.dtype))[:rows]


def loop_of_weights(x_RC: jax.Array, dy_RO: jax.Array, counts_E: jax.Array, dtype: Any) -> jax.Array:
    """A group's rows in one product, of the smallest of some sizes that holds them: to add up visits would cost as much
    as to multiply."""
    rows, ends_E = len(x_RC), jnp.cumsum(counts_E)
    sizes = product_sizes(rows)

    def product_of(size: int) -> Callable:
        def product(begin, count):
            first = jnp.minimum(begin, rows - size)
            place_r = first + jnp.arange(size)
            own_r = (place_r >= begin) & (place_r < begin + count)
            x_rC = lax.dynamic_slice_in_dim(x_RC, first, size)
            x_Cr = separate_on_cpu(jnp.where(own_r[:, None], x_rC, jnp.zeros_like(x_rC)).T)
            dy_rO = lax.dynamic_slice_in_dim(dy_RO, first, size)
            # A row of another group may hold anything: 0 times infinity is no number.
            dy_rO = jnp.where(own_r[:, None], dy_rO, jnp.zeros_like(dy_rO))
            return separate_on_cpu(jnp.matmul(x_Cr, dy_rO, preferred_element_type=F32)).astype(dtype)

        return product if size else lambda begin, count: jnp.zeros((x_RC.shape[1], dy_RO.shape[1]), dtype)

    def one(_, group):
        begin, count = group
        which = jnp.searchsorted(jnp.asarray(sizes), count)
        return None, lax.switch(which, [product_of(size) for size in sizes], begin, count)

    return lax.scan(one, None, (ends_E - counts_E, counts_E))[1]


def product_sizes(rows: int) -> list[int]:
    """0, then sizes up to `rows` of which each is at most a quarter larger, or 16 rows, than the one before."""
    sizes, size = [0], 16
    while size < rows:
        sizes.append(size)
        size += max(16, size // 4 // 16 * 16)
    return [*sizes, rows]


def at(w_ECO: jax.Array, group: jax.Array) -> jax.Array:
    """The matrix of a group."""
    return lax.dynamic_index_in_dim(w_ECO, group, keepdims=False)


def kernel_products(*, interpret: bool = False) -> Products:
    """Those of JAX's Pallas kernels for TPUs, which visit no group without rows. interpret: on a CPU, for tests."""

    def forward(x_RC, w_ECO, counts_E):
        x_RC, rows = whole_tiles(x_RC), len(x_RC)
        tiles = tiling(*x_RC.shape, w_ECO.shape[2], x_RC.dtype.itemsize)
        return gmm(x_RC, w_ECO, counts_E, x_RC.dtype, tiles, interpret=interpret)[:rows]

    def back(dy_RO, w_ECO, counts_E):
        dy_RO, rows = whole_tiles(dy_RO), len(dy_RO)
        tiles = tiling(*dy_RO.shape, w_ECO.shape[1], dy_RO.dtype.itemsize)
        return gmm(dy_RO, w_ECO, counts_E, dy_RO.dtype, tiles, transpose_rhs=True, interpret=interpret)[:rows]

    def of_weights(x_RC, dy_RO, counts_E, dtype):
        x_RC, dy_RO = whole_tiles(x_RC), whole_tiles(dy_RO)
        tiles = tiling(*x_RC.shape, dy_RO.shape[1], x_RC.dtype.itemsize)
        return tgmm(x_RC.swapaxes(0, 1), dy_RO, counts_E, dtype, tiles, interpret=interpret)  # 0 where no rows are

    return Products(forward, back, of_weights, reads_turned=True)


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


LOOPS = Products(loop_forward, loop_back, loop_of_weights)
looped: GroupedProject = functools.partial(grouped_project, LOOPS)


def choose_grouped(platform: str) -> GroupedProject:
    """For "tpu" kernels; elsewhere a loop, since XLA has no form there that leaves out what no row asks for."""
    return functools.partial(grouped_project, kernel_products()) if platform == "tpu" else looped
