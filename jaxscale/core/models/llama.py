"""Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU (arXiv:2302.13971, arXiv:2407.21783).

Settings cover related models: Mistral (arXiv:2310.06825), Qwen2 and 3 (arXiv:2407.10671, arXiv:2505.09388), OLMo-2
(arXiv:2501.00656), Gemma 1 to 3 (arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786), and DeepSeek-V2 and V3
(arXiv:2405.04434, arXiv:2412.19437), whose attention is in latent_attention.py.

B batch  T query position  S key position  D embed  N query heads  K kv heads  H head dim  F mlp  V vocab  L layers
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale.core.models.config import ATTENTION_ADDED, BLOCK_INPUT, BLOCKS, DENSE, KEY, MLP_GATE, MLP_UP, QUERY, VALUE
from jaxscale.core.models.latent_attention import LatentAttention
from jaxscale.core.models.layers import (
    Block,
    StackedModel,
    constant,
    gather_after,
    make_stack,
    param,
    with_bias,
)
from jaxscale.core.models.llama_config import LlamaConfig
from jaxscale.core.models.moe import SparseMlp
from jaxscale.core.plan import ParallelPlan
from jaxscale.core.recorder import ATTENTION, MLP
from jaxscale.kernels.activation import geglu_tanh, swiglu
from jaxscale.kernels.attention.xla import as_mask_spec
from jaxscale.kernels.norm import rms_norm, rms_norm_heads
from jaxscale.kernels.rope import Rotation, make_rotation, scale_rotation
from jaxscale.kernels.vocabulary import lookup_sharded

HEAD_STD = 0.02  # as in GPT-2; the initial loss is log(vocab_size) + embed_dim / 5000


def norm_scale(cfg: LlamaConfig, *shape: int, axes: tuple[str, ...] = ("norm",)) -> nnx.Param:
    """Returns a norm scale parameter whose initial factor is 1."""
    return constant(shape, axes, 0.0 if cfg.zero_centred_norms else 1.0)


def norm_factor(cfg: LlamaConfig, scale: nnx.Param) -> jax.Array:
    """Returns the factor by which a norm multiplies."""
    return 1.0 + scale[...] if cfg.zero_centred_norms else scale[...]


class LlamaAttention(nnx.Module):
    """Causal attention within each packed document."""

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs, plan: ParallelPlan):
        D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.cfg, self.plan = cfg, plan
        self.wq = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), fan_in=D)
        self.wk = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), fan_in=D)
        self.wv = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), fan_in=D)
        # Decreases with depth, so that the variance of the residual stream does not grow (GPT-2, section 2.3).
        self.wo = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), std=(N * H * 2 * cfg.init_layers) ** -0.5)
        q_axes, kv_axes = ("heads", "head_dim"), ("kv_heads", "head_dim")
        if cfg.qkv_bias:
            self.bias_q = constant((N, H), q_axes, 0.0)
            self.bias_k = constant((K, H), kv_axes, 0.0)
            self.bias_v = constant((K, H), kv_axes, 0.0)
        if cfg.out_bias:
            self.bias_o = constant((D,), ("norm",), 0.0)
        if cfg.qk_norm and cfg.qk_norm_over == "all_heads":
            self.q_norm = norm_scale(cfg, N, H, axes=q_axes)
            self.k_norm = norm_scale(cfg, K, H, axes=kv_axes)
        elif cfg.qk_norm:
            self.q_norm, self.k_norm = norm_scale(cfg, H), norm_scale(cfg, H)

    @jax.named_scope("attention")
    def __call__(self, x_BTD, rotation: Rotation, segment_ids_BT, local: jax.Array | None = None):
        cfg, project, x_BTD = self.cfg, self.plan.project, self.plan.tensor.all_gather(x_BTD)
        q_BTNH = project("BTD,DNH->BTNH", x_BTD, self.wq[...])
        k_BSKH = project("BSD,DKH->BSKH", x_BTD, self.wk[...])
        v_BSKH = project("BSD,DKH->BSKH", x_BTD, self.wv[...])
        if cfg.qkv_bias:
            q_BTNH, k_BSKH = with_bias(q_BTNH, self.bias_q[...]), with_bias(k_BSKH, self.bias_k[...])
            v_BSKH = with_bias(v_BSKH, self.bias_v[...])
        v_BSKH = checkpoint_name(v_BSKH, VALUE)
        if cfg.qk_norm:
            q_BTNH, k_BSKH = self.normalize(q_BTNH, self.q_norm), self.normalize(k_BSKH, self.k_norm)
        q_rotation = rotation
        if cfg.score_scalar is not None:  # attend divides by sqrt(head_dim)
            q_rotation = scale_rotation(rotation, (cfg.head_dim / cfg.score_scalar) ** 0.5)
        q_BTNH = checkpoint_name(self.plan.rotate(q_BTNH, q_rotation), QUERY)
        k_BSKH = checkpoint_name(self.plan.rotate(k_BSKH, rotation), KEY)
        window = {} if local is None else {"local": local}
        out_BTNH = self.plan.attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, **window)  # marks ATTENTION_OUT
        added_BTD = self.plan.tensor.reduce_scatter(project("BTNH,NHD->BTD", out_BTNH, self.wo[...]))
        if cfg.out_bias:
            added_BTD = with_bias(added_BTD, self.bias_o[...])
        return checkpoint_name(added_BTD, ATTENTION_ADDED)

    def normalize(self, x_BTNH, scale: nnx.Param):
        """Normalizes queries or keys, either per head or over all heads."""
        if self.cfg.qk_norm_over == "all_heads":
            return rms_norm_heads(x_BTNH, norm_factor(self.cfg, scale), self.cfg.norm_eps, self.plan.tensor)
        return rms_norm(x_BTNH, norm_factor(self.cfg, scale), self.cfg.norm_eps)


class LlamaMlp(nnx.Module):
    """Gated MLP, SwiGLU or GEGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: LlamaConfig, width: int, *, rngs: nnx.Rngs, plan: ParallelPlan):
        D, F = cfg.embed_dim, width
        self.plan = plan
        self.activate = swiglu if cfg.activation == "silu" else geglu_tanh
        self.gate = param(rngs, (D, F), ("embed", "mlp"), fan_in=D)
        self.up = param(rngs, (D, F), ("embed", "mlp"), fan_in=D)
        self.down = param(rngs, (F, D), ("mlp", "embed"), std=(F * 2 * cfg.init_layers) ** -0.5)

    @jax.named_scope("mlp")
    def __call__(self, x_BTD):
        return self.plan.tensor.reduce_scatter(self.unreduced(self.plan.tensor.all_gather(x_BTD)))

    def unreduced(self, x_BTD):
        """Returns the output of the local MLP columns at all positions, before the sum over devices."""
        project = self.plan.project
        gate_BTF = checkpoint_name(project("BTD,DF->BTF", x_BTD, self.gate[...]), MLP_GATE)
        up_BTF = checkpoint_name(project("BTD,DF->BTF", x_BTD, self.up[...]), MLP_UP)
        return project("BTF,FD->BTD", self.activate(gate_BTF, up_BTF), self.down[...])


