"""Selects how devices of the context axis exchange keys and values, with the reason."""

import functools
from typing import Any, NamedTuple

from jaxscale.core.axes.context_axis import ContextAxis
from jaxscale.kernels.attention import context_parallel, ring_flash, ring_splash, splash
from jaxscale.kernels.config import AttentionNeeds, Choice
from jaxscale.system.exits import BadInput
from jaxscale.units import size

# Largest share of a device's memory for the gathered keys and values of a layer and their gradients. Weights, moments
# and activations need the rest.
MAX_GATHERED = 1 / 8
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


DESCRIPTIONS = {
    "gather": "keys and values are gathered (gather)",
    "ulysses": "positions are exchanged for heads (ulysses)",
    "ring": "keys and values go round (ring)",
}


def describe(exchange: Choice) -> str:
    """Returns the exchange and its reason; "" without context parallelism."""
    return f"{DESCRIPTIONS[exchange.name]}: {exchange.reason}" if exchange.name else ""


class ContextLoad(NamedTuple):
    """Sizes that the decision depends on; None: unknown."""

    devices: int  # size of the context axis
    kv_heads: int  # local, after tensor parallelism
    rows: int | None = None  # local rows of a microbatch
    row_length: int | None = None
    memory_bytes: int | None = None  # of a device
    in_pipeline: bool = False  # True with more than one pipeline stage


def resolve_context_exchange(name: str, attention: str, needs: AttentionNeeds, load: ContextLoad) -> Choice:
    """Returns the requested exchange, for "auto" a suitable one, and an empty one for a single device.

    attention: the name of the kernel. Raises BadInput for an exchange that the model, kernel or mesh rules out.
    """
    if load.devices == 1:
        return Choice(name)
    context = f"mesh.context={load.devices}"
    if needs.bias:
        raise BadInput(f"{context}: the bias that this model adds to its scores needs whole rows; use mesh.context=1")
    reasons = {form: unsupported_reason(form, attention, needs, load) for form in DESCRIPTIONS}
    unsupported = {form: reason for form, reason in reasons.items() if reason}
    if name != "auto":
        if name in unsupported:
            fixes = [f"context.attention={form!r}" for form in DESCRIPTIONS if form not in unsupported] + [
                "mesh.context=1"
            ]
            raise BadInput(f"context.attention={name!r}: {unsupported[name]}; use {' or '.join(fixes)}")
        return Choice(name, name, "set by context.attention")
    if "gather" not in unsupported:
        return gather_if_it_fits(needs, load, unsupported)
    if "ulysses" not in unsupported:
        return Choice(name, "ulysses", unsupported["gather"])
    raise BadInput(f"{context}: {unsupported['gather']}, and {unsupported['ulysses']}; use model.attention='blockwise'")


def unsupported_reason(form: str, attention: str, needs: AttentionNeeds, load: ContextLoad) -> str:
    """Why this exchange is not possible, or ""."""
    if form == "ulysses":
        if load.kv_heads % load.devices:
            return f"{load.kv_heads} key-value heads of a device cannot be split over {load.devices}"
        return ""
    if attention == "cudnn":
        return "cudnn reads whole rows only"
    if form == "ring" and (needs.prefix or needs.bidirectional):
        return "a ring is causal, and this model is bidirectional"
    if form == "ring" and load.in_pipeline:
        return "a ring's sends wait for the devices of all stages of mesh.pipeline, and some of those are idle"
    return ""


def gather_if_it_fits(needs: AttentionNeeds, load: ContextLoad, unsupported: dict[str, str]) -> Choice:
    """Returns gather unless its memory exceeds MAX_GATHERED, then ulysses, then ring.

    A ring merges partial results in HBM: on v5p up to 0.50 s of a step of 8.9 s more than gather (Llama 3 8B, rows of
    131,072, context 8), 4.3 of 56 (1,048,576, context 64), at the published memory bandwidth. Gather waits 0.10 and
    0.7 s for links, ulysses 0.23 s of the former (compiled, libtpu 0.0.51, 2026-11-24).
    """
    if load.rows is None or load.row_length is None:
        return Choice("auto", "gather", "the default for all but very long rows")
    chunk = load.row_length // (2 * load.devices)
    if needs.window is not None and needs.window_layers is None and needs.window - 1 <= chunk:
        return Choice("auto", "gather", f"devices receive only the {needs.window - 1} remote keys within the window")
    head_dims = needs.head_dim + needs.v_dim
    gathered_bytes = 2 * load.rows * load.row_length * load.kv_heads * head_dims * ITEM_BYTES[needs.dtype]
    memory = f"those of a layer and their gradients take {size(gathered_bytes)} on a device"
    if load.memory_bytes is None or gathered_bytes <= MAX_GATHERED * load.memory_bytes:
        return Choice("auto", "gather", memory)
    too_large = f"gathered, {memory}, more than 1/{1 / MAX_GATHERED:g} of its {size(load.memory_bytes)}"
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
    """Returns attend(q_BtNH, k_BtKH, v_BtKH, segments, **kwargs) -> out_BtNH, of local positions.

    exchange, attention: names of the exchange and of the kernel.
    whole_row_attend: the kernel for unsharded rows, which only ulysses uses.
    """
    if exchange == "ulysses":
        return context_parallel.ulysses(whole_row_attend, context)
    settings: dict[str, Any] = dict(softcap=needs.softcap, window=window)
    if attention == "splash":
        settings["blocks"] = splash.blocks_for(device_kind)
    positioned_attend = POSITIONED_ATTEND[attention](**settings)
    if exchange == "ring":
        flash_ring = functools.partial(ring_flash.make_attend, unrolled=device_kind == "cpu")
        attend = (ring_splash.make_attend if attention == "splash" else flash_ring)(**settings, context=context)
    else:
        attend = context_parallel.all_gather_kv(positioned_attend, context)
    if window is None:
        return attend
    return context_parallel.with_neighbour_chunks(positioned_attend, attend, window, context)


POSITIONED_ATTEND = {
    "xla": context_parallel.make_xla_positioned,
    "blockwise": context_parallel.make_flash_positioned,
    "splash": splash.make_positioned_attend,
}
