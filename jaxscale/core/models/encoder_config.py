"""Settings of BERT's encoder, and quantities derived from them."""

import dataclasses
from typing import ClassVar, Literal

from jaxscale.core.models.config import INSIDE_GELU, BiasedConfig, ModelKind, ResidualDtype
from jaxscale.kernels.config import AttentionNeeds
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(BiasedConfig):
    """Settings of BERT. The base model: 12 layers, width 768, 12 heads, 512 positions, 30522 tokens."""

    name: Literal["encoder"] = setting("encoder", "which model this is")
    mlp_dim: int = setting(help="width of the MLP; BERT has 4 * embed_dim")
    max_seq_len: int = setting(512, "number of learned positions, the longest row")
    num_token_types: int = setting(0, "rows of BERT's token type table; all tokens have type 0")
    dropout: float = setting(0.0, "rate for embeddings, attention and MLP outputs; BERT had 0.1")
    norm_eps: float = setting(1e-12, "added to the variance in norms")

    kind: ClassVar[ModelKind] = "encoder"

    def __post_init__(self):
        super().__post_init__()
        if self.num_token_types < 0:
            raise BadInput(f"num_token_types={self.num_token_types} must not be negative")

    @property
    def matmul_params(self) -> int:
        """Number of parameters in matmuls per token, the head's matrix included."""
        return super().matmul_params + self.embed_dim**2

    @property
    def num_params(self) -> int:
        """Number of parameters, embeddings and the head's bias included."""
        D, F = self.embed_dim, self.mlp_dim
        biases_and_norms = self.num_layers * (4 * D + F + D + 4 * D) + 2 * D + 3 * D + self.vocab_size
        return self.matmul_params + (self.max_seq_len + self.num_token_types) * D + biases_and_norms

    def attention_needs(self, *, prefix: bool = False) -> AttentionNeeds:
        """Returns the features that an attention kernel must support."""
        return dataclasses.replace(super().attention_needs(prefix=prefix), bidirectional=True)

    @property
    def mlp_residuals(self) -> tuple[tuple[str, ResidualDtype], ...]:
        """Adds the float32 arrays that exact GELU saves besides its input."""
        return *super().mlp_residuals, *[INSIDE_GELU] * 2
