"""Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU (arXiv:2302.13971, arXiv:2407.21783).

B batch  T query position  S key position  D embed  N query heads  K kv heads  H head dim  F mlp  V vocab  L layers
"""

import dataclasses
from typing import ClassVar, Literal

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale.models.layers import ModelConfig, check_positive, constant, make_stack, param, run_stack, settle_together
from jaxscale.models.remat import ATTENTION_ADDED, BLOCK_INPUT, KEY, MLP_GATE, MLP_UP, QUERY, VALUE
from jaxscale.ops.attention.names import ATTENTION_OUT
from jaxscale.ops.embed import lookup_shared
from jaxscale.ops.kernels import Kernels
from jaxscale.ops.rope import RopeScaling, Rotation, make_rotation, rotate
from jaxscale.ops.taps import ATTENTION, MLP
from jaxscale.schema import setting
from jaxscale.sharding.place import Gather
from jaxscale.sharding.tensor_axis import TensorAxis

HEAD_STD = 0.02  # GPT-2's: the first loss is near log(vocabulary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """A Llama 2 or 3 and its relatives; qk_norm makes it Qwen3's attention."""

    name: Literal["llama"] = setting("llama", "which model this is")
    num_kv_heads: int = setting(help="key and value heads; num_heads is a multiple")
    head_dim: int = setting(help="size of one head, even")
    mlp_dim: int = setting(help="width of the gated MLP")
    rope_base: float = setting(10_000.0, "RoPE's theta (arXiv:2104.09864)")
    rope_scaling: RopeScaling | None = setting(None, "stretching of RoPE for long contexts")
    qk_norm: bool = setting(False, "RMSNorm on queries and keys of each head (arXiv:2302.05442)")
    attention_window: int | None = setting(
        None, "keys that a query sees, the newest ones and its own (arXiv:2310.06825); none: all before it"
    )
    attention_softcap: float | None = setting(
        None, "c: attention scores become c * tanh(scores / c) (arXiv:2408.00118); none: as they are"
    )
    tied_embeddings: bool = setting(False, "true: the embedding table is also the output projection")

    activation_names: ClassVar[tuple[str, ...]] = (
        BLOCK_INPUT, QUERY, KEY, VALUE, ATTENTION_OUT, ATTENTION_ADDED, MLP_GATE, MLP_UP
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "num_kv_heads", "head_dim", "mlp_dim", "rope_base")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.attention_window is not None and self.attention_window < 1:
            raise ValueError(f"attention_window={self.attention_window} must be at least 1, or none")
        if self.attention_softcap is not None and self.attention_softcap <= 0:
            raise ValueError(f"attention_softcap={self.attention_softcap} must be above 0, or none")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, for RoPE turns pairs")


def num_params(cfg: LlamaConfig) -> int:
    """Parameters in all, embeddings included."""
    return matmul_params(cfg) + cfg.vocab_size * cfg.embed_dim * (not cfg.tied_embeddings) + norm_params(cfg)


def matmul_params(cfg: LlamaConfig) -> int:
    """Parameters that each token is multiplied with: all matrices and the output projection, not the lookup."""
    D, N, K, H, F = cfg.embed_dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.mlp_dim
    return cfg.num_layers * (2 * D * N * H + 2 * D * K * H + 3 * D * F) + cfg.vocab_size * D


def norm_params(cfg: LlamaConfig) -> int:
    """Scales of all norms."""
    return cfg.num_layers * (2 * cfg.embed_dim + 2 * cfg.head_dim * cfg.qk_norm) + cfg.embed_dim


def flops_per_token(cfg: LlamaConfig, seq_len: int) -> float:
    """Floating-point operations of one training step per token: 6 per matrix parameter (2 forward, 4 backward), and
    attention's two products over the keys that a query sees on average: T / 2 of a causal row, W - W^2 / (2 T) with a
    window of W. Recomputation is not counted.

    PaLM's formula (arXiv:2204.02311, appendix B) counts the masked half too, so its MFU is a little higher than ours.
    """
    window = min(cfg.attention_window or seq_len, seq_len)
    keys = window - window * window / (2 * seq_len)
    return 6 * matmul_params(cfg) + 12 * cfg.num_layers * cfg.num_heads * cfg.head_dim * keys


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
        self.q_norm = constant((H,), ("norm",), 1.0) if cfg.qk_norm else None
        self.k_norm = constant((H,), ("norm",), 1.0) if cfg.qk_norm else None

    def __call__(self, x_BTD, rotation: Rotation, segment_ids_BT):
        cfg, project = self.cfg, self.kernels.project
        x_BTD = self.tensor.gather(x_BTD)
        q_BTNH = project("BTD,DNH->BTNH", x_BTD, self.wq[...])
        k_BSKH = project("BSD,DKH->BSKH", x_BTD, self.wk[...])
        v_BSKH = checkpoint_name(project("BSD,DKH->BSKH", x_BTD, self.wv[...]), VALUE)
        if cfg.qk_norm:
            q_BTNH = self.kernels.rms_norm(q_BTNH, self.q_norm[...], cfg.norm_eps)
            k_BSKH = self.kernels.rms_norm(k_BSKH, self.k_norm[...], cfg.norm_eps)
        q_BTNH = checkpoint_name(rotate(q_BTNH, rotation), QUERY)
        k_BSKH = checkpoint_name(rotate(k_BSKH, rotation), KEY)
        out_BTNH = self.kernels.attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT)  # named ATTENTION_OUT within
        return checkpoint_name(self.tensor.scatter(project("BTNH,NHD->BTD", out_BTNH, self.wo[...])), ATTENTION_ADDED)


