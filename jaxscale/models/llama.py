"""Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU (arXiv:2302.13971, arXiv:2407.21783).

Settings make it its relatives: Mistral (arXiv:2310.06825), Qwen2 and 3 (arXiv:2407.10671, arXiv:2505.09388), OLMo-2
(arXiv:2501.00656), Gemma 1 to 3 (arXiv:2403.08295, arXiv:2408.00118, arXiv:2503.19786).

B batch  T query position  S key position  D embed  N query heads  K kv heads  H head dim  F mlp  V vocab  L layers
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.layers import (
    ModelConfig,
    check_positive,
    constant,
    make_stack,
    param,
    run_stack,
    settle_together,
    with_bias,
)
from jaxscale.models.remat import ATTENTION_ADDED, BLOCK_INPUT, KEY, MLP_GATE, MLP_UP, QUERY, VALUE
from jaxscale.ops.attention.names import ATTENTION_OUT
from jaxscale.ops.embed import lookup_shared
from jaxscale.ops.kernels import Kernels
from jaxscale.ops.norm import rms_norm_heads
from jaxscale.ops.rope import RopeScaling, Rotation, make_rotation, rotate, stretched
from jaxscale.ops.taps import ATTENTION, MLP
from jaxscale.schema import setting
from jaxscale.sharding.place import Gather
from jaxscale.sharding.tensor_axis import TensorAxis
from jaxscale.system.exits import BadInput

HEAD_STD = 0.02  # GPT-2's: the first loss is near log(vocabulary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """A Llama 2 or 3 and its relatives."""

    name: Literal["llama"] = setting("llama", "which model this is")
    num_kv_heads: int = setting(help="key and value heads; num_heads is a multiple")
    head_dim: int = setting(help="size of one head, even")
    mlp_dim: int = setting(help="width of the gated MLP")
    rope_base: float = setting(10_000.0, "RoPE's theta (arXiv:2104.09864)")
    rope_scaling: RopeScaling | None = setting(None, "stretching of RoPE for long contexts")
    qkv_bias: bool = setting(False, "biases on queries, keys and values, as in Qwen2")
    qk_norm: bool = setting(False, "RMSNorm on queries and keys before RoPE (arXiv:2302.05442)")
    qk_norm_over: Literal["head", "all_heads"] = setting(
        "head", "each head alone, or all together as in OLMo-2", read_if="model.qk_norm"
    )
    query_scalar: float | None = setting(None, "scores are divided by its square root; none: by that of head_dim")
    attention_window: int | None = setting(
        None, "keys that a query sees, the newest ones and its own (arXiv:2310.06825); none: all before it"
    )
    global_every: int | None = setting(
        None,
        "each n-th layer sees all keys and only the others have attention_window (Gemma 3: 6); none: all have it",
        read_if="model.attention_window",
    )
    local_rope_base: float | None = setting(
        None,
        "RoPE's theta, without rope_scaling, of the layers with a window; none: one RoPE for all",
        read_if="model.global_every",
    )
    attention_softcap: float | None = setting(
        None, "c: attention scores become c * tanh(scores / c) (arXiv:2408.00118); none: as they are"
    )
    norm_placement: Literal["before", "after", "both"] = setting(
        "before", "of what a block adds: its input (before), its result as in OLMo-2 (after), or both as in Gemma 2"
    )
    zero_centred_norms: bool = setting(False, "norms multiply by 1 + scale, as in Gemma")
    activation: Literal["silu", "gelu_tanh"] = setting("silu", "of the MLP's gate; gelu_tanh as in Gemma")
    scaled_embeddings: bool = setting(False, "embeddings are multiplied by sqrt(embed_dim), as in Gemma")
    tied_embeddings: bool = setting(False, "true: the embedding table is also the output projection")

    activation_names: ClassVar[tuple[str, ...]] = (
        BLOCK_INPUT, QUERY, KEY, VALUE, ATTENTION_OUT, ATTENTION_ADDED, MLP_GATE, MLP_UP
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "num_kv_heads", "head_dim", "mlp_dim", "rope_base")
        if self.num_heads % self.num_kv_heads:
            raise BadInput(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.attention_window is not None and self.attention_window < 1:
            raise BadInput(f"attention_window={self.attention_window} must be at least 1, or none")
        if self.attention_softcap is not None and self.attention_softcap <= 0:
            raise BadInput(f"attention_softcap={self.attention_softcap} must be above 0, or none")
        if self.query_scalar is not None and self.query_scalar <= 0:
            raise BadInput(f"query_scalar={self.query_scalar} must be above 0, or none")
        if self.qk_norm_over == "all_heads" and not self.qk_norm:
            raise BadInput("qk_norm_over='all_heads' needs qk_norm=true")
        if self.global_every is not None and (self.global_every < 2 or self.attention_window is None):
            raise BadInput(
                f"global_every={self.global_every} needs an attention_window, and must be at least 2, or none"
            )
        if self.local_rope_base is not None and (self.local_rope_base < 1 or self.global_every is None):
            raise BadInput(
                f"local_rope_base={self.local_rope_base} needs global_every, and must be at least 1, or none"
            )
        if self.head_dim % 2:
            raise BadInput(f"head_dim={self.head_dim} must be even, for RoPE turns pairs")


def num_params(cfg: LlamaConfig) -> int:
    """Parameters in all, embeddings included."""
    biases = cfg.num_layers * cfg.qkv_bias * (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim
    head = cfg.vocab_size * cfg.embed_dim * (not cfg.tied_embeddings)
    return matmul_params(cfg) + head + biases + norm_params(cfg)


def matmul_params(cfg: LlamaConfig) -> int:
    """Parameters that each token is multiplied with: all matrices and the output projection, not the lookup."""
    D, N, K, H, F = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.mlp_dim
    return cfg.num_layers * (2 * D * N * H + 2 * D * K * H + 3 * D * F) + cfg.vocab_size * D


def norm_params(cfg: LlamaConfig) -> int:
    """Scales of all norms."""
    of_queries, of_keys = (cfg.num_heads, cfg.num_kv_heads) if cfg.qk_norm_over == "all_heads" else (1, 1)
    of_attention = cfg.qk_norm * (of_queries + of_keys) * cfg.head_dim
    per_part = 2 if cfg.norm_placement == "both" else 1
    return cfg.num_layers * (2 * per_part * cfg.embed_dim + of_attention) + cfg.embed_dim


def flops_per_token(cfg: LlamaConfig, seq_len: int) -> float:
    """Floating-point operations of one training step per token: 6 per matrix parameter (2 forward, 4 backward), and
    attention's two products over the keys that a query sees on average: T / 2 of a causal row, W - W^2 / (2 T) with a
    window of W. Recomputation is not counted.

    PaLM's formula (arXiv:2204.02311, appendix B) counts the masked half too, so its MFU is a little higher than ours.
    """
    window = min(cfg.attention_window or seq_len, seq_len)
    near, far = window - window * window / (2 * seq_len), seq_len / 2
    num_local = int(np.sum(local_layers(cfg)))
    keys = num_local * near + (cfg.num_layers - num_local) * far  # over all layers
    return 6 * matmul_params(cfg) + 12 * cfg.num_heads * cfg.head_dim * keys


def local_layers(cfg: LlamaConfig) -> np.ndarray:
    """bool[L]: whether a layer has the window."""
    if cfg.global_every is None:
        return np.full(cfg.num_layers, cfg.attention_window is not None)
    return np.arange(1, cfg.num_layers + 1) % cfg.global_every != 0


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
        self.wo = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), std=(N * H * 2 * cfg.num_layers) ** -0.5)
        of_heads = ("heads", "head_dim"), ("kv_heads", "head_dim")
        if cfg.qkv_bias:
            self.bias_q = constant((N, H), of_heads[0], 0.0)
            self.bias_k = constant((K, H), of_heads[1], 0.0)
            self.bias_v = constant((K, H), of_heads[1], 0.0)
        if cfg.qk_norm and cfg.qk_norm_over == "all_heads":
            self.q_norm = norm_scale(cfg, N, H, axes=of_heads[0])
            self.k_norm = norm_scale(cfg, K, H, axes=of_heads[1])
        elif cfg.qk_norm:
            self.q_norm, self.k_norm = norm_scale(cfg, H), norm_scale(cfg, H)

    def __call__(self, x_BTD, rotation: Rotation, segment_ids_BT, local: jax.Array | None = None):
        cfg = self.cfg
        q_BTNH, k_BSKH, v_BSKH = self.projected(self.tensor.gather(x_BTD))
        v_BSKH = checkpoint_name(v_BSKH, VALUE)
        if cfg.qk_norm:
            q_BTNH, k_BSKH = self.normalised(q_BTNH, self.q_norm), self.normalised(k_BSKH, self.k_norm)
        of_queries = rotation
        if cfg.query_scalar is not None:  # attend divides by sqrt(head_dim)
            of_queries = stretched(rotation, (cfg.head_dim / cfg.query_scalar) ** 0.5)
        q_BTNH = checkpoint_name(rotate(q_BTNH, of_queries), QUERY)
        k_BSKH = checkpoint_name(rotate(k_BSKH, rotation), KEY)
        seen = {} if local is None else {"local": local}
        out_BTNH = self.kernels.attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, **seen)  # named ATTENTION_OUT within
        out_BTD = self.kernels.project("BTNH,NHD->BTD", out_BTNH, self.wo[...])
        return checkpoint_name(self.tensor.scatter(out_BTD), ATTENTION_ADDED)

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

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs, kernels: Kernels, tensor: TensorAxis):
        D, F = cfg.embed_dim, cfg.mlp_dim
        self.kernels, self.tensor = kernels, tensor
        self.activate = kernels.swiglu if cfg.activation == "silu" else kernels.geglu_tanh
        self.gate = param(rngs, (D, F), ("embed", "mlp"), fan_in=D)
        self.up = param(rngs, (D, F), ("embed", "mlp"), fan_in=D)
        self.down = param(rngs, (F, D), ("mlp", "embed"), std=(F * 2 * cfg.num_layers) ** -0.5)

    def __call__(self, x_BTD):
        project = self.kernels.project
        x_BTD = self.tensor.gather(x_BTD)
        gate_BTF = checkpoint_name(project("BTD,DF->BTF", x_BTD, self.gate[...]), MLP_GATE)
        up_BTF = checkpoint_name(project("BTD,DF->BTF", x_BTD, self.up[...]), MLP_UP)
        return self.tensor.scatter(project("BTF,FD->BTD", self.activate(gate_BTF, up_BTF), self.down[...]))


class Block(nnx.Module):
    """Attention, then MLP, each normalised and added to the residual stream."""

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs, kernels: Kernels, tensor: TensorAxis):
        self.cfg, self.kernels = cfg, kernels
        before, after = cfg.norm_placement != "after", cfg.norm_placement != "before"
        self.attention_norm = norm_scale(cfg, cfg.embed_dim) if before else None
        self.attention = Attention(cfg, rngs=rngs, kernels=kernels, tensor=tensor)
        self.attention_out_norm = norm_scale(cfg, cfg.embed_dim) if after else None
        self.mlp_norm = norm_scale(cfg, cfg.embed_dim) if before else None
        self.mlp = Mlp(cfg, rngs=rngs, kernels=kernels, tensor=tensor)
        self.mlp_out_norm = norm_scale(cfg, cfg.embed_dim) if after else None

    def __call__(self, x_BTD, rotation: Rotation, segment_ids_BT, local: jax.Array | None = None):
        see = self.kernels.taps.see
        x_BTD = checkpoint_name(x_BTD, BLOCK_INPUT)
        added_BTD = self.attention(self.normalised(x_BTD, self.attention_norm), rotation, segment_ids_BT, local)
        x_BTD = x_BTD + see(ATTENTION, self.normalised(added_BTD, self.attention_out_norm))
        added_BTD = self.mlp(self.normalised(x_BTD, self.mlp_norm))
        return x_BTD + see(MLP, self.normalised(added_BTD, self.mlp_out_norm))

    def normalised(self, x_BTD, scale: nnx.Param | None):
        """x_BTD as it is where there is no norm."""
        return x_BTD if scale is None else self.kernels.rms_norm(x_BTD, factor(self.cfg, scale), self.cfg.norm_eps)


class Llama(nnx.Module):
    """The decoder. hidden() is all but the output projection, so that a loss can chunk the logits."""

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs, kernels: Kernels, gather: Gather, tensor: TensorAxis):
        D, V = cfg.embed_dim, cfg.vocab_size
        self.cfg, self.kernels, self.gather, self.tensor = cfg, kernels, gather, tensor
        # No norm follows the table: unit scale (arXiv:2204.02311, section 5), but where logits use it too.
        self.embedding = param(rngs, (V, D), ("vocab", "embed"), std=HEAD_STD if cfg.tied_embeddings else 1.0)
        make_block = lambda rngs: Block(cfg, rngs=rngs, kernels=kernels, tensor=tensor)
        self.blocks = make_stack(make_block, rngs, cfg.num_layers, cfg.scan_layers)
        self.final_norm = norm_scale(cfg, D)
        self.head = None if cfg.tied_embeddings else param(rngs, (D, V), ("embed", "vocab"), std=HEAD_STD)

    def hidden(self, tokens_BT, positions_BT, segment_ids_BT, keys_B: jax.Array | None = None):
        """The normalised residual stream after the last block, compute_dtype[B, T, D], of the device's own positions.

        No dropout: no keys.
        """
        cfg = self.cfg
        table_VD = self.gather(self.embedding[...], ("vocab", "embed"), cfg.embed_dtype)
        x_BTD = lookup_shared(table_VD, tokens_BT, cfg.embed_dtype, self.tensor).astype(cfg.compute_dtype)
        if cfg.scaled_embeddings:
            x_BTD = x_BTD * jnp.asarray(cfg.embed_dim**0.5, x_BTD.dtype)
        rotation = make_rotation(positions_BT, cfg.head_dim, cfg.rope_base, cfg.rope_scaling)
        local_rotation = rotation
        if cfg.local_rope_base is not None:
            local_rotation = make_rotation(positions_BT, cfg.head_dim, cfg.local_rope_base)

        def run(block: Block, x_BTD, local: jax.Array | None):
            turned = rotation
            if cfg.local_rope_base is not None:
                turned = jax.tree.map(lambda near, far: jnp.where(local, near, far), local_rotation, rotation)
            return block(x_BTD, turned, segment_ids_BT, local)

        per_layer = None if cfg.global_every is None else local_layers(cfg)
        x_BTD = run_stack(self.blocks, run, x_BTD, per_layer, cfg, self.gather, self.kernels.taps)
        return self.kernels.rms_norm(x_BTD, factor(cfg, self.final_norm), cfg.norm_eps)

    def unembedding(self, h_BTD):
        """(h_BTD as it is, the output projection [D, V], gathered once for all chunks of a loss)."""
        if self.head is None:
            h_BTD, table_VD = settle_together(h_BTD, self.embedding[...])
            return h_BTD, self.gather(table_VD, ("vocab", "embed"), self.cfg.embed_dtype).T
        h_BTD, w_DV = settle_together(h_BTD, self.head[...])
        return h_BTD, self.gather(w_DV, ("embed", "vocab"), self.cfg.embed_dtype)
