"""Attention on a mesh: each device works on its own rows and heads, and nothing moves between devices.

B batch  T query position  S key position  N query heads  K key-value heads  H head dim
"""

import math
from collections.abc import Callable, Mapping

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxscale.sharding.place import manual_axes
from jaxscale.sharding.rules import Placement, axis_size, names_of, partition_spec

HEADS = ("act_batch", "act_seq", "act_heads", "head_dim")


def spread(attend: Callable[..., jax.Array], mesh: Mesh | None, rules: Mapping[str, Placement]):
    """attend over the parts that each device of the mesh holds by the rules; attend itself on a mesh of one.

    For forms that the partitioner cannot look into, and would refuse or run whole on every device: custom kernels and
    loops over rows. Rows that the batch axes do not divide (a prompt to sample from) are computed by every device.
    """
    if mesh is None or mesh.size == 1:
        return attend
    assert axis_size("act_seq", rules, mesh.shape) == 1, "each device needs whole rows"

    def attend_own_part(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
        done = manual_axes()  # over these the caller works on its own part already
        if len(done) == len(mesh.axis_names):
            return attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)
        left = [name for name in mesh.axis_names if name not in done]
        parts = [tuple(name for name in names_of(place) if name in left) for place in partition_spec(HEADS, rules)]
        if q_BTNH.shape[0] % math.prod(mesh.shape[name] for name in parts[0]):
            parts[0] = ()
        # An axis that no spec names has its gradients summed over it, one device or not: each is named.
        parts[0] += tuple(name for name in left if mesh.shape[name] == 1 and not any(name in part for part in parts))
        heads, rows = (PartitionSpec(*[part or None for part in some]) for some in (parts, parts[:2]))
        own = jax.shard_map(
            attend,
            mesh=None if done else mesh,  # inside another shard_map the mesh is that one's
            in_specs=(heads, heads, heads, rows),
            out_specs=heads,
            axis_names=set(left),
            check_vma=False,  # kernels do not say over which axes their results vary
        )
        return own(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)

    return attend_own_part
