"""What the backward pass keeps of each block where nothing is computed again (remat="none"), array by array.

Each follows from the model's code: what a derivative reads, in the type in which it is computed. They are the arrays
that the loops over the layers carry where XLA:TPU compiled quickstart, masked_lm, span_corruption and gpt2_124m (its
buffer assignment, libtpu 0.0.42.1, 2026-11-22); dropout's masks were predicted and then found. Those of qk_norm,
attention_softcap, T5's ReLU, a tensor axis and GPUs are by the code alone.

B rows of a microbatch on one device  T query positions  S key positions  D embed  N heads  K key-value heads
H head dim  F mlp
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxscale.build import Program
from jaxscale.models import EncoderConfig, Gpt2Config, LlamaConfig, T5Config, layer_stacks, layer_widths
from jaxscale.models.layers import ModelConfig
from jaxscale.sharding.tiles import LANES, SUBLANES, on_tpu

F32 = 4


class Kept(NamedTuple):
    """One array that is kept of every layer."""

    name: str
    shape: tuple[int, ...]
    itemsize: int


def kept_by_stack(program: Program) -> dict[str, tuple[int, int]]:
    """{stack of blocks: (its layers, bytes on one device that are kept of each)}, where nothing is computed again."""
    cfg, tpu = program.cfg, on_tpu(program.mesh)
    rows = cfg.rows_per_step // cfg.train.num_microbatches // program.batch_shards
    how = dict(scores=program.attention == "xla", tensor=program.mesh.shape["tensor"], tpu=tpu)
    found = {}
    for stack, layers in layer_stacks(cfg.model).items():
        encodes = stack == "encoder_blocks"
        length = cfg.row_lengths.encoder if encodes else cfg.row_lengths.row
        read = None if encodes else cfg.row_lengths.encoder
        arrays = kept_of_block(cfg.model, rows, length, read, **how)
        found[stack] = layers, sum(tiled_bytes(one.shape, one.itemsize, tpu) for one in arrays)
    return found


def kept_of_block(
    model: ModelConfig, rows: int, length: int, read: int | None, *, scores: bool, tensor: int, tpu: bool
) -> list[Kept]:
    """The arrays of one block on rows of `length` positions.

    read: positions of the encoder's rows, for a decoder that reads them. scores: attention keeps its probabilities,
    where a fused kernel keeps one number for each row of them.
    """
    width, operand = number_bytes(model, tpu)
    B, T, D, own = rows, length, model.embed_dim, length // tensor
    parts = 2 if read is None else 3  # of a block, each behind a norm and with a projection of its own
    kept = [Kept("input of a part", (B, T, D), operand)] * parts
    if isinstance(model, (Gpt2Config, EncoderConfig)):  # layer_norm: float32 before and after its scale
        kept += [Kept("of a norm", (B, own, D), F32)] * 2 * parts
    else:  # rms_norm: its input alone
        kept += [Kept("of a norm", (B, own, D), width)] * parts
    if getattr(model, "dropout", 0.0):
        kept += [Kept("dropout's mask", (B, own, D), 1)] * parts
    for keys in (T,) if read is None else (T, read):
        kept += kept_of_attention(model, B, T, keys, scores=scores, tensor=tensor, tpu=tpu)
    return kept + kept_of_mlp(model, (B, T, layer_widths(model)[2] // tensor), tpu=tpu)


def kept_of_attention(
    model: ModelConfig, B: int, T: int, S: int, *, scores: bool, tensor: int, tpu: bool
) -> list[Kept]:
    """Queries, keys, values, the result, and probabilities in float32 and as their product with values reads them.

    A kernel's arrays have heads before positions, so that a head of 64 is filled up to the lanes of a TPU; its result
    is kept twice, as the kernel and as the projection behind it read it.
    """
    width, operand = number_bytes(model, tpu)
    N = model.num_heads // tensor
    H = layer_widths(model)[0] // model.num_heads
    K = layer_widths(model)[1] // H // tensor
    per_head = [(B, N, T, H), (B, K, S, H), (B, K, S, H), (B, N, T, H)]  # query, key, value, result
    before_norm = (
        [Kept("before its norm", shape, width) for shape in per_head[:2]] if getattr(model, "qk_norm", 0) else []
    )
    if scores:
        probabilities = [Kept("probabilities", (B, N, T, S), itemsize) for itemsize in (F32, operand)]
        if getattr(model, "attention_softcap", None):
            probabilities.append(Kept("tanh of scores", (B, N, T, S), F32))
        return before_norm + probabilities + [Kept("of attention", shape, operand) for shape in per_head]
    lanes = filled(H, LANES) if tpu else H
    fixed = [Kept("of the kernel", (*shape[:-1], lanes), width) for shape in per_head]
    fixed += before_norm
    return [*fixed, Kept("attention's result", (B, N, T, H), operand), Kept("logarithms of sums", (B, N, T), F32)]


def kept_of_mlp(model: ModelConfig, shape: tuple[int, ...], *, tpu: bool) -> list[Kept]:
    """What the MLP's non-linearity needs, and its result as the product behind it reads it. GELU is float32 inside."""
    width, operand = number_bytes(model, tpu)
    of_gelu = 2 if isinstance(model, EncoderConfig) else 4  # beside its input: as it is defined, and in its tanh form
    gated = isinstance(model, T5Config) and model.mlp == "gated_gelu"
    arrays = [Kept("result", shape, operand), Kept("before the non-linearity", shape, width)]
    if isinstance(model, LlamaConfig):
        return [*arrays, Kept("up", shape, width)]
    if isinstance(model, T5Config) and not gated:  # ReLU: its input tells where it was above 0
        return arrays
    arrays += [Kept("inside GELU", shape, F32)] * of_gelu
    return arrays + [Kept("factor of the gate", shape, width)] * 2 * gated


def number_bytes(model: ModelConfig, tpu: bool) -> tuple[int, int]:
    """Bytes of (a number of compute_dtype, one that waits for a product).

    A TPU multiplies float32 as bfloat16 unless told otherwise, and XLA keeps for the backward pass what it multiplies.
    """
    if model.compute_dtype != "float32":
        return 2, 2
    return F32, 2 if tpu and model.matmul_precision != "highest" else F32


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
                factors.append(filled(lanes, LANES) * filled(rows, tile) / (lanes * rows))
    return round(itemsize * math.prod(shape) * min(factors))


def filled(size: int, tile: int) -> int:
    """The next multiple of `tile`."""
    return -(-size // tile) * tile
