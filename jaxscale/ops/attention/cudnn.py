"""cuDNN's flash attention for Ampere, through jax.nn: scores never reach the card's memory.

Packed documents are told apart by a mask that is read as a bias: T x T numbers in the compute dtype for each row of the
batch, shared by all heads, and as many for its gradient, which nobody reads. Newer cards: cudnn_packed.py.

B batch  T query position  S key position  N query heads  K key-value heads  H head dim
"""

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = ("bfloat16", "float16")
MOST_HEAD_DIM = 128  # 256 on Hopper, which JAX can only ask of a card that is here
LEAST_CAPABILITY = 8.0  # Ampere: cuDNN has no flash attention for older cards


def make_attend(*, window: int | None = None):
    """attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT) -> out_BTNH with the values of xla.make_attend(window=window).

    What it keeps for its backward pass bears no name; is_cudnn_forward of models/layers.py recognises it.
    """

    def attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
        T = q_BTNH.shape[1]
        fill = lambda x: jnp.pad(x, [(0, 0), (0, T % 2)] + [(0, 0)] * (x.ndim - 2))  # with a bias T must be even
        ids_BT = fill(segment_ids_BT)
        seen_B1TS = ids_BT[:, None, :, None] == ids_BT[:, None, None, :]
        if window is not None:  # in the mask: with cuDNN's own window older versions take no bias
            place_T = np.arange(ids_BT.shape[1])
            seen_B1TS &= (place_T[:, None] - place_T[None, :] < window)[None, None]
        out_BTNH = jax.nn.dot_product_attention(
            fill(q_BTNH),
            fill(k_BSKH),
            fill(v_BSKH),
            mask=seen_B1TS,
            is_causal=True,
            implementation="cudnn",
        )
        return out_BTNH[:, :T]

    return attend
