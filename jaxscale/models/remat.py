"""What is kept between the forward and the backward pass: by a policy's name, or by the names of arrays.

Models mark their activations with jax.ad_checkpoint.checkpoint_name under the names below; a policy keeps some of them
on the device, moves some to the host's memory, and lets the rest be computed again.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
from jax import lax

from jaxscale.ops.attention.names import ATTENTION_OUT, kept_by_kernel
from jaxscale.ops.project import PRODUCT
from jaxscale.sharding.batch_axes import GATHERED
from jaxscale.sharding.offload import HOST
from jaxscale.sharding.tensor_axis import AXIS
from jaxscale.system.exits import BadInput

BLOCK_INPUT = "block_input"  # the residual stream as a block finds it: the least that must be kept of each layer
QUERY, KEY, VALUE = "query", "key", "value"  # as attention reads them: rotated and normalised where the model does that
ATTENTION_ADDED = "attention_added"  # what attention adds to the residual stream
MLP_GATE, MLP_UP = "mlp_gate", "mlp_up"  # before the non-linearity. What comes out of the MLP no gradient needs.

RematName = Literal["none", "full", "attention", "qkv", "minimal", "dots", "save"]
# Policies that are lists of names. "save" reads model.remat_save; "none" and "dots" are no lists.
SAVED: dict[str, tuple[str, ...]] = {
    "full": (),
    "attention": (ATTENTION_OUT,),
    "qkv": (QUERY, KEY, VALUE, ATTENTION_OUT),
    "minimal": (QUERY, KEY, VALUE, ATTENTION_OUT, ATTENTION_ADDED, MLP_GATE, MLP_UP),
}


def check_remat(remat: RematName, save: tuple[str, ...], offload: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Raises BadInput for a list that the policy does not read, or a name that the model does not give.

    names: of the model's activations.
    """
    for field, listed in (("remat_save", save), ("remat_offload", offload)):
        for name in listed:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
                hint = f"did you mean {close[0]!r}?" if close else f"there is {', '.join(names)}"
                raise BadInput(f"{field} has {name!r}, which this model gives to no activation; {hint}")
        if twice := sorted({name for name in listed if listed.count(name) > 1}):
            raise BadInput(f"{field} has {twice[0]!r} twice; name it once")
    if save and remat != "save":
        raise BadInput(f"remat_save is read with remat='save' only, and remat={remat!r}; set that, or remat_save=()")
    if remat == "save" and not save and not offload:
        raise BadInput(f"remat='save' needs remat_save or remat_offload: names among {', '.join(names)}")
    if offload and remat not in (*SAVED, "save"):
        able = ", ".join(name for name in get_args(RematName) if name in SAVED or name == "save")
        raise BadInput(f"remat_offload cannot go with remat={remat!r}, which keeps by other rules; use {able}")
    if both := [name for name in save if name in offload]:
        raise BadInput(f"{both[0]!r} is in remat_save and in remat_offload; it can be kept in one place")


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
