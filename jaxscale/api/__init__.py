"""The Python API: the functions that the command line calls.

`import jaxscale` exports all of them and imports their modules on use; see docs/python_api.md. User errors raise
BadInput with one line; other ends of a training raise Stop with an exit code (both of jaxscale.system.exits).
"""

import dataclasses
from collections.abc import Callable, Mapping

Say = Callable[[str], None]  # takes a line of progress
silent: Say = lambda line: None


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of a training, which the other functions accept in place of a work folder."""

    workdir: str
    step: int  # the last trained step
    metrics: Mapping[str, float]  # the last value of each: loss, validation/loss, ...

    def __str__(self) -> str:
        return self.workdir
