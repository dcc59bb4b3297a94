"""Context parallelism: attention over devices that each have some positions of a sequence.

"gather" all-gathers keys and values, or with a window only receives those of the previous chunk. "ulysses"
(arXiv:2309.14509) exchanges positions for heads, so that each device attends to whole sequences with some of the heads.
"ring" sends keys and values around a ring of devices (ring.py). resolve_context_exchange() selects one of them.

B batch  T query position  S key position  N query heads  K key-value heads  H head dim  C devices  c chunks per device
t: local positions, which are consecutive within a chunk
"""

import dataclasses
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.core.axes.context_axis import ContextAxis
from jaxscale.kernels.attention.xla import MaskSpec, as_mask_spec
from jaxscale.kernels.attention.xla import make_attend as make_plain
from jaxscale.kernels.config import AttentionNeeds, Choice
from jaxscale.system.exits import BadInput
from jaxscale.units import size

BLOCK = 512  # positions per block of flash.py; scores of a pair of blocks need 1 MiB per row and head
MIN_BLOCK = 32  # positions; a chunk without a divisor from MIN_BLOCK to BLOCK is a single block
# Maximum fraction of device memory for the gathered keys and values of a layer and their gradients. Weights, moments
# and activations need the rest.
MAX_GATHERED = 1 / 8
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Kernels for queries at given positions, and kernels of a ring. A file is imported when its kernel is selected.
POSITIONED_ATTEND = {
    "xla": "jaxscale.kernels.attention.context_parallel:make_xla_positioned",
    "blockwise": "jaxscale.kernels.attention.flash:make_positioned_attend",
    "splash": "jaxscale.kernels.attention.splash:make_positioned_attend",
}
RING_ATTEND = {
    "splash": "jaxscale.kernels.attention.ring_splash:make_attend",
    "blockwise": "jaxscale.kernels.attention.ring_flash:make_attend",
}
SPLASH_BLOCKS = "jaxscale.kernels.attention.splash:blocks_for"
DESCRIPTIONS = {
    "gather": "keys and values are gathered (gather)",
    "ulysses": "positions are exchanged for heads (ulysses)",
    "ring": "keys and values circulate in a ring (ring)",
}


@dataclasses.dataclass(frozen=True)
class QueryPositions:
    """Positions of each device's queries in the sequence of keys."""

    starts_Cc: np.ndarray  # int32: first position of each chunk
    chunk: int
    device: jax.Array | int  # index of this device

    @property
    def positions_T(self) -> jax.Array:
        """Positions of this device's queries, int32[T]."""
        starts_c = jnp.asarray(self.starts_Cc)[self.device]
        return (starts_c[:, None] + jnp.arange(self.chunk, dtype=jnp.int32)[None]).reshape(-1)


# attend(q_BTNH, k_BSKH, v_BSKH, spec, positions, **kwargs) -> out_BTNH; spec.key_segment_ids_BS is set.
PositionedAttend = Callable[..., jax.Array]


def make_xla_positioned(*, softcap: float | None, window: int | None) -> PositionedAttend:
    """Returns the reference attention for queries at given positions, with all features of xla.make_attend."""
    attend = make_plain(softcap=softcap, window=window)

    def positioned_attend(q_BTNH, k_BSKH, v_BSKH, spec: MaskSpec, positions: QueryPositions, **kwargs):
        return attend(q_BTNH, k_BSKH, v_BSKH, spec._replace(query_positions_T=positions.positions_T), **kwargs)

    return positioned_attend


def chunk_block_size(chunk: int) -> int:
    """Returns the block length: the largest divisor of `chunk` between MIN_BLOCK and BLOCK, or `chunk` if none."""
    largest = max(size for size in range(1, min(chunk, BLOCK) + 1) if chunk % size == 0)
    return largest if largest >= MIN_BLOCK else chunk


def all_gather_kv(attend: PositionedAttend, context: ContextAxis):
    """Returns attend(q_BtNH, k_BtKH, v_BtKH, segments, **kwargs) -> out_BtNH, which all-gathers keys and values."""

    def attend_gathered(q_BtNH, k_BtKH, v_BtKH, segments: jax.Array | MaskSpec, **kwargs):
        k_BSKH, v_BSKH = context.all_gather((k_BtKH, v_BtKH))
        chunk = q_BtNH.shape[1] // context.chunks
        positions = QueryPositions(context.chunk_starts(chunk), chunk, context.index())
        return attend(q_BtNH, k_BSKH, v_BSKH, gather_mask_spec(context, segments), positions, **kwargs)

    return attend_gathered


def over_all_keys(f: Callable[..., jax.Array], context: ContextAxis) -> Callable[..., jax.Array]:
    """Converts f to a function of local queries and keys that gathers the keys of all devices."""
    if context.size == 1:
        return f

    def f_all_keys(q_BtNH, k_BtKH, segments: jax.Array | MaskSpec, **kwargs):
        chunk = q_BtNH.shape[1] // context.chunks
        positions = QueryPositions(context.chunk_starts(chunk), chunk, context.index())
        spec = gather_mask_spec(context, segments)._replace(query_positions_T=positions.positions_T)
        return f(q_BtNH, context.all_gather(k_BtKH), spec, **kwargs)

    return f_all_keys


