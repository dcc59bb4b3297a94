"""Settings of GPT-2, BERT's encoder and T5, and quantities derived from them."""

import dataclasses
from typing import ClassVar, Literal

from jaxscale.core.models.config import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    ModelConfig,
    ModelKind,
    ResidualDtype,
    check_positive,
)
from jaxscale.kernels.config import AttentionNeeds
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

INSIDE_GELU: tuple[str, ResidualDtype] = ("inside GELU", "float32")  # saved for the backward pass of GELU


class BiasedConfig(ModelConfig):
    """Settings shared by GPT-2 and BERT, which have LayerNorm, biases and learned positions."""

    norm_residuals: ClassVar[tuple[ResidualDtype, ...]] = ("float32", "float32")  # before and after LayerNorm's scale
    activation_names: ClassVar[tuple[str, ...]] = ACTIVATIONS

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "max_seq_len", "mlp_dim")
        if self.embed_dim % self.num_heads:
            raise BadInput(f"embed_dim={self.embed_dim} must be a multiple of num_heads={self.num_heads}")

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.embed_dim // self.num_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2Config(BiasedConfig):
    """Settings of GPT-2. The 124M model has 12 layers, width 768, 12 heads, 1024 positions and 50257 tokens."""

    name: Literal["gpt2"] = setting("gpt2", "which model this is")
    max_seq_len: int = setting(1024, "number of learned positions, which is the longest sequence")
    dropout: float = setting(0.0, "dropout rate of embeddings, attention and MLP outputs; GPT-2 used 0.1, now mostly 0")

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP."""
        return 4 * self.embed_dim

    @property
    def num_params(self) -> int:
        """Number of parameters, embeddings included."""
        D = self.embed_dim
        biases_and_norms = self.num_layers * ((3 * D + D) + (4 * D + D) + 4 * D) + 2 * D
        return self.matmul_params + self.max_seq_len * D + biases_and_norms

    @property
    def mlp_residuals(self) -> tuple[tuple[str, ResidualDtype], ...]:
        """Arrays that the MLP saves for its backward pass, including the float32 arrays of tanh GELU."""
        return *super().mlp_residuals, *[INSIDE_GELU] * 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(BiasedConfig):
    """Settings of BERT. The base model has 12 layers, width 768, 12 heads, 512 positions and 30522 tokens."""

    name: Literal["encoder"] = setting("encoder", "which model this is")
    mlp_dim: int = setting(help="width of the MLP; BERT uses 4 * embed_dim")
    max_seq_len: int = setting(512, "number of learned positions, which is the longest sequence")
    num_token_types: int = setting(0, "rows of BERT's token type table, of which all tokens use row 0")
    dropout: float = setting(0.0, "dropout rate of embeddings, attention and MLP outputs; BERT used 0.1")
    norm_eps: float = setting(1e-12, "added to the variance in norms")

    kind: ClassVar[ModelKind] = "encoder"

    def __post_init__(self):
        super().__post_init__()
        if self.num_token_types < 0:
            raise BadInput(f"num_token_types={self.num_token_types} must not be negative")

    @property
    def matmul_params(self) -> int:
        """Number of matmul parameters per token, including the matrix of the MLM head."""
        return super().matmul_params + self.embed_dim**2

    @property
    def num_params(self) -> int:
        """Number of parameters, including embeddings and the bias of the head."""
        D, F = self.embed_dim, self.mlp_dim
        biases_and_norms = self.num_layers * (4 * D + F + D + 4 * D) + 2 * D + 3 * D + self.vocab_size
        return self.matmul_params + (self.max_seq_len + self.num_token_types) * D + biases_and_norms

    def attention_needs(self, *, prefix: bool = False) -> AttentionNeeds:
        """Returns the features that an attention kernel must support."""
        return dataclasses.replace(super().attention_needs(prefix=prefix), bidirectional=True)

    @property
    def mlp_residuals(self) -> tuple[tuple[str, ResidualDtype], ...]:
        """Arrays that the MLP saves for its backward pass, including the float32 arrays of exact GELU."""
        return *super().mlp_residuals, *[INSIDE_GELU] * 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(ModelConfig):
    """Settings of T5. The small model has 6 + 6 layers, width 512, 8 heads of size 64 and 32128 tokens."""

    name: Literal["t5"] = setting("t5", "which model this is")
    num_decoder_layers: int | None = setting(None, "blocks of the decoder; none: num_layers, as in the encoder")
    head_dim: int = setting(help="size of one head")
    mlp_dim: int = setting(help="width of the MLP")
    mlp: Literal["relu", "gated_gelu"] = setting("gated_gelu", "relu: T5 1.0; gated_gelu: T5 1.1")
    tied_embeddings: bool = setting(
        False, "true: the output projection is the embedding table, applied to states times embed_dim**-0.5 (T5 1.0)"
    )
    num_buckets: int = setting(32, "number of buckets of relative positions")
    max_distance: int = setting(128, "relative positions of at least this distance share a bucket")
    dropout: float = setting(0.0, "dropout rate of embeddings, sublayer outputs and last states; T5 1.0 used 0.1")
    norm_eps: float = setting(1e-6, "added to the mean square in norms")

    kind: ClassVar[ModelKind] = "encoder_decoder"
    activation_names: ClassVar[tuple[str, ...]] = GATED_ACTIVATIONS

    @property
    def decoder_layers(self) -> int:
        """Number of decoder blocks."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "head_dim", "mlp_dim")
        if self.decoder_layers < 1:
            raise BadInput(f"num_decoder_layers={self.num_decoder_layers} must be at least 1; use none for num_layers")
        if self.num_buckets < 4 or self.num_buckets % 2:
            raise BadInput(f"num_buckets={self.num_buckets} must be even and at least 4")
        if self.max_distance <= self.num_buckets // 2:
            raise BadInput(
                f"max_distance={self.max_distance} must be more than half of num_buckets={self.num_buckets}; "
                "increase max_distance, or reduce num_buckets"
            )

    @property
    def gated_mlp(self) -> bool:
        """True if the MLP has a gate."""
        return self.mlp == "gated_gelu"

    @property
    def layer_stacks(self) -> dict[str, int]:
        """Number of layers by name of each stack of blocks."""
        return {"encoder_blocks": self.num_layers, "decoder_blocks": self.decoder_layers}

    @property
    def block_params(self) -> tuple[int, int]:
        """Number of matrix parameters in (an encoder block, a decoder block with cross-attention)."""
        return self.block_matrix_params, self.block_matrix_params + 4 * self.embed_dim * self.query_width

    @property
    def num_params(self) -> int:
        """Number of parameters, embeddings included."""
        D, layers = self.embed_dim, tuple(self.layer_stacks.values())
        matrices = sum(count * params for count, params in zip(layers, self.block_params))
        norms, tables = (2 * layers[0] + 3 * layers[1] + 2) * D, 2 * self.num_buckets * self.num_heads
        return matrices + norms + tables + self.vocab_size * D * (1 if self.tied_embeddings else 2)

    def flops_per_token(self, seq_len: int, encoder_len: int | None = None) -> float:
        """Returns the FLOPs of a training step per decoder token, including the FLOPs of the encoder.

        Counts 6 FLOPs per matrix parameter and token, and the attention matmuls over visible keys. Keys and values of
        cross-attention are computed from encoder tokens.
        """
        assert encoder_len is not None, "encoder_len is missing"
        D, width, layers = self.embed_dim, self.query_width, self.decoder_layers
        encoder_block, decoder_block = self.block_params
        cross_kv = 2 * D * width  # keys and values of cross-attention
        encoded = encoder_len * (self.num_layers * encoder_block + layers * cross_kv)
        decoded = seq_len * (layers * (decoder_block - cross_kv) + self.vocab_size * D)
        pairs = self.num_layers * encoder_len**2 + layers * seq_len * (seq_len / 2 + encoder_len)
        return (6 * (encoded + decoded) + 12 * width * pairs) / seq_len

    def attention_needs(self, *, prefix: bool = False) -> AttentionNeeds:
        """Returns the features that an attention kernel must support."""
        return dataclasses.replace(super().attention_needs(), bidirectional=True, bias=True)

    @property
    def mlp_residuals(self) -> tuple[tuple[str, ResidualDtype], ...]:
        """Arrays that the MLP saves for its backward pass. A gated GELU saves more arrays than a ReLU."""
        if not self.gated_mlp:
            return super().mlp_residuals
        factor: tuple[str, ResidualDtype] = ("factor of the gate", "compute")
        return *super().mlp_residuals, *[INSIDE_GELU] * 4, *[factor] * 2
