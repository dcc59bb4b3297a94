"""cuDNN's flash attention, which does not write scores to HBM.

On Ampere, jax.nn separates packed documents by a mask. The mask becomes a bias [T, T] per row in the compute dtype,
shared by all heads, and its unused gradient has the same size.

Hopper and newer GPUs need no mask or bias. The kernel reads the offset and length of each document of the local
rows, in arrays of static size with DOCUMENTS_PER_ROW entries per row, shared among rows. Additional documents run in
further rounds of the same kernel. A document, or the padding of a row, begins where the segment id changes.

JAX 0.10's wrapper of this kernel queries an attached GPU for the compute capability, and reads the keys of
grouped-query attention at wrong offsets (github.com/jax-ml/jax/pull/39521), so this module calls the kernel directly.

B batch  T query position  S key position  N query heads  K key-value heads  H head dim
C documents of one round = B * DOCUMENTS_PER_ROW
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxscale.kernels.config import ATTENTION_OUT
from jaxscale.system.exits import BadInput

# The kernel saves 4 bytes per document, position and head for the backward pass. With 16 documents this is a quarter of
# the output size at a head_dim of 128 in bfloat16. Web text has about 6 documents in a row of 4096.
DOCUMENTS_PER_ROW = 16
MAX_ELEMENTS = 2**31  # offsets in q are int32


def make_masked_attend(*, window: int | None = None):
    """Returns attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT) -> out_BTNH, equivalent to xla.make_attend().

    The residuals have no checkpoint_name. Remat policies recognize the primitive instead (core/models/layers.py).
    """

    def attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
        T = q_BTNH.shape[1]
        pad = lambda x: jnp.pad(x, [(0, 0), (0, T % 2)] + [(0, 0)] * (x.ndim - 2))  # with a bias T must be even
        ids_BT = pad(segment_ids_BT)
        mask_B1TS = ids_BT[:, None, :, None] == ids_BT[:, None, None, :]
        if window is not None:  # part of the mask, because older cuDNN versions do not support a bias with a window
            position_T = np.arange(ids_BT.shape[1])
            mask_B1TS &= (position_T[:, None] - position_T[None, :] < window)[None, None]
        out_BTNH = jax.nn.dot_product_attention(
            pad(q_BTNH),
            pad(k_BSKH),
            pad(v_BSKH),
            mask=mask_B1TS,
            is_causal=True,
            implementation="cudnn",
        )
        return out_BTNH[:, :T]

    return attend


class DocumentSpans(NamedTuple):
    """Offsets and lengths of the documents of one round."""

    lengths_BC: jax.Array  # int32[B, C/B]: number of tokens; 0 for an unused entry
    begins_BC: jax.Array  # int32[B, C/B + 1]: index of the first token over all rows, and the end of the last document


class Kernel(NamedTuple):
    """Forward and backward pass of flash attention over document spans. Outputs outside of spans are undefined."""

    # (q_BTNH, k_BTKH, v_BTKH, spans) -> (out_BTNH, softmax stats)
    forward: Callable[..., tuple[jax.Array, jax.Array]]
    # (q_BTNH, k_BTKH, v_BTKH, spans, out_BTNH, stats, dout_BTNH) -> (dq_BTNH, dk_BTKH, dv_BTKH)
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def make_packed_attend(*, window: int | None = None, kernel: Kernel | None = None, documents: int = DOCUMENTS_PER_ROW):
    """Returns attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT) -> out_BTNH, equivalent to xla.make_attend().

    The positions of a segment must be consecutive. kernel: None means cuDNN. documents: average number of
    documents per sequence that one round of kernel calls processes.
    """
    kernel = kernel or cudnn_kernel(window)

    @jax.custom_vjp
    def attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        return forward(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)[0]

    def forward(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        numbers_BT = document_numbers(segment_ids_BT)
        run = lambda spans: kernel.forward(q_BTNH, k_BTKH, v_BTKH, spans)
        out_BTNH, stats = run(find_spans(numbers_BT, 0, documents))
        (out_BTNH,) = further_rounds(lambda spans: run(spans)[:1], (out_BTNH,), numbers_BT, documents)
        out_BTNH, stats = (checkpoint_name(result, ATTENTION_OUT) for result in (out_BTNH, stats))
        return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, numbers_BT, out_BTNH, stats)

    def backward(saved, dout_BTNH):
        q_BTNH, k_BTKH, v_BTKH, numbers_BT, out_BTNH, stats = saved

        def run(spans, stats):
            return tuple(kernel.backward(q_BTNH, k_BTKH, v_BTKH, spans, out_BTNH, stats, dout_BTNH))

        def recompute(spans):  # only the stats of the first round are saved
            return run(spans, kernel.forward(q_BTNH, k_BTKH, v_BTKH, spans)[1])

        grads = run(find_spans(numbers_BT, 0, documents), stats)
        return *further_rounds(recompute, grads, numbers_BT, documents), None

    attend.defvjp(forward, backward)

    def attend_batch_halves(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        """Applies attend() to halves of the batch, recursively, so that offsets fit int32."""
        B, arrays = len(q_BTNH), (q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
        if q_BTNH.size < MAX_ELEMENTS or B == 1:
            return attend(*arrays)
        return jnp.concatenate(
            [attend_batch_halves(*(x[rows] for x in arrays)) for rows in (np.s_[: B // 2], np.s_[B // 2 :])]
        )

    return attend_batch_halves


def document_numbers(segment_ids_BT: jax.Array) -> jax.Array:
    """Returns int32[B, T], the index of each token's document over all rows."""
    begins_BT = jnp.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], [(0, 0), (1, 0)], constant_values=True)
    return jnp.cumsum(begins_BT.reshape(-1), dtype=jnp.int32).reshape(begins_BT.shape) - 1


