"""Settings of periodic exports."""

import dataclasses
import re
from typing import Literal

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Weights as a Hugging Face model in WORKDIR/export/STEP, written in the background after a save."""

    every_steps: int = setting(
        0,
        "steps between two exports, each made of the checkpoint of that step, so a multiple of "
        "checkpoint.save_every_steps; the last step is exported too; 0: none",
        may_change=True,
    )
    dtype: Literal["bfloat16", "float32"] = setting("bfloat16", "of the exported weights", may_change=True)
    ema: bool = setting(False, "true: the average that train.ema keeps", may_change=True)
    keep: int = setting(1, "newest exports that are kept; 0: all", may_change=True)
    push_to: str | None = setting(
        None,
        "OWNER/NAME on the Hugging Face Hub to which each export is sent; the token is read from HF_TOKEN alone; "
        "none: nowhere",
        may_change=True,
    )

    def __post_init__(self):
        for name in ("every_steps", "keep"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name}={getattr(self, name)} must be 0 or more")
        if self.push_to is not None:
            check_hub_name("push_to", self.push_to)
            if not self.every_steps:
                raise BadInput("push_to sends what every_steps=0 never exports; set every_steps too")


def check_hub_name(setting_name: str, name: str) -> None:
    """Raises BadInput unless the name is a valid Hub repository name."""
    if not HUB_NAME.fullmatch(name) or ".." in name or "--" in name:
        raise BadInput(f"{setting_name}={name!r} must be a repository of the Hub, written OWNER/NAME")
