"""Settings of GPT-2, and what follows from them."""

import dataclasses
from typing import ClassVar, Literal

from jaxscale.models.config import (
    ATTENTION_ADDED,
    BLOCK_INPUT,
    KEY,
    MLP_UP,
    QUERY,
    VALUE,
    ModelConfig,
    NumberKind,
    check_positive,
)
from jaxscale.ops.config import ATTENTION_OUT
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt2Config(ModelConfig):
    """GPT-2; the 124M model is 12 layers of width 768 with 12 heads over 1024 positions and 50257 tokens."""

    name: Literal["gpt2"] = setting("gpt2", "which model this is")
    max_seq_len: int = setting(1024, "learned positions: the longest row")
    dropout: float = setting(0.0, "of embeddings and of what each block adds; GPT-2 had 0.1, pretraining today has 0")

    norm_residuals: ClassVar[tuple[NumberKind, ...]] = ("float32", "float32")  # LayerNorm: before and after its scale
    activation_names: ClassVar[tuple[str, ...]] = (
        BLOCK_INPUT, QUERY, KEY, VALUE, ATTENTION_OUT, ATTENTION_ADDED, MLP_UP
    )  # fmt: skip

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "max_seq_len")
        if self.embed_dim % self.num_heads:
            raise BadInput(f"embed_dim={self.embed_dim} must be a multiple of num_heads={self.num_heads}")

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.embed_dim // self.num_heads

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
        return *super().mlp_residuals, *[("inside GELU", "float32")] * 4