def find_spans(numbers_BT: jax.Array, round_number: int | jax.Array, documents: int) -> DocumentSpans:
    """Returns the spans of one round, which has B * documents documents."""
    B = len(numbers_BT)
    number_C = jnp.minimum(jnp.arange(B * documents + B, dtype=jnp.int32), B * documents) + round_number * B * documents
    # compare_all is one pass over the tokens. A binary search would be 14 small kernels in every layer.
    begins = jnp.searchsorted(numbers_BT.reshape(-1), number_C, method="compare_all").astype(jnp.int32)
    lengths = jnp.diff(begins)[: B * documents]
    return DocumentSpans(lengths.reshape(B, documents), begins.reshape(B, documents + 1))


def further_rounds(
    run: Callable[[DocumentSpans], tuple[jax.Array, ...]],
    results: tuple[jax.Array, ...],
    numbers_BT: jax.Array,
    documents: int,
) -> tuple[jax.Array, ...]:
    """Runs the rounds after the first. Returns `results` with the values of tokens in these rounds replaced."""
    round_BT = numbers_BT // (len(numbers_BT) * documents)

    def run_round(carry):
        number, results = carry
        in_round_BT11 = (round_BT == number)[:, :, None, None]
        new_results = run(find_spans(numbers_BT, number, documents))
        return number + 1, tuple(jnp.where(in_round_BT11, new, old) for new, old in zip(new_results, results))

    has_more = lambda carry: carry[0] <= round_BT[-1, -1]
    with jax.named_scope("usually_0_trips"):  # read by tools.preflight.hlo_trips
        return lax.while_loop(has_more, run_round, (jnp.int32(1), results))[1]


def cudnn_kernel(window: int | None) -> Kernel:
    """Returns cuDNN's causal kernel with scale 1/sqrt(H). window: see xla.make_attend()."""

    def forward(q_BTNH, k_BTKH, v_BTKH, spans):
        call = CudnnCall(*q_BTNH.shape, dtype=q_BTNH.dtype, documents=spans.lengths_BC.shape[1], window=window)
        stats = jax.ShapeDtypeStruct((call.B * call.documents, call.N, call.T), jnp.float32)
        run = call.make("__cudnn$fmhaSoftmax", [call.heads_first(q_BTNH)], [stats], FORWARD)
        out_BNTH, stats, _ = run(q_BTNH, k_BTKH, v_BTKH, *call.lengths_and_offsets(spans, k_BTKH))
        return out_BNTH.swapaxes(1, 2), stats

    def backward(q_BTNH, k_BTKH, v_BTKH, spans, out_BTNH, stats, dout_BTNH):
        call = CudnnCall(*q_BTNH.shape, dtype=q_BTNH.dtype, documents=spans.lengths_BC.shape[1], window=window)
        results = [call.heads_first(x) for x in (q_BTNH, k_BTKH, v_BTKH)]
        run = call.make("__cudnn$fmhaSoftmaxBackward", results, [], BACKWARD)
        lengths = call.lengths_and_offsets(spans, k_BTKH)
        *grads, _ = run(q_BTNH, k_BTKH, v_BTKH, stats, dout_BTNH, out_BTNH, *lengths)
        return tuple(grad.swapaxes(1, 2) for grad in grads)

    return Kernel(forward, backward)


