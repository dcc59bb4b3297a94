"""Settings of multi-head latent attention, and sizes derived from them."""

import dataclasses

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Projects keys and values of all heads from one latent per position (arXiv:2405.04434, section 2.1)."""

    kv_rank: int = setting(help="size of the latent of keys and values")
    q_rank: int = setting(0, "size of the latent of queries; 0: queries are projected from the residual stream")
    nope_dim: int = setting(help="features of a head's query or key without RoPE")
    rope_dim: int = setting(help="features with RoPE, even; keys of all heads share them")
    value_dim: int = setting(help="features of a head's value")

    def __post_init__(self):
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 1")
        if self.q_rank < 0:
            raise BadInput(f"q_rank={self.q_rank} must be at least 1, or 0 for none")
        if self.rope_dim % 2:
            raise BadInput(f"rope_dim={self.rope_dim} must be even, since RoPE rotates pairs")

    @property
    def head_dim(self) -> int:
        """Size of a query or key of a head."""
        return self.nope_dim + self.rope_dim

    @property
    def cache_width(self) -> int:
        """Cached features per position and layer in sampling, shared by all heads."""
        return self.kv_rank + self.rope_dim

    @property
    def width(self) -> int:
        """Features per position of all latents."""
        return self.q_rank + self.cache_width

    @property
    def norm_params(self) -> int:
        """Number of norm scales of a layer's latents."""
        return self.q_rank + self.kv_rank

    def matrices(self, embed_dim: int, heads: int) -> dict[str, tuple[int, int]]:
        """Returns {matrix: (input features, output features)}."""
        D, queries = embed_dim, heads * self.head_dim
        query = {"wq": (D, queries)}
        if self.q_rank:
            query = {"wq_down": (D, self.q_rank), "wq_up": (self.q_rank, queries)}
        return query | {
            "wkv_down": (D, self.cache_width),
            "wkv_up": (self.kv_rank, heads * (self.nope_dim + self.value_dim)),
            "wo": (heads * self.value_dim, D),
        }
