"""Which way devices that share a row attend to each other's keys, by a rule that gives its reason."""

import functools
from typing import Any, NamedTuple

from jaxscale.ops.attention import context_parallel, ring_flash, ring_splash, splash
from jaxscale.ops.config import AttentionNeeds
from jaxscale.sharding.context_axis import ContextAxis
from jaxscale.system.exits import BadInput
from jaxscale.units import size

# Of a device's memory, for the gathered keys and values of a layer and their gradients. Beside them are weights,
# moments and activations, of which a plan knows more.
MOST_GATHERED = 1 / 8
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Sharing(NamedTuple):
    """How the keys of a row are met, and why so."""

    form: str = ""  # "gather", "ulysses" or "ring"; "" where no row is shared
    reason: str = ""

    def __str__(self) -> str:
        return f"{WORDS[self.form]}: {self.reason}" if self.form else ""


WORDS = {
    "gather": "keys and values are gathered (gather)",
    "ulysses": "positions are exchanged for heads (ulysses)",
    "ring": "keys and values go round (ring)",
}


class SharedWork(NamedTuple):
    """What the rule looks at. None: not known."""

    devices: int  # that share a row
    kv_heads: int  # of a device, those of the other parts of the tensor axis left out
    rows: int | None = None  # that a device works on at a time
    row_length: int | None = None
    memory_bytes: int | None = None  # of a device
    in_pipeline: bool = False  # whether these devices are in one stage of several


def choose_sharing(wish: str, attention: str, needs: AttentionNeeds, work: SharedWork) -> Sharing:
    """The way that `wish` names, or for "auto" one that suits; of one device, none.

    attention: the name of the kernel. Raises BadInput for a way that this model, kernel or mesh has not.
    """
    if work.devices == 1:
        return Sharing()
    context = f"mesh.context={work.devices}"
    if needs.bias:
        raise BadInput(f"{context}: this model adds a bias to its scores, which is of whole rows; use mesh.context=1")
    lacks = {form: lack for form in WORDS if (lack := what_lacks(form, attention, needs, work))}
    if wish != "auto":
        if wish in lacks:
            others = [f"context.attention={form!r}" for form in WORDS if form not in lacks]
            raise BadInput(f"context.attention={wish!r}: {lacks[wish]}; use {' or '.join([*others, 'mesh.context=1'])}")
        return Sharing(wish, "as context.attention says")
    if "gather" not in lacks:
        return beyond_gather(needs, work, lacks)
    if "ulysses" not in lacks:
        return Sharing("ulysses", lacks["gather"])
    raise BadInput(f"{context}: {lacks['gather']}, and {lacks['ulysses']}; use model.attention='blockwise'")


def what_lacks(form: str, attention: str, needs: AttentionNeeds, work: SharedWork) -> str:
    """Why attention cannot be shared in this form, or ""."""
    if form == "ulysses":
        if work.kv_heads % work.devices:
            return f"{work.kv_heads} key-value heads of a device cannot be shared among {work.devices}"
        return ""
    if attention == "cudnn":
        return "cudnn reads whole rows only"
    if form == "ring" and (needs.prefix or needs.bidirectional):
        return "a ring is causal, and this model reads in both directions"
    if form == "ring" and work.in_pipeline:
        return "a ring's sends wait for the devices of all stages of mesh.pipeline, and some of those are idle"
    return ""


def beyond_gather(needs: AttentionNeeds, work: SharedWork, lacks: dict[str, str]) -> Sharing:
    """gather where it fits, else what takes less memory: the ring last.

    Round the ring results are joined in device memory: on v5p up to 0.50 s of a step of 8.9 s beyond what gathering
    needs (Llama 3 8B, rows of 131,072, context 8), 4.3 of 56 (1,048,576, context 64), at the memory's published rate.
    To wait for links gathering takes 0.10 and 0.7 s, ulysses 0.23 of the former (compiled, libtpu 0.0.51, 2026-11-24).
    """
    if work.rows is None or work.row_length is None:
        return Sharing("gather", "it suits all but very long rows")
    chunk = work.row_length // (2 * work.devices)
    if needs.window is not None and needs.mixed is None and needs.window - 1 <= chunk:
        return Sharing("gather", f"of others' keys no more than the {needs.window - 1} that a window reaches are sent")
    widths = needs.head_dim + needs.of_values
    held = 2 * work.rows * work.row_length * work.kv_heads * widths * ITEM_BYTES[needs.dtype]
    what = f"those of a layer and their gradients take {size(held)} on a device"
    if work.memory_bytes is None or held <= MOST_GATHERED * work.memory_bytes:
        return Sharing("gather", what)
    too_much = f"gathered, {what}, more than 1/{1 / MOST_GATHERED:g} of its {size(work.memory_bytes)}"
    if "ulysses" not in lacks:
        return Sharing("ulysses", too_much)
    if "ring" not in lacks:
        return Sharing("ring", f"{too_much}, and {lacks['ulysses']}")
    return Sharing("gather", f"{too_much}; but {lacks['ulysses']}, and {lacks['ring']}")


def share_attention(
    sharing: Sharing,
    attention: str,
    whole_rows: Any,
    *,
    needs: AttentionNeeds,
    context: ContextAxis,
    window: int | None,
    device_kind: str | None = None,
):
    """attend(q_BtNH, k_BtKH, v_BtKH, segments, **how) -> out_BtNH, of the device's own positions.

    whole_rows: the kernel for whole rows.
    """
    if sharing.form == "ulysses":
        return context_parallel.by_heads(whole_rows, context)
    how: dict[str, Any] = dict(softcap=needs.softcap, window=window)
    blocks: dict[str, Any] = {"blocks": splash.blocks_for(device_kind)} if attention == "splash" else {}
    standing = STANDING[attention](**how, **blocks)
    if sharing.form == "ring":
        walk = functools.partial(ring_flash.make_attend, unrolled=device_kind == "cpu")
        far = (ring_splash.make_attend if attention == "splash" else walk)(**how, **blocks, context=context)
    else:
        far = context_parallel.gathered(standing, context)
    return far if window is None else context_parallel.with_neighbours(standing, far, window, context)


STANDING = {
    "xla": context_parallel.plain_standing,
    "blockwise": context_parallel.long_standing,
    "splash": splash.make_attend_standing,
}