# Dimension numbers of the matmuls for arrays BTNH and scores BNTS: contracting axes of lhs and rhs, then batch axes.
FORWARD = {"bmm1": (3, 3, (0, 2), (0, 2)), "bmm2": (3, 1, (0, 1), (0, 2))}
BACKWARD = {
    "bmm1_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm1_grad_gemm2": (3, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm2": (3, 3, (0, 2), (0, 2)),
}


@dataclasses.dataclass(frozen=True)
class CudnnCall:
    """Builder of the custom calls of the forward and backward kernels."""

    B: int
    T: int
    N: int
    H: int
    dtype: Any
    documents: int
    window: int | None

    def __post_init__(self):
        if self.B * self.T * self.N * self.H >= MAX_ELEMENTS:
            raise BadInput(
                f"model.attention='cudnn' needs fewer than 2^31 elements per sequence and device, not {self.T} tokens "
                f"with {self.N} heads of size {self.H}; use a larger mesh.tensor, or model.attention='blockwise'"
            )

    def heads_first(self, x_BTNH: jax.Array) -> jax.ShapeDtypeStruct:
        """Returns the shape [B, N, T, H] of a result like x_BTNH."""
        B, T, N, H = x_BTNH.shape
        return jax.ShapeDtypeStruct((B, N, T, H), x_BTNH.dtype)

    def lengths_and_offsets(self, spans: DocumentSpans, k_BTKH: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the lengths of queries and keys in tokens, and their offsets in elements."""
        K = k_BTKH.shape[2]
        return spans.lengths_BC, spans.lengths_BC, spans.begins_BC * (self.N * self.H), spans.begins_BC * (K * self.H)

    def make(
        self, name: str, arrays: list[jax.ShapeDtypeStruct], others: list[jax.ShapeDtypeStruct], matmuls: dict
    ) -> Callable[..., Any]:
        """Returns the custom call. Its results are `arrays` with memory layout BTNH, `others`, and the workspace."""
        workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)  # XLA sets the size during compilation for the GPU
        return jax.ffi.ffi_call(
            name,
            [*arrays, *others, workspace],
            output_layouts=[(0, 2, 1, 3)] * len(arrays) + [None] * (len(others) + 1),
            custom_call_api_version=2,
            legacy_backend_config=json.dumps(self.settings(matmuls)),
        )

    def settings(self, matmuls: dict) -> dict[str, Any]:
        """Returns XLA's CudnnfMHABackendConfig as JSON."""
        scores = {
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[jnp.dtype(self.dtype).name],
            "dimensions": [str(size) for size in (self.B, self.N, self.T, self.T)],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        }
        axes = {
            f"{name}_dot_dimension_numbers": {
                "lhs_contracting_dimensions": [str(has_more)],
                "rhs_contracting_dimensions": [str(right)],
                "lhs_batch_dimensions": [str(axis) for axis in left_batch],
                "rhs_batch_dimensions": [str(axis) for axis in right_batch],
            }
            for name, (has_more, right, left_batch, right_batch) in matmuls.items()
        }
        kernel = {
            "algorithm": {
                "algo_id": "0",
                "math_type": "TENSOR_OP_MATH",
                "tuning_knobs": {"17": "1", "24": "0"},
                "is_cudnn_frontend": True,
                "workspace_size": "0",
            },
            "fmha_scale": self.H**-0.5,
            "intermediate_tensor_shape": scores,
            "is_flash_attention": True,
            "mask_type": "PADDING_CAUSAL",
            "dropout_rate": 0.0,
            "seed": 42,
            "sliding_window_length": self.window or 0,
            "max_seg_per_batch": self.documents,
            "is_paged_attention": False,
        }
        return {"operation_queue_id": "0", "cudnn_fmha_backend_config": kernel | axes}
