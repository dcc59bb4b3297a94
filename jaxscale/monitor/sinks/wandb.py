"""Weights & Biases: one run there for all starts of a run here. The one file that imports wandb.

Its own step can only grow, and a run that goes back to an older step must show both lines. So metrics are drawn over
`step`, which is ours, and each record carries `attempt`: how often the run was opened. A chart grouped or filtered by
it shows the steps that were run again apart from those that were given up.

Sources: https://docs.wandb.ai/guides/track/log/customize-logging-axes (define_metric) and
https://docs.wandb.ai/guides/runs/resuming (an id with resume="allow").
"""

import os
import tempfile
from collections.abc import Mapping
from typing import Any

from jaxscale.monitor.sinks.base import CLOSE_SECONDS, Begin
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

OFFLINE = ("offline", "disabled", "dryrun")


class WandbRun:
    """An open run."""

    def __init__(self, run: Any, attempt: int):
        self.run, self.attempt = run, attempt
        kept = f"kept in {run.dir.removesuffix('/files')}; wandb sync --append brings it there"
        self.place = kept if run.offline else run.url

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes a record. What is not known is left out: W&B would draw nothing for it."""
        numbers = {name: value for name, value in metrics.items() if value is not None}
        self.run.log(numbers | {"step": step, "attempt": self.attempt})

    def finish(self) -> None:
        """Sends what is left, if that can be done in time."""
        self.run.finish()


def open_run(begin: Begin) -> WandbRun:
    """The run of this work folder, gone on with. WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and WANDB_API_KEY hold.

    Raises BadInput where nobody is logged in, for wandb would ask at the terminal that the run prints to.
    """
    import wandb

    if os.environ.get("WANDB_MODE") not in OFFLINE and not wandb.api.api_key:
        raise BadInput("nobody is logged in; set WANDB_API_KEY, or WANDB_MODE=offline to keep all on this machine")
    settings = wandb.Settings(
        console="off",  # the run's own output stays where it is
        silent=True,
        disable_git=True,  # the commit is in the config; a diff of the sources is nobody else's
        disable_code=True,
        finish_timeout=CLOSE_SECONDS,
        finish_timeout_raises=True,
        x_disable_machine_info=True,  # the name of this machine is nobody else's either
    )
    folder = tempfile.mkdtemp(prefix="jaxscale-wandb-") if paths.is_remote(begin.folder) else str(begin.folder)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "jaxscale",
        id=begin.id,
        name=os.environ.get("WANDB_NAME") or begin.run_name,
        resume=None
        if os.environ.get("WANDB_MODE") in OFFLINE
        else "allow",  # offline, `wandb sync --append` joins them
        dir=folder,
        config=begin.config.get("config", begin.config) | {"attempts": begin.attempt},
        settings=settings,
    )
    run.config.update({"attempts": begin.attempt}, allow_val_change=True)
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return WandbRun(run, begin.attempt)
