"""The forms of the costly operations that suit a platform, in one object that a model is given."""

import dataclasses
from collections.abc import Callable

import jax

from jaxscale.ops.activation import swiglu
from jaxscale.ops.attention import Attend, AttentionName, AttentionNeeds, choose_attention, xla
from jaxscale.ops.norm import rms_norm
from jaxscale.ops.project import Project, cpu_project, einsum_project


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Functions from arrays to arrays. All choices give the same values, at different speeds."""

    attend: Attend
    attention: str  # the resolved name of `attend`, for logs
    project: Project
    why_plain: str = ""  # what kept "auto" from the platform's own attention
    rms_norm: Callable[[jax.Array, jax.Array, float], jax.Array] = rms_norm
    swiglu: Callable[[jax.Array, jax.Array], jax.Array] = swiglu


PLAIN = Kernels(attend=xla.attend, attention="xla", project=einsum_project)


def choose_kernels(
    platform: str, attention: AttentionName, needs: AttentionNeeds, device: jax.Device | None = None
) -> Kernels:
    """The kernels for "cpu", "gpu" or "tpu". Raises ValueError for an attention that the platform lacks.

    device: one of those that the kernels are for, where that is known.
    """
    attend, resolved, why_plain = choose_attention(attention, platform, needs, device)
    project = cpu_project if platform == "cpu" else einsum_project
    return Kernels(attend=attend, attention=resolved, why_plain=why_plain, project=project)
