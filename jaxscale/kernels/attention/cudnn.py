"""cuDNN's flash attention for Ampere, through jax.nn: scores stay out of HBM.

Packed documents are separated by a mask, which becomes a bias of T x T numbers in the compute dtype per row, shared by
all heads, plus as many for its unused gradient. Newer GPUs use cudnn_packed.py.

B batch  T query position  S key position  N query heads  K key-value heads  H head dim
"""

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 128  # 256 on Hopper, but JAX asks an attached GPU
MIN_CAPABILITY = 8.0  # Ampere: no cuDNN flash attention on older GPUs


def make_attend(*, window: int | None = None):
    """Returns attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT) -> out_BTNH with the values of xla.make_attend.

    Its residuals have no checkpoint_name; core/models/layers.py recognises them for remat policies.
    """

    def attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
        T = q_BTNH.shape[1]
        pad = lambda x: jnp.pad(x, [(0, 0), (0, T % 2)] + [(0, 0)] * (x.ndim - 2))  # with a bias T must be even
        ids_BT = pad(segment_ids_BT)
        mask_B1TS = ids_BT[:, None, :, None] == ids_BT[:, None, None, :]
        if window is not None:  # in the mask: older cuDNN accepts no bias together with its own window
            position_T = np.arange(ids_BT.shape[1])
            mask_B1TS &= (position_T[:, None] - position_T[None, :] < window)[None, None]
        out_BTNH = jax.nn.dot_product_attention(
            pad(q_BTNH),
            pad(k_BSKH),
            pad(v_BSKH),
            mask=mask_B1TS,
            is_causal=True,
            implementation="cudnn",
        )
        return out_BTNH[:, :T]

    return attend
