"""Settings of the step."""

import dataclasses
from typing import Literal

from jaxscale.models.config import AUX_LOSSES
from jaxscale.schema import setting
from jaxscale.system.exits import BadInput
from jaxscale.training.ema import EmaConfig
from jaxscale.training.guard import GuardConfig
from jaxscale.training.loss_scale import LossScaleConfig
from jaxscale.training.recovery import RecoveryConfig
from jaxscale.training.replica_watch import ReplicaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a batch goes through the model, and what is done when that goes wrong."""

    num_microbatches: int = setting(1, "parts in which a batch goes through the model, to save memory")
    reduce_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "in which gradients are summed over devices; bfloat16 halves their bytes and rounds them"
    )
    aux_losses: dict[str, float] = setting({}, f"weight by name of auxiliary losses; there is {', '.join(AUX_LOSSES)}")
    guard: GuardConfig = setting(GuardConfig)
    ladder: RecoveryConfig = setting(RecoveryConfig)
    loss_scale: LossScaleConfig = setting(LossScaleConfig)
    ema: EmaConfig = setting(EmaConfig)
    replicas: ReplicaConfig = setting(ReplicaConfig)

    def __post_init__(self):
        if self.num_microbatches < 1:
            raise BadInput(f"num_microbatches={self.num_microbatches} must be at least 1")
        for name, weight in self.aux_losses.items():
            if name not in AUX_LOSSES:
                raise BadInput(f"aux_losses has {name!r}; there is {', '.join(AUX_LOSSES)}")
            if weight < 0:
                raise BadInput(f"aux_losses.{name}={weight} must not be negative")
