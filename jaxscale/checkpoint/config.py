"""When the state is saved, which checkpoints stay, and what happens when one cannot be written or read."""

import dataclasses
from typing import Literal

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved, and which checkpoints stay."""

    save_every_steps: int = setting(500, "steps between two checkpoints; 0: only at the end", may_change=True)
    keep_last: int = setting(3, "newest checkpoints that are kept", may_change=True)
    keep_every_steps: int = setting(
        0, "checkpoints of steps divisible by this are kept for good; 0: none", may_change=True
    )
    keep_best: int = setting(
        0, "checkpoints with the lowest validation loss that are kept", may_change=True, read_if="eval.num_rows"
    )
    verify_saved: bool = setting(
        True, "read every checkpoint back after it was written, and compare every bit", may_change=True
    )
    on_corrupt: Literal["fallback", "stop"] = setting(
        "fallback", "a checkpoint that cannot be read: go on from the one before it, or stop", may_change=True
    )
    wait_seconds: float = setting(
        30.0, "how long a step may wait for the save before; then its own is put off", may_change=True
    )
    max_failed_saves: int = setting(3, "saves in a row that may fail before the run stops", may_change=True)
    max_save_seconds: float = setting(
        1800.0, "how long a save may take, waiting for storage included, before the run stops", may_change=True
    )

    def __post_init__(self):
        for name in ("save_every_steps", "keep_every_steps", "keep_best"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must be 0 or more")
        if self.keep_last < 1:
            raise BadInput(f"keep_last={self.keep_last} must be at least 1, or there would be nothing to go on from")
        if self.max_failed_saves < 1:
            raise BadInput(f"max_failed_saves={self.max_failed_saves} must be at least 1: the first failure stops")
        if self.wait_seconds < 0:
            raise BadInput(f"wait_seconds={self.wait_seconds} must be 0 or more")
        if self.max_save_seconds <= 0:
            raise BadInput(f"max_save_seconds={self.max_save_seconds} must be above 0; give it an hour if unsure")
