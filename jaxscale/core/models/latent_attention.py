"""Multi-head latent attention (arXiv:2405.04434, section 2.1). Keys and values of all heads are projected from one
latent per position, and queries from a second latent.

Queries and keys have a part without positions and a part rotated by RoPE. The rotated part of a key is shared by all
heads. Weights use RoPE's half-split layout. DeepSeek's checkpoints interleave pairs and are permuted on conversion
(tools/interop/families/experts.py), not at run time.

B batch  T query position  S key position  t local position  D embed  N heads  H head dim  Q query rank
C key and value rank  R rotated part of a head  U part without RoPE  V value dim
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale.core.models.config import ATTENTION_ADDED, KEY, LATENT, QUERY, VALUE
from jaxscale.core.models.layers import constant, param
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.plan import ParallelPlan
from jaxscale.kernels.norm import rms_norm
from jaxscale.kernels.rope import Rotation, latent_logit_scale, scale_rotation

EPS = 1e-6  # epsilon of the latents' norms; DeepSeek's code also ignores rms_norm_eps for them


class Latents(NamedTuple):
    """Latents from which keys and values are projected."""

    kv_BSC: jax.Array  # normalized latent of keys and values
    key_BSR: jax.Array  # rotated part of keys


class LatentAttention(nnx.Module):
    """Multi-head latent attention (MLA), causal within each packed document.

    Heads are sharded over the tensor axis. Each device computes the latents of local positions and all-gathers them,
    because latents are smaller than the residual stream.
    """

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs, plan: ParallelPlan):
        latent, D, N, H = cfg.latent, cfg.embed_dim, cfg.num_heads, cfg.head_dim
        assert latent is not None, "needs a config with latent attention"
        Q, C, V = latent.q_rank, latent.kv_rank, latent.value_dim
        self.cfg, self.latent, self.plan = cfg, latent, plan
        if Q:
            self.wq_down = param(rngs, (D, Q), ("embed", "channels"), fan_in=D)
            self.q_norm = constant((Q,), ("norm",), 1.0)
            self.wq_up = param(rngs, (Q, N, H), ("latent", "heads", "head_dim"), fan_in=Q)
        else:
            self.wq = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), fan_in=D)
        self.wkv_down = param(rngs, (D, latent.cache_width), ("embed", "channels"), fan_in=D)
        self.kv_norm = constant((C,), ("norm",), 1.0)
        self.wkv_up = param(rngs, (C, N, latent.nope_dim + V), ("latent", "heads", "head_dim"), fan_in=C)
        self.wo = param(rngs, (N, V, D), ("heads", "head_dim", "embed"), std=(N * V * 2 * cfg.num_layers) ** -0.5)

    @jax.named_scope("attention")
    def __call__(self, x_BtD, rotation: Rotation, segment_ids_BT, local: jax.Array | None = None):
        q_BTNH, latents = self.queries_and_latents(x_BtD, rotation)
        attend = self.plan.recorder.wrap_latent(self.attend)
        window = {} if local is None else {"local": local}
        out_BTNV = attend(q_BTNH, latents, self.wkv_up[...], segment_ids_BT, **window)
        added_BtD = self.plan.tensor.reduce_scatter(self.plan.project("BTNV,NVD->BTD", out_BTNV, self.wo[...]))
        return checkpoint_name(added_BtD, ATTENTION_ADDED)

    def queries_and_latents(self, x_BtD, rotation: Rotation) -> tuple[jax.Array, Latents]:
        """Returns (q_BTNH of local heads, the latents of all positions)."""
        latent, project = self.latent, self.plan.project
        down_BtC = project("BtD,DC->BtC", x_BtD, self.wkv_down[...])
        if latent.q_rank:
            down_BtC = jnp.concatenate([project("BtD,DQ->BtQ", x_BtD, self.wq_down[...]), down_BtC], axis=-1)
        down_BTC = checkpoint_name(self.plan.tensor.all_gather(down_BtC), LATENT)
        q_BTQ, kv_BTC, key_BTR = jnp.split(down_BTC, [latent.q_rank, latent.q_rank + latent.kv_rank], axis=-1)
        if latent.q_rank:
            q_BTNH = project("BTQ,QNH->BTNH", self.normalize(q_BTQ, self.q_norm), self.wq_up[...])
        else:
            q_BTNH = project("BTD,DNH->BTNH", self.plan.tensor.all_gather(x_BtD), self.wq[...])
        key_BTR = self.plan.rotate(key_BTR[:, :, None], rotation)[:, :, 0]
        return self.rotate_queries(q_BTNH, rotation), Latents(self.normalize(kv_BTC, self.kv_norm), key_BTR)

    def rotate_queries(self, q_BTNH, rotation: Rotation) -> jax.Array:
        """Rotates the last features of the queries. YaRN may scale all features."""
        q_BTNU, q_BTNR = jnp.split(q_BTNH, [self.latent.nope_dim], axis=-1)
        if (factor := latent_logit_scale(self.cfg.rope_scaling)) != 1.0:
            q_BTNU = (factor * q_BTNU.astype(jnp.float32)).astype(q_BTNU.dtype)
            rotation = scale_rotation(rotation, factor)
        return checkpoint_name(jnp.concatenate([q_BTNU, self.plan.rotate(q_BTNR, rotation)], axis=-1), QUERY)

    def normalize(self, latent_BTC, scale: nnx.Param) -> jax.Array:
        """Applies RMSNorm to a latent."""
        return rms_norm(latent_BTC, scale[...], EPS)

    def attend(self, q_BTNH, latents: Latents, wkv_up_CNE, segment_ids_BT, **window) -> jax.Array:
        """Projects the latents to keys and values, and returns the attention output out_BTNV. E: U + V."""
        kv_BSNE = self.plan.project("BSC,CNE->BSNE", latents.kv_BSC, wkv_up_CNE)
        k_BSNU, v_BSNV = jnp.split(kv_BSNE, [self.latent.nope_dim], axis=-1)
        (B, S, N, _), R = k_BSNU.shape, latents.key_BSR.shape[-1]
        shared_BSNR = jnp.broadcast_to(latents.key_BSR[:, :, None], (B, S, N, R))
        k_BSNH = checkpoint_name(jnp.concatenate([k_BSNU, shared_BSNR], axis=-1), KEY)
        return self.plan.attend(q_BTNH, k_BSNH, checkpoint_name(v_BSNV, VALUE), segment_ids_BT, **window)
