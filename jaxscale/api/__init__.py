"""The Python API: the functions that the command line calls.

`import jaxscale` exports these functions and imports their modules on first use; see docs/python_api.md. User errors
raise BadInput with a one-line message. Training that ends for other reasons raises Stop with an exit code. Both
exceptions are in jaxscale.system.exits.
"""

import dataclasses
from collections.abc import Callable, Mapping

Say = Callable[[str], None]  # called with a line of progress
silent: Say = lambda line: None


@dataclasses.dataclass(frozen=True)
class Trained:
    """Result of train(), which the other functions accept instead of a work folder."""

    workdir: str
    step: int  # last step of the training
    metrics: Mapping[str, float]  # last value of each metric, such as loss and validation/loss

    def __str__(self) -> str:
        return self.workdir
