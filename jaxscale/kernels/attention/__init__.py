"""Selection of the attention kernel for a platform. Every kernel computes the same values as `xla`."""

import pkgutil
from collections.abc import Callable
from typing import Any, get_args

import jax
import numpy as np
from jax import lax

from jaxscale.kernels.config import AttentionName, AttentionNeeds, Choice, WindowLayers
from jaxscale.kernels.hardware import Device, compute_capability
from jaxscale.system.exits import BadInput
from jaxscale.units import or_list

# attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT) -> out_BTNH is causal within segments and scales scores by 1/sqrt(H).
# All kernels except cuDNN support values whose head dim differs from that of keys. Only `xla` accepts a MaskSpec and
# the keywords of xla.make_attend(); unsupported_reason() rejects models that need these. With
# AttentionNeeds.window_layers, attend has a keyword `local`, True for a layer with the window. Results that the
# backward pass reads have the checkpoint_name ATTENTION_OUT, for remat policies.
Attend = Callable[..., jax.Array]
PLATFORM_DEFAULT = {"tpu": "splash", "gpu": "cudnn", "cpu": "blockwise"}
HARDWARE = {"splash": "TPUs", "cudnn": "NVIDIA GPUs"}  # kernels that need specific hardware
MAKE_ATTEND = {  # the file of a kernel is imported when the kernel is selected
    "xla": "jaxscale.kernels.attention.xla:make_attend",
    "splash": "jaxscale.kernels.attention.splash:make_attend",
    "cudnn": "jaxscale.kernels.attention.cudnn:make_masked_attend",
    "cudnn, packed": "jaxscale.kernels.attention.cudnn:make_packed_attend",
    "blockwise": "jaxscale.kernels.attention.flash:make_blockwise",
}
DTYPES = {
    # Any head_dim from 8 to 256 compiles, but float16 does not (libtpu 0.0.42 and 0.0.51, 2026-11-21).
    "splash": ("bfloat16", "float32"),
    "cudnn": ("bfloat16", "float16"),
}
CUDNN_MAX_HEAD_DIM = 128  # Hopper supports 256, but JAX then queries an attached GPU
CUDNN_CAPABILITY = 8.0  # Ampere, the oldest GPU with cuDNN flash attention
PACKED_CAPABILITY = 9.0  # Hopper, the oldest GPU with the packed layout


def resolve_attention(
    name: AttentionName, platform: str, needs: AttentionNeeds, device: Device | None = None
) -> tuple[Attend, Choice]:
    """Returns (attend, choice of the kernel). Choice.reason is the reason why "auto" selected xla as a fallback, or "".

    device: a device of the mesh, or None if unknown. Raises BadInput if the kernel does not support model or device.
    """
    resolved = PLATFORM_DEFAULT.get(platform, "xla") if name == "auto" else name
    if resolved not in get_args(AttentionName):
        raise BadInput(f"model.attention={name!r} is unknown; use {or_list(get_args(AttentionName))}")
    if resolved in HARDWARE and PLATFORM_DEFAULT.get(platform) != resolved:
        raise BadInput(f"model.attention={name!r} needs {HARDWARE[resolved]}, not {platform}; use 'auto' or 'xla'")
    if reason := unsupported_reason(resolved, needs, device):
        if name != "auto":
            raise BadInput(f"model.attention={name!r} is not supported: {reason}; use 'auto' or 'xla'")
        resolved = "xla"
    packed = resolved == "cudnn" and supports_packed_documents(device)
    make = pkgutil.resolve_name(MAKE_ATTEND["cudnn, packed" if packed else resolved])
    settings: dict[str, Any] = {}
    if resolved != "cudnn":
        settings["softcap"] = needs.softcap
    if resolved == "splash":
        settings["device_kind"] = device.device_kind if device else None
    if resolved == "blockwise":
        settings["platform"] = platform
    attend = make(window=needs.window, **settings)
    if needs.window_layers is not None:
        attend = windowed_or_full(attend, make(window=None, **settings), needs.window_layers)
    return attend, Choice(name, resolved, reason)


def unsupported_reason(name: str, needs: AttentionNeeds, device: Device | None) -> str:
    """Returns the reason why this kernel does not support the model on this device, or ""."""
    if name != "xla":
        for needed, feature in (
            (needs.prefix, "a bidirectional prefix"),
            (needs.bidirectional, "bidirectional attention"),
            (needs.bias, "an attention bias"),
        ):
            if needed:
                return f"{name} does not support {feature}"
    dtypes = DTYPES.get(name, (needs.dtype,))
    if needs.dtype not in dtypes:
        return f"{name} supports {' or '.join(dtypes)}, not {needs.dtype}"
    if name != "cudnn":
        return ""
    if needs.softcap is not None:
        return "cudnn does not support softcap"
    if needs.v_dim != needs.head_dim:
        return f"cudnn needs values and keys with the same head_dim, not {needs.v_dim} and {needs.head_dim}"
    if needs.head_dim > CUDNN_MAX_HEAD_DIM or needs.head_dim % 8:
        return f"cudnn needs a head_dim that is a multiple of 8 and at most {CUDNN_MAX_HEAD_DIM}, not {needs.head_dim}"
    if (capability := capability_of(device)) < CUDNN_CAPABILITY:
        return f"cudnn needs compute capability {CUDNN_CAPABILITY} (Ampere), but this GPU has {capability}"
    return ""


def capability_of(device: Device | None) -> float:
    """Returns the compute capability of an NVIDIA GPU, or the minimum that cuDNN attention needs if unknown."""
    return compute_capability(device) or CUDNN_CAPABILITY


def supports_packed_documents(device: Device | None) -> bool:
    """Returns True if cuDNN supports packed documents on this GPU. On other GPUs, attention uses a mask."""
    return capability_of(device) >= PACKED_CAPABILITY


def windowed_or_full(windowed: Callable, full: Callable, layers: WindowLayers) -> Callable[..., Any]:
    """Returns f(*arrays, local=), which calls windowed(*arrays) if `local` is true, else full(*arrays).

    `local` is traced if layers are scanned. The compiled layer then contains both branches.
    """
    scope = f"taken_{layers.windowed}_of_{layers.total}"  # tools.preflight.hlo_trips reads how often each branch runs

    def run(*arrays: jax.Array, local: bool | np.bool_ | jax.Array) -> Any:
        if isinstance(local, (bool, np.bool_)):
            return windowed(*arrays) if local else full(*arrays)
        with jax.named_scope(scope):
            return lax.cond(local, windowed, full, *arrays)

    return run
