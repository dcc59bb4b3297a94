"""Context parallelism by arithmetic: bytes of keys and values that a device holds and sends.

C devices of the axis  T positions of a row  K key-value heads  H head dim
"""

from jaxscale.build import Program
from jaxscale.core.models.config import SAVED_NAMES
from jaxscale.kernels.config import ATTENTION_OUT
from jaxscale.tools.planning.stages import compute_bytes

CONTEXT = "context"
MIN_POSITIONS = 1024  # of a row on one device, our choice: below it matmuls end before keys and values arrive
F32 = 4


def window_layer_fraction(program: Program) -> float:
    """Returns the fraction of layers whose window ends in the previous chunk, so that only its last keys are sent."""
    needs, size = program.plan.needs, program.mesh.shape[CONTEXT]
    if needs.window is None or needs.window - 1 > program.cfg.row_lengths.row // (2 * size):
        return 0.0
    return needs.window_layers.windowed / needs.window_layers.total if needs.window_layers else 1.0


def kv_bytes(program: Program) -> float:
    """Returns bytes of one layer's local keys and values for one microbatch."""
    cfg, shape = program.cfg, program.mesh.shape
    num_shards = shape["data"] * shape["fsdp"] * shape["expert"] * shape[CONTEXT] * shape["tensor"]
    tokens = cfg.tokens_per_step / cfg.train.num_microbatches
    return tokens / num_shards * (cfg.model.key_width + cfg.model.value_width) * compute_bytes(cfg)


def query_bytes(program: Program) -> float:
    """Returns bytes of one layer's local queries, or of its outputs: the mean of the two, which differ only with
    latents."""
    model = program.cfg.model
    widths = model.query_width + model.result_width
    return kv_bytes(program) / (model.key_width + model.value_width) * widths / 2


def context_exchange_memory(program: Program) -> float:
    """Returns peak bytes of attention in addition to the local queries, keys, values and outputs.

    Gather: keys and values of all positions, and their gradients. Ulysses: all four arrays, for a subset of heads.
    Ring, in the backward pass: two neighbours' keys and values; in float32 their gradients as received, as accumulated
    and as sent, and the local queries' gradients; queries and output gradients in the kernel's dimension order, and one
    of two chunks of each with its results. The ring's share does not depend on the row length.
    """
    size, keys, exchange = program.mesh.shape[CONTEXT], kv_bytes(program), program.plan.context_exchange.name
    if size == 1 or exchange == "gather" and window_layer_fraction(program) == 1:
        return 0.0
    queries = query_bytes(program)
    by_exchange = {
        "gather": 2 * size * keys,
        "ulysses": keys + 2 * queries,
        "ring": 2 * keys + 3.5 * queries + (3 * keys + queries) * F32 / compute_bytes(program.cfg),
    }
    return by_exchange[exchange]


def context_collectives(program: Program) -> list[tuple[str, float]]:
    """Returns [(collective, bytes of its whole arrays)] of one layer and microbatch along the context axis.

    Gather: all-gathered forward, again in the backward pass under remat, and gradients reduce-scattered. Ulysses:
    exchanged forward, under remat again, and backward. Ring: C - 1 hops each way; XLA merges one of the first hops of
    the backward pass with one that remat repeats; gradients take C - 1 hops in float32 and one back to their owner. A
    window's tail of the previous chunk is permuted forward, under remat again, and backward; in a pipeline it is
    gathered.
    """
    model, size = program.cfg.model, program.mesh.shape[CONTEXT]
    keys, exchange = kv_bytes(program), program.plan.context_exchange.name
    if size == 1:
        return []
    passes = 1 if model.remat == "none" else 2
    if exchange == "ulysses":
        return [("all-to-all", (passes + 1) * (keys + 2 * query_bytes(program)))]
    windowed = window_layer_fraction(program)
    window = program.plan.needs.window or 1
    tails = keys * 2 * (window - 1) * size / program.cfg.row_lengths.row
    collectives = [("collective-permute", windowed * (passes + 1) * tails)] if windowed else []
    if windowed and program.mesh.shape["pipeline"] > 1:
        gathered = windowed * size * tails
        collectives = [("all-gather", passes * gathered), ("reduce-scatter", gathered)]
    if windowed == 1:
        return collectives
    if exchange == "gather":
        gathered = (1 - windowed) * size * keys
        return [*collectives, ("all-gather", passes * gathered), ("reduce-scatter", gathered)]
    saved = (*SAVED_NAMES.get(model.remat, ()), *(model.remat_save if model.remat == "save" else ()))
    forward = 1 if ATTENTION_OUT in saved else passes
    rounds = (size - 1) * (forward + 1) - (forward - 1) + (size - 1) * F32 / compute_bytes(program.cfg) + 1
    return [*collectives, ("collective-permute", (1 - windowed) * rounds * keys)]
