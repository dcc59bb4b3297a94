"""The forms of the costly operations that suit a platform, in one object that a model is given."""

import dataclasses
import functools
from collections.abc import Callable

import jax

from jaxscale.hardware import Device
from jaxscale.ops.activation import geglu_tanh, swiglu
from jaxscale.ops.attention import Attend, choose_attention, either, xla
from jaxscale.ops.attention.context_exchange import Sharing, share_attention
from jaxscale.ops.attention.context_parallel import of_all_keys
from jaxscale.ops.attention.logit_max import EXACT, largest_score, score_bound
from jaxscale.ops.config import AttentionName, AttentionNeeds
from jaxscale.ops.grouped import ExpertKernels, choose_expert_kernels
from jaxscale.ops.norm import rms_norm
from jaxscale.ops.project import Project, cpu_project, einsum_project
from jaxscale.ops.recorder import NO_RECORDER, Recorder, ScoreRecorder, StatisticsRecorder
from jaxscale.ops.rope import Rotation, rotate, rotate_on_tpu
from jaxscale.sharding.context_axis import NO_CONTEXT_AXIS, ContextAxis
from jaxscale.sharding.expert_axis import NO_EXPERT_AXIS, ExpertAxis
from jaxscale.sharding.tensor_axis import TensorAxis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Functions from arrays to arrays. All choices give the same values, at different speeds."""

    attend: Attend
    attention: str  # the resolved name of `attend`, for logs
    project: Project
    why_plain: str = ""  # what kept "auto" from the platform's own attention
    sharing: Sharing = Sharing()  # how `attend` meets the keys of a row that devices share
    rotate: Callable[[jax.Array, Rotation], jax.Array] = rotate
    rms_norm: Callable[[jax.Array, jax.Array, float], jax.Array] = rms_norm
    experts: ExpertKernels = ExpertKernels()
    expert_axis: ExpertAxis = NO_EXPERT_AXIS  # among whose devices rows are sent to their experts
    limits: bool = False  # whether experts have a capacity, of models that give them one: in training alone
    swiglu: Callable[[jax.Array, jax.Array], jax.Array] = swiglu
    geglu_tanh: Callable[[jax.Array, jax.Array], jax.Array] = geglu_tanh
    loop_layers: bool = True  # one compiled layer for all of a stack; false: each is compiled on its own
    recorder: Recorder = NO_RECORDER  # of intermediates, for a statistics program


PLAIN = Kernels(attend=xla.make_attend(), attention="xla", project=einsum_project)


def choose_kernels(
    platform: str, attention: AttentionName, needs: AttentionNeeds, device: Device | None = None
) -> Kernels:
    """The kernels for "cpu", "gpu" or "tpu". Raises BadInput for an attention that the platform lacks.

    device: one of those that the kernels are for, where that is known.
    """
    attend, resolved, why_plain = choose_attention(attention, platform, needs, device)
    project = cpu_project if platform == "cpu" else einsum_project
    turn = rotate_on_tpu if platform == "tpu" else rotate
    experts = choose_expert_kernels(platform, device, needs.dtype)
    return Kernels(
        attend=attend, attention=resolved, why_plain=why_plain, project=project, experts=experts, rotate=turn
    )


def share_rows(
    kernels: Kernels, sharing: Sharing, needs: AttentionNeeds, context: ContextAxis, device: Device | None = None
) -> Kernels:
    """The kernels for devices that share rows, as they are where none do. device: one of them."""
    if not sharing.form:
        return kernels
    own = dict(needs=needs, context=context, device_kind=device.device_kind if device else None)
    share = functools.partial(share_attention, sharing, kernels.attention, **own)
    if needs.mixed is None or sharing.form == "ulysses":  # which takes what there is for whole rows
        attend = share(kernels.attend, window=needs.window)
    else:
        attend = either(share(None, window=needs.window), share(None, window=None), needs.mixed)
    return dataclasses.replace(kernels, attend=attend, sharing=sharing)


def make_recorder(
    kernels: Kernels, needs: AttentionNeeds, tensor: TensorAxis, context: ContextAxis = NO_CONTEXT_AXIS
) -> StatisticsRecorder:
    """A recorder for one trace of a model with these kernels: of the largest scores if they are known, else a bound."""
    if kernels.attention in EXACT:
        largest = functools.partial(largest_score, window=needs.window)
        if needs.mixed is not None:
            largest = either(largest, largest_score, needs.mixed)
        return StatisticsRecorder("attention_logit_max", of_all_keys(largest, context), tensor)
    return StatisticsRecorder("attention_logit_bound", of_all_keys(score_bound, context), tensor)


def make_score_recorder(
    kernels: Kernels, needs: AttentionNeeds, tensor: TensorAxis, context: ContextAxis = NO_CONTEXT_AXIS
) -> ScoreRecorder:
    """A recorder of the largest score of each head, computed beside whichever kernel attends."""
    by_head = functools.partial(largest_score, by_head=True)
    largest = functools.partial(by_head, window=needs.window)
    if needs.mixed is not None:
        largest = either(largest, by_head, needs.mixed)
    return ScoreRecorder(of_all_keys(largest, context), tensor)


def with_recorder(kernels: Kernels, recorder: Recorder) -> Kernels:
    """The kernels with a recorder: the same values."""
    return dataclasses.replace(kernels, recorder=recorder, attend=recorder.wrap_attention(kernels.attend))
