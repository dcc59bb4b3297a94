"""Grouped products on NVIDIA's Hopper cards (H100, H200): Pallas kernels in JAX's Mosaic GPU dialect.

Each block of threads has one warpgroup that fetches tiles and two that multiply them. Rows of a group lie together and
begin anywhere, so that a tile of rows may be of several groups: it is computed once for each of them, and only the own
rows are written. Gradients of weights are summed and written in float32.

E groups  R rows  C contracted size  O output size  T tiles of rows, one for each group that has rows in it
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

TILE_R, TILE_O, TILE_K = 128, 256, 64  # of y: rows and columns; and of what is contracted, at a time
TILE_DW = 256, 128  # of a weight's gradient
HALF = TILE_R // 2  # rows that are written at a time
WIDTHS = 128  # of matrices: multiples. Of 64 columns all came out wrong (H200, jax 0.11.2), though not when interpreted
STAGES = 4  # of the pipeline: 192 KiB of the 227 that a block of threads can have
WARPGROUPS = 2  # that multiply
FETCH_REGISTERS = 40  # of the warpgroup that fetches: it leaves the rest to those that multiply
ACROSS = 8  # tiles of columns that are walked before the next rows: what they share stays in the L2 cache
CORES = 132  # streaming multiprocessors of an H100 SXM and an H200; with fewer, some run two blocks in turn
SWIZZLE_BYTES, LINES = 128, 8  # of a line of shared memory; lines that are swizzled together


def padded_rows(x_RC: jax.Array) -> jax.Array:
    """Rows with zeros behind them: as many as TMA can copy, and of a size that tiles divide."""
    return jnp.pad(x_RC, ((0, -len(x_RC) % LINES), (0, -x_RC.shape[1] % WIDTHS)))


def padded_matrices(w_ECO: jax.Array) -> jax.Array:
    """Matrices with zeros behind them, of sizes that tiles divide."""
    return jnp.pad(w_ECO, ((0, 0), (0, -w_ECO.shape[1] % WIDTHS), (0, -w_ECO.shape[2] % WIDTHS)))


def transforms(dtype: Any) -> tuple[Any, ...]:
    """How a tile lies in shared memory, for TMA and wgmma: lines of 128 bytes, swizzled."""
    tile = plgpu.TilingTransform((LINES, SWIZZLE_BYTES // jnp.dtype(dtype).itemsize))
    return tile, plgpu.SwizzleTransform(SWIZZLE_BYTES)


def transposed(tile: Any) -> Any:
    """The tile, read the other way about."""
    return tile.transpose((1, 0)) if hasattr(tile, "transpose") else plgpu.transpose_ref(tile, (1, 0))  # jax 0.10


def tiles_of_groups(counts_E: jax.Array, rows: int) -> tuple[jax.Array, int]:
    """(for each tile its group, its number among tiles of rows, and the first own row and the one behind the last as
    [4, T]; how many there are at most). Tiles behind the last have no own row."""
    most = -(-rows // TILE_R) + len(counts_E) - 1
    ends_E = jnp.cumsum(counts_E)
    starts_E = ends_E - counts_E
    first_E = starts_E // TILE_R
    tiles_E = jnp.where(counts_E > 0, -(-ends_E // TILE_R) - first_E, 0)
    last_E = jnp.cumsum(tiles_E)
    number_T = jnp.arange(most, dtype=jnp.int32)
    group_T = jnp.searchsorted(last_E, number_T, side="right", method="compare_all")  # at once: no loop on the card
    group_T = jnp.minimum(group_T, len(counts_E) - 1)
    tile_T = first_E[group_T] + number_T - (last_E - tiles_E)[group_T]
    begin_T = jnp.maximum(starts_E[group_T], tile_T * TILE_R)
    end_T = jnp.where(number_T < last_E[-1], jnp.minimum(ends_E[group_T], (tile_T + 1) * TILE_R), begin_T)
    return jnp.stack([group_T, tile_T, begin_T, end_T]).astype(jnp.int32), most


def pipeline(body: Any, steps: Any, specs: list[Any], compute: Any) -> Any:
    """One warpgroup fetches what the others multiply."""
    return plgpu.emit_pipeline_warp_specialized(
        body, grid=(steps,), memory_registers=FETCH_REGISTERS, in_specs=specs, wg_axis="wg",
        num_compute_wgs=WARPGROUPS, max_concurrent_steps=STAGES, compute_context=compute,
    )  # fmt: skip


def summing(shape: tuple[int, int], dtype: Any, write: Any) -> Any:
    """What a warpgroup does with a pipeline: it sums products of this shape in registers and writes them in `dtype`."""

    def compute(run):
        @functools.partial(pl.run_scoped, sum_ref=plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]  # public: a lazy export
        def _(sum_ref):
            run(sum_ref)
            write(sum_ref[...].astype(dtype))

    return compute


def idle(*_: Any, **__: Any) -> None:
    """In place of what a pipeline runs, where only its shared memory is asked for."""


def launch(body: Any, out: jax.ShapeDtypeStruct, *arrays: jax.Array) -> jax.Array:
    """Runs a kernel on all of the card."""
    return plgpu.kernel(
        body, out_type=out, grid=(CORES,), grid_names=("core",), num_threads=WARPGROUPS + 1, thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*arrays)  # fmt: skip


def hopper_project(x_RC: jax.Array, w_ECO: jax.Array, counts_E: jax.Array, *, turned: bool = False) -> jax.Array:
    """y_RO in x's dtype, of 16 bits; turned: w is [E, O, C]. Rows behind the last group are not written."""
    asked = len(x_RC), w_ECO.shape[1 if turned else 2]
    x_RC, w_ECO = padded_rows(x_RC), padded_matrices(w_ECO)
    (rows, contracted), width = x_RC.shape, w_ECO.shape[1 if turned else 2]
    tiles, most = tiles_of_groups(counts_E, rows)
    of_tile = pl.cdiv(width, TILE_O)
    own_O = TILE_O // WARPGROUPS  # columns of each warpgroup
    line = SWIZZLE_BYTES // x_RC.dtype.itemsize  # columns that are written at a time
    steps = contracted // TILE_K
    specs = lambda tile, column: [
        plgpu.BlockSpec((TILE_R, TILE_K), lambda k: (tile, k), transforms=transforms(x_RC.dtype)),
        plgpu.BlockSpec((TILE_O, TILE_K), lambda k: (column, k), transforms=transforms(x_RC.dtype))
        if turned
        else plgpu.BlockSpec((TILE_K, TILE_O), lambda k: (k, column), transforms=transforms(x_RC.dtype)),
    ]

    def hopper_project_kernel(tiles_gmem, x_gmem, w_gmem, y_gmem):
        @functools.partial(
            pl.run_scoped,
            stages=pipeline(idle, steps, specs(0, 0), idle).get_allocations(x_gmem, w_gmem.at[0]),
            y_smem=plgpu.SMEM((WARPGROUPS, HALF, line), y_gmem.dtype, transforms=transforms(y_gmem.dtype)),
            few_smem=plgpu.SMEM((WARPGROUPS, HALF, line), y_gmem.dtype),
            collective_axes="wg",
        )
        def scope(stages, y_smem, few_smem):
            wg = lax.axis_index("wg")

            @plgpu.nd_loop((most * of_tile,), collective_axes="core")
            def loop(info):
                number, column = plgpu.planar_snake(info.index[0], (most, of_tile), 1, ACROSS)
                group, tile = tiles_gmem[0, number], tiles_gmem[1, number]
                begin, end = tiles_gmem[2, number], tiles_gmem[3, number]
                own = pl.ds(wg * own_O, own_O)

                def multiply(_, x_smem, w_smem, sum_ref):
                    w_own = transposed(w_smem.at[own]) if turned else w_smem.at[:, own]
                    plgpu.wgmma(sum_ref, x_smem, w_own)
                    plgpu.wgmma_wait(0)
                    return sum_ref

                def write(y):
                    at = tile * TILE_R, column * TILE_O + wg * own_O
                    write_tile(y, wg, (y_smem, few_smem), y_gmem, at, begin, end)

                @pl.when(end > begin)
                def _():
                    compute = summing((TILE_R, own_O), y_gmem.dtype, write)
                    run = pipeline(multiply, steps, specs(tile, column), compute)
                    run(x_gmem, w_gmem.at[group], allocations=stages)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    y_RO = launch(hopper_project_kernel, jax.ShapeDtypeStruct((rows, width), x_RC.dtype), tiles, x_RC, w_ECO)
    return y_RO[: asked[0], : asked[1]]


