"""Reports out-of-memory errors of devices in one line instead of XLA's traceback."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import jax

from jaxscale import units
from jaxscale.build import Program
from jaxscale.program.memory import memory_need
from jaxscale.system.exits import Exit, Stop

EXHAUSTED = re.compile(r"RESOURCE_EXHAUSTED.*memory|RESOURCE_EXHAUSTED.*allocat", re.DOTALL | re.IGNORECASE)
ASKED = re.compile(r"allocat\w*\s+(?:a buffer of\s+)?([\d.]+ ?(?:bytes|[KMGT]i?B))")


@contextlib.contextmanager
def out_of_memory_explained(help: Callable[[], tuple[str, Sequence[str]]]) -> Iterator[None]:
    """Converts XLA's out-of-memory errors to Stop (NO_GO), and re-raises all other errors.

    help: returns (memory estimate or '', settings that reduce memory most).
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not EXHAUSTED.search(message := str(error)):
            raise
        asked = ASKED.search(message)
        what = f"allocating {asked[1]} failed" if asked else message.splitlines()[0][:200]
        estimate, settings = help()
        line = f"out of device memory: {what}{estimate}; try {' or '.join(settings)}"
        raise Stop(Exit.NO_GO, line) from None


def memory_help(program: Program | None) -> tuple[str, tuple[str, ...]]:
    """Returns (memory estimate of a training step, two settings that reduce the largest part of it)."""
    if program is None:
        return "", ("a smaller model", "more devices (mesh.fsdp)")
    need, cfg = memory_need(program), program.cfg
    estimate = (
        f"; estimated need per device: {units.size(need.total)}, of which weights, gradients and moments need "
        f"{units.size(need.state)} and activations {units.size(need.activations)}"
    )
    if need.state > need.activations:
        return estimate, ("more devices to shard the state over (mesh.fsdp)", "fewer layers (model.num_layers)")
    fewer_rows = f"train.num_microbatches={2 * cfg.train.num_microbatches}"
    remat_fix = "model.remat=full" if cfg.model.remat != "full" else f"a smaller seq_len than {cfg.seq_len}"
    return estimate, (fewer_rows, remat_fix)
