"""Settings of a mixture of experts, which some models have in place of their blocks' MLP, and its counts."""

import dataclasses
import math

from jaxscale.ops.config import RouterForm
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

# Among the named parts of a loss. L layers  E experts  Q rounds
EXPERT_COUNTS = "expert_counts"  # int32[L, E]: how often each was chosen
EXPERT_ROUNDS = "expert_rounds"  # int32[Q]: exchanges of rows, by the rounds that they needed; where rows are sent
ROUTER_ENTROPY = "router_entropy"  # float32[L]
ROUTER_SCORES = "router_scores"  # float32[L]: how far the scores of a token lie apart
EXPERTS_DROPPED = "experts_dropped"  # int32[L]: choices that a limit left out; where there is one


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(RouterForm):
    """A router, experts of which each token has a few, and perhaps one that all have."""

    number: int = setting(help="experts of a layer")
    mlp_dim: int = setting(help="width of an expert's gated MLP")
    shared_dim: int = setting(0, "width of a gated MLP that every token has besides; 0: none")
    first_dense: int = setting(0, "the first n layers have the model's own mlp_dim and no experts")
    capacity_factor: float = setting(
        0.0,
        "in training an expert takes at most so many times its equal share of each row's tokens, the first ones "
        "(arXiv:2101.03961); the others go past it, and are counted; 0: no limit",
    )
    bias: bool = setting(
        False,
        "a number is added to each expert's score when a token's are chosen; after a step it grows by bias_rate where "
        "the expert had fewer tokens than the mean, and shrinks where it had more (arXiv:2408.15664)",
    )
    bias_rate: float = setting(1e-3, "by how much; 0: it stays", read_if=".bias")

    def __post_init__(self):
        for name in ("number", "mlp_dim"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("shared_dim", "first_dense", "capacity_factor", "bias_rate"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must not be negative")
        self.check_router(self.number)

    def capacity(self, row_length: int) -> int | None:
        """Tokens of a row of this length that an expert takes at most, in training."""
        factor = self.capacity_factor
        return math.ceil(factor * self.chosen * row_length / self.number) if factor else None

    @property
    def active_dim(self) -> int:
        """Width of what a token goes through."""
        return self.chosen * self.mlp_dim + self.shared_dim
