"""Other places that metrics go to, by name; which of them a run has is `monitor.writers`."""

import importlib.util
from collections.abc import Sequence
from typing import Any

from jaxscale.monitor.sinks import trackio, wandb
from jaxscale.monitor.sinks.base import Sink
from jaxscale.system.exits import BadInput

OPEN = {"wandb": wandb.open_run, "trackio": trackio.open_run}


def open_sinks(names: Sequence[str], workdir: Any, start_step: int) -> list[Sink]:
    """A sink for each name. Raises BadInput where a package is missing."""
    if missing := missing_packages(names):
        raise BadInput("; ".join(missing))
    return [Sink(name, workdir, start_step, OPEN[name]) for name in names]


def missing_packages(names: Sequence[str]) -> list[str]:
    """One line for each writer whose package is not installed."""
    return [
        f"monitor.writers={name!r} needs its package: pip install 'jaxscale[{name}]', or leave it out"
        for name in names
        if importlib.util.find_spec(name) is None
    ]
