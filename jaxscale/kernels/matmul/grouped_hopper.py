"""Grouped matmuls on NVIDIA Hopper GPUs (H100, H200): Pallas kernels for JAX's Mosaic GPU backend.

Each thread block has one warpgroup that loads tiles and two warpgroups that multiply tiles. The rows of a group are
contiguous and may begin at any row, so a tile of rows may belong to several groups. Such a tile is computed once per
group, and only the rows of the group are written. Weight gradients are accumulated and written in float32.

E groups  R rows  C contracted size  O output size  T (tile of rows, group) pairs
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE_R, TILE_O, TILE_K = 128, 256, 64  # rows and columns of a tile of y; contracted elements per step
TILE_DW = 256, 128  # rows and columns of a tile of a weight gradient
HALF = TILE_R // 2  # rows written at a time
WIDTH_MULTIPLE = 128  # matrices are padded to this; results with 64 columns were wrong on an H200 (jax 0.11.2)
STAGES = 4  # pipeline stages, which use 192 of the 227 KiB of shared memory of a thread block
WARPGROUPS = 2  # warpgroups that multiply
FETCH_REGISTERS = 40  # registers of the warpgroup that loads; the others get the remaining registers
SNAKE_WIDTH = 8  # column tiles before the next row tile, so that shared operands stay in the L2 cache
CORES = 132  # streaming multiprocessors of an H100 SXM and H200; with fewer, some run two blocks in sequence
SWIZZLE_BYTES, LINES = 128, 8  # bytes of a shared memory line; lines swizzled together


def pad_rows(x_RC: jax.Array) -> jax.Array:
    """Pads rows and columns with zeros to sizes that TMA and the tiles support."""
    return jnp.pad(x_RC, ((0, -len(x_RC) % LINES), (0, -x_RC.shape[1] % WIDTH_MULTIPLE)))


def pad_matrices(w_ECO: jax.Array) -> jax.Array:
    """Pads matrices with zeros to sizes that the tiles divide."""
    return jnp.pad(w_ECO, ((0, 0), (0, -w_ECO.shape[1] % WIDTH_MULTIPLE), (0, -w_ECO.shape[2] % WIDTH_MULTIPLE)))


def transforms(dtype: Any) -> tuple[Any, ...]:
    """Returns the layout of a tile in shared memory for TMA and wgmma: swizzled lines of 128 bytes."""
    tile = plgpu.TilingTransform((LINES, SWIZZLE_BYTES // jnp.dtype(dtype).itemsize))
    return tile, plgpu.SwizzleTransform(SWIZZLE_BYTES)


def transpose_tile(tile: Any) -> Any:
    """Returns a transposed view of a tile."""
    return tile.transpose((1, 0)) if hasattr(tile, "transpose") else plgpu.transpose_ref(tile, (1, 0))  # jax 0.10


def group_tiles(counts_E: jax.Array, rows: int) -> tuple[jax.Array, int]:
    """Returns (table int32[4, T] with the group, row tile, begin and end of each step, T). Padding has begin == end."""
    max_tiles = -(-rows // TILE_R) + len(counts_E) - 1
    ends_E = jnp.cumsum(counts_E)
    starts_E = ends_E - counts_E
    first_E = starts_E // TILE_R
    tiles_E = jnp.where(counts_E > 0, -(-ends_E // TILE_R) - first_E, 0)
    last_E = jnp.cumsum(tiles_E)
    number_T = jnp.arange(max_tiles, dtype=jnp.int32)
    group_T = jnp.searchsorted(last_E, number_T, side="right", method="compare_all")  # no loop on the GPU
    group_T = jnp.minimum(group_T, len(counts_E) - 1)
    tile_T = first_E[group_T] + number_T - (last_E - tiles_E)[group_T]
    begin_T = jnp.maximum(starts_E[group_T], tile_T * TILE_R)
    end_T = jnp.where(number_T < last_E[-1], jnp.minimum(ends_E[group_T], (tile_T + 1) * TILE_R), begin_T)
    return jnp.stack([group_T, tile_T, begin_T, end_T]).astype(jnp.int32), max_tiles


def pipeline(body: Any, steps: Any, specs: list[Any], compute: Any) -> Any:
    """Returns a pipeline in which one warpgroup loads tiles that the others multiply."""
    return plgpu.emit_pipeline_warp_specialized(
        body, grid=(steps,), memory_registers=FETCH_REGISTERS, in_specs=specs, wg_axis="wg",
        num_compute_wgs=WARPGROUPS, max_concurrent_steps=STAGES, compute_context=compute,
    )  # fmt: skip


def make_compute_context(shape: tuple[int, int], dtype: Any, write: Any) -> Any:
    """Returns the compute context of a warpgroup, which accumulates in registers and writes the result in `dtype`."""

    def compute(run):
        @functools.partial(pl.run_scoped, sum_ref=plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]  # public: a lazy export
        def _(sum_ref):
            run(sum_ref)
            write(sum_ref[...].astype(dtype))

    return compute


def no_op(*_: Any, **__: Any) -> None:
    """Does nothing. Serves as the body of a pipeline that only allocates shared memory."""


def launch(body: Any, out: jax.ShapeDtypeStruct, *arrays: jax.Array) -> jax.Array:
    """Runs a kernel on all streaming multiprocessors."""
    return plgpu.kernel(
        body, out_type=out, grid=(CORES,), grid_names=("core",), num_threads=WARPGROUPS + 1, thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*arrays)  # fmt: skip


def hopper_project(x_RC: jax.Array, w_ECO: jax.Array, counts_E: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Returns y_RO in the 16-bit dtype of x. Rows after the last group are undefined. transposed: w is [E, O, C]."""
    shape = len(x_RC), w_ECO.shape[1 if transposed else 2]
    x_RC, w_ECO = pad_rows(x_RC), pad_matrices(w_ECO)
    (rows, contracted), width = x_RC.shape, w_ECO.shape[1 if transposed else 2]
    tiles, max_tiles = group_tiles(counts_E, rows)
    column_tiles = pl.cdiv(width, TILE_O)
    warpgroup_O = TILE_O // WARPGROUPS  # columns of a warpgroup
    line = SWIZZLE_BYTES // x_RC.dtype.itemsize  # columns written at a time
    steps = contracted // TILE_K
    specs = lambda tile, column: [
        plgpu.BlockSpec((TILE_R, TILE_K), lambda k: (tile, k), transforms=transforms(x_RC.dtype)),
        plgpu.BlockSpec((TILE_O, TILE_K), lambda k: (column, k), transforms=transforms(x_RC.dtype))
        if transposed
        else plgpu.BlockSpec((TILE_K, TILE_O), lambda k: (k, column), transforms=transforms(x_RC.dtype)),
    ]

    def hopper_project_kernel(tiles_gmem, x_gmem, w_gmem, y_gmem):
        @functools.partial(
            pl.run_scoped,
            stages=pipeline(no_op, steps, specs(0, 0), no_op).get_allocations(x_gmem, w_gmem.at[0]),
            y_smem=plgpu.SMEM((WARPGROUPS, HALF, line), y_gmem.dtype, transforms=transforms(y_gmem.dtype)),
            partial_smem=plgpu.SMEM((WARPGROUPS, HALF, line), y_gmem.dtype),
            collective_axes="wg",
        )
        def scope(stages, y_smem, partial_smem):
            wg = lax.axis_index("wg")

            @plgpu.nd_loop((max_tiles * column_tiles,), collective_axes="core")
            def loop(info):
                number, column = plgpu.planar_snake(info.index[0], (max_tiles, column_tiles), 1, SNAKE_WIDTH)
                group, tile = tiles_gmem[0, number], tiles_gmem[1, number]
                begin, end = tiles_gmem[2, number], tiles_gmem[3, number]
                columns = pl.ds(wg * warpgroup_O, warpgroup_O)

                def multiply(_, x_smem, w_smem, sum_ref):
                    w_part = transpose_tile(w_smem.at[columns]) if transposed else w_smem.at[:, columns]
                    plgpu.wgmma(sum_ref, x_smem, w_part)
                    plgpu.wgmma_wait(0)
                    return sum_ref

                def write(y):
                    at = tile * TILE_R, column * TILE_O + wg * warpgroup_O
                    write_tile(y, wg, (y_smem, partial_smem), y_gmem, at, begin, end)

                @pl.when(end > begin)
                def _():
                    compute = make_compute_context((TILE_R, warpgroup_O), y_gmem.dtype, write)
                    run = pipeline(multiply, steps, specs(tile, column), compute)
                    run(x_gmem, w_gmem.at[group], allocations=stages)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    y_RO = launch(hopper_project_kernel, jax.ShapeDtypeStruct((rows, width), x_RC.dtype), tiles, x_RC, w_ECO)
    return y_RO[: shape[0], : shape[1]]


