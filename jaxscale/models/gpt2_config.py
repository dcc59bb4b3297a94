"""Settings of GPT-2, and what follows from them."""

import dataclasses
from typing import Literal

from jaxscale.models.config import INSIDE_GELU, BiasedConfig, NumberKind
from jaxscale.schema import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2Config(BiasedConfig):
    """GPT-2; the 124M model is 12 layers of width 768 with 12 heads over 1024 positions and 50257 tokens."""

    name: Literal["gpt2"] = setting("gpt2", "which model this is")
    max_seq_len: int = setting(1024, "learned positions: the longest row")
    dropout: float = setting(0.0, "of embeddings and of what each block adds; GPT-2 had 0.1, pretraining today has 0")

    @property
    def mlp_dim(self) -> int:
        """Width of the MLP."""
        return 4 * self.embed_dim

    @property
    def num_params(self) -> int:
        """Parameters in all, embeddings included."""
        D = self.embed_dim
        biases_and_norms = self.num_layers * ((3 * D + D) + (4 * D + D) + 4 * D) + 2 * D
        return self.matmul_params + self.max_seq_len * D + biases_and_norms

    @property
    def mlp_residuals(self) -> tuple[tuple[str, NumberKind], ...]:
        """GELU in its tanh form keeps four arrays beside its input, in float32."""
        return *super().mlp_residuals, *[INSIDE_GELU] * 4
