"""Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU (arXiv:2302.13971, arXiv:2407.21783).

Settings make it its relatives: Mistral (arXiv:2310.06825), Qwen2 and 3 (arXiv:2407.10671, arXiv:2505.09388), OLMo-2
(arXiv:2501.00656), Gemma 1 to 3 (arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786), DeepSeek-V2 and V3
(arXiv:2405.04434, arXiv:2412.19437), whose attention is in latent.py.

B batch  T query position  S key position  D embed  N query heads  K kv heads  H head dim  F mlp  V vocab  L layers
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.config import ATTENTION_ADDED, BLOCK_INPUT, BLOCKS, DENSE, KEY, MLP_GATE, MLP_UP, QUERY, VALUE
from jaxscale.models.experts import SparseMlp
from jaxscale.models.latent import LatentAttention
from jaxscale.models.layers import OneStack, constant, in_parts, make_stack, param, settle_together, with_bias
from jaxscale.models.llama_config import LlamaConfig
from jaxscale.ops.attention.xla import as_scope
from jaxscale.ops.embed import lookup_shared
from jaxscale.ops.kernels import Kernels
from jaxscale.ops.norm import rms_norm_heads
from jaxscale.ops.recorder import ATTENTION, MLP, NO_RECORDER
from jaxscale.ops.rope import Rotation, make_rotation, stretched
from jaxscale.sharding.shardings import Gather
from jaxscale.sharding.tensor_axis import TensorAxis

HEAD_STD = 0.02  # GPT-2's: the first loss is log(vocabulary), and embed_dim / 5000 more


def norm_scale(cfg: LlamaConfig, *shape: int, axes: tuple[str, ...] = ("norm",)) -> nnx.Param:
    """A norm's scale that starts by multiplying with 1."""
    return constant(shape, axes, 0.0 if cfg.zero_centred_norms else 1.0)


def factor(cfg: LlamaConfig, scale: nnx.Param) -> jax.Array:
    """What a norm multiplies with."""
    return 1.0 + scale[...] if cfg.zero_centred_norms else scale[...]


class Attention(nnx.Module):
    """Causal attention within each packed document."""

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs, kernels: Kernels, tensor: TensorAxis):
        D, N, K, H = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.cfg, self.kernels, self.tensor = cfg, kernels, tensor
        self.wq = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), fan_in=D)
        self.wk = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), fan_in=D)
        self.wv = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), fan_in=D)
        # Outputs into the residual stream shrink with depth, so that its variance does not grow (GPT-2, section 2.3).
        self.wo = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), std=(N * H * 2 * cfg.init_layers) ** -0.5)
        of_heads = ("heads", "head_dim"), ("kv_heads", "head_dim")
        if cfg.qkv_bias:
            self.bias_q = constant((N, H), of_heads[0], 0.0)
            self.bias_k = constant((K, H), of_heads[1], 0.0)
            self.bias_v = constant((K, H), of_heads[1], 0.0)
        if cfg.out_bias:
            self.bias_o = constant((D,), ("norm",), 0.0)
        if cfg.qk_norm and cfg.qk_norm_over == "all_heads":
            self.q_norm = norm_scale(cfg, N, H, axes=of_heads[0])
            self.k_norm = norm_scale(cfg, K, H, axes=of_heads[1])
        elif cfg.qk_norm:
            self.q_norm, self.k_norm = norm_scale(cfg, H), norm_scale(cfg, H)

    @jax.named_scope("attention")
    def __call__(self, x_BTD, rotation: Rotation, segment_ids_BT, local: jax.Array | None = None):
        cfg = self.cfg
        q_BTNH, k_BSKH, v_BSKH = self.projected(self.tensor.all_gather(x_BTD))
        v_BSKH = checkpoint_name(v_BSKH, VALUE)
        if cfg.qk_norm:
            q_BTNH, k_BSKH = self.normalised(q_BTNH, self.q_norm), self.normalised(k_BSKH, self.k_norm)
        of_queries = rotation
        if cfg.score_scalar is not None:  # attend divides by sqrt(head_dim)
            of_queries = stretched(rotation, (cfg.head_dim / cfg.score_scalar) ** 0.5)
        q_BTNH = checkpoint_name(self.kernels.rotate(q_BTNH, of_queries), QUERY)
        k_BSKH = checkpoint_name(self.kernels.rotate(k_BSKH, rotation), KEY)
        seen = {} if local is None else {"local": local}
        out_BTNH = self.kernels.attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, **seen)  # named ATTENTION_OUT within
        added_BTD = self.tensor.reduce_scatter(self.kernels.project("BTNH,NHD->BTD", out_BTNH, self.wo[...]))
        if cfg.out_bias:
            added_BTD = with_bias(added_BTD, self.bias_o[...])
        return checkpoint_name(added_BTD, ATTENTION_ADDED)

    def projected(self, x_BTD):
        """(q_BTNH, k_BSKH, v_BSKH)"""
        project = self.kernels.project
        q_BTNH = project("BTD,DNH->BTNH", x_BTD, self.wq[...])
        k_BSKH = project("BSD,DKH->BSKH", x_BTD, self.wk[...])
        v_BSKH = project("BSD,DKH->BSKH", x_BTD, self.wv[...])
        if not self.cfg.qkv_bias:
            return q_BTNH, k_BSKH, v_BSKH
        biases = self.bias_q[...], self.bias_k[...], self.bias_v[...]
        return tuple(map(with_bias, (q_BTNH, k_BSKH, v_BSKH), biases))

    def normalised(self, x_BTNH, scale: nnx.Param):
        """Queries or keys, each head alone or all of them together."""
        if self.cfg.qk_norm_over == "all_heads":
            return rms_norm_heads(x_BTNH, factor(self.cfg, scale), self.cfg.norm_eps, self.tensor)
        return self.kernels.rms_norm(x_BTNH, factor(self.cfg, scale), self.cfg.norm_eps)


