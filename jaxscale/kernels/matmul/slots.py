"""Expert matmuls without a grouped kernel. Every expert has the same number of rows, which are called slots.

Each expert has a matmul of fixed size, which XLA:CPU runs as fast as that of a dense model, without copying the
weights. Rows of an expert in excess of its slots run in overflow chunks of a few rows, so no row is dropped. Unused
slots are zeros, forward and backward.

E experts  R rows, sorted by expert  S slots of an expert, or rows of an overflow chunk  D embed  F width of an expert
C contracted size  O output size
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxscale.kernels.gradient import custom_vjp
from jaxscale.kernels.matmul.project import cpu_project

F32 = jnp.float32
TILE = 16  # divisor of the number of slots
MIN_ROWS = 16  # minimum mean rows per expert for slots; with fewer, all rows run in overflow chunks
MAX_UNROLLED = 16  # maximum number of experts with separate matmuls; more use one batched matmul, which is slower


class SlotSizes(NamedTuple):
    """Sizes of slots (rows reserved for an expert) and of chunks for overflowing rows. Unused slots cost time."""

    spare: Callable[[int], int]  # mean rows of an expert -> number of additional slots
    max_chunk: int  # maximum rows of an overflow chunk

    # The fastest sizes in `python -m benchmarks.experts` on 2 cores of an EPYC, jax 0.10.2, 2026-11-26, for 8 experts
    # of 512 x 768 in bfloat16 with 128 to 1,024 rows on average and at most 1.1 and 1.4 times as many. Chunks of 32 and
    # 128 were not faster.


ON_CPU = SlotSizes(lambda average: 0 if average >= 1024 else TILE, 64)
ON_GPU = SlotSizes(lambda average: average // 16, 128)  # about fits random routing of 4,096 tokens; nothing else timed

# (x_RC, w_ECO, counts_E) -> y_RO in the dtype of x. The gradient of w has the dtype of w. Rows after the last group are
# undefined, also in gradients. transposed=True means that the memory layout of w is [E, O, C].
GroupedProject = Callable[..., jax.Array]
# (weights of an expert, x_SD, weight_S, None) -> y_SD
RunExpert = Callable[[Any, jax.Array, jax.Array, Any], jax.Array]
# (activate, gate, up, weight) -> h
WeightedActivation = Callable[[Callable, jax.Array, jax.Array, jax.Array], jax.Array]
# (RunExpert, weights of all experts, x_RD, weight_R, counts_E) -> y_RD
MapExperts = Callable[[RunExpert, Any, jax.Array, jax.Array, jax.Array], jax.Array]


def project_expert(x_SC: jax.Array, w_CO: jax.Array, counts: Any = None, *, transposed: bool = False) -> jax.Array:
    """Implements GroupedProject for one expert. Returns y_SO."""
    return cpu_project("SC,CO->SO", x_SC, w_CO)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def weighted_activation_f32(activate: Callable, gate_SF: jax.Array, up_SF: jax.Array, weight_S: jax.Array) -> jax.Array:
    """Returns activate(gate, up) * weight, computed in float32. Only the arguments are saved for the backward pass."""
    return (activate(gate_SF.astype(F32), up_SF.astype(F32)) * weight_S[..., None]).astype(gate_SF.dtype)


def _weighted_activation_backward(activate, saved, dh_SF):
    gate_SF, up_SF, weight_S = saved
    h_SF, vjp = jax.vjp(activate, gate_SF.astype(F32), up_SF.astype(F32))
    dh_SF = dh_SF.astype(F32)
    dgate_SF, dup_SF = vjp(dh_SF * weight_S[..., None])
    dweight_S = jnp.sum(dh_SF * h_SF, axis=-1).astype(weight_S.dtype)
    return dgate_SF.astype(gate_SF.dtype), dup_SF.astype(up_SF.dtype), dweight_S


weighted_activation_f32.defvjp(
    lambda activate, *args: (weighted_activation_f32(activate, *args), args), _weighted_activation_backward
)


class RowSpan(NamedTuple):
    """S consecutive rows, with a mask of the rows of one expert."""

    begin: jax.Array
    mask_S: jax.Array

    def read(self, bits_R: jax.Array, dtype: Any) -> jax.Array:
        """Returns the rows [S, ...] in `dtype`, with zeros where mask_S is False."""
        bits_S = lax.dynamic_slice_in_dim(bits_R, self.begin, len(self.mask_S))
        return bitcast_from_uint(jnp.where(self.mask_like(bits_S), bits_S, jnp.zeros_like(bits_S)), dtype)

    def write(self, bits_R: jax.Array, new_S: jax.Array) -> jax.Array:
        """Returns bits_R with the rows replaced where mask_S is True."""
        old = lax.dynamic_slice_in_dim(bits_R, self.begin, len(self.mask_S))
        new = jnp.where(self.mask_like(old), bitcast_to_uint(new_S), old)
        return lax.dynamic_update_slice_in_dim(bits_R, new, self.begin, 0)

    def mask_like(self, array_S: jax.Array) -> jax.Array:
        """Returns mask_S reshaped to the number of axes of the array."""
        return self.mask_S.reshape(-1, *[1] * (array_S.ndim - 1))


def bitcast_to_uint(array: jax.Array) -> jax.Array:
    """Bitcasts an array to unsigned integers. To move bfloat16 rows, XLA:CPU would convert them to float32 and back."""
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


def bitcast_from_uint(array: jax.Array, dtype: Any) -> jax.Array:
    """Inverse of bitcast_to_uint()."""
    return lax.bitcast_convert_type(array, dtype)


def make_row_span(begin: jax.Array, end: jax.Array, rows: int, size: int) -> RowSpan:
    """Returns the span of the first `size` rows in [begin, end)."""
    first = jnp.minimum(begin, rows - size)
    row_S = first + jnp.arange(size, dtype=jnp.int32)
    return RowSpan(first, (row_S >= begin) & (row_S < end))


class SlotLayout(NamedTuple):
    """Layout of slots and overflow chunks for a number of rows and experts."""

    rows: int
    experts: int
    sizes: SlotSizes

    @property
    def slots(self) -> int:
        """Number of slots per expert, or 0 if experts have fewer than MIN_ROWS rows on average."""
        if self.rows < MIN_ROWS * self.experts:
            return 0
        average = -(-self.rows // self.experts)
        return min(self.rows, -(-(average + self.sizes.spare(average)) // TILE) * TILE)

    @property
    def chunk(self) -> int:
        """Number of rows in an overflow chunk: a power of 2 up to half of the mean rows per expert."""
        half = max(self.rows // (2 * self.experts), 8)
        return min(self.sizes.max_chunk, 1 << (half.bit_length() - 1), self.rows)

    def spans(self, counts_E: jax.Array) -> list[RowSpan]:
        """Returns the spans of the slots, in the form of split()."""
        ends_E = jnp.cumsum(counts_E).astype(jnp.int32)
        make_span = lambda begin, end: make_row_span(begin, end, self.rows, self.slots)
        return self.split(jax.vmap(make_span)(ends_E - counts_E, ends_E)) if self.slots else []

    def split(self, tree: Any) -> list[Any]:
        """Splits stacked arrays into one part per expert. More than MAX_UNROLLED experts remain a single part."""
        if self.experts > MAX_UNROLLED:
            return [tree]
        return [jax.tree.map(operator.itemgetter(expert), tree) for expert in range(self.experts)]

    def join(self, parts: Sequence[Any]) -> Any:
        """Inverse of split()."""
        return parts[0] if self.experts > MAX_UNROLLED else jax.tree.map(lambda *arrays: jnp.stack(arrays), *parts)

    def over_parts(self, f: Callable) -> Callable:
        """Converts a function of one expert to a function of a part from split()."""
        return jax.vmap(f) if self.experts > MAX_UNROLLED else f

    def write(self, spans: list[RowSpan], bits_R: jax.Array, parts: Sequence[jax.Array]) -> jax.Array:
        """Returns bits_R with the slots written to their rows."""
        for span, part in zip(spans, parts, strict=True):
            if self.experts > MAX_UNROLLED:
                bits_R = lax.scan(lambda bits_R, new: (new[0].write(bits_R, new[1]), None), bits_R, (span, part))[0]
            else:
                bits_R = span.write(bits_R, part)
        return bits_R

    def fold_overflow(self, f: Callable, counts_E: jax.Array, carry: Any) -> Any:
        """Runs carry = f(expert, fold_chunks, carry) for each expert with more rows than slots.

        fold_chunks(g, carry) runs carry = g(RowSpan, carry) for each overflow chunk of the expert.
        """
        ends_E = jnp.cumsum(counts_E).astype(jnp.int32)
        overflow_E = jnp.maximum(counts_E - self.slots, 0).astype(jnp.int32)
        overflowing_E = jnp.nonzero(overflow_E, size=self.experts)[0]

        def one_expert(index, carry):
            expert = overflowing_E[index]
            end, overflow = ends_E[expert], overflow_E[expert]
            span = lambda n: make_row_span(end - overflow + n * self.chunk, end, self.rows, self.chunk)
            chunks = -(-overflow // self.chunk)
            fold_chunks = lambda g, carry: lax.fori_loop(0, chunks, lambda n, carry: g(span(n), carry), carry)
            return f(expert, fold_chunks, carry)

        return lax.fori_loop(0, jnp.sum(overflow_E > 0), one_expert, carry)


@functools.partial(custom_vjp, nondiff_argnums=(0, 1))
def run_in_slots(
    sizes: SlotSizes, run: RunExpert, weights: Any, x_RD: jax.Array, weight_R: jax.Array, counts_E: jax.Array
) -> jax.Array:
    """Implements MapExperts with slots. Returns y_RD, in which rows after those of the last expert are 0.
    The backward pass recomputes overflow chunks, even if a remat policy saves activations of run()."""
    return _forward(sizes, run, weights, x_RD, weight_R, counts_E)[0]


def _forward(sizes, run, weights, x_RD, weight_R, counts_E):
    layout = SlotLayout(len(x_RD), len(counts_E), sizes)
    spans, parts, vjps = layout.spans(counts_E), [], []
    x_bits, weight_bits = bitcast_to_uint(x_RD), bitcast_to_uint(weight_R)
    read = lambda span: (span.read(x_bits, x_RD.dtype), span.read(weight_bits, weight_R.dtype))
    run_rows = lambda w, x_SD, weight_S: run(w, x_SD, weight_S, None)
    for w, span in zip(layout.split(weights), spans):
        part, vjp = jax.vjp(layout.over_parts(run_rows), w, *layout.over_parts(read)(span))
        parts, vjps = [*parts, part], [*vjps, vjp]

    def run_overflow(expert, fold_chunks, y_R):
        w = select_expert(weights, expert)
        return fold_chunks(lambda span, y_R: span.write(y_R, run_rows(w, *read(span))), y_R)

    y_R = layout.write(spans, jnp.zeros_like(x_bits), parts)
    y_RD = bitcast_from_uint(layout.fold_overflow(run_overflow, counts_E, y_R), x_RD.dtype)
    return y_RD, (weights, x_RD, weight_R, counts_E, vjps)


def _backward(sizes, run, saved, dy_RD):
    weights, x_RD, weight_R, counts_E, vjps = saved
    layout = SlotLayout(len(x_RD), len(counts_E), sizes)
    spans = layout.spans(counts_E)
    x_bits, weight_bits, dy_bits = bitcast_to_uint(x_RD), bitcast_to_uint(weight_R), bitcast_to_uint(dy_RD)
    read_dy = lambda span: span.read(dy_bits, dy_RD.dtype)
    run_rows = lambda w, x_SD, weight_S: run(w, x_SD, weight_S, None)
    dx_R, dweight_R = jnp.zeros_like(x_bits), jnp.zeros_like(weight_bits)
    if spans:
        parts = [vjp(layout.over_parts(read_dy)(span)) for vjp, span in zip(vjps, spans)]
        dweights, dx, dweight = zip(*parts)
        grads = layout.join(dweights), layout.write(spans, dx_R, dx), layout.write(spans, dweight_R, dweight)
    else:
        grads = jax.tree.map(jnp.zeros_like, weights), dx_R, dweight_R

    def backward_overflow(expert, fold_chunks, grads):
        w = select_expert(weights, expert)

        def backward_chunk(span, grads):
            dw, dx_R, dweight_R = grads
            rows = span.read(x_bits, x_RD.dtype), span.read(weight_bits, weight_R.dtype)
            chunk_dw, dx, dweight = jax.vjp(run_rows, w, *rows)[1](read_dy(span))
            return jax.tree.map(jnp.add, dw, chunk_dw), span.write(dx_R, dx), span.write(dweight_R, dweight)

        dweights, *row_grads = grads
        dw, *row_grads = fold_chunks(backward_chunk, (select_expert(dweights, expert), *row_grads))
        update = lambda all_dw, new: lax.dynamic_update_index_in_dim(all_dw, new, expert, 0)
        return jax.tree.map(update, dweights, dw), *row_grads

    dweights, dx_R, dweight_R = layout.fold_overflow(backward_overflow, counts_E, grads)
    return dweights, bitcast_from_uint(dx_R, x_RD.dtype), bitcast_from_uint(dweight_R, weight_R.dtype), None


run_in_slots.defvjp(_forward, _backward)


def select_expert(weights: Any, expert: jax.Array) -> Any:
    """Returns the weights of one expert."""
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, expert, keepdims=False), weights)


class ExpertKernels(NamedTuple):
    """Functions that apply experts to rows sorted by expert."""

    project: GroupedProject = project_expert  # applied to the rows that map_experts passes
    map_experts: MapExperts = functools.partial(run_in_slots, ON_CPU)
    weighted_activation: WeightedActivation = weighted_activation_f32
    as_bits: bool = True  # whether dispatch and combine gather integers, which is faster on CPUs