class Rotations(NamedTuple):
    """RoPE rotations of layers with and without a window."""

    full: Rotation
    local: Rotation | None = None  # for layers with a window, if these have a separate base

    def for_layer(self, local: jax.Array | None) -> Rotation:
        """Returns the rotation of a layer. local: bool[], True if the layer has an attention window."""
        if self.local is None:
            return self.full
        assert local is not None, "local_rope_base needs mixed windows"
        return jax.tree.map(functools.partial(jnp.where, local), self.local, self.full)


class LlamaBlock(Block):
    """Attention and MLP with norms, each added to the residual stream.

    sparse: whether the MLP is a mixture of experts, in which case the block also returns router metrics.
    """

    def __init__(self, cfg: LlamaConfig, *, sparse: bool, rngs: nnx.Rngs, plan: ParallelPlan):
        self.cfg, self.plan = cfg, plan
        before, after = cfg.norm_placement != "after", cfg.norm_placement != "before"
        self.attention_norm = norm_scale(cfg, cfg.embed_dim) if before else None
        attend = LlamaAttention if cfg.latent is None else LatentAttention
        self.attention = attend(cfg, rngs=rngs, plan=plan)
        self.attention_out_norm = norm_scale(cfg, cfg.embed_dim) if after else None
        self.mlp_norm = norm_scale(cfg, cfg.embed_dim) if before else None
        make_mlp = functools.partial(LlamaMlp, cfg, rngs=rngs, plan=plan)
        if sparse:
            assert cfg.experts is not None, "layer_stacks has sparse layers only with experts"
            shared = make_mlp(cfg.experts.shared_dim) if cfg.experts.shared_dim else None
            self.mlp = SparseMlp(cfg, rngs=rngs, plan=plan, shared=shared)
        else:
            self.mlp = make_mlp(cfg.mlp_dim)
        self.mlp_out_norm = norm_scale(cfg, cfg.embed_dim) if after else None

    def __call__(self, x_BTD, local: jax.Array | None, rotations: Rotations, segment_ids_BT):
        sow, rotation = self.plan.recorder.sow, rotations.for_layer(local)
        x_BTD = checkpoint_name(x_BTD, BLOCK_INPUT)
        added_BTD = self.attention(self.normalize(x_BTD, self.attention_norm), rotation, segment_ids_BT, local)
        x_BTD = x_BTD + sow(ATTENTION, self.scaled(self.normalize(added_BTD, self.attention_out_norm)))
        h_BTD, metrics = self.normalize(x_BTD, self.mlp_norm), None
        if isinstance(self.mlp, LlamaMlp):
            added_BTD = self.mlp(h_BTD)
        else:
            added_BTD, metrics = self.mlp(h_BTD, as_mask_spec(segment_ids_BT).segment_ids_BT)
        x_BTD = x_BTD + sow(MLP, self.scaled(self.normalize(added_BTD, self.mlp_out_norm)))
        return x_BTD if metrics is None else (x_BTD, metrics)

    def normalize(self, x_BTD, scale: nnx.Param | None):
        """Returns x_BTD unchanged if scale is None."""
        return x_BTD if scale is None else rms_norm(x_BTD, norm_factor(self.cfg, scale), self.cfg.norm_eps)

    def scaled(self, added_BTD):
        """Scales the output of attention or MLP by muP's rule for depth."""
        residual = self.cfg.scales.residual
        return added_BTD if residual == 1.0 else added_BTD * jnp.asarray(residual, added_BTD.dtype)


