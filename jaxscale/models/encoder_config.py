"""Settings of BERT's encoder, and what follows from them."""

import dataclasses
from typing import ClassVar, Literal

from jaxscale.models.config import INSIDE_GELU, BiasedConfig, Kind, NumberKind
from jaxscale.ops.config import AttentionNeeds
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(BiasedConfig):
    """BERT; the base model is 12 layers of width 768 with 12 heads over 512 positions and 30522 tokens."""

    name: Literal["encoder"] = setting("encoder", "which model this is")
    mlp_dim: int = setting(help="width of the MLP; BERT has 4 * embed_dim")
    max_seq_len: int = setting(512, "learned positions: the longest row")
    num_token_types: int = setting(0, "rows of BERT's table of token types, of which every token here has type 0")
    dropout: float = setting(0.0, "of embeddings and of what each block adds; BERT had 0.1")
    norm_eps: float = setting(1e-12, "added to the variance in norms")

    kind: ClassVar[Kind] = "encoder"

    def __post_init__(self):
        super().__post_init__()
        if self.num_token_types < 0:
            raise BadInput(f"num_token_types={self.num_token_types} must not be negative")

    @property
    def matmul_params(self) -> int:
        """Parameters that each token is multiplied with, the head's matrix among them."""
        return super().matmul_params + self.embed_dim**2

    @property
    def num_params(self) -> int:
        """Parameters in all, embeddings and the head's bias included."""
        D, F = self.embed_dim, self.mlp_dim
        biases_and_norms = self.num_layers * (4 * D + F + D + 4 * D) + 2 * D + 3 * D + self.vocab_size
        return self.matmul_params + (self.max_seq_len + self.num_token_types) * D + biases_and_norms

    def attention_needs(self, *, prefix: bool = False) -> AttentionNeeds:
        """What the model asks of its attention kernel."""
        return dataclasses.replace(super().attention_needs(prefix=prefix), bidirectional=True)

    @property
    def mlp_residuals(self) -> tuple[tuple[str, NumberKind], ...]:
        """GELU as it is defined keeps two arrays beside its input, in float32."""
        return *super().mlp_residuals, *[INSIDE_GELU] * 2
