"""GPT-2 (Radford et al., 2019): LayerNorm, learned positions, GELU, biases, tied embeddings.

B batch  T query position  S key position  D embed  N heads  H head dim  F mlp  V vocab  L layers  P positions
"""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale.core.models.config import BLOCK_INPUT
from jaxscale.core.models.gpt2_bert_t5_config import Gpt2Config
from jaxscale.core.models.layers import (
    STD,
    BiasedAttention,
    BiasedMlp,
    Block,
    StackedModel,
    constant,
    dropout,
    dropout_embeddings,
    dropout_keys,
    grad_barrier,
    make_stack,
    param,
    split_keys,
)
from jaxscale.core.plan import ParallelPlan
from jaxscale.core.recorder import ATTENTION, MLP
from jaxscale.kernels.activation import gelu_tanh
from jaxscale.kernels.embed import lookup, lookup_sharded
from jaxscale.kernels.norm import layer_norm


class Gpt2Block(Block):
    """Pre-norm attention and MLP."""

    def __init__(self, cfg: Gpt2Config, *, rngs: nnx.Rngs, plan: ParallelPlan):
        D = cfg.embed_dim
        self.cfg, self.plan = cfg, plan
        self.scale_attention, self.bias_attention = constant((D,), ("norm",), 1.0), constant((D,), ("norm",), 0.0)
        std = STD * (2 * cfg.num_layers) ** -0.5
        self.attention = BiasedAttention(cfg, causal=True, out_std=std, rngs=rngs, plan=plan)
        self.scale_mlp, self.bias_mlp = constant((D,), ("norm",), 1.0), constant((D,), ("norm",), 0.0)
        # tanh form, as in GPT-2
        self.mlp = BiasedMlp(cfg, gelu_tanh, out_std=std, rngs=rngs, plan=plan)

    def __call__(self, x_BTD, keys_B: jax.Array | None, segment_ids_BT):
        cfg, sow = self.cfg, self.plan.recorder.sow
        key_attention, key_mlp = (None, None) if keys_B is None else split_keys(keys_B, 2)
        x_BTD = checkpoint_name(x_BTD, BLOCK_INPUT)
        h_BTD = layer_norm(x_BTD, self.scale_attention[...], self.bias_attention[...], cfg.norm_eps)
        added_BTD = sow(ATTENTION, self.attention(h_BTD, segment_ids_BT))
        x_BTD = x_BTD + dropout(added_BTD, cfg.dropout, key_attention, self.plan.tensor)
        h_BTD = layer_norm(x_BTD, self.scale_mlp[...], self.bias_mlp[...], cfg.norm_eps)
        return x_BTD + dropout(sow(MLP, self.mlp(h_BTD)), cfg.dropout, key_mlp, self.plan.tensor)


class Gpt2(StackedModel):
    """GPT-2 decoder."""

    def __init__(self, cfg: Gpt2Config, *, rngs: nnx.Rngs, plan: ParallelPlan):
        D, V = cfg.embed_dim, cfg.vocab_size
        self.cfg, self.plan = cfg, plan
        self.embedding = param(rngs, (V, D), ("vocab", "embed"), std=STD)
        self.position_embedding = param(rngs, (cfg.max_seq_len, D), ("position", "embed"), std=0.01)  # as GPT-2's code
        make_block = lambda rngs: Gpt2Block(cfg, rngs=rngs, plan=plan)
        self.blocks = make_stack(make_block, rngs, cfg.num_layers, cfg.scan_layers)
        self.scale_final, self.bias_final = constant((D,), ("norm",), 1.0), constant((D,), ("norm",), 0.0)

    def embed_tokens(self, tokens_BT, positions_BT, segment_ids_BT, keys_B: jax.Array | None = None):
        """Returns the residual stream before the first block. keys_B: for dropout."""
        return dropout_embeddings(self.embed(tokens_BT, positions_BT), keys_B, self.cfg, self.plan.tensor)

    def layer_inputs(self, keys_B: jax.Array | None, stack: str):
        """Returns the dropout keys of each block."""
        return dropout_keys(keys_B, self.cfg)

    def last_hidden(self, x_BTD):
        """Returns the normalized residual stream."""
        return layer_norm(x_BTD, self.scale_final[...], self.bias_final[...], self.cfg.norm_eps)

    @jax.named_scope("embedding")
    def embed(self, tokens_BT, positions_BT):
        """Returns token plus position embeddings of the device's positions."""
        dtype = self.cfg.embed_dtype
        table_VD = self.plan.gather(self.embedding[...], ("vocab", "embed"), dtype)
        positions_PD = self.plan.gather(self.position_embedding[...], ("position", "embed"), dtype)
        x_BTD = lookup_sharded(table_VD, tokens_BT, dtype, self.plan.tensor)
        x_BTD = x_BTD + lookup(positions_PD, self.plan.tensor.local(positions_BT), dtype)
        return x_BTD.astype(self.cfg.compute_dtype)

    def unembedding(self, h_BTD):
        """Returns (h_BTD, the output projection [D, V]: the embedding table, gathered once per loss)."""
        h_BTD, table_VD = grad_barrier(h_BTD, self.embedding[...])
        return h_BTD, self.plan.gather(table_VD, ("vocab", "embed"), self.cfg.embed_dtype).T
