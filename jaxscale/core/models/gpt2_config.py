"""Settings of GPT-2, and quantities derived from them."""

import dataclasses
from typing import Literal

from jaxscale.core.models.config import INSIDE_GELU, BiasedConfig, ResidualDtype
from jaxscale.schema import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2Config(BiasedConfig):
    """Settings of GPT-2. The 124M model: 12 layers, width 768, 12 heads, 1024 positions, 50257 tokens."""

    name: Literal["gpt2"] = setting("gpt2", "which model this is")
    max_seq_len: int = setting(1024, "number of learned positions, the longest row")
    dropout: float = setting(0.0, "rate for embeddings, attention and MLP outputs; GPT-2 had 0.1, now usually 0")

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
        """Adds the float32 arrays that tanh GELU saves besides its input."""
        return *super().mlp_residuals, *[INSIDE_GELU] * 4
