"""The context axis by arithmetic: what devices with some positions of each row hold and send of keys and values.

C devices of the axis  T positions of a row  K key-value heads  H head dim
"""

from jaxscale.build import Program
from jaxscale.config import RunConfig
from jaxscale.planning.stages import compute_bytes

CONTEXT = "context"
LEAST_POSITIONS = 1024  # ours: of a row on one device. With fewer its products are over before keys and values arrive


def attention_way(cfg: RunConfig) -> str:
    """How devices reach each other's keys: 'gather', 'ulysses' or 'ring'."""
    return "gather" if cfg.context.attention == "auto" else cfg.context.attention


def key_value_bytes(program: Program) -> float:
    """Bytes of one layer's keys and values for one microbatch, of a device's own positions and heads."""
    cfg, shape = program.cfg, program.mesh.shape
    own = shape["data"] * shape["fsdp"] * shape[CONTEXT] * shape["tensor"]
    tokens = cfg.tokens_per_step / cfg.train.num_microbatches
    return tokens / own * 2 * cfg.model.key_width * compute_bytes(cfg)


def query_bytes(program: Program) -> float:
    """Bytes of one layer's queries for one microbatch, of a device's own positions and heads; results are as many."""
    return key_value_bytes(program) / (2 * program.cfg.model.key_width) * program.cfg.model.query_width


def attention_memory(program: Program) -> float:
    """Bytes that attention takes beside a device's own queries, keys, values and result, at one time.

    Gathered: keys and values of all positions, and their gradients. Exchanged (Ulysses): all four, of some heads. In a
    ring: a neighbour's keys and values and the next one's, and the gradients that go with them in float32.
    """
    size, keys = program.mesh.shape[CONTEXT], key_value_bytes(program)
    if size == 1:
        return 0.0
    ways = {
        "gather": 2 * size * keys,
        "ulysses": keys + 2 * query_bytes(program),
        "ring": 2 * keys + 2 * keys * 4 / compute_bytes(program.cfg),
    }
    return ways[attention_way(program.cfg)]


def attention_sending(program: Program) -> list[tuple[str, float]]:
    """[(kind of collective, bytes of its whole arrays)] of one layer and microbatch along the context axis.

    Gathered forward, again where the backward pass computes the layer again, and the gradients scattered; exchanged
    forward, again, and backward; round the ring C - 1 times each, backward with the gradients.
    """
    size, keys = program.mesh.shape[CONTEXT], key_value_bytes(program)
    passes = 1 if program.cfg.model.remat == "none" else 2
    way = attention_way(program.cfg)
    if size == 1:
        return []
    if way == "gather":
        return [("all-gather", passes * size * keys), ("reduce-scatter", size * keys)]
    if way == "ulysses":
        return [("all-to-all", (passes + 1) * (keys + 2 * query_bytes(program)))]
    return [("collective-permute", (size - 1) * (passes + 2) * keys)]