class Mlp(nnx.Module):
    """A gated MLP: SwiGLU, or GEGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: LlamaConfig, width: int, *, rngs: nnx.Rngs, kernels: Kernels, tensor: TensorAxis):
        D, F = cfg.embed_dim, width
        self.kernels, self.tensor = kernels, tensor
        self.activate = kernels.swiglu if cfg.activation == "silu" else kernels.geglu_tanh
        self.gate = param(rngs, (D, F), ("embed", "mlp"), fan_in=D)
        self.up = param(rngs, (D, F), ("embed", "mlp"), fan_in=D)
        self.down = param(rngs, (F, D), ("mlp", "embed"), std=(F * 2 * cfg.init_layers) ** -0.5)

    @jax.named_scope("mlp")
    def __call__(self, x_BTD):
        return self.tensor.reduce_scatter(self.own_part(self.tensor.all_gather(x_BTD)))

    def own_part(self, x_BTD):
        """What the device's own columns add to all positions."""
        project = self.kernels.project
        gate_BTF = checkpoint_name(project("BTD,DF->BTF", x_BTD, self.gate[...]), MLP_GATE)
        up_BTF = checkpoint_name(project("BTD,DF->BTF", x_BTD, self.up[...]), MLP_UP)
        return project("BTF,FD->BTD", self.activate(gate_BTF, up_BTF), self.down[...])


class Block(nnx.Module):
    """Attention, then MLP, each normalised and added to the residual stream.

    sparse: the MLP is a mixture of experts, and the block tells of it beside the residual stream.
    """

    def __init__(self, cfg: LlamaConfig, *, sparse: bool, rngs: nnx.Rngs, kernels: Kernels, tensor: TensorAxis):
        self.cfg, self.kernels, self.tensor = cfg, kernels, tensor
        before, after = cfg.norm_placement != "after", cfg.norm_placement != "before"
        self.attention_norm = norm_scale(cfg, cfg.embed_dim) if before else None
        attend = Attention if cfg.latent is None else LatentAttention
        self.attention = attend(cfg, rngs=rngs, kernels=kernels, tensor=tensor)
        self.attention_out_norm = norm_scale(cfg, cfg.embed_dim) if after else None
        self.mlp_norm = norm_scale(cfg, cfg.embed_dim) if before else None
        make_mlp = functools.partial(Mlp, cfg, rngs=rngs, kernels=kernels, tensor=tensor)
        if sparse:
            assert cfg.experts is not None, "layer_stacks has sparse layers only with experts"
            shared = make_mlp(cfg.experts.shared_dim) if cfg.experts.shared_dim else None
            self.mlp = SparseMlp(cfg, rngs=rngs, kernels=kernels, tensor=tensor, shared=shared)
        else:
            self.mlp = make_mlp(cfg.mlp_dim)
        self.mlp_out_norm = norm_scale(cfg, cfg.embed_dim) if after else None

    def __call__(self, x_BTD, rotation: Rotation, segment_ids_BT, local: jax.Array | None = None):
        run = functools.partial(self.run, local=local)
        if self.kernels.recorder is not NO_RECORDER:  # it takes one record a layer
            return run(x_BTD, rotation, segment_ids_BT)
        run = functools.partial(self.tensor.run_in_halves, run)
        return in_parts(run, self.cfg, x_BTD, rotation, segment_ids_BT)

    def run(self, x_BTD, rotation: Rotation, segment_ids_BT, *, local: jax.Array | None):
        """The block on some rows."""
        sow = self.kernels.recorder.sow
        x_BTD = checkpoint_name(x_BTD, BLOCK_INPUT)
        added_BTD = self.attention(self.normalised(x_BTD, self.attention_norm), rotation, segment_ids_BT, local)
        x_BTD = x_BTD + sow(ATTENTION, self.scaled(self.normalised(added_BTD, self.attention_out_norm)))
        read_BTD = self.normalised(x_BTD, self.mlp_norm)
        add = lambda added_BTD: x_BTD + sow(MLP, self.scaled(self.normalised(added_BTD, self.mlp_out_norm)))
        if isinstance(self.mlp, Mlp):
            return add(self.mlp(read_BTD))
        added_BTD, metrics = self.mlp(read_BTD, as_scope(segment_ids_BT).segment_ids_BT)
        return add(added_BTD), metrics

    def normalised(self, x_BTD, scale: nnx.Param | None):
        """x_BTD as it is where there is no norm."""
        return x_BTD if scale is None else self.kernels.rms_norm(x_BTD, factor(self.cfg, scale), self.cfg.norm_eps)

    def scaled(self, added_BTD):
        """What is added to the residual stream, by muP's rule of depth."""
        residual = self.cfg.scales.residual
        return added_BTD if residual == 1.0 else added_BTD * jnp.asarray(residual, added_BTD.dtype)


