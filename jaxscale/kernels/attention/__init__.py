"""Selects the attention kernel of a platform. Every kernel returns the values of `xla`."""

from collections.abc import Callable
from typing import Any, get_args

import jax
import numpy as np
from jax import lax

from jaxscale.kernels.attention import blockwise, cudnn, cudnn_packed, flash, splash, xla
from jaxscale.kernels.config import AttentionName, AttentionNeeds, Choice, WindowLayers
from jaxscale.kernels.hardware import Device, compute_capability
from jaxscale.system.exits import BadInput
from jaxscale.units import or_list

# attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT) -> out_BTNH: causal within segments, scale 1/sqrt(H). All kernels but
# cuDNN accept values with another head dim than keys.
# Only `xla` accepts a MaskSpec and the keywords of its attend; unsupported_reason() rejects models that need them.
# With AttentionNeeds.window_layers, attend has a keyword `local`: True for a layer with the window.
# Results that the backward pass reads have the checkpoint_name ATTENTION_OUT, for remat policies.
Attend = Callable[..., jax.Array]
PLATFORM_DEFAULT = {"tpu": "splash", "gpu": "cudnn", "cpu": "blockwise"}
HARDWARE = {"splash": "TPUs", "cudnn": "NVIDIA GPUs"}  # kernels of one kind of hardware
# On a CPU longer rows use flash.py, since the blocks of blockwise.py grow from here on. At 4096 it was no slower, and
# its step took 25 MiB instead of 617 (4 heads of 64, 2 busy cores, 2026-11-21).
BLOCKWISE_MAX_LEN = 1024


def resolve_attention(
    name: AttentionName, platform: str, needs: AttentionNeeds, device: Device | None = None
) -> tuple[Attend, Choice]:
    """Returns (attend, the choice of its kernel; its reason is why "auto" fell back to xla, or "").

    device: one of the mesh; None if unknown. Raises BadInput for a kernel that the platform or the model rules out.
    """
    resolved = PLATFORM_DEFAULT.get(platform, "xla") if name == "auto" else name
    if resolved not in get_args(AttentionName):
        raise BadInput(f"unknown attention={name!r}; use {or_list(get_args(AttentionName))}")
    if resolved in HARDWARE and PLATFORM_DEFAULT.get(platform) != resolved:
        raise BadInput(f"attention={name!r} needs {HARDWARE[resolved]}, not {platform}; use 'auto' or 'xla'")
    if reason := unsupported_reason(resolved, needs, device):
        if name != "auto":
            raise BadInput(f"attention={name!r}: {reason}; use 'auto' or 'xla'")
        resolved = "xla"
    make = {
        "xla": xla.make_attend,
        "splash": splash.make_attend,
        "cudnn": cudnn_packed.make_attend if supports_packed_documents(device) else cudnn.make_attend,
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
    if needs.window_layers is not None:
        attend = windowed_or_full(attend, make[resolved](window=None, **settings), needs.window_layers)
    return attend, Choice(name, resolved, reason)


def make_blockwise(*, softcap: float | None, window: int | None, platform: str) -> Attend:
    """Returns blockwise.py's attention for short rows on a CPU, else flash.py's, whose memory is linear in T."""
    flash_attend = flash.make_attend(softcap=softcap, window=window)
    if platform != "cpu":
        return flash_attend
    block_attend = blockwise.make_attend(softcap=softcap, window=window)
    return lambda q_BTNH, *args: (block_attend if q_BTNH.shape[1] <= BLOCKWISE_MAX_LEN else flash_attend)(q_BTNH, *args)


def unsupported_reason(name: str, needs: AttentionNeeds, device: Device | None) -> str:
    """Why this kernel cannot serve the model on this device, or ""."""
    if name != "xla":
        for needed, feature in (
            (needs.prefix, "a bidirectional prefix"),
            (needs.bidirectional, "bidirectional attention"),
            (needs.bias, "a bias of the scores"),
        ):
            if needed:
                return f"{name} does not support {feature}"
    dtypes = {"splash": splash.DTYPES, "cudnn": cudnn.DTYPES}.get(name, (needs.dtype,))
    if needs.dtype not in dtypes:
        return f"{name} computes in {' or '.join(dtypes)}, not in {needs.dtype}"
    if name != "cudnn":
        return ""
    if needs.softcap is not None:
        return "cudnn has no softcap"
    if needs.v_dim != needs.head_dim:
        return f"cudnn takes values as wide as keys, and here they have {needs.v_dim} and {needs.head_dim} numbers"
    if needs.head_dim > cudnn.MAX_HEAD_DIM or needs.head_dim % 8:
        return f"cudnn takes a head_dim of at most {cudnn.MAX_HEAD_DIM} and a multiple of 8, not {needs.head_dim}"
    if (capability := capability_of(device)) < cudnn.MIN_CAPABILITY:
        return f"cudnn needs compute capability {cudnn.MIN_CAPABILITY} (Ampere), and this card has {capability}"
    return ""


def capability_of(device: Device | None) -> float:
    """The compute capability of an NVIDIA GPU; if unknown, the minimum of cuDNN's attention."""
    return compute_capability(device) or cudnn.MIN_CAPABILITY


def supports_packed_documents(device: Device | None) -> bool:
    """True where cuDNN supports packed documents; other GPUs use a mask."""
    return capability_of(device) >= cudnn_packed.MIN_CAPABILITY


def windowed_or_full(windowed: Callable, full: Callable, layers: WindowLayers) -> Callable[..., Any]:
    """Returns f(*arrays, local=): windowed(*arrays) where `local` is true, else full(*arrays).

    `local` is traced where layers are scanned: one compiled layer then has both branches.
    """
    scope = f"taken_{layers.windowed}_of_{layers.total}"  # tools.preflight.hlo_trips reads how often each branch runs

    def run(*arrays: jax.Array, local: bool | np.bool_ | jax.Array) -> Any:
        if isinstance(local, (bool, np.bool_)):
            return windowed(*arrays) if local else full(*arrays)
        with jax.named_scope(scope):
            return lax.cond(local, windowed, full, *arrays)

    return run
