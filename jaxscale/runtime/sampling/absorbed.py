"""Attention of one new token to latents (core/models/latent_attention.py) without computing keys and values.

A score is q . (W c) = (W^T q) . c: the key weights multiply the query instead, and the value weights the mean of the
latents (arXiv:2405.04434, section 2.1.2). For S tokens in the cache this takes N C (U + V) + N S (2 C + R)
multiplications instead of S N C (U + V) + N S (U + R + V): fewer from the second token on, and for long texts 120 times
fewer with the sizes of DeepSeek-V3.

B batch  R slot  N heads  C rank of latents  U head dim without RoPE  r head dim with RoPE  V value dim
"""

import jax
import jax.numpy as jnp

from jaxscale.core.models.latent_attention import Latents
from jaxscale.kernels.attention.xla import MASK_VALUE

F32 = jnp.float32


def attend_absorbed(
    q_B1NH: jax.Array,
    new: Latents,
    cached: Latents,
    w_CNE: jax.Array,
    seen_BR: jax.Array,
    softcap: float | None,
) -> jax.Array:
    """Returns [B, 1, N, V] in q.dtype: attention to the new token and to the cached ones in seen_BR.

    w_CNE: weights of a head's keys (without RoPE) and values.
    """
    dtype, H, U = q_B1NH.dtype, q_B1NH.shape[-1], q_B1NH.shape[-1] - new.key_BSR.shape[-1]
    product = lambda spec, *arrays: jnp.einsum(spec, *arrays, preferred_element_type=F32)
    w_CNU, w_CNV = jnp.split(w_CNE.astype(dtype), [U], axis=-1)
    q_BNU, q_BNr = jnp.split(q_B1NH[:, 0], [U], axis=-1)
    q_BNC = product("BNU,CNU->BNC", q_BNU, w_CNU).astype(dtype)
    score = lambda c: product("BNC,BSC->BNS", q_BNC, c.kv_BSC) + product("BNr,BSr->BNS", q_BNr, c.key_BSR)
    score_BNS = jnp.concatenate([score(cached), score(new)], axis=-1) * H**-0.5
    if softcap is not None:
        score_BNS = softcap * jnp.tanh(score_BNS / softcap)
    seen_B1S = jnp.pad(seen_BR, ((0, 0), (0, 1)), constant_values=True)[:, None]
    probs_BNS = jax.nn.softmax(jnp.where(seen_B1S, score_BNS, MASK_VALUE), axis=-1).astype(dtype)
    mean_BNC = product("BNS,BSC->BNC", probs_BNS[..., :-1], cached.kv_BSC)
    mean_BNC += probs_BNS[..., -1:].astype(F32) * new.kv_BSC.astype(F32)
    return product("BNC,CNV->BNV", mean_BNC.astype(dtype), w_CNV).astype(dtype)[:, None]
