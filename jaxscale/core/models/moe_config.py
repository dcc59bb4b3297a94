"""Settings of a mixture of experts, and quantities derived from them."""

import dataclasses
import math

from jaxscale.kernels.config import RouterConfig
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

# Keys of a loss's named parts. L layers  E experts  Q rounds
EXPERT_COUNTS = "expert_counts"  # int32[L, E]: tokens routed to each
EXPERT_ROUNDS = "expert_rounds"  # int32[Q]: all-to-all exchanges by number of rounds; if tokens are sent
ROUTER_ENTROPY = "router_entropy"  # float32[L]
ROUTER_SCORES = "router_scores"  # float32[L]: range of a token's scores
EXPERTS_DROPPED = "experts_dropped"  # int32[L]: (token, expert) pairs beyond capacity; with a capacity


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(RouterConfig):
    """A router, experts of which each token selects a few, and optionally a shared expert."""

    number: int = setting(help="experts per layer")
    mlp_dim: int = setting(help="width of an expert's gated MLP")
    shared_dim: int = setting(0, "width of a shared gated MLP for every token; 0: none")
    first_dense: int = setting(0, "the first n layers are dense, with the model's mlp_dim")
    capacity_factor: float = setting(
        0.0,
        "limits an expert to this multiple of its equal share of each row's tokens in training, first tokens first "
        "(arXiv:2101.03961); dropped tokens are counted; 0: no limit",
    )
    bias: bool = setting(
        False,
        "balances load by a bias per expert, added to its score in top-k only; after each step it grows by bias_rate "
        "if the expert had fewer tokens than the mean, and shrinks if it had more (arXiv:2408.15664)",
    )
    bias_rate: float = setting(1e-3, "step size of the bias; 0: constant", read_if=".bias")

    def __post_init__(self):
        for name in ("number", "mlp_dim"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("shared_dim", "first_dense", "capacity_factor", "bias_rate"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must not be negative")
        self.check_router(self.number)

    def capacity(self, row_length: int) -> int | None:
        """Returns the maximum number of tokens that an expert takes from a row of this length in training."""
        factor = self.capacity_factor
        return math.ceil(factor * self.chosen * row_length / self.number) if factor else None

    @property
    def active_dim(self) -> int:
        """Width of a token's experts, the shared one included."""
        return self.chosen * self.mlp_dim + self.shared_dim
