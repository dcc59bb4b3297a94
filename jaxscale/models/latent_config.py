"""Settings of latent attention, which some models have in place of plain attention, and its counts."""

import dataclasses

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Keys and values of all heads come from one small vector of each position (arXiv:2405.04434, section 2.1)."""

    kv_rank: int = setting(help="numbers of a position that the keys and values of all heads come from")
    q_rank: int = setting(0, "the same for queries; 0: they come from the residual stream itself")
    nope_dim: int = setting(help="numbers of a query or key of a head that know no position")
    rope_dim: int = setting(help="those that RoPE turns, even; of keys all heads have the same")
    value_dim: int = setting(help="numbers of a value of a head")

    def __post_init__(self):
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 1")
        if self.q_rank < 0:
            raise BadInput(f"q_rank={self.q_rank} must be at least 1, or 0 for none")
        if self.rope_dim % 2:
            raise BadInput(f"rope_dim={self.rope_dim} must be even, for RoPE turns pairs")

    @property
    def head_dim(self) -> int:
        """Size of a query, and of a key."""
        return self.nope_dim + self.rope_dim

    @property
    def cached(self) -> int:
        """Numbers of a position and layer that writing text keeps: no head has any of its own."""
        return self.kv_rank + self.rope_dim

    @property
    def width(self) -> int:
        """Numbers of a position that all heads make their queries, keys and values of."""
        return self.q_rank + self.cached

    @property
    def norm_params(self) -> int:
        """Scales of the norms of a layer's small vectors."""
        return self.q_rank + self.kv_rank

    def matrices(self, embed_dim: int, heads: int) -> dict[str, tuple[int, int]]:
        """{name of each matrix: (numbers per position that come in, numbers that come out)}."""
        D, queries = embed_dim, heads * self.head_dim
        of_queries = {"wq": (D, queries)}
        if self.q_rank:
            of_queries = {"wq_down": (D, self.q_rank), "wq_up": (self.q_rank, queries)}
        return of_queries | {
            "wkv_down": (D, self.cached),
            "wkv_up": (self.kv_rank, heads * (self.nope_dim + self.value_dim)),
            "wo": (heads * self.value_dim, D),
        }
