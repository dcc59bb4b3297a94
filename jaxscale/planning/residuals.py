"""Residuals that the backward pass saves of each block without remat (remat="none"), array by array.

Each follows from the model's code: what a derivative reads, in the type in which it is computed. They are the arrays
that the loops over the layers carry where XLA:TPU compiled quickstart, masked_lm, span_corruption and gpt2_124m (its
buffer assignment, libtpu 0.0.42.1, 2026-11-22); dropout's masks were predicted and then found. Those of qk_norm,
attention_softcap, latents, T5's ReLU, a tensor axis and GPUs are by the code alone.

B rows of a microbatch on one device  T query positions  S key positions  D embed  N heads  K key-value heads
H head dim  V of values  F mlp
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxscale.build import Program
from jaxscale.models.config import ModelConfig, ResidualDtype
from jaxscale.planning.positions import attention_way
from jaxscale.sharding.batch_axes import LANES, SUBLANES, on_tpu

F32 = 4


class Residual(NamedTuple):
    """One array that is kept of every layer for the backward pass."""

    name: str
    shape: tuple[int, ...]
    itemsize: int


def residuals_by_stack(program: Program) -> dict[str, tuple[int, int]]:
    """{stack of blocks: (its layers, bytes on one device that are kept of each)}, where nothing is computed again."""
    cfg, tpu = program.cfg, on_tpu(program.mesh)
    rows = cfg.rows_per_step // cfg.train.num_microbatches // program.batch_shards
    context = program.mesh.shape["context"]
    whole = context > 1 and attention_way(program) == "gather"
    how = dict(scores=program.attention == "xla", tensor=program.mesh.shape["tensor"], tpu=tpu)
    found = {}
    for stack, layers in cfg.model.layer_stacks.items():
        encodes = stack == "encoder_blocks"
        length = (cfg.row_lengths.encoder if encodes else cfg.row_lengths.row) // context
        read = None if encodes else cfg.row_lengths.encoder
        arrays = block_residuals(cfg.model, rows, length, read, keys=length * context if whole else length, **how)
        found[stack] = layers, sum(tiled_bytes(one.shape, one.itemsize, tpu) for one in arrays)
    return found


def block_residuals(
    model: ModelConfig, rows: int, length: int, read: int | None, *, keys: int, scores: bool, tensor: int, tpu: bool
) -> list[Residual]:
    """The arrays of one block on `length` positions of each row.

    read: positions of the encoder's rows, for a decoder that reads them. keys: positions whose keys and values are
    there: more than `length` where other devices' are gathered. scores: attention keeps its probabilities,
    where a fused kernel keeps one number for each row of them.
    """
    sizes = number_bytes(model, tpu)
    B, T, D, own = rows, length, model.embed_dim, length // tensor
    parts = 2 if read is None else 3  # of a block, each behind a norm and with a projection of its own
    kept = [Residual("input of a part", (B, T, D), sizes["operand"])] * parts
    kept += [Residual("of a norm", (B, own, D), sizes[kind]) for kind in model.norm_residuals] * parts
    if model.dropout:
        kept += [Residual("dropout's mask", (B, own, D), 1)] * parts
    for seen in (keys,) if read is None else (keys, read):
        kept += attention_residuals(model, B, T, seen, scores=scores, tensor=tensor, tpu=tpu)
    return kept + [Residual(name, (B, T, model.mlp_width // tensor), sizes[kind]) for name, kind in model.mlp_residuals]


def attention_residuals(
    model: ModelConfig, B: int, T: int, S: int, *, scores: bool, tensor: int, tpu: bool
) -> list[Residual]:
    """Queries, keys, values, the result, and probabilities in float32 and as their product with values reads them.

    A kernel's arrays have heads before positions, so that a head of 64 is filled up to the lanes of a TPU; its result
    is kept twice, as the kernel and as the projection behind it read it.
    """
    sizes = number_bytes(model, tpu)
    width, operand = sizes["compute"], sizes["operand"]
    N, H, K = model.num_heads // tensor, model.head_dim, model.key_width // model.head_dim // tensor
    V = model.attention_needs().v_dim
    per_head = [(B, N, T, H), (B, K, S, H), (B, K, S, V), (B, N, T, V)]  # query, key, value, result
    before_norm = [Residual("before its norm", shape, width) for shape in per_head[:2]] if model.qk_norm else []
    if latent := model.latent_width:
        before_norm += [Residual("latents", (B, T, latent), itemsize) for itemsize in (width, operand)]
    if scores:
        probabilities = [Residual("probabilities", (B, N, T, S), itemsize) for itemsize in (F32, operand)]
        if model.attention_needs().softcap is not None:
            probabilities.append(Residual("tanh of scores", (B, N, T, S), F32))
        return before_norm + probabilities + [Residual("of attention", shape, operand) for shape in per_head]
    lanes = lambda shape: (*shape[:-1], round_up(shape[-1], LANES) if tpu else shape[-1])
    kept = [Residual("of the kernel", lanes(shape), width) for shape in per_head] + before_norm
    return [
        *kept,
        Residual("attention's result", (B, N, T, V), operand),
        Residual("logarithms of sums", (B, N, T), F32),
    ]


def number_bytes(model: ModelConfig, tpu: bool) -> dict[ResidualDtype, int]:
    """Bytes of each kind of number.

    A TPU multiplies float32 as bfloat16 unless told otherwise, and XLA keeps for the backward pass what it multiplies.
    """
    if model.compute_dtype != "float32":
        return {"compute": 2, "operand": 2, "float32": F32}
    return {"compute": F32, "operand": 2 if tpu and model.matmul_precision != "highest" else F32, "float32": F32}


def tiled_bytes(shape: Sequence[int], itemsize: int, tpu: bool) -> int:
    """Bytes of an array with its last two axes filled up to tiles of 8 x 128 on a TPU, in the order of axes that takes
    the least: XLA is free to choose it."""
    sizes = [size for size in shape if size > 1]
    if not tpu or len(sizes) < 2:  # a vector has tiles of its own, and is small
        return itemsize * math.prod(shape)
    factors = []
    for last, lanes in enumerate(sizes):
        for before, rows in enumerate(sizes):
            if last != before:
                tile = min(SUBLANES, 2 ** math.ceil(math.log2(rows)))  # of few rows it is smaller
                factors.append(round_up(lanes, LANES) * round_up(rows, tile) / (lanes * rows))
    return round(itemsize * math.prod(shape) * min(factors))


def round_up(size: int, tile: int) -> int:
    """The next multiple of `tile`."""
    return -(-size // tile) * tile
