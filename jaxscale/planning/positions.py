"""The context axis by arithmetic: what devices with some positions of each row hold and send of keys and values.

C devices of the axis  T positions of a row  K key-value heads  H head dim
"""

from jaxscale.build import Program
from jaxscale.model_on_mesh import parallel_request
from jaxscale.models.config import SAVED_NAMES
from jaxscale.models.sharded import context_work
from jaxscale.ops.attention.context_exchange import resolve_context_exchange
from jaxscale.ops.config import ATTENTION_OUT
from jaxscale.planning.stages import compute_bytes

CONTEXT = "context"
LEAST_POSITIONS = 1024  # ours: of a row on one device. With fewer its products are over before keys and values arrive
F32 = 4


def attention_way(program: Program) -> str:
    """How devices reach each other's keys: 'gather', 'ulysses' or 'ring'; '' where they need not."""
    cfg, model = program.cfg, program.model
    work = context_work(cfg.model, program.mesh, parallel_request(cfg, program.mesh))
    return resolve_context_exchange(cfg.context.attention, model.kernels.attention, model.needs, work).form


def near_share(program: Program) -> float:
    """The part of the layers whose window reaches no further than the chunk before: they need its last keys alone."""
    needs, size = program.model.needs, program.mesh.shape[CONTEXT]
    if needs.window is None or needs.window - 1 > program.cfg.row_lengths.row // (2 * size):
        return 0.0
    return needs.window_layers.windowed / needs.window_layers.total if needs.window_layers else 1.0


def key_value_bytes(program: Program) -> float:
    """Bytes of one layer's keys and values for one microbatch, of a device's own positions and heads."""
    cfg, shape = program.cfg, program.mesh.shape
    own = shape["data"] * shape["fsdp"] * shape["expert"] * shape[CONTEXT] * shape["tensor"]
    tokens = cfg.tokens_per_step / cfg.train.num_microbatches
    return tokens / own * (cfg.model.key_width + cfg.model.value_width) * compute_bytes(cfg)


def query_bytes(program: Program) -> float:
    """The same of one layer's queries, or of its results: the mean of the two, which differ with latents alone."""
    model = program.cfg.model
    widths = model.query_width + model.result_width
    return key_value_bytes(program) / (model.key_width + model.value_width) * widths / 2


def attention_memory(program: Program) -> float:
    """Bytes that attention takes beside a device's own queries, keys, values and result, at one time.

    Gathered: keys and values of all positions, and their gradients. Exchanged (Ulysses): all four, of some heads. In a
    ring, going back: a neighbour's keys and values and the next one's; in float32 their gradients as they come, as they
    are here and as they go, and those of own queries; these queries and the result's gradient in the kernel's order of
    dimensions, and of each and of what comes of them one of two chunks. That knows nothing of the row's length.
    """
    size, keys, way = program.mesh.shape[CONTEXT], key_value_bytes(program), attention_way(program)
    if size == 1 or way == "gather" and near_share(program) == 1:
        return 0.0
    queries = query_bytes(program)
    ways = {
        "gather": 2 * size * keys,
        "ulysses": keys + 2 * queries,
        "ring": 2 * keys + 3.5 * queries + (3 * keys + queries) * F32 / compute_bytes(program.cfg),
    }
    return ways[way]


def attention_sending(program: Program) -> list[tuple[str, float]]:
    """[(kind of collective, bytes of its whole arrays)] of one layer and microbatch along the context axis.

    Gathered forward, again where the backward pass needs them, and the gradients scattered; exchanged forward, again,
    and backward; round the ring C - 1 times each, of which XLA makes one of the first ones of the backward pass and of
    what it does again, and their gradients C - 1 times in float32, and home as they are needed. What a window reaches
    of the chunk before is sent from device to device, forward, again, and back; in a pipeline it is gathered.
    """
    model, size, keys, way = (
        program.cfg.model,
        program.mesh.shape[CONTEXT],
        key_value_bytes(program),
        attention_way(program),
    )
    if size == 1:
        return []
    passes = 1 if model.remat == "none" else 2
    if way == "ulysses":
        return [("all-to-all", (passes + 1) * (keys + 2 * query_bytes(program)))]
    near = near_share(program)
    window = program.model.needs.window or 1
    tails = keys * 2 * (window - 1) * size / program.cfg.row_lengths.row
    sent = [("collective-permute", near * (passes + 1) * tails)] if near else []
    if near and program.mesh.shape["pipeline"] > 1:
        sent = [("all-gather", near * passes * size * tails), ("reduce-scatter", near * size * tails)]
    if near == 1:
        return sent
    if way == "gather":
        return [*sent, ("all-gather", (1 - near) * passes * size * keys), ("reduce-scatter", (1 - near) * size * keys)]
    kept = ATTENTION_OUT in (*SAVED_NAMES.get(model.remat, ()), *(model.remat_save if model.remat == "save" else ()))
    forward = 1 if kept else passes
    rounds = (size - 1) * (forward + 1) - (forward - 1) + (size - 1) * F32 / compute_bytes(program.cfg) + 1
    return [*sent, ("collective-permute", (1 - near) * rounds * keys)]
