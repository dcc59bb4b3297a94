"""Which attention runs where. Every form promises the values of `xla`."""

from collections.abc import Callable
from typing import Literal

import jax

from jaxscale.ops.attention import blockwise, xla

# attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT) -> out_BTNH: causal, closed to the segment, scale 1/sqrt(H)
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
AttentionName = Literal["auto", "xla", "blockwise"]


def choose_attention(
    name: AttentionName, platform: str, softcap: float | None = None, *, one_device: bool = True
) -> tuple[Attend, str]:
    """(attend, the name that "auto" became). one_device: blockwise may walk through the batch row by row.

    Raises ValueError for a form that the platform lacks.
    """
    resolved = ("blockwise" if platform == "cpu" else "xla") if name == "auto" else name
    if resolved == "xla":
        return xla.make_attend(softcap), resolved
    if resolved != "blockwise":
        raise ValueError(f"attention={name!r} is not known; use 'auto', 'xla' or 'blockwise'")
    if platform != "cpu":
        raise ValueError(f"attention='blockwise' is made for the CPU, not for {platform}; use 'auto' or 'xla'")
    return blockwise.make_attend(softcap=softcap, rows_apart=one_device), resolved
