"""Attention of one new token to latents (models/latent.py), of which no key and no value is ever made.

A score is q . (W c) = (W^T q) . c: what makes keys of a latent is multiplied with the query instead, and what makes
values with the mean of the latents (arXiv:2405.04434, section 2.1.2). For S tokens in the cache that is N C (U + V) +
N S (2 C + R) multiplications in the place of S N C (U + V) + N S (U + R + V): fewer from the second token on, and
in long texts 120 times fewer for DeepSeek-V3's sizes.

B batch  R slot  N heads  C rank of latents  U part of a head without position, r with  V value dim
"""

import jax
import jax.numpy as jnp

from jaxscale.models.latent import Latents
from jaxscale.ops.attention.xla import HIDDEN

F32 = jnp.float32


def attend_absorbed(
    q_B1NH: jax.Array,
    new: Latents,
    held: Latents,
    w_CNE: jax.Array,
    seen_BR: jax.Array,
    softcap: float | None,
) -> jax.Array:
    """[B, 1, N, V] in q.dtype: attention to the new token, and to those that are held and seen.

    w_CNE: what makes a head's keys, without position, and then its values of a latent.
    """
    dtype, H, U = q_B1NH.dtype, q_B1NH.shape[-1], q_B1NH.shape[-1] - new.key_BSR.shape[-1]
    product = lambda spec, *arrays: jnp.einsum(spec, *arrays, preferred_element_type=F32)
    w_CNU, w_CNV = jnp.split(w_CNE.astype(dtype), [U], axis=-1)
    q_BNU, q_BNr = jnp.split(q_B1NH[:, 0], [U], axis=-1)
    q_BNC = product("BNU,CNU->BNC", q_BNU, w_CNU).astype(dtype)
    score = lambda of: product("BNC,BSC->BNS", q_BNC, of.kv_BSC) + product("BNr,BSr->BNS", q_BNr, of.key_BSR)
    score_BNS = jnp.concatenate([score(held), score(new)], axis=-1) * H**-0.5
    if softcap is not None:
        score_BNS = softcap * jnp.tanh(score_BNS / softcap)
    seen_B1S = jnp.pad(seen_BR, ((0, 0), (0, 1)), constant_values=True)[:, None]
    share_BNS = jax.nn.softmax(jnp.where(seen_B1S, score_BNS, HIDDEN), axis=-1).astype(dtype)
    mean_BNC = product("BNS,BSC->BNC", share_BNS[..., :-1], held.kv_BSC)
    mean_BNC += share_BNS[..., -1:].astype(F32) * new.kv_BSC.astype(F32)
    return product("BNC,CNV->BNV", mean_BNC.astype(dtype), w_CNV).astype(dtype)[:, None]