class Llama(StackedModel):
    """Llama decoder."""

    cfg: LlamaConfig

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs, plan: ParallelPlan):
        D, V = cfg.embed_dim, cfg.vocab_size
        self.cfg, self.plan = cfg, plan
        # Unit scale, because no norm follows (arXiv:2204.02311, section 5), unless logits also use the table.
        self.embedding = param(rngs, (V, D), ("vocab", "embed"), std=HEAD_STD if cfg.tied_embeddings else 1.0)
        make_block = functools.partial(LlamaBlock, cfg, plan=plan)
        stack = lambda name, sparse: make_stack(
            lambda rngs: make_block(sparse=sparse, rngs=rngs), rngs, cfg.layer_stacks[name], cfg.scan_layers
        )
        self.dense_blocks = stack(DENSE, False) if DENSE in cfg.layer_stacks else None
        self.blocks = stack(BLOCKS, cfg.experts is not None)
        self.final_norm = norm_scale(cfg, D)
        self.head = None if cfg.tied_embeddings else param(rngs, (D, V), ("embed", "vocab"), std=HEAD_STD)

    def embed_tokens(self, tokens_BT, positions_BT, segment_ids_BT, keys_B: jax.Array | None = None):
        """Returns the residual stream before the first block. keys_B is unused: Llama has no dropout."""
        return self.embed(tokens_BT)

    def layer_inputs(self, keys_B: jax.Array | None, stack: str):
        """Returns a mask, True for layers with an attention window, or None if all layers have the same window."""
        dense = self.cfg.layer_stacks.get(DENSE, 0)
        layers = slice(dense) if stack == DENSE else slice(dense, None)
        return self.cfg.local_layers[layers] if self.cfg.mixed_windows else None

    def shared_inputs(self, positions_BT, segment_ids_BT):
        """Returns (rotations, segment_ids_BT)."""
        cfg = self.cfg
        rotation = make_rotation(positions_BT, cfg.rope_dim, cfg.rope_base, cfg.rope_scaling)
        if cfg.local_rope_base is None:
            return Rotations(rotation), segment_ids_BT
        return Rotations(rotation, make_rotation(positions_BT, cfg.rope_dim, cfg.local_rope_base)), segment_ids_BT

    def last_hidden(self, x_BTD):
        """Returns the normalized residual stream, multiplied by muP's factor for logits."""
        scale, output = norm_factor(self.cfg, self.final_norm), self.cfg.scales.output
        return rms_norm(x_BTD, scale if output == 1.0 else output * scale, self.cfg.norm_eps)

    @jax.named_scope("embedding")
    def embed(self, tokens_BT):
        """Returns the embeddings of local positions."""
        cfg = self.cfg
        table_VD = self.plan.gather(self.embedding[...], ("vocab", "embed"), cfg.embed_dtype)
        x_BTD = lookup_sharded(table_VD, tokens_BT, cfg.embed_dtype, self.plan.tensor).astype(cfg.compute_dtype)
        return x_BTD * jnp.asarray(cfg.embed_dim**0.5, x_BTD.dtype) if cfg.scaled_embeddings else x_BTD

    def unembedding(self, h_BTD):
        """Returns (h_BTD, output projection [D, V]). The projection is gathered once for all chunks of the loss."""
        dtype, gather = self.cfg.embed_dtype, self.plan.gather
        if self.head is None:
            h_BTD, table_VD = gather_after(gather, h_BTD, self.embedding[...], ("vocab", "embed"), dtype)
            return h_BTD, table_VD.T
        return gather_after(gather, h_BTD, self.head[...], ("embed", "vocab"), dtype)
