"""Multi-head latent attention (arXiv:2405.04434, section 2.1): keys and values of all heads are made of one small
vector of each position, and their queries of another.

A head's queries and keys have a part without position and a part that RoPE turns, which of keys is the same for all
heads. Weights are those of halves that are turned against each other: DeepSeek's files have pairs of neighbours, and
come in and go out in another order (interop/families/deepseek.py), so that nothing is reordered as it runs.

B batch  T query position  S key position  t a device's own position  D embed  N heads  H head dim  Q rank of queries
C rank of keys and values  R part of a head that RoPE turns  U the rest of it  V value dim
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.config import ATTENTION_ADDED, KEY, LATENT, QUERY, VALUE
from jaxscale.models.layers import constant, param
from jaxscale.models.llama_config import LlamaConfig
from jaxscale.ops.kernels import Kernels
from jaxscale.ops.rope import Rotation, score_factor, stretched
from jaxscale.sharding.tensor_axis import TensorAxis

EPS = 1e-6  # of the norms of latents, in DeepSeek's code too whatever rms_norm_eps is


class Latents(NamedTuple):
    """Of keys and values."""

    kv_BSC: jax.Array  # normalised
    key_BSR: jax.Array  # turned


class LatentAttention(nnx.Module):
    """Causal attention within each packed document.

    Devices of the tensor axis have some of the heads each. Of their own positions they compute the latents, and gather
    these: fewer numbers than the residual stream has.
    """

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs, kernels: Kernels, tensor: TensorAxis):
        own, D, N, H = cfg.latent, cfg.embed_dim, cfg.num_heads, cfg.head_dim
        assert own is not None, "made for a config with latent attention"
        Q, C, V = own.q_rank, own.kv_rank, own.value_dim
        self.cfg, self.latent, self.kernels, self.tensor = cfg, own, kernels, tensor
        if Q:
            self.wq_down = param(rngs, (D, Q), ("embed", "channels"), fan_in=D)
            self.q_norm = constant((Q,), ("norm",), 1.0)
            self.wq_up = param(rngs, (Q, N, H), ("latent", "heads", "head_dim"), fan_in=Q)
        else:
            self.wq = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), fan_in=D)
        self.wkv_down = param(rngs, (D, own.cached), ("embed", "channels"), fan_in=D)
        self.kv_norm = constant((C,), ("norm",), 1.0)
        self.wkv_up = param(rngs, (C, N, own.nope_dim + V), ("latent", "heads", "head_dim"), fan_in=C)
        self.wo = param(rngs, (N, V, D), ("heads", "head_dim", "embed"), std=(N * V * 2 * cfg.num_layers) ** -0.5)

    @jax.named_scope("attention")
    def __call__(self, x_BtD, rotation: Rotation, segment_ids_BT, local: jax.Array | None = None):
        q_BTNH, latents = self.projected(x_BtD, rotation)
        attend = self.kernels.recorder.wrap_latent(self.attend)
        seen = {} if local is None else {"local": local}
        out_BTNV = attend(q_BTNH, latents, self.wkv_up[...], segment_ids_BT, **seen)
        added_BtD = self.tensor.reduce_scatter(self.kernels.project("BTNV,NVD->BTD", out_BTNV, self.wo[...]))
        return checkpoint_name(added_BtD, ATTENTION_ADDED)

    def projected(self, x_BtD, rotation: Rotation) -> tuple[jax.Array, Latents]:
        """(q_BTNH of the device's own heads, the latents of all positions)."""
        own, project = self.latent, self.kernels.project
        down_BtC = project("BtD,DC->BtC", x_BtD, self.wkv_down[...])
        if own.q_rank:
            down_BtC = jnp.concatenate([project("BtD,DQ->BtQ", x_BtD, self.wq_down[...]), down_BtC], axis=-1)
        down_BTC = checkpoint_name(self.tensor.all_gather(down_BtC), LATENT)
        q_BTQ, kv_BTC, key_BTR = jnp.split(down_BTC, [own.q_rank, own.q_rank + own.kv_rank], axis=-1)
        if own.q_rank:
            q_BTNH = project("BTQ,QNH->BTNH", self.normalised(q_BTQ, self.q_norm), self.wq_up[...])
        else:
            q_BTNH = project("BTD,DNH->BTNH", self.tensor.all_gather(x_BtD), self.wq[...])
        key_BTR = self.kernels.rotate(key_BTR[:, :, None], rotation)[:, :, 0]
        return self.turned(q_BTNH, rotation), Latents(self.normalised(kv_BTC, self.kv_norm), key_BTR)

    def turned(self, q_BTNH, rotation: Rotation) -> jax.Array:
        """Queries whose last part is turned. With YaRN all of their numbers may be multiplied too."""
        q_BTNU, q_BTNR = jnp.split(q_BTNH, [self.latent.nope_dim], axis=-1)
        if (factor := score_factor(self.cfg.rope_scaling)) != 1.0:
            q_BTNU = (factor * q_BTNU.astype(jnp.float32)).astype(q_BTNU.dtype)
            rotation = stretched(rotation, factor)
        return checkpoint_name(jnp.concatenate([q_BTNU, self.kernels.rotate(q_BTNR, rotation)], axis=-1), QUERY)

    def normalised(self, latent_BTC, scale: nnx.Param) -> jax.Array:
        """RMSNorm."""
        return self.kernels.rms_norm(latent_BTC, scale[...], EPS)

    def attend(self, q_BTNH, latents: Latents, wkv_up_CNE, segment_ids_BT, **seen) -> jax.Array:
        """out_BTNV: every head's keys and values are computed, and attended to. E: U + V."""
        kv_BSNE = self.kernels.project("BSC,CNE->BSNE", latents.kv_BSC, wkv_up_CNE)
        k_BSNU, v_BSNV = jnp.split(kv_BSNE, [self.latent.nope_dim], axis=-1)
        (B, S, N, _), R = k_BSNU.shape, latents.key_BSR.shape[-1]
        shared_BSNR = jnp.broadcast_to(latents.key_BSR[:, :, None], (B, S, N, R))
        k_BSNH = checkpoint_name(jnp.concatenate([k_BSNU, shared_BSNR], axis=-1), KEY)
        return self.kernels.attend(q_BTNH, k_BSNH, checkpoint_name(v_BSNV, VALUE), segment_ids_BT, **seen)
