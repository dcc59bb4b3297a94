"""The forms of the costly operations that suit a platform, in one object that a model is given."""

import dataclasses
from collections.abc import Callable

import jax

from jaxscale.ops.activation import swiglu
from jaxscale.ops.attention import Attend, AttentionName, choose_attention, xla
from jaxscale.ops.norm import rms_norm
from jaxscale.ops.project import Project, cpu_project, einsum_project


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Functions from arrays to arrays. All choices give the same values, at different speeds."""

    attend: Attend
    attention: str  # the resolved name of `attend`, for logs
    project: Project
    rms_norm: Callable[[jax.Array, jax.Array, float], jax.Array] = rms_norm
    swiglu: Callable[[jax.Array, jax.Array], jax.Array] = swiglu


PLAIN = Kernels(attend=xla.attend, attention="xla", project=einsum_project)


def choose_kernels(
    platform: str, attention: AttentionName = "auto", softcap: float | None = None, *, one_device: bool = True
) -> Kernels:
    """The kernels for "cpu", "gpu" or "tpu". Raises ValueError for an attention that the platform lacks.

    softcap: of the attention scores. one_device: False where the batch is spread over several devices.
    """
    attend, resolved = choose_attention(attention, platform, softcap, one_device=one_device)
    # The fast form hides its products from the partitioner, which would gather the activations of all devices.
    project = cpu_project if platform == "cpu" and one_device else einsum_project
    return Kernels(attend=attend, attention=resolved, project=project)