def write_tile(
    y: Any, wg: Any, buffers: tuple[Any, Any], y_gmem: Any, at: tuple[Any, Any], begin: Any, end: Any
) -> None:
    """Writes a warpgroup's part of a tile, which lies at this row and column; of its rows those from begin up to end.

    buffers: in shared memory, for HALF rows of a line each: one for whole halves, swizzled, and one for fewer rows,
    since no part of eight swizzled lines can be copied alone.
    """
    y_smem, few_smem = buffers
    line = y_smem.shape[-1]
    for half, part in itertools.product(range(2), range(y.shape[1] // line)):
        first, columns = at[0] + half * HALF, pl.ds(at[1] + part * line, line)
        piece = y[half * HALF : (half + 1) * HALF, part * line : (part + 1) * line]
        whole = (begin <= first) & (end >= first + HALF)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(whole)
        def _(piece=piece, first=first, columns=columns):
            y_smem[wg] = piece
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(y_smem.at[wg], y_gmem.at[pl.ds(first, HALF), columns])

        @pl.when(~whole)
        def _(piece=piece, first=first, columns=columns):
            few_smem[wg] = piece
            plgpu.commit_smem()
            write_rows(few_smem.at[wg], y_gmem, first, begin, end, columns)


def write_rows(y_smem: Any, y_gmem: Any, first: Any, begin: Any, end: Any, columns: Any) -> None:
    """Writes the rows from begin up to end of HALF rows, of which the first is row `first`. A copy has a fixed
    number of rows: there is one for each power of two in the length."""
    offset = jnp.clip(begin - first, 0, HALF)
    length = jnp.maximum(jnp.minimum(end - first, HALF) - offset, 0)
    size = HALF
    while size:

        @pl.when(length & size != 0)
        def _(size=size, offset=offset):
            plgpu.copy_smem_to_gmem(y_smem.at[pl.ds(offset, size)], y_gmem.at[pl.ds(first + offset, size), columns])

        offset += length & size
        size //= 2


def hopper_of_weights(x_RC: jax.Array, dy_RO: jax.Array, counts_E: jax.Array, dtype: Any) -> jax.Array:
    """dw_ECO, 0 of groups without rows."""
    asked = x_RC.shape[1], dy_RO.shape[1]
    x_RC, dy_RO = padded_rows(x_RC), padded_rows(dy_RO)
    contracted, width = x_RC.shape[1], dy_RO.shape[1]
    groups = len(counts_E)
    ends_E = jnp.cumsum(counts_E)
    spans = jnp.stack([ends_E - counts_E, ends_E]).astype(jnp.int32)
    tile_C, tile_O = TILE_DW
    of_C, of_O = pl.cdiv(contracted, tile_C), pl.cdiv(width, tile_O)
    own_C = tile_C // WARPGROUPS
    line = SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    specs = lambda first, at_C, at_O: [
        plgpu.BlockSpec((TILE_K, tile_C), lambda k: (first + k, at_C), transforms=transforms(x_RC.dtype)),
        plgpu.BlockSpec((TILE_K, tile_O), lambda k: (first + k, at_O), transforms=transforms(x_RC.dtype)),
    ]

    def hopper_of_weights_kernel(spans_gmem, x_gmem, dy_gmem, dw_gmem):
        @functools.partial(
            pl.run_scoped,
            stages=pipeline(idle, STAGES, specs(0, 0, 0), idle).get_allocations(x_gmem, dy_gmem),
            dw_smem=plgpu.SMEM((WARPGROUPS, own_C, line), dw_gmem.dtype, transforms=transforms(dw_gmem.dtype)),
            collective_axes="wg",
        )
        def scope(stages, dw_smem):
            wg = lax.axis_index("wg")

            @plgpu.nd_loop((groups, of_C * of_O), collective_axes="core")
            def loop(info):
                group = info.index[0]
                at_C, at_O = plgpu.planar_snake(info.index[1], (of_C, of_O), 1, ACROSS)
                begin, end = spans_gmem[0, group], spans_gmem[1, group]
                first = lax.div(begin, jnp.int32(TILE_K))
                steps = jnp.maximum(lax.div(end + (TILE_K - 1), jnp.int32(TILE_K)) - first, 1)
                own = pl.ds(wg * own_C, own_C)

                def multiply(index, x_smem, dy_smem, sum_ref):
                    at = (first + index[0]) * TILE_K
                    x_own = x_smem.at[:, own]

                    @pl.when((at < begin) | (at + TILE_K > end))
                    def _():  # rows of others; both warpgroups write the same to dy
                        keep_rows((x_own, dy_smem), begin - at, end - at)

                    plgpu.wgmma(sum_ref, transposed(x_own), dy_smem)
                    plgpu.wgmma_wait(0)
                    return sum_ref

                def write(dw):
                    at = at_C * tile_C + wg * own_C, at_O * tile_O
                    write_matrix(dw, wg, dw_smem, dw_gmem.at[group], at)

                compute = summing((own_C, tile_O), dw_gmem.dtype, write)
                pipeline(multiply, steps, specs(first, at_C, at_O), compute)(x_gmem, dy_gmem, allocations=stages)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out = jax.ShapeDtypeStruct((groups, contracted, width), dtype)
    dw_ECO = launch(hopper_of_weights_kernel, out, spans, x_RC, dy_RO)
    return dw_ECO[:, : asked[0], : asked[1]]


def write_matrix(dw: Any, wg: Any, dw_smem: Any, dw_gmem: Any, at: tuple[Any, Any]) -> None:
    """Writes a warpgroup's part of a matrix, which lies at this row and column."""
    rows, line = dw_smem.shape[1:]
    for part in range(dw.shape[1] // line):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dw_smem[wg] = dw[:, part * line : (part + 1) * line]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(dw_smem.at[wg], dw_gmem.at[pl.ds(at[0], rows), pl.ds(at[1] + part * line, line)])


def keep_rows(tiles: Sequence[Any], begin: Any, end: Any) -> None:
    """Writes zeros into all rows of the tiles but those from begin up to end."""
    for tile in tiles:
        row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, tile.shape, 0), plgpu.Layout.WGMMA)
        own = (row >= begin) & (row < end)
        tile[...] = jnp.where(own, tile[...], jnp.zeros_like(tile))
    plgpu.commit_smem()
