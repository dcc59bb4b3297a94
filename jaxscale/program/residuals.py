"""Arrays that each block saves for the backward pass with remat="none".

They are the operands of each derivative in the model's code, in their dtype. They match the arrays carried by the layer
loops of quickstart, masked_lm, span_corruption and gpt2_124m in XLA:TPU's buffer assignment (libtpu 0.0.42.1,
2026-11-22). Residuals of qk_norm, attention_softcap, latents, T5's ReLU, a tensor axis and GPUs are derived from the
code only.

B local rows of a microbatch  T query positions  S key positions  D embed  N heads  K key-value heads
H head dim  V value dim  F mlp
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxscale.build import Program
from jaxscale.core.models.config import ModelConfig, ResidualDtype
from jaxscale.kernels.collectives import LANES, SUBLANES, on_tpu

F32 = 4


class Residual(NamedTuple):
    """An array that every layer saves for the backward pass."""

    name: str
    shape: tuple[int, ...]
    itemsize: int


def residuals_by_stack(program: Program) -> dict[str, tuple[int, int]]:
    """Returns {stack of blocks: (number of layers, local residual bytes per layer)} for a model without remat."""
    cfg, tpu = program.cfg, on_tpu(program.mesh)
    rows = cfg.rows_per_step // cfg.train.num_microbatches // program.batch_shards
    context = program.mesh.shape["context"]
    gathers_keys = context > 1 and program.plan.context_exchange.name == "gather"
    options = dict(scores=program.plan.attention.name == "xla", tensor=program.mesh.shape["tensor"], tpu=tpu)
    residuals = {}
    for stack, layers in cfg.model.layer_stacks.items():
        is_encoder = stack == "encoder_blocks"
        length = (cfg.row_lengths.encoder if is_encoder else cfg.row_lengths.row) // context
        read = None if is_encoder else cfg.row_lengths.encoder
        keys = length * context if gathers_keys else length
        arrays = block_residuals(cfg.model, rows, length, read, keys=keys, **options)
        residuals[stack] = layers, sum(tiled_bytes(array.shape, array.itemsize, tpu) for array in arrays)
    return residuals


def block_residuals(
    model: ModelConfig, rows: int, length: int, read: int | None, *, keys: int, scores: bool, tensor: int, tpu: bool
) -> list[Residual]:
    """Returns the residuals of one block for sequences with `length` local positions.

    read: number of encoder positions to which a decoder attends; None without cross-attention. keys: number of key
    positions, including gathered remote keys. scores: True if attention saves probabilities; False if a fused kernel
    saves one number per query.
    """
    sizes = element_bytes(model, tpu)
    B, T, D, local_length = rows, length, model.embed_dim, length // tensor
    sublayers = 2 if read is None else 3  # attention, cross-attention, MLP, each with a norm and an output projection
    residuals = [Residual("sublayer input", (B, T, D), sizes["operand"])] * sublayers
    residuals += [Residual("norm", (B, local_length, D), sizes[kind]) for kind in model.norm_residuals] * sublayers
    if model.dropout:
        residuals += [Residual("dropout mask", (B, local_length, D), 1)] * sublayers
    for num_keys in (keys,) if read is None else (keys, read):
        residuals += attention_residuals(model, B, T, num_keys, scores=scores, tensor=tensor, tpu=tpu)
    F = model.mlp_width // tensor
    return residuals + [Residual(name, (B, T, F), sizes[kind]) for name, kind in model.mlp_residuals]


def attention_residuals(
    model: ModelConfig, B: int, T: int, S: int, *, scores: bool, tensor: int, tpu: bool
) -> list[Residual]:
    """Returns the residuals of one attention layer.

    XLA attention saves probabilities in float32 and again in the operand dtype of matmuls. Kernel arrays end with the
    head dim, which a TPU pads to a multiple of 128. A kernel's output is saved again for the output projection.
    """
    sizes = element_bytes(model, tpu)
    width, operand = sizes["compute"], sizes["operand"]
    N, H, K = model.num_heads // tensor, model.head_dim, model.key_width // model.head_dim // tensor
    V = model.attention_needs().v_dim
    per_head = [(B, N, T, H), (B, K, S, H), (B, K, S, V), (B, N, T, V)]  # query, key, value, result
    before_norm = [Residual("input of qk_norm", shape, width) for shape in per_head[:2]] if model.qk_norm else []
    if latent := model.latent_width:
        before_norm += [Residual("latents", (B, T, latent), itemsize) for itemsize in (width, operand)]
    if scores:
        probabilities = [Residual("probabilities", (B, N, T, S), itemsize) for itemsize in (F32, operand)]
        if model.attention_needs().softcap is not None:
            probabilities.append(Residual("tanh of scores", (B, N, T, S), F32))
        return before_norm + probabilities + [Residual("attention", shape, operand) for shape in per_head]
    pad_lanes = lambda shape: (*shape[:-1], round_up(shape[-1], LANES) if tpu else shape[-1])
    residuals = [Residual("kernel", pad_lanes(shape), width) for shape in per_head] + before_norm
    return [
        *residuals,
        Residual("attention output", (B, N, T, V), operand),
        Residual("logsumexp", (B, N, T), F32),
    ]


def element_bytes(model: ModelConfig, tpu: bool) -> dict[ResidualDtype, int]:
    """Returns the bytes per element of each kind of residual.

    A TPU multiplies float32 arrays as bfloat16 by default, and XLA saves the bfloat16 operands.
    """
    if model.compute_dtype != "float32":
        return {"compute": 2, "operand": 2, "float32": F32}
    return {"compute": F32, "operand": 2 if tpu and model.matmul_precision != "highest" else F32, "float32": F32}


def tiled_bytes(shape: Sequence[int], itemsize: int, tpu: bool) -> int:
    """Returns the bytes of an array with two axes padded to TPU tiles of 8 x 128.

    XLA chooses the order of axes, so the result is the smallest size over all orders.
    """
    sizes = [size for size in shape if size > 1]
    if not tpu or len(sizes) < 2:  # vectors are small and have different tiles
        return itemsize * math.prod(shape)
    factors = []
    for lane_axis, lanes in enumerate(sizes):
        for sublane_axis, rows in enumerate(sizes):
            if lane_axis != sublane_axis:
                tile = min(SUBLANES, 2 ** math.ceil(math.log2(rows)))  # tiles are smaller for few rows
                factors.append(round_up(lanes, LANES) * round_up(rows, tile) / (lanes * rows))
    return round(itemsize * math.prod(shape) * min(factors))


def round_up(size: int, tile: int) -> int:
    return -(-size // tile) * tile
