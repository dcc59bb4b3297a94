"""cuDNN's flash attention over packed documents, for Hopper and newer: no mask and no bias, a document at a time.

The kernel is told where each document of a device's rows begins and how long it is, in arrays whose size is that of the
program: DOCUMENTS a row, pooled over the rows. Of rows with more documents than that, the rest is done in further
rounds of the same kernel. Documents begin where the segment number changes; so does a row's padding.

JAX 0.10's own wrapper of this kernel asks an attached card for its age, and takes the keys of grouped-query attention
from wrong places (github.com/jax-ml/jax/pull/39521); so the kernel is called here, with the operands of that wrapper.

B batch  T position  N query heads  K key-value heads  H head dim  C documents of one round = B * DOCUMENTS
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

from jaxscale.ops.config import ATTENTION_OUT
from jaxscale.system.exits import BadInput

LEAST_CAPABILITY = 9.0  # Hopper: cuDNN has no packed layout for older cards
# Between the passes the kernel keeps 4 bytes for each of these, position and head: at 16 and a head_dim of 128 in
# bfloat16, a quarter of its result. Web text has about 6 documents in a row of 4096.
DOCUMENTS = 16
MOST_ELEMENTS = 2**31  # places in q are told in int32


class Spans(NamedTuple):
    """Where the documents of one round lie."""

    lengths_BC: jax.Array  # int32[B, C/B]: tokens of each, 0 where there is none
    begins_BC: jax.Array  # int32[B, C/B + 1]: first token of each, counted over all rows, and the end of the last


class Kernel(NamedTuple):
    """A flash attention over spans. What it returns outside of these is undefined."""

    # (q_BTNH, k_BTKH, v_BTKH, spans) -> (out_BTNH, what its backward pass needs beside)
    forward: Callable[..., tuple[jax.Array, jax.Array]]
    # (q_BTNH, k_BTKH, v_BTKH, spans, out_BTNH, the same, dout_BTNH) -> (dq_BTNH, dk_BTKH, dv_BTKH)
    backward: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def make_attend(*, window: int | None = None, kernel: Kernel | None = None, documents: int = DOCUMENTS):
    """attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT) -> out_BTNH with the values of xla.make_attend(window=window).

    A segment's positions must be consecutive. kernel: cuDNN's, unless given. documents: of a row and round.
    """
    kernel = kernel or cudnn_kernel(window)

    @jax.custom_vjp
    def attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        return keep(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)[0]

    def keep(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        numbers_BT = document_numbers(segment_ids_BT)
        run = lambda spans: kernel.forward(q_BTNH, k_BTKH, v_BTKH, spans)
        out_BTNH, rest = run(find_spans(numbers_BT, 0, documents))
        (out_BTNH,) = further_rounds(lambda spans: run(spans)[:1], (out_BTNH,), numbers_BT, documents)
        out_BTNH, rest = (checkpoint_name(result, ATTENTION_OUT) for result in (out_BTNH, rest))
        return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, numbers_BT, out_BTNH, rest)

    def backward(saved, dout_BTNH):
        q_BTNH, k_BTKH, v_BTKH, numbers_BT, out_BTNH, rest = saved

        def run(spans, rest):
            return tuple(kernel.backward(q_BTNH, k_BTKH, v_BTKH, spans, out_BTNH, rest, dout_BTNH))

        def run_again(spans):  # what is kept is of the first round
            return run(spans, kernel.forward(q_BTNH, k_BTKH, v_BTKH, spans)[1])

        grads = run(find_spans(numbers_BT, 0, documents), rest)
        return *further_rounds(run_again, grads, numbers_BT, documents), None

    attend.defvjp(keep, backward)

    def attend_parts(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT):
        """As many rows at once as the kernel can count the numbers of."""
        B, arrays = len(q_BTNH), (q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
        if q_BTNH.size < MOST_ELEMENTS or B == 1:
            return attend(*arrays)
        return jnp.concatenate(
            [attend_parts(*(x[rows] for x in arrays)) for rows in (np.s_[: B // 2], np.s_[B // 2 :])]
        )

    return attend_parts


def document_numbers(segment_ids_BT: jax.Array) -> jax.Array:
    """int32[B, T]: which document of all rows each token is in, from 0, in the order of memory."""
    begins_BT = jnp.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], [(0, 0), (1, 0)], constant_values=True)
    return jnp.cumsum(begins_BT.reshape(-1), dtype=jnp.int32).reshape(begins_BT.shape) - 1


def find_spans(numbers_BT: jax.Array, round_number: int | jax.Array, documents: int) -> Spans:
    """The spans of one round, which holds as many documents as `documents` a row come to."""
    B = len(numbers_BT)
    wanted = jnp.minimum(jnp.arange(B * documents + B, dtype=jnp.int32), B * documents) + round_number * B * documents
    # compare_all: one pass over the tokens, where a binary search would be 14 small kernels, in every layer
    begins = jnp.searchsorted(numbers_BT.reshape(-1), wanted, method="compare_all").astype(jnp.int32)
    lengths = jnp.diff(begins)[: B * documents]
    return Spans(lengths.reshape(B, documents), begins.reshape(B, documents + 1))


def further_rounds(
    run: Callable[[Spans], tuple[jax.Array, ...]],
    results: tuple[jax.Array, ...],
    numbers_BT: jax.Array,
    documents: int,
) -> tuple[jax.Array, ...]:
    """`results` of the first round, each token's replaced by those of the round that its document is in."""
    round_BT = numbers_BT // (len(numbers_BT) * documents)

    def another(carry):
        number, results = carry
        own_BT11 = (round_BT == number)[:, :, None, None]
        found = run(find_spans(numbers_BT, number, documents))
        return number + 1, tuple(jnp.where(own_BT11, new, old) for new, old in zip(found, results))

    left = lambda carry: carry[0] <= round_BT[-1, -1]
    with jax.named_scope("usually_0_trips"):  # for who counts the program's work (ahead.hlo_trips)
        return lax.while_loop(left, another, (jnp.int32(1), results))[1]


