"""What `jaxscale preflight` found out about the very step that is planned, if it is kept in the user's cache folder."""

from jaxscale.ahead.compiled import read_result, result_key
from jaxscale.ahead.preflight import ahead_program, make_report
from jaxscale.config import RunConfig
from jaxscale.planning.measured import Kept
from jaxscale.planning.topology import open_topology
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import cache_dir


def find_kept(cfg: RunConfig, topology: str) -> Kept | None:
    """The kept result, or None where there is none, or no package that could tell. Compiles nothing.

    The step is traced to find its name, which takes seconds; nothing is traced where nothing is kept.
    """
    if not any((cache_dir() / "preflight").glob("*.json")):
        return None
    try:
        opened = open_topology(topology)
        program = ahead_program(cfg, opened)
    except BadInput:  # no libtpu or CUDA plugin here, or a machine that only plan knows
        return None
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    found = read_result(result_key(lowered.as_text(), program, opened), print)
    if found is None:
        return None
    report = make_report("", program, opened, found)
    if report.peak_bytes is None or report.roofline is None:
        return None
    return Kept(report.peak_bytes, report.roofline.mfu_ceiling, report.date)
