"""Orbax, imported at first use and made to be quiet: its failures leave jaxscale as one line, not as thousands."""

import functools
import logging
import sys
import warnings
from typing import Any


def import_orbax() -> Any:
    """The package orbax.checkpoint (0.5 to 2 s the first time), silenced."""
    import orbax.checkpoint  # here, because a run needs it only at its first save and should not start later for it
    from orbax.checkpoint._src.path import gcs_utils

    # To delete a step it asks the bucket whether it has a hierarchical namespace, by a client that wants a project and
    # the right storage.buckets.get, which an account that may read and write objects lacks: the save then fails.
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False  # there, empty folders stay and count as nothing
    silence()
    return orbax.checkpoint


@functools.cache
def silence() -> None:
    """Keeps from stderr what Orbax logs and what its unfinished reads and writes complain of after one has failed.

    After the import, not before: absl makes a logger of its own kind, which knows who called it.
    """
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
    logging.getLogger("asyncio").addFilter(lambda record: not is_leftover(record.getMessage()))
    # a failed read leaves coroutines that nobody waits for; Python complains when it collects them
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        # a read or write that ends after another has failed finds the event loop closed, or is ended where it waits;
        # the failure itself is raised
        code = getattr(unraisable.object, "cr_code", None)
        leftover = code is not None and is_leftover(code.co_filename)
        if not (leftover or isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    sys.unraisablehook = hook


def is_leftover(message: str) -> bool:
    """True for asyncio's complaint about reads and writes that failed beside the one whose error is raised.

    Nothing else in this program uses asyncio.
    """
    return "orbax" in message or "never retrieved" in message