def cudnn_kernel(window: int | None) -> Kernel:
    """cuDNN's kernel, causal, scale 1/sqrt(H); `window` as in xla.make_attend. XLA's GPU compiler knows its names."""

    def forward(q_BTNH, k_BTKH, v_BTKH, spans):
        call = Call(*q_BTNH.shape, dtype=q_BTNH.dtype, documents=spans.lengths_BC.shape[1], window=window)
        statistics = jax.ShapeDtypeStruct((call.B * call.documents, call.N, call.T), jnp.float32)
        run = call.make("__cudnn$fmhaSoftmax", [call.heads_first(q_BTNH)], [statistics], FORWARD)
        out_BNTH, statistics, _ = run(q_BTNH, k_BTKH, v_BTKH, *call.places(spans, k_BTKH))
        return out_BNTH.swapaxes(1, 2), statistics

    def backward(q_BTNH, k_BTKH, v_BTKH, spans, out_BTNH, statistics, dout_BTNH):
        call = Call(*q_BTNH.shape, dtype=q_BTNH.dtype, documents=spans.lengths_BC.shape[1], window=window)
        results = [call.heads_first(x) for x in (q_BTNH, k_BTKH, v_BTKH)]
        run = call.make("__cudnn$fmhaSoftmaxBackward", results, [], BACKWARD)
        places = call.places(spans, k_BTKH)
        *grads, _ = run(q_BTNH, k_BTKH, v_BTKH, statistics, dout_BTNH, out_BTNH, *places)
        return tuple(grad.swapaxes(1, 2) for grad in grads)

    return Kernel(forward, backward)


# The products of one row and head, for arrays with the axes BTNH and scores BNTS: contracted axes of left and right,
# then batch axes of left and right.
FORWARD = {"bmm1": (3, 3, (0, 2), (0, 2)), "bmm2": (3, 1, (0, 1), (0, 2))}
BACKWARD = {
    "bmm1_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm1_grad_gemm2": (3, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm1": (2, 1, (0, 1), (0, 2)),
    "bmm2_grad_gemm2": (3, 3, (0, 2), (0, 2)),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """What forward and backward pass of the kernel have in common."""

    B: int
    T: int
    N: int
    H: int
    dtype: Any
    documents: int
    window: int | None

    def __post_init__(self):
        if self.B * self.T * self.N * self.H >= MOST_ELEMENTS:
            raise BadInput(
                f"attention=cudnn: rows of {self.T} tokens with {self.N} heads of {self.H} on a device are 2^31 "
                "numbers or more; use a larger mesh.tensor, or model.attention=blockwise"
            )

    def heads_first(self, x_BTNH: jax.Array) -> jax.ShapeDtypeStruct:
        """A result of the kernel with the shape of x, as [B, N, T, H]."""
        B, T, N, H = x_BTNH.shape
        return jax.ShapeDtypeStruct((B, N, T, H), x_BTNH.dtype)

    def places(self, spans: Spans, k_BTKH: jax.Array) -> tuple[jax.Array, ...]:
        """Lengths of queries and of keys [tokens], then places of queries and of keys [elements]."""
        K = k_BTKH.shape[2]
        return spans.lengths_BC, spans.lengths_BC, spans.begins_BC * (self.N * self.H), spans.begins_BC * (K * self.H)

    def make(
        self, name: str, arrays: list[jax.ShapeDtypeStruct], others: list[jax.ShapeDtypeStruct], products: dict
    ) -> Callable[..., Any]:
        """The call: its results are `arrays`, which lie in memory as BTNH, `others`, and XLA's room for the kernel."""
        room = jax.ShapeDtypeStruct((0,), jnp.uint8)  # its size is known where the card is
        return jax.ffi.ffi_call(
            name,
            [*arrays, *others, room],
            output_layouts=[(0, 2, 1, 3)] * len(arrays) + [None] * (len(others) + 1),
            custom_call_api_version=2,
            legacy_backend_config=json.dumps(self.settings(products)),
        )

    def settings(self, products: dict) -> dict[str, Any]:
        """XLA's CudnnfMHABackendConfig, as JSON spells it."""
        scores = {
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[jnp.dtype(self.dtype).name],
            "dimensions": [str(size) for size in (self.B, self.N, self.T, self.T)],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        }
        axes = {
            f"{name}_dot_dimension_numbers": {
                "lhs_contracting_dimensions": [str(left)],
                "rhs_contracting_dimensions": [str(right)],
                "lhs_batch_dimensions": [str(axis) for axis in left_batch],
                "rhs_batch_dimensions": [str(axis) for axis in right_batch],
            }
            for name, (left, right, left_batch, right_batch) in products.items()
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
