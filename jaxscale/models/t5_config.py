"""Settings of T5, and what follows from them."""

import dataclasses
from typing import ClassVar, Literal

from jaxscale.models.config import GATED_ACTIVATIONS, INSIDE_GELU, Kind, ModelConfig, NumberKind, check_positive
from jaxscale.ops.config import AttentionNeeds
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(ModelConfig):
    """T5; the small model is 6 and 6 layers of width 512 with 8 heads of 64 over 32128 tokens."""

    name: Literal["t5"] = setting("t5", "which model this is")
    num_decoder_layers: int | None = setting(None, "blocks of the decoder; none: as many as the encoder's num_layers")
    head_dim: int = setting(help="size of one head")
    mlp_dim: int = setting(help="width of the MLP")
    mlp: Literal["relu", "gated_gelu"] = setting("gated_gelu", "relu: T5 1.0; gated_gelu: T5 1.1")
    tied_embeddings: bool = setting(
        False, "true: the embedding table is also the output projection, and states shrink by embed_dim**-0.5 (1.0)"
    )
    num_buckets: int = setting(32, "of relative positions")
    max_distance: int = setting(128, "positions that are this far apart, or farther, share a bucket")
    dropout: float = setting(0.0, "of embeddings, of what each block adds and of the last states; T5 1.0 had 0.1")
    norm_eps: float = setting(1e-6, "added to the mean square in norms")

    kind: ClassVar[Kind] = "encoder_decoder"
    activation_names: ClassVar[tuple[str, ...]] = GATED_ACTIVATIONS

    @property
    def decoder_layers(self) -> int:
        """Blocks of the decoder."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "head_dim", "mlp_dim")
        if self.decoder_layers < 1:
            raise BadInput(f"num_decoder_layers={self.num_decoder_layers} must be at least 1, or none")
        if self.num_buckets < 4 or self.num_buckets % 2:
            raise BadInput(f"num_buckets={self.num_buckets} must be even and at least 4")
        if self.max_distance <= self.num_buckets // 2:
            raise BadInput(
                f"max_distance={self.max_distance} must be above half of num_buckets={self.num_buckets}: "
                "nearer positions have a bucket each"
            )

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP has a gate."""
        return self.mlp == "gated_gelu"

    @property
    def layer_stacks(self) -> dict[str, int]:
        """{stack of blocks: its layers}."""
        return {"encoder_blocks": self.num_layers, "decoder_blocks": self.decoder_layers}

    @property
    def block_params(self) -> tuple[int, int]:
        """The matrices of a block of (the encoder, the decoder, which also reads what was encoded)."""
        return self.block_matrix_params, self.block_matrix_params + 4 * self.embed_dim * self.query_width

    @property
    def num_params(self) -> int:
        """Parameters in all, embeddings included."""
        D, layers = self.embed_dim, tuple(self.layer_stacks.values())
        matrices = sum(count * of_block for count, of_block in zip(layers, self.block_params))
        norms, tables = (2 * layers[0] + 3 * layers[1] + 2) * D, 2 * self.num_buckets * self.num_heads
        return matrices + norms + tables + self.vocab_size * D * (1 if self.tied_embeddings else 2)

    def flops_per_token(self, seq_len: int, encoder_len: int | None = None) -> float:
        """Floating-point operations of one training step per token of the decoder's row of seq_len tokens.

        The encoder's row, of encoder_len tokens, is counted with them: 6 per matrix parameter and token that meets it
        (the keys and values of what was encoded are its tokens' own), and attention's products over the keys seen.
        """
        assert encoder_len is not None, "T5 has two rows, and the length of one is missing"
        D, width, layers = self.embed_dim, self.query_width, self.decoder_layers
        of_encoder, of_decoder = self.block_params
        across = 2 * D * width  # keys and values for the decoder
        encoded = encoder_len * (self.num_layers * of_encoder + layers * across)
        decoded = seq_len * (layers * (of_decoder - across) + self.vocab_size * D)
        seen = self.num_layers * encoder_len**2 + layers * seq_len * (seq_len / 2 + encoder_len)
        return (6 * (encoded + decoded) + 12 * width * seen) / seq_len

    def attention_needs(self, *, prefix: bool = False) -> AttentionNeeds:
        """What the model asks of its attention kernel, whether or not rows have a prefix."""
        return dataclasses.replace(super().attention_needs(), bidirectional=True, bias=True)

    @property
    def mlp_residuals(self) -> tuple[tuple[str, NumberKind], ...]:
        """ReLU's input tells where it was above 0; a gated GELU keeps more, in its tanh form."""
        if not self.gated_mlp:
            return super().mlp_residuals
        factor: tuple[str, NumberKind] = ("factor of the gate", "compute")
        return *super().mlp_residuals, *[INSIDE_GELU] * 4, *[factor] * 2
