"""T5 encoder-decoder (arXiv:1910.10683): RMSNorm, and relative position biases on attention scores as the only biases.

Version 1.0 has a ReLU and a shared embedding table. Version 1.1 has a gated GELU (arXiv:2002.05202) and untied tables.

B batch  T query position  S key position  D embed  N heads  H head dim  F mlp  V vocab  L layers  R buckets
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxscale.core.batch import EncoderInput
from jaxscale.core.models.config import ATTENTION_ADDED, BLOCK_INPUT, KEY, MLP_GATE, MLP_UP, QUERY, VALUE
from jaxscale.core.models.gpt2_bert_t5_config import T5Config
from jaxscale.core.models.layers import (
    Block,
    Stack,
    constant,
    dropout,
    gather_after,
    make_stack,
    param,
    run_stack,
    split_keys,
)
from jaxscale.core.plan import ParallelPlan
from jaxscale.core.recorder import ATTENTION, CROSS_ATTENTION, MLP
from jaxscale.kernels.activation import gelu_tanh
from jaxscale.kernels.attention.xla import MaskSpec
from jaxscale.kernels.norm import rms_norm
from jaxscale.kernels.vocabulary import lookup_sharded


class T5Attention(nnx.Module):
    """Self- or cross-attention with unscaled scores and an optional bias.

    Instead of scaling scores, T5 initializes query weights with a smaller std (code of arXiv:1910.10683).
    """

    def __init__(self, cfg: T5Config, *, rngs: nnx.Rngs, plan: ParallelPlan):
        D, N, H = cfg.embed_dim, cfg.num_heads, cfg.head_dim
        self.plan = plan
        self.wq = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), std=(D * H) ** -0.5)
        self.wk = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), fan_in=D)
        self.wv = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), fan_in=D)
        self.wo = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), fan_in=N * H)

    @jax.named_scope("attention")
    def __call__(self, x_BTD, encoded_BSD, segments: jax.Array | MaskSpec, *, causal: bool, bias_NTS: jax.Array | None):
        """Attends to encoded_BSD, the encoder output at all positions, or to x_BTD if encoded_BSD is None."""
        project = self.plan.project
        x_BTD = self.plan.tensor.all_gather(x_BTD)
        encoded_BSD = x_BTD if encoded_BSD is None else encoded_BSD
        q_BTNH = checkpoint_name(project("BTD,DNH->BTNH", x_BTD, self.wq[...]), QUERY)
        k_BSNH = checkpoint_name(project("BSD,DNH->BSNH", encoded_BSD, self.wk[...]), KEY)
        v_BSNH = checkpoint_name(project("BSD,DNH->BSNH", encoded_BSD, self.wv[...]), VALUE)
        out_BTNH = self.plan.attend(
            q_BTNH, k_BSNH, v_BSNH, segments, causal=causal, bias_NTS=bias_NTS, scale=1.0
        )  # marks ATTENTION_OUT
        added_BTD = self.plan.tensor.reduce_scatter(project("BTNH,NHD->BTD", out_BTNH, self.wo[...]))
        return checkpoint_name(added_BTD, ATTENTION_ADDED)


class T5Mlp(nnx.Module):
    """MLP with a ReLU or a gated GELU (tanh form)."""

    def __init__(self, cfg: T5Config, *, rngs: nnx.Rngs, plan: ParallelPlan):
        D, F = cfg.embed_dim, cfg.mlp_dim
        self.plan = plan
        self.gate = param(rngs, (D, F), ("embed", "mlp"), fan_in=D) if cfg.mlp == "gated_gelu" else None
        self.up = param(rngs, (D, F), ("embed", "mlp"), fan_in=D)
        self.down = param(rngs, (F, D), ("mlp", "embed"), fan_in=F)

    @jax.named_scope("mlp")
    def __call__(self, x_BTD):
        project = self.plan.project
        x_BTD = self.plan.tensor.all_gather(x_BTD)
        h_BTF = checkpoint_name(project("BTD,DF->BTF", x_BTD, self.up[...]), MLP_UP)
        if self.gate is None:
            h_BTF = jax.nn.relu(h_BTF)
        else:
            gate_BTF = checkpoint_name(project("BTD,DF->BTF", x_BTD, self.gate[...]), MLP_GATE)
            h_BTF = gelu_tanh(gate_BTF) * h_BTF
        return self.plan.tensor.reduce_scatter(project("BTF,FD->BTD", h_BTF, self.down[...]))


class T5Block(Block):
    """Pre-norm self-attention, cross-attention in the decoder, and MLP."""

    def __init__(self, cfg: T5Config, *, is_decoder: bool, rngs: nnx.Rngs, plan: ParallelPlan):
        D = cfg.embed_dim
        attention = functools.partial(T5Attention, cfg, rngs=rngs, plan=plan)
        self.cfg, self.plan, self.is_decoder = cfg, plan, is_decoder
        self.attention_norm, self.attention = constant((D,), ("norm",), 1.0), attention()
        if is_decoder:
            self.across_norm, self.across = constant((D,), ("norm",), 1.0), attention()
        self.mlp_norm = constant((D,), ("norm",), 1.0)
        self.mlp = T5Mlp(cfg, rngs=rngs, plan=plan)

    def __call__(self, x_BTD, keys_B, segment_ids_BT, bias_NTS, encoded_BSD=None, across: MaskSpec | None = None):
        cfg, sow = self.cfg, self.plan.recorder.sow
        keys = (None, None, None) if keys_B is None else split_keys(keys_B, 3)
        drop = lambda added_BTD, key_B: dropout(added_BTD, cfg.dropout, key_B, self.plan.tensor)
        x_BTD = checkpoint_name(x_BTD, BLOCK_INPUT)
        h_BTD = rms_norm(x_BTD, self.attention_norm[...], cfg.norm_eps)
        added_BTD = self.attention(h_BTD, None, segment_ids_BT, causal=self.is_decoder, bias_NTS=bias_NTS)
        x_BTD = x_BTD + drop(sow(ATTENTION, added_BTD), keys[0])
        if self.is_decoder:
            assert across is not None, "the decoder needs a cross-attention mask"
            h_BTD = rms_norm(x_BTD, self.across_norm[...], cfg.norm_eps)
            added_BTD = self.across(h_BTD, encoded_BSD, across, causal=False, bias_NTS=None)
            x_BTD = x_BTD + drop(sow(CROSS_ATTENTION, added_BTD), keys[1])
        return x_BTD + drop(sow(MLP, self.mlp(rms_norm(x_BTD, self.mlp_norm[...], cfg.norm_eps))), keys[2])


class T5(nnx.Module):
    """T5 encoder-decoder. hidden() excludes the output projection, so that a loss can compute the logits in chunks."""

    def __init__(self, cfg: T5Config, *, rngs: nnx.Rngs, plan: ParallelPlan):
        D, V, N, R = cfg.embed_dim, cfg.vocab_size, cfg.num_heads, cfg.num_buckets
        self.cfg, self.plan = cfg, plan
        self.embedding = param(rngs, (V, D), ("vocab", "embed"), std=1.0)
        make_block = functools.partial(T5Block, cfg, plan=plan)
        encoder_block = lambda rngs: make_block(is_decoder=False, rngs=rngs)
        decoder_block = lambda rngs: make_block(is_decoder=True, rngs=rngs)
        self.encoder_bias = param(rngs, (R, N), ("position", "heads"), fan_in=D)
        self.encoder_blocks = make_stack(encoder_block, rngs, cfg.num_layers, cfg.scan_layers)
        self.encoder_norm = constant((D,), ("norm",), 1.0)
        self.decoder_bias = param(rngs, (R, N), ("position", "heads"), fan_in=D)
        self.decoder_blocks = make_stack(decoder_block, rngs, cfg.decoder_layers, cfg.scan_layers)
        self.decoder_norm = constant((D,), ("norm",), 1.0)
        self.head = None if cfg.tied_embeddings else param(rngs, (D, V), ("embed", "vocab"), fan_in=D)

    def hidden(self, tokens_BT, positions_BT, segment_ids_BT, keys_B: jax.Array | None = None, encoder=None):
        """Returns the decoder's last hidden states of local positions, compute_dtype[B, T, D].

        positions_BT is unused, because position biases are relative. keys_B: dropout keys. encoder: EncoderInput.
        """
        assert encoder is not None, "T5 needs an encoder input"
        keys = (None, None) if keys_B is None or not self.cfg.dropout else split_keys(keys_B, 2)
        encoded_BSD = self.plan.tensor.all_gather(self.encode(encoder, keys[0]))  # once for all blocks
        across = MaskSpec(segment_ids_BT, key_segment_ids_BS=encoder.segment_ids)
        bias_NTS = self.relative_bias(self.decoder_bias[...], tokens_BT.shape[1], bidirectional=False)
        shared = segment_ids_BT, bias_NTS, encoded_BSD, across
        return self.run_blocks(
            self.decoder_blocks, self.cfg.decoder_layers, tokens_BT, shared, self.decoder_norm[...], keys[1]
        )

    def encode(self, encoder: EncoderInput, keys_B: jax.Array | None):
        """Returns the encoder's last hidden states of local positions, compute_dtype[B, S, D]."""
        bias_NSS = self.relative_bias(self.encoder_bias[...], encoder.tokens.shape[1], bidirectional=True)
        shared = encoder.segment_ids, bias_NSS
        return self.run_blocks(
            self.encoder_blocks, self.cfg.num_layers, encoder.tokens, shared, self.encoder_norm[...], keys_B
        )

    def run_blocks(self, blocks: Stack, num_layers: int, tokens_BT, shared: tuple, scale_D, keys_B: jax.Array | None):
        """Embeds tokens and returns the normalized residual stream after the blocks."""
        cfg = self.cfg
        x_BTD = self.embed(tokens_BT)
        keys_LB = last_B = None
        if keys_B is not None:
            first_B, last_B, *keys_LB = split_keys(keys_B, num_layers + 2)
            keys_LB, x_BTD = jnp.stack(keys_LB), dropout(x_BTD, cfg.dropout, first_B, self.plan.tensor)
        x_BTD, _ = run_stack(blocks, x_BTD, keys_LB, shared, cfg, self.plan)
        return dropout(rms_norm(x_BTD, scale_D, cfg.norm_eps), cfg.dropout, last_B, self.plan.tensor)

    @jax.named_scope("embedding")
    def embed(self, tokens_BT):
        """Returns the embeddings of local positions."""
        table_VD = self.plan.gather(self.embedding[...], ("vocab", "embed"), self.cfg.embed_dtype)
        x_BTD = lookup_sharded(table_VD, tokens_BT, self.cfg.embed_dtype, self.plan.tensor)
        return x_BTD.astype(self.cfg.compute_dtype)

    def relative_bias(self, table_RN, length: int, *, bidirectional: bool):
        """Returns the relative position biases of local heads, float32[N, length, length]."""
        buckets = relative_buckets(length, self.cfg.num_buckets, self.cfg.max_distance, bidirectional)
        return jnp.take(table_RN.T, buckets, axis=1)

    def unembedding(self, h_BTD):
        """Returns (h_BTD, output projection [D, V]). h_BTD is scaled if embeddings are tied."""
        dtype, gather = self.cfg.embed_dtype, self.plan.gather
        if self.head is None:
            h_BTD = h_BTD * self.cfg.embed_dim**-0.5
            h_BTD, table_VD = gather_after(gather, h_BTD, self.embedding[...], ("vocab", "embed"), dtype)
            return h_BTD, table_VD.T
        return gather_after(gather, h_BTD, self.head[...], ("embed", "vocab"), dtype)


def relative_buckets(length: int, num_buckets: int, max_distance: int, bidirectional: bool) -> np.ndarray:
    """Returns int32[T, S], the relative position bucket of each query and key (arXiv:1910.10683, section 2.1).

    Half of the buckets contain one distance each. The others contain ranges that grow logarithmically to max_distance.
    If bidirectional, earlier keys use one half of the buckets and later keys the other. Else later keys use bucket 0.
    """
    offset_TS = np.arange(length)[None, :] - np.arange(length)[:, None]
    first_TS = np.zeros_like(offset_TS)
    if bidirectional:
        num_buckets //= 2
        first_TS = np.where(offset_TS > 0, num_buckets, 0)
    distance_TS = np.abs(offset_TS) if bidirectional else np.maximum(-offset_TS, 0)
    exact = num_buckets // 2
    scaled_TS = np.log(np.maximum(distance_TS, exact).astype(np.float32) / np.float32(exact))
    scaled_TS = scaled_TS / np.float32(math.log(max_distance / exact)) * np.float32(num_buckets - exact)
    log_TS = np.minimum(exact + scaled_TS.astype(np.int64), num_buckets - 1)
    return (first_TS + np.where(distance_TS < exact, distance_TS, log_TS)).astype(np.int32)
