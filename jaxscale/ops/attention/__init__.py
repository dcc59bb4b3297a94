"""Which attention runs where. Every form promises the values of `xla`."""

from collections.abc import Callable
from typing import Any, get_args

import jax
import numpy as np
from jax import lax

from jaxscale.hardware import Device, compute_capability
from jaxscale.ops.attention import blockwise, cudnn, cudnn_packed, flash, splash, xla
from jaxscale.ops.config import AttentionName, AttentionNeeds, Mix
from jaxscale.system.exits import BadInput
from jaxscale.units import or_list

# attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT) -> out_BTNH: causal, closed to the segment, scale 1/sqrt(H). All but
# cuDNN take values of another size than keys, which their results then have.
# Only `xla` takes a Scope in place of the segments, and the keywords of its attend: other forms refuse the needs.
# A model with AttentionNeeds.mixed also says `local=`: whether this layer has the window.
# What its backward pass needs of its results bears the name ATTENTION_OUT, for remat policies.
Attend = Callable[..., jax.Array]
BEST = {"tpu": "splash", "gpu": "cudnn", "cpu": "blockwise"}
HOMES = {"splash": "TPUs", "cudnn": "NVIDIA GPUs"}  # forms that run on one kind of machine only
# Longer rows than this take the form that is linear in memory on a CPU too: from here on the other's blocks grow. At
# 4096 it was no slower and its step took 25 MiB, not 617 (4 heads of 64, 2 busy cores, 2026-11-21).
LONG_ROW = 1024


def choose_attention(
    name: AttentionName, platform: str, needs: AttentionNeeds, device: Device | None = None
) -> tuple[Attend, str, str]:
    """(attend, the name that "auto" became, why "auto" had to be content with xla or "").

    Each device computes its own rows and heads. device: one of them, where that is known.
    Raises BadInput for a form that the platform lacks, or that cannot do what the model needs.
    """
    resolved = BEST.get(platform, "xla") if name == "auto" else name
    if resolved not in get_args(AttentionName):
        raise BadInput(f"attention={name!r} is not known; use {or_list(get_args(AttentionName))}")
    if resolved in HOMES and BEST.get(platform) != resolved:
        raise BadInput(f"attention={name!r} is made for {HOMES[resolved]}, not for {platform}; use 'auto' or 'xla'")
    if lack := what_lacks(resolved, needs, device):
        if name != "auto":
            raise BadInput(f"attention={name!r}: {lack}; use 'auto' or 'xla'")
        resolved = "xla"
    make = {
        "xla": xla.make_attend,
        "splash": splash.make_attend,
        "cudnn": cudnn_packed.make_attend if reads_packed_rows(device) else cudnn.make_attend,
        "blockwise": make_blockwise,
    }
    settings: dict[str, Any] = {}
    if resolved != "cudnn":
        settings["softcap"] = needs.softcap
    if resolved == "splash":
        settings["blocks"] = splash.blocks_for(device.device_kind if device else None)
    if resolved == "blockwise":
        settings["platform"] = platform
    attend = make[resolved](window=needs.window, **settings)
    if needs.mixed is not None:
        attend = either(attend, make[resolved](window=None, **settings), needs.mixed)
    return attend, resolved, lack


def make_blockwise(*, softcap: float | None, window: int | None, platform: str) -> Attend:
    """The form that suits a CPU's cache; for long rows, and on other platforms, the one whose memory grows with T."""
    linear = flash.make_attend(softcap=softcap, window=window)
    if platform != "cpu":
        return linear
    cached = blockwise.make_attend(softcap=softcap, window=window)
    return lambda q_BTNH, *rest: (cached if q_BTNH.shape[1] <= LONG_ROW else linear)(q_BTNH, *rest)


def what_lacks(name: str, needs: AttentionNeeds, device: Device | None) -> str:
    """Why this form cannot serve these needs on this device, or ""."""
    if name != "xla":
        for needed, what in (
            (needs.prefix, "reads a prefix in both directions"),
            (needs.bidirectional, "reads a row in both directions"),
            (needs.bias, "adds a bias to its scores"),
        ):
            if needed:
                return f"{name} is causal and plain, and this model {what}"
    dtypes = {"splash": splash.DTYPES, "cudnn": cudnn.DTYPES}.get(name, (needs.dtype,))
    if needs.dtype not in dtypes:
        return f"{name} computes in {' or '.join(dtypes)}, not in {needs.dtype}"
    if name != "cudnn":
        return ""
    if needs.softcap is not None:
        return "cudnn has no softcap"
    if needs.of_values != needs.head_dim:
        return f"cudnn takes values as wide as keys, and here they have {needs.of_values} and {needs.head_dim} numbers"
    if needs.head_dim > cudnn.MOST_HEAD_DIM or needs.head_dim % 8:
        return f"cudnn takes a head_dim of at most {cudnn.MOST_HEAD_DIM} and a multiple of 8, not {needs.head_dim}"
    if (capability := capability_of(device)) < cudnn.LEAST_CAPABILITY:
        return f"cudnn needs compute capability {cudnn.LEAST_CAPABILITY} (Ampere), and this card has {capability}"
    return ""


def capability_of(device: Device | None) -> float:
    """The compute capability of an NVIDIA GPU; where it is unknown, the least that cuDNN's attention runs on."""
    return compute_capability(device) or cudnn.LEAST_CAPABILITY


def reads_packed_rows(device: Device | None) -> bool:
    """Whether cuDNN reads packed documents on this card; it is given a mask on others."""
    return capability_of(device) >= cudnn_packed.LEAST_CAPABILITY


def either(near: Callable[..., Any], far: Callable[..., Any], mix: Mix) -> Callable[..., Any]:
    """f(*arrays, local=) with the values of near(*arrays) where `local` is true, else of far(*arrays).

    For a stack of which some layers have a window. Where one compiled layer serves them all, which of the two a layer
    is becomes known only as the program runs.
    """
    # The program's text says how often each runs, for who counts its work (ahead.hlo_trips).
    scope = f"taken_{mix.near}_of_{mix.layers}"

    def run(*arrays: jax.Array, local: bool | np.bool_ | jax.Array) -> Any:
        if isinstance(local, (bool, np.bool_)):
            return near(*arrays) if local else far(*arrays)
        with jax.named_scope(scope):
            return lax.cond(local, near, far, *arrays)

    return run