class Mlp(nnx.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs, kernels: Kernels, tensor: TensorAxis):
        D, F = cfg.embed_dim, cfg.mlp_dim
        self.kernels, self.tensor = kernels, tensor
        self.gate = param(rngs, (D, F), ("embed", "mlp"), fan_in=D)
        self.up = param(rngs, (D, F), ("embed", "mlp"), fan_in=D)
        self.down = param(rngs, (F, D), ("mlp", "embed"), std=(F * 2 * cfg.num_layers) ** -0.5)

    def __call__(self, x_BTD):
        project = self.kernels.project
        x_BTD = self.tensor.gather(x_BTD)
        gate_BTF = checkpoint_name(project("BTD,DF->BTF", x_BTD, self.gate[...]), MLP_GATE)
        up_BTF = checkpoint_name(project("BTD,DF->BTF", x_BTD, self.up[...]), MLP_UP)
        return self.tensor.scatter(project("BTF,FD->BTD", self.kernels.swiglu(gate_BTF, up_BTF), self.down[...]))


class Block(nnx.Module):
    """Attention, then MLP, each normalised first and added to the residual stream."""

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs, kernels: Kernels, tensor: TensorAxis):
        self.cfg, self.kernels = cfg, kernels
        self.attention_norm = constant((cfg.embed_dim,), ("norm",), 1.0)
        self.attention = Attention(cfg, rngs=rngs, kernels=kernels, tensor=tensor)
        self.mlp_norm = constant((cfg.embed_dim,), ("norm",), 1.0)
        self.mlp = Mlp(cfg, rngs=rngs, kernels=kernels, tensor=tensor)

    def __call__(self, x_BTD, rotation: Rotation, segment_ids_BT):
        norm, eps, see = self.kernels.rms_norm, self.cfg.norm_eps, self.kernels.taps.see
        x_BTD = checkpoint_name(x_BTD, BLOCK_INPUT)
        h_BTD = norm(x_BTD, self.attention_norm[...], eps)
        x_BTD = x_BTD + see(ATTENTION, self.attention(h_BTD, rotation, segment_ids_BT))
        return x_BTD + see(MLP, self.mlp(norm(x_BTD, self.mlp_norm[...], eps)))


class Llama(nnx.Module):
    """The decoder. hidden() is all but the output projection, so that a loss can chunk the logits."""

    def __init__(self, cfg: LlamaConfig, *, rngs: nnx.Rngs, kernels: Kernels, gather: Gather, tensor: TensorAxis):
        D, V = cfg.embed_dim, cfg.vocab_size
        self.cfg, self.kernels, self.gather, self.tensor = cfg, kernels, gather, tensor
        # No norm follows the table: unit scale (arXiv:2204.02311, section 5), but where logits use it too.
        self.embedding = param(rngs, (V, D), ("vocab", "embed"), std=HEAD_STD if cfg.tied_embeddings else 1.0)
        make_block = lambda rngs: Block(cfg, rngs=rngs, kernels=kernels, tensor=tensor)
        self.blocks = make_stack(make_block, rngs, cfg.num_layers, cfg.scan_layers)
        self.final_norm = constant((D,), ("norm",), 1.0)
        self.head = None if cfg.tied_embeddings else param(rngs, (D, V), ("embed", "vocab"), std=HEAD_STD)

    def hidden(self, tokens_BT, positions_BT, segment_ids_BT, keys_B: jax.Array | None = None):
        """The normalised residual stream after the last block, compute_dtype[B, T, D], of the device's own positions.

        No dropout: no keys.
        """
        cfg = self.cfg
        table_VD = self.gather(self.embedding[...], ("vocab", "embed"), cfg.embed_dtype)
        x_BTD = lookup_shared(table_VD, tokens_BT, cfg.embed_dtype, self.tensor).astype(cfg.compute_dtype)
        rotation = make_rotation(positions_BT, cfg.head_dim, cfg.rope_base, cfg.rope_scaling)
        run = lambda block, x_BTD, _: block(x_BTD, rotation, segment_ids_BT)
        x_BTD = run_stack(self.blocks, run, x_BTD, None, cfg, self.gather, self.kernels.taps)
        return self.kernels.rms_norm(x_BTD, self.final_norm[...], cfg.norm_eps)

    def unembedding(self, h_BTD):
        """(h_BTD as it is, the output projection [D, V], gathered once for all chunks of a loss)."""
        if self.head is None:
            h_BTD, table_VD = settle_together(h_BTD, self.embedding[...])
            return h_BTD, self.gather(table_VD, ("vocab", "embed"), self.cfg.embed_dtype).T
        h_BTD, w_DV = settle_together(h_BTD, self.head[...])
        return h_BTD, self.gather(w_DV, ("embed", "vocab"), self.cfg.embed_dtype)
