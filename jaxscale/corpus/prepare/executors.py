"""Where the pieces of work of a preparation are done: what an executor can, and the one for this machine."""

import pathlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Executor(AbstractContextManager, Protocol):
    """All cores of this machine, or a cluster. Pieces write their results to files, and may be done twice."""

    def run_all(self, function: Callable[[Any], Any], calls: Sequence[Any]) -> Iterator[Any]:
        """Yields function(call) of each call, in any order. Raises what a call raised."""

    def write_pairs(self, paths: Sequence[str], threshold: float | None, folder: pathlib.Path) -> None:
        """Writes folder/pairs-*.npy, uint64[2, k]: the join of the blocks' sketches at `paths`; see joins.py."""