def gather_mask_spec(context: ContextAxis, segments: jax.Array | MaskSpec) -> MaskSpec:
    """Returns the MaskSpec of local queries and all keys."""
    spec = as_mask_spec(segments)
    return MaskSpec(spec.segment_ids_BT, context.all_gather(spec.prefix_BT), context.all_gather(spec.segment_ids_BT))


def with_neighbour_chunks(attend: PositionedAttend, fallback: Callable, window: int, context: ContextAxis):
    """Returns attend(q_BtNH, k_BtKH, v_BtKH, segment_ids_Bt, **kwargs) -> out_BtNH with a sliding window.

    Each chunk receives the last keys of the previous chunk. `fallback` is used if the window is longer than a chunk.
    """

    def attend_neighbours(q_BtNH, k_BtKH, v_BtKH, segments, **kwargs):
        chunk = q_BtNH.shape[1] // context.chunks
        block = chunk_block_size(chunk)
        tail = max(1, window - 1)
        padded_tail = -(-tail // block) * block  # padded in front to whole blocks with masked positions
        if padded_tail > chunk or not isinstance(segments, jax.Array):
            return fallback(q_BtNH, k_BtKH, v_BtKH, segments, **kwargs)
        by_chunk = lambda x: x.reshape(x.shape[0] * context.chunks, chunk, *x.shape[2:])
        fields = (k_BtKH, v_BtKH, segments + 1)  # the first chunk of a sequence receives zeros, which match no segment
        tails = previous_tails(tuple(map(by_chunk, fields)), tail, context)
        pad = lambda x: jnp.pad(x, [(0, 0), (padded_tail - tail, 0)] + [(0, 0)] * (x.ndim - 2))
        prepend = lambda tail, x: jnp.concatenate([pad(tail), by_chunk(x)], axis=1)
        k_BSKH, v_BSKH, ids_BS = map(prepend, tails, fields)
        spec = MaskSpec(by_chunk(segments), key_segment_ids_BS=ids_BS - 1)
        positions = QueryPositions(np.array([[padded_tail]], np.int32), chunk, 0)
        return attend(by_chunk(q_BtNH), k_BSKH, v_BSKH, spec, positions, **kwargs).reshape(*q_BtNH.shape[:3], -1)

    return attend_neighbours


def previous_tails(fields: tuple[jax.Array, ...], length: int, context: ContextAxis) -> tuple[jax.Array, ...]:
    """Returns the last `length` positions of the previous chunk of each chunk, or zeros. fields: [chunks, ...]."""
    size, chunks = context.size, context.chunks
    tails = jax.tree.map(lambda x: x[:, x.shape[1] - length :].reshape(-1, chunks, length, *x.shape[2:]), fields)
    to_next = [(device, device + 1) for device in range(size - 1)]
    from_previous = context.ppermute(jax.tree.map(lambda x: x[:, 0], tails), to_next)
    if chunks == 1:
        return from_previous
    from_next = context.ppermute(jax.tree.map(lambda x: x[:, 1], tails), [(after, before) for before, after in to_next])
    is_last = context.index() == size - 1  # the two chunks of the last device are adjacent
    from_next = jax.tree.map(lambda local, tail: jnp.where(is_last, local[:, 0], tail), tails, from_next)
    return jax.tree.map(lambda a, b: jnp.stack([a, b], 1).reshape(-1, *a.shape[1:]), from_previous, from_next)


def ulysses(attend: Callable[..., jax.Array], context: ContextAxis):
    """Returns attend(q_BtNH, k_BtKH, v_BtKH, segments, **kwargs) -> out_BtNH. `attend` receives whole sequences."""

    def attend_ulysses(q_BtNH, k_BtKH, v_BtKH, segments: jax.Array | MaskSpec, **kwargs):
        q_BTNH, k_BSKH, v_BSKH = map(context.shard_heads, (q_BtNH, k_BtKH, v_BtKH))
        out_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, context.all_gather(segments), **kwargs)
        return context.shard_positions(out_BTNH)

    return attend_ulysses


def describe(exchange: Choice) -> str:
    """Returns a description of the exchange and its reason, or "" without context parallelism."""
    return f"{DESCRIPTIONS[exchange.name]}: {exchange.reason}" if exchange.name else ""


class ContextLoad(NamedTuple):
    """Sizes that determine the exchange. An unknown size is None."""

    devices: int  # size of the context axis
    kv_heads: int  # key-value heads per device, after tensor parallelism
    rows: int | None = None  # rows per device and microbatch
    row_length: int | None = None
    memory_bytes: int | None = None  # memory of a device
    in_pipeline: bool = False  # True if there are several pipeline stages


