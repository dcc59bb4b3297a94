"""The Python interface, for notebooks and programs of one's own: the functions that the command line calls.

`import jaxscale` gives them all, each from its module here when it is asked for; docs/python_api.md has more. What a
person got wrong is a BadInput of one line; what else ends a training is a Stop with its exit code (both of
jaxscale.system.exits).
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Trained:
    """A work folder after training in it: what the other calls are given."""

    workdir: str
    step: int  # the last one that was trained
    metrics: Mapping[str, float]  # the last of each that was measured: loss, validation/loss, ...

    def __str__(self) -> str:
        return self.workdir