class Llama(OneStack):
    """The decoder."""

    cfg: LlamaConfig

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs, kernels: Kernels, gather: Gather, tensor: TensorAxis):
        D, V = cfg.embed_dim, cfg.vocab_size
        self.cfg, self.kernels, self.gather, self.tensor = cfg, kernels, gather, tensor
        # No norm follows the table: unit scale (arXiv:2204.02311, section 5), but where logits use it too.
        self.embedding = param(rngs, (V, D), ("vocab", "embed"), std=HEAD_STD if cfg.tied_embeddings else 1.0)
        make_block = functools.partial(Block, cfg, kernels=kernels, tensor=tensor)
        stack = lambda name, sparse: make_stack(
            lambda rngs: make_block(sparse=sparse, rngs=rngs), rngs, cfg.layer_stacks[name], cfg.scan_layers
        )
        self.dense_blocks = stack(DENSE, False) if DENSE in cfg.layer_stacks else None
        self.blocks = stack(BLOCKS, cfg.experts is not None)
        self.final_norm = norm_scale(cfg, D)
        self.head = None if cfg.tied_embeddings else param(rngs, (D, V), ("embed", "vocab"), std=HEAD_STD)

    def enter(self, tokens_BT, positions_BT, segment_ids_BT, keys_B: jax.Array | None = None):
        """The residual stream before the first block. No dropout: no keys."""
        return self.embed(tokens_BT)

    def per_layer(self, keys_B: jax.Array | None, stack: str = BLOCKS):
        """Which layers of a stack have the window, or None where all are alike."""
        dense = self.cfg.layer_stacks.get(DENSE, 0)
        own = slice(dense) if stack == DENSE else slice(dense, None)
        return self.cfg.local_layers[own] if self.cfg.mixed_windows else None

    def layer(self, positions_BT, segment_ids_BT):
        """A function that takes the residual stream through a block of these rows."""
        cfg = self.cfg
        rotation = make_rotation(positions_BT, cfg.rope_dim, cfg.rope_base, cfg.rope_scaling)
        local_rotation = rotation
        if cfg.local_rope_base is not None:
            local_rotation = make_rotation(positions_BT, cfg.rope_dim, cfg.local_rope_base)

        def run(block: Block, x_BTD, local: jax.Array | None):
            turned = rotation
            if cfg.local_rope_base is not None:
                assert local is not None, "local_rope_base needs mixed windows"
                turned = jax.tree.map(lambda near, far: jnp.where(local, near, far), local_rotation, rotation)
            return block(x_BTD, turned, segment_ids_BT, local)

        return run

    def leave(self, x_BTD):
        """The residual stream after the last block, normalised; with muP, times its factor of logits."""
        scale, output = factor(self.cfg, self.final_norm), self.cfg.scales.output
        return self.kernels.rms_norm(x_BTD, scale if output == 1.0 else output * scale, self.cfg.norm_eps)

    @jax.named_scope("embedding")
    def embed(self, tokens_BT):
        """The residual stream before the first block, of the device's own positions."""
        cfg = self.cfg
        table_VD = self.gather(self.embedding[...], ("vocab", "embed"), cfg.embed_dtype)
        x_BTD = lookup_shared(table_VD, tokens_BT, cfg.embed_dtype, self.tensor).astype(cfg.compute_dtype)
        return x_BTD * jnp.asarray(cfg.embed_dim**0.5, x_BTD.dtype) if cfg.scaled_embeddings else x_BTD

    def unembedding(self, h_BTD):
        """(h_BTD as it is, the output projection [D, V], gathered once for all chunks of a loss)."""
        if self.head is None:
            h_BTD, table_VD = settle_together(h_BTD, self.embedding[...])
            return h_BTD, self.gather(table_VD, ("vocab", "embed"), self.cfg.embed_dtype).T
        h_BTD, w_DV = settle_together(h_BTD, self.head[...])
        return h_BTD, self.gather(w_DV, ("embed", "vocab"), self.cfg.embed_dtype)