def resolve_context_exchange(name: str, attention: str, needs: AttentionNeeds, load: ContextLoad) -> Choice:
    """Returns the requested exchange, a suitable exchange for "auto", or an empty Choice for a single device.

    attention: name of the kernel. Raises BadInput if the model, kernel or mesh does not support the exchange.
    """
    if load.devices == 1:
        return Choice(name)
    context = f"mesh.context={load.devices}"
    if needs.bias:
        raise BadInput(f"{context} does not support the attention bias of this model; use mesh.context=1")
    reasons = {form: unsupported_reason(form, attention, needs, load) for form in DESCRIPTIONS}
    unsupported = {form: reason for form, reason in reasons.items() if reason}
    if name != "auto":
        if name in unsupported:
            fixes = [f"context.attention={form!r}" for form in DESCRIPTIONS if form not in unsupported] + [
                "mesh.context=1"
            ]
            raise BadInput(
                f"context.attention={name!r} is not supported: {unsupported[name]}; use {' or '.join(fixes)}"
            )
        return Choice(name, name, "set by context.attention")
    if "gather" not in unsupported:
        return gather_if_it_fits(needs, load, unsupported)
    if "ulysses" not in unsupported:
        return Choice(name, "ulysses", unsupported["gather"])
    raise BadInput(
        f"{context} is not supported: {unsupported['gather']}, and {unsupported['ulysses']}; use "
        "model.attention='blockwise'"
    )


def unsupported_reason(form: str, attention: str, needs: AttentionNeeds, load: ContextLoad) -> str:
    """Returns the reason why an exchange is not supported, or ""."""
    if form == "ulysses":
        if load.kv_heads % load.devices:
            return f"{load.kv_heads} key-value heads per device cannot be split over {load.devices}"
        return ""
    if attention == "cudnn":
        return "cudnn needs whole sequences"
    if form == "ring" and (needs.prefix or needs.bidirectional):
        return "ring attention is causal, but this model is bidirectional"
    if form == "ring" and load.in_pipeline:
        return "ring sends would wait for all stages of mesh.pipeline, some of which are idle"
    return ""


def gather_if_it_fits(needs: AttentionNeeds, load: ContextLoad, unsupported: dict[str, str]) -> Choice:
    """Returns gather if its memory is at most MAX_GATHERED, else ulysses or ring if supported.

    A ring is slower, because it merges partial results in HBM. For Llama 3 8B on v5p, this adds up to 0.50 s to a step
    of 8.9 s (context=8, sequences of 131,072), or up to 4.3 s to a step of 56 s (context=64, sequences of 1,048,576).
    Times are estimated from compiled programs and the published memory bandwidth (libtpu 0.0.51, 2026-11-24).
    """
    if load.rows is None or load.row_length is None:
        return Choice("auto", "gather", "the default except for very long sequences")
    chunk = load.row_length // (2 * load.devices)
    if needs.window is not None and needs.window_layers is None and needs.window - 1 <= chunk:
        return Choice("auto", "gather", f"devices receive only the {needs.window - 1} remote keys within the window")
    head_dims = needs.head_dim + needs.v_dim
    gathered_bytes = 2 * load.rows * load.row_length * load.kv_heads * head_dims * ITEM_BYTES[needs.dtype]
    memory = f"keys and values of a layer and their gradients need {size(gathered_bytes)} per device"
    if load.memory_bytes is None or gathered_bytes <= MAX_GATHERED * load.memory_bytes:
        return Choice("auto", "gather", memory)
    too_large = f"gathered {memory}, more than 1/{1 / MAX_GATHERED:g} of its {size(load.memory_bytes)}"
    if "ulysses" not in unsupported:
        return Choice("auto", "ulysses", too_large)
    if "ring" not in unsupported:
        return Choice("auto", "ring", f"{too_large}, and {unsupported['ulysses']}")
    return Choice("auto", "gather", f"{too_large}; but {unsupported['ulysses']}, and {unsupported['ring']}")


def make_context_attention(
    exchange: str,
    attention: str,
    whole_row_attend: Any,
    *,
    needs: AttentionNeeds,
    context: ContextAxis,
    window: int | None,
    device_kind: str | None = None,
):
    """Returns attend(q_BtNH, k_BtKH, v_BtKH, segments, **kwargs) -> out_BtNH for local positions.

    exchange, attention: names of the exchange and the kernel. whole_row_attend: kernel for ulysses.
    """
    if exchange == "ulysses":
        return ulysses(whole_row_attend, context)
    settings: dict[str, Any] = dict(softcap=needs.softcap, window=window)
    if attention == "splash":
        settings["blocks"] = pkgutil.resolve_name(SPLASH_BLOCKS)(device_kind)
    positioned_attend = pkgutil.resolve_name(POSITIONED_ATTEND[attention])(**settings)
    if exchange == "ring":
        ring = pkgutil.resolve_name(RING_ATTEND["splash" if attention == "splash" else "blockwise"])
        unrolled = {} if attention == "splash" else {"unrolled": device_kind == "cpu"}
        attend = ring(**settings, **unrolled, context=context)
    else:
        attend = all_gather_kv(positioned_attend, context)
    if window is None:
        return attend
    return with_neighbour_chunks(positioned_attend, attend, window, context)
