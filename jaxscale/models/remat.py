"""What is kept between the forward and the backward pass: by a policy's name, or by the names of arrays.

Models mark their activations with jax.ad_checkpoint.checkpoint_name under the names below; a policy keeps some of them
on the device, moves some to the host's memory, and lets the rest be computed again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax

from jaxscale.models.config import SAVED, RematName
from jaxscale.ops.config import ATTENTION_OUT
from jaxscale.ops.project import PRODUCT
from jaxscale.sharding.batch_axes import GATHERED
from jaxscale.sharding.offload import HOST
from jaxscale.sharding.tensor_axis import AXIS


def all_but_gathered(primitive: Any, *inputs: Any, **params: Any) -> bool:
    """A policy of jax.checkpoint: everything is kept but weights that were gathered or fetched from the host, and what
    is only their cast."""
    if any(getattr(one, "memory_space", None) == jax.memory.Space.Host for one in inputs):
        return False
    inside = getattr(params.get("call_jaxpr"), "eqns", ())  # of a function with a gradient of its own
    gathers = any(gathers_weight(one.primitive, one.params) for one in inside) or gathers_weight(primitive, params)
    return not gathers and primitive is not lax.convert_element_type_p and params.get("name") != GATHERED


def gathers_weight(primitive: Any, params: Mapping[str, Any]) -> bool:
    """True for a gather over the batch axes; over the tensor axis it is activations that are gathered."""
    return primitive is lax.all_gather_p and params["axis_name"] != (AXIS,)


def remat_policy(remat: RematName, save: tuple[str, ...], offload: tuple[str, ...]) -> Callable[..., Any]:
    """The policy of jax.checkpoint.

    A name in `offload` goes to the host's memory, also where the policy would keep it on the device. No policy keeps
    weights that were gathered from other devices: of a whole model they would fill each of them.
    """
    if remat == "none":
        return all_but_gathered
    if remat == "dots":
        return jax.checkpoint_policies.save_only_these_names(PRODUCT)
    kept = [name for name in (save if remat == "save" else SAVED[remat]) if name not in offload]
    if offload:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=kept,
            names_which_can_be_offloaded=list(offload),
            offload_src="device",
            offload_dst=HOST,
        )
    else:
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
    if ATTENTION_OUT not in kept:
        return policy
    return lambda primitive, *args, **params: kept_by_kernel(primitive) or policy(primitive, *args, **params)


def kept_by_kernel(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of jax.checkpoint: whether this is cuDNN's forward pass, whose two results are not ours to name."""
    return primitive.name == "dot_product_attention_fwd_wrapper"
