"""Trackio: metrics in a local database, or a Hugging Face Space. The one file that imports trackio.

Its steps are the record's own, and a step that is run again is there twice: once for each `attempt`, which counts how
often the run was opened. TRACKIO_PROJECT, TRACKIO_DIR and TRACKIO_SPACE_ID hold as they do elsewhere.

Source: https://huggingface.co/docs/trackio/index.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from jaxscale.monitor.sinks.base import Begin


class TrackioRun:
    """An open run."""

    def __init__(self, run: Any, attempt: int):
        self.run, self.attempt = run, attempt
        self.place = f"run {run.name}; trackio show --project {run.project}"

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes a record, without what is not known."""
        numbers = {name: value for name, value in metrics.items() if value is not None}
        self.run.log(numbers | {"attempt": self.attempt}, step=step)

    def finish(self) -> None:
        """Sends what is left."""
        with contextlib.redirect_stdout(sys.stderr):
            self.run.finish()


def open_run(begin: Begin) -> TrackioRun:
    """The run of this work folder, gone on with: its name there is that of the folder and the id that it keeps."""
    import trackio

    with contextlib.redirect_stdout(sys.stderr):  # it prints what it does; the bar is on stdout
        run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or "jaxscale",
            name=f"{begin.run_name}-{begin.id}",
            resume="allow",
            config=begin.config.get("config", begin.config) | {"attempts": begin.attempt},
            embed=False,
            auto_log_gpu=False,  # the run's own records have what the devices say
            auto_log_cpu=False,
        )
    return TrackioRun(run, begin.attempt)
