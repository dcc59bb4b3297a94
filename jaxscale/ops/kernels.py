"""The kernels of a platform, in one object that a model receives."""

import dataclasses
import functools
from collections.abc import Callable

import jax

from jaxscale.hardware import Device
from jaxscale.ops.activation import geglu_tanh, swiglu
from jaxscale.ops.attention import Attend, resolve_attention, windowed_or_full, xla
from jaxscale.ops.attention.context_exchange import ContextExchange, make_context_attention
from jaxscale.ops.attention.context_parallel import over_all_keys
from jaxscale.ops.attention.logit_max import EXACT, attention_logit_bound, attention_logit_max
from jaxscale.ops.config import AttentionName, AttentionNeeds
from jaxscale.ops.grouped import ExpertKernels, resolve_expert_kernels
from jaxscale.ops.norm import rms_norm
from jaxscale.ops.project import Project, cpu_project, einsum_project
from jaxscale.ops.recorder import NO_RECORDER, MaxLogitRecorder, Recorder, StatisticsRecorder
from jaxscale.ops.rope import Rotation, rotate, rotate_on_tpu
from jaxscale.sharding.context_axis import NO_CONTEXT_AXIS, ContextAxis
from jaxscale.sharding.expert_axis import NO_EXPERT_AXIS, ExpertAxis
from jaxscale.sharding.tensor_axis import TensorAxis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Functions from arrays to arrays. All choices compute the same values, at different speeds."""

    attend: Attend
    attention: str  # the resolved name of `attend`, for logs
    project: Project
    attention_fallback: str = ""  # why "auto" is not the platform's kernel
    context_exchange: ContextExchange = ContextExchange()  # of keys and values over the context axis
    rotate: Callable[[jax.Array, Rotation], jax.Array] = rotate
    rms_norm: Callable[[jax.Array, jax.Array, float], jax.Array] = rms_norm
    experts: ExpertKernels = ExpertKernels()
    expert_axis: ExpertAxis = NO_EXPERT_AXIS  # of the all-to-all
    use_capacity: bool = False  # experts have a capacity, if the model sets one: in training only
    swiglu: Callable[[jax.Array, jax.Array], jax.Array] = swiglu
    geglu_tanh: Callable[[jax.Array, jax.Array], jax.Array] = geglu_tanh
    scan_layers: bool = True  # False: layers are unrolled
    recorder: Recorder = NO_RECORDER  # of intermediates, in the statistics program


XLA_KERNELS = Kernels(attend=xla.make_attend(), attention="xla", project=einsum_project)


def resolve_kernels(
    platform: str, attention: AttentionName, needs: AttentionNeeds, device: Device | None = None
) -> Kernels:
    """Returns the kernels for "cpu", "gpu" or "tpu". Raises BadInput for an attention that the platform lacks.

    device: one of the mesh; None if unknown.
    """
    attend, resolved, fallback = resolve_attention(attention, platform, needs, device)
    project = cpu_project if platform == "cpu" else einsum_project
    experts = resolve_expert_kernels(platform, device, needs.dtype)
    kernels = Kernels(attend=attend, attention=resolved, attention_fallback=fallback, project=project, experts=experts)
    return dataclasses.replace(kernels, rotate=rotate_on_tpu) if platform == "tpu" else kernels


def with_context_parallelism(
    kernels: Kernels, exchange: ContextExchange, needs: AttentionNeeds, context: ContextAxis, device: Device | None
) -> Kernels:
    """Returns kernels whose attention exchanges keys and values over the context axis. device: one of the mesh."""
    if not exchange.form:
        return kernels
    settings = dict(needs=needs, context=context, device_kind=device.device_kind if device else None)
    make_attend = functools.partial(make_context_attention, exchange, kernels.attention, **settings)
    if needs.window_layers is None or exchange.form == "ulysses":  # ulysses wraps the kernel for whole rows
        attend = make_attend(kernels.attend, window=needs.window)
    else:
        windowed, full = make_attend(None, window=needs.window), make_attend(None, window=None)
        attend = windowed_or_full(windowed, full, needs.window_layers)
    return dataclasses.replace(kernels, attend=attend, context_exchange=exchange)


def make_recorder(
    kernels: Kernels, needs: AttentionNeeds, tensor: TensorAxis, context: ContextAxis = NO_CONTEXT_AXIS
) -> StatisticsRecorder:
    """Returns a recorder for one trace of a model, of the largest attention logit or a bound on it."""
    if kernels.attention in EXACT:
        logit_max = functools.partial(attention_logit_max, window=needs.window)
        if needs.window_layers is not None:
            logit_max = windowed_or_full(logit_max, attention_logit_max, needs.window_layers)
        return StatisticsRecorder("attention_logit_max", over_all_keys(logit_max, context), tensor)
    return StatisticsRecorder("attention_logit_bound", over_all_keys(attention_logit_bound, context), tensor)


def make_max_logit_recorder(
    kernels: Kernels, needs: AttentionNeeds, tensor: TensorAxis, context: ContextAxis = NO_CONTEXT_AXIS
) -> MaxLogitRecorder:
    """Returns a recorder of the largest logit of each head, computed in addition to any attention kernel."""
    by_head = functools.partial(attention_logit_max, by_head=True)
    logit_max = functools.partial(by_head, window=needs.window)
    if needs.window_layers is not None:
        logit_max = windowed_or_full(logit_max, by_head, needs.window_layers)
    return MaxLogitRecorder(over_all_keys(logit_max, context), tensor)


def with_recorder(kernels: Kernels, recorder: Recorder) -> Kernels:
    """Returns the kernels with a recorder, which changes no values."""
    return dataclasses.replace(kernels, recorder=recorder, attend=recorder.wrap_attention(kernels.attend))
