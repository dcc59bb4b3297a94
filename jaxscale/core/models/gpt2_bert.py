"""GPT-2 (Radford et al., 2019) and the BERT encoder for masked language modelling (arXiv:1810.04805).

Both models have LayerNorm, learned positions, GELU, biases and tied embeddings. BERT has a norm after each addition.

B batch  T query position  S key position  D embed  N heads  H head dim  F mlp  V vocab  L layers  P positions
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale.core.models.config import BLOCK_INPUT
from jaxscale.core.models.gpt2_bert_t5_config import EncoderConfig, Gpt2Config
from jaxscale.core.models.layers import (
    STD,
    BiasedAttention,
    BiasedMlp,
    Block,
    StackedModel,
    constant,
    dropout,
    gather_after,
    make_stack,
    param,
    split_keys,
    with_bias,
)
from jaxscale.core.plan import ParallelPlan
from jaxscale.core.recorder import ATTENTION, MLP
from jaxscale.kernels.activation import gelu, gelu_tanh
from jaxscale.kernels.norm import layer_norm
from jaxscale.kernels.vocabulary import lookup, lookup_sharded


class LearnedPositionsModel(StackedModel):
    """Base class of GPT-2 and BERT, which apply dropout and use positions only in the embedding."""

    embed: Callable[..., jax.Array]  # (tokens_BT, positions_BT) -> embeddings of local positions

    def embed_tokens(self, tokens_BT, positions_BT, segment_ids_BT, keys_B: jax.Array | None = None):
        """Returns the residual stream before the first block. keys_B: dropout keys."""
        x_BTD = self.embed(tokens_BT, positions_BT)
        if keys_B is None or not self.cfg.dropout:
            return x_BTD
        return dropout(x_BTD, self.cfg.dropout, split_keys(keys_B, self.cfg.num_layers + 1)[0], self.plan.tensor)

    def layer_inputs(self, keys_B: jax.Array | None, stack: str):
        """Returns a dropout key for each block and sequence, [L, B], or None without dropout."""
        return None if keys_B is None or not self.cfg.dropout else split_keys(keys_B, self.cfg.num_layers + 1)[1:]


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


class Gpt2(LearnedPositionsModel):
    """GPT-2 decoder."""

    def __init__(self, cfg: Gpt2Config, *, rngs: nnx.Rngs, plan: ParallelPlan):
        D, V = cfg.embed_dim, cfg.vocab_size
        self.cfg, self.plan = cfg, plan
        self.embedding = param(rngs, (V, D), ("vocab", "embed"), std=STD)
        self.position_embedding = param(rngs, (cfg.max_seq_len, D), ("position", "embed"), std=0.01)  # as GPT-2's code
        make_block = lambda rngs: Gpt2Block(cfg, rngs=rngs, plan=plan)
        self.blocks = make_stack(make_block, rngs, cfg.num_layers, cfg.scan_layers)
        self.scale_final, self.bias_final = constant((D,), ("norm",), 1.0), constant((D,), ("norm",), 0.0)

    def last_hidden(self, x_BTD):
        """Returns the normalized residual stream."""
        return layer_norm(x_BTD, self.scale_final[...], self.bias_final[...], self.cfg.norm_eps)

    @jax.named_scope("embedding")
    def embed(self, tokens_BT, positions_BT):
        """Returns the sum of token and position embeddings, for local positions."""
        dtype = self.cfg.embed_dtype
        table_VD = self.plan.gather(self.embedding[...], ("vocab", "embed"), dtype)
        positions_PD = self.plan.gather(self.position_embedding[...], ("position", "embed"), dtype)
        x_BTD = lookup_sharded(table_VD, tokens_BT, dtype, self.plan.tensor)
        x_BTD = x_BTD + lookup(positions_PD, self.plan.tensor.local(positions_BT), dtype)
        return x_BTD.astype(self.cfg.compute_dtype)

    def unembedding(self, h_BTD):
        """Returns (h_BTD, output projection [D, V]). The output projection is the transposed embedding table."""
        table, dtype = self.embedding[...], self.cfg.embed_dtype
        h_BTD, table_VD = gather_after(self.plan.gather, h_BTD, table, ("vocab", "embed"), dtype)
        return h_BTD, table_VD.T


class EncoderBlock(Block):
    """Post-norm attention and MLP."""

    def __init__(self, cfg: EncoderConfig, *, rngs: nnx.Rngs, plan: ParallelPlan):
        D = cfg.embed_dim
        self.cfg, self.plan = cfg, plan
        self.attention = BiasedAttention(cfg, causal=False, out_std=STD, rngs=rngs, plan=plan)
        self.scale_attention, self.bias_attention = constant((D,), ("norm",), 1.0), constant((D,), ("norm",), 0.0)
        self.mlp = BiasedMlp(cfg, gelu, out_std=STD, rngs=rngs, plan=plan)
        self.scale_mlp, self.bias_mlp = constant((D,), ("norm",), 1.0), constant((D,), ("norm",), 0.0)

    def __call__(self, x_BTD, keys_B: jax.Array | None, segment_ids_BT):
        cfg, sow = self.cfg, self.plan.recorder.sow
        key_attention, key_mlp = (None, None) if keys_B is None else split_keys(keys_B, 2)
        x_BTD = checkpoint_name(x_BTD, BLOCK_INPUT)
        added_BTD = sow(ATTENTION, self.attention(x_BTD, segment_ids_BT))
        x_BTD = x_BTD + dropout(added_BTD, cfg.dropout, key_attention, self.plan.tensor)
        x_BTD = layer_norm(x_BTD, self.scale_attention[...], self.bias_attention[...], cfg.norm_eps)
        x_BTD = x_BTD + dropout(sow(MLP, self.mlp(x_BTD)), cfg.dropout, key_mlp, self.plan.tensor)
        return layer_norm(x_BTD, self.scale_mlp[...], self.bias_mlp[...], cfg.norm_eps)


class MlmHead(nnx.Module):
    """Masked language modeling head: matmul, GELU and LayerNorm before the output projection."""

    def __init__(self, cfg: EncoderConfig, *, rngs: nnx.Rngs, plan: ParallelPlan):
        D = cfg.embed_dim
        self.cfg, self.plan = cfg, plan
        self.dense = param(rngs, (D, D), ("embed", "channels"), std=STD)
        self.bias_dense = constant((D,), ("norm",), 0.0)
        self.scale, self.bias = constant((D,), ("norm",), 1.0), constant((D,), ("norm",), 0.0)

    def __call__(self, h_BTD):
        dense_DD = self.plan.gather(self.dense[...], ("embed", "channels"), self.cfg.compute_dtype)
        h_BTD = gelu(with_bias(self.plan.project("BTD,DE->BTE", h_BTD, dense_DD), self.bias_dense[...]))
        return layer_norm(h_BTD, self.scale[...], self.bias[...], self.cfg.norm_eps)


class Encoder(LearnedPositionsModel):
    """BERT encoder."""

    def __init__(self, cfg: EncoderConfig, *, rngs: nnx.Rngs, plan: ParallelPlan):
        D, V = cfg.embed_dim, cfg.vocab_size
        self.cfg, self.plan = cfg, plan
        self.embedding = param(rngs, (V, D), ("vocab", "embed"), std=STD)
        self.position_embedding = param(rngs, (cfg.max_seq_len, D), ("position", "embed"), std=STD)
        types = cfg.num_token_types
        self.type_embedding = param(rngs, (types, D), ("position", "embed"), std=STD) if types else None
        self.scale_embedding, self.bias_embedding = constant((D,), ("norm",), 1.0), constant((D,), ("norm",), 0.0)
        make_block = lambda rngs: EncoderBlock(cfg, rngs=rngs, plan=plan)
        self.blocks = make_stack(make_block, rngs, cfg.num_layers, cfg.scan_layers)
        self.head = MlmHead(cfg, rngs=rngs, plan=plan)
        self.bias_vocab = constant((V,), ("vocab",), 0.0)

    def last_hidden(self, x_BTD):
        """Returns x_BTD unchanged, because each block ends with a norm."""
        return x_BTD

    @jax.named_scope("embedding")
    def embed(self, tokens_BT, positions_BT):
        """Returns the normalized sum of token, position and type embeddings at local positions."""
        cfg = self.cfg
        table_VD = self.plan.gather(self.embedding[...], ("vocab", "embed"), cfg.embed_dtype)
        positions_PD = self.plan.gather(self.position_embedding[...], ("position", "embed"), cfg.embed_dtype)
        x_BTD = lookup_sharded(table_VD, tokens_BT, cfg.embed_dtype, self.plan.tensor)
        x_BTD = x_BTD + lookup(positions_PD, self.plan.tensor.local(positions_BT), cfg.embed_dtype)
        if self.type_embedding is not None:
            types_2D = self.plan.gather(self.type_embedding[...], ("position", "embed"), cfg.embed_dtype)
            x_BTD = with_bias(x_BTD, types_2D[0])
        x_BTD = layer_norm(x_BTD, self.scale_embedding[...], self.bias_embedding[...], cfg.norm_eps)
        return x_BTD.astype(cfg.compute_dtype)

    def unembedding(self, h_BTD):
        """Returns (hidden states with a 1 appended, output projection [D + 1, V] with the logit bias as the last row).
        Their product includes the bias."""
        table, dtype = self.embedding[...], self.cfg.embed_dtype
        h_BTD, table_VD = gather_after(self.plan.gather, h_BTD, table, ("vocab", "embed"), dtype)
        h_BTD = self.head(h_BTD).astype(self.cfg.embed_dtype)
        ones = jnp.ones((*h_BTD.shape[:-1], 1), h_BTD.dtype)
        bias_1V = self.bias_vocab[...].astype(table_VD.dtype)[None]
        return jnp.concatenate([h_BTD, ones], axis=-1), jnp.concatenate([table_VD.T, bias_1V])