def write_tile(
    y: Any, wg: Any, buffers: tuple[Any, Any], y_gmem: Any, at: tuple[Any, Any], begin: Any, end: Any
) -> None:
    """Writes rows [begin, end) of a warpgroup's part of a tile. at: (row, column) of the part in y_gmem.

    buffers: (swizzled, plain) shared memory for HALF rows of one line. The plain buffer is for fewer rows than HALF,
    because swizzled lines can only be copied in groups of eight.
    """
    y_smem, partial_smem = buffers
    line = y_smem.shape[-1]
    for half, part in itertools.product(range(2), range(y.shape[1] // line)):
        first, columns = at[0] + half * HALF, pl.ds(at[1] + part * line, line)
        piece = y[half * HALF : (half + 1) * HALF, part * line : (part + 1) * line]
        is_whole = (begin <= first) & (end >= first + HALF)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(is_whole)
        def _(piece=piece, first=first, columns=columns):
            y_smem[wg] = piece
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(y_smem.at[wg], y_gmem.at[pl.ds(first, HALF), columns])

        @pl.when(~is_whole)
        def _(piece=piece, first=first, columns=columns):
            partial_smem[wg] = piece
            plgpu.commit_smem()
            write_rows(partial_smem.at[wg], y_gmem, first, begin, end, columns)


def write_rows(y_smem: Any, y_gmem: Any, first: Any, begin: Any, end: Any, columns: Any) -> None:
    """Writes the rows of [first, first + HALF) that are in [begin, end), in copies of static power-of-two sizes."""
    offset = jnp.clip(begin - first, 0, HALF)
    length = jnp.maximum(jnp.minimum(end - first, HALF) - offset, 0)
    size = HALF
    while size:

        @pl.when(length & size != 0)
        def _(size=size, offset=offset):
            plgpu.copy_smem_to_gmem(y_smem.at[pl.ds(offset, size)], y_gmem.at[pl.ds(first + offset, size), columns])

        offset += length & size
        size //= 2


def hopper_weight_grad(x_RC: jax.Array, dy_RO: jax.Array, counts_E: jax.Array, dtype: Any) -> jax.Array:
    """Returns dw_ECO, which is 0 for empty groups."""
    shape = x_RC.shape[1], dy_RO.shape[1]
    x_RC, dy_RO = pad_rows(x_RC), pad_rows(dy_RO)
    contracted, width = x_RC.shape[1], dy_RO.shape[1]
    groups = len(counts_E)
    ends_E = jnp.cumsum(counts_E)
    spans = jnp.stack([ends_E - counts_E, ends_E]).astype(jnp.int32)
    tile_C, tile_O = TILE_DW
    tiles_C, tiles_O = pl.cdiv(contracted, tile_C), pl.cdiv(width, tile_O)
    warpgroup_C = tile_C // WARPGROUPS
    line = SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    specs = lambda first, at_C, at_O: [
        plgpu.BlockSpec((TILE_K, tile_C), lambda k: (first + k, at_C), transforms=transforms(x_RC.dtype)),
        plgpu.BlockSpec((TILE_K, tile_O), lambda k: (first + k, at_O), transforms=transforms(x_RC.dtype)),
    ]

    def hopper_weight_grad_kernel(spans_gmem, x_gmem, dy_gmem, dw_gmem):
        @functools.partial(
            pl.run_scoped,
            stages=pipeline(no_op, STAGES, specs(0, 0, 0), no_op).get_allocations(x_gmem, dy_gmem),
            dw_smem=plgpu.SMEM((WARPGROUPS, warpgroup_C, line), dw_gmem.dtype, transforms=transforms(dw_gmem.dtype)),
            collective_axes="wg",
        )
        def scope(stages, dw_smem):
            wg = lax.axis_index("wg")

            @plgpu.nd_loop((groups, tiles_C * tiles_O), collective_axes="core")
            def loop(info):
                group = info.index[0]
                at_C, at_O = plgpu.planar_snake(info.index[1], (tiles_C, tiles_O), 1, SNAKE_WIDTH)
                begin, end = spans_gmem[0, group], spans_gmem[1, group]
                first = lax.div(begin, jnp.int32(TILE_K))
                steps = jnp.maximum(lax.div(end + (TILE_K - 1), jnp.int32(TILE_K)) - first, 1)
                columns = pl.ds(wg * warpgroup_C, warpgroup_C)

                def multiply(index, x_smem, dy_smem, sum_ref):
                    at = (first + index[0]) * TILE_K
                    x_part = x_smem.at[:, columns]

                    @pl.when((at < begin) | (at + TILE_K > end))
                    def _():  # masks rows of other groups; both warpgroups write the same values to dy
                        mask_rows((x_part, dy_smem), begin - at, end - at)

                    plgpu.wgmma(sum_ref, transpose_tile(x_part), dy_smem)
                    plgpu.wgmma_wait(0)
                    return sum_ref

                def write(dw):
                    at = at_C * tile_C + wg * warpgroup_C, at_O * tile_O
                    write_matrix(dw, wg, dw_smem, dw_gmem.at[group], at)

                compute = make_compute_context((warpgroup_C, tile_O), dw_gmem.dtype, write)
                pipeline(multiply, steps, specs(first, at_C, at_O), compute)(x_gmem, dy_gmem, allocations=stages)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out = jax.ShapeDtypeStruct((groups, contracted, width), dtype)
    dw_ECO = launch(hopper_weight_grad_kernel, out, spans, x_RC, dy_RO)
    return dw_ECO[:, : shape[0], : shape[1]]


def write_matrix(dw: Any, wg: Any, dw_smem: Any, dw_gmem: Any, at: tuple[Any, Any]) -> None:
    """Writes a warpgroup's part of a matrix to (row, column)."""
    rows, line = dw_smem.shape[1:]
    for part in range(dw.shape[1] // line):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dw_smem[wg] = dw[:, part * line : (part + 1) * line]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(dw_smem.at[wg], dw_gmem.at[pl.ds(at[0], rows), pl.ds(at[1] + part * line, line)])


def mask_rows(tiles: Sequence[Any], begin: Any, end: Any) -> None:
    """Sets all rows of the tiles except begin to end to 0."""
    for tile in tiles:
        row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, tile.shape, 0), plgpu.Layout.WGMMA)
        mask = (row >= begin) & (row < end)
        tile[...] = jnp.where(mask, tile[...], jnp.zeros_like(tile))
    plgpu.commit_smem()
