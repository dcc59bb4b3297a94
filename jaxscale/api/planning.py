"""plan() and preflight(): cost and memory of a run, without a device."""

import pathlib
from collections.abc import Mapping
from typing import Any

from jaxscale.api import Say, silent
from jaxscale.config import RunConfig
from jaxscale.program.auto_dtype import device_dtypes
from jaxscale.program.budget import BEGINNING, Position
from jaxscale.runtime.checkpoint.branch import open_source
from jaxscale.runtime.run.resume_checks import recorded_position
from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.measured import Measured, measured_file, measured_on_chip, newest_machine, read_measured
from jaxscale.tools.planning.placeholder_devices import THIS_MACHINE, measured_machine, open_machine
from jaxscale.tools.planning.plan import PlanOptions, make_plan
from jaxscale.tools.planning.run_plan import RunPlan
from jaxscale.tools.planning.topology import Topology, open_topology
from jaxscale.tools.preflight import preflight as compiled
from jaxscale.tools.preflight.step_report import PreflightReport

USUAL = PlanOptions()


def plan(
    cfg: RunConfig, topology: str | None, options: PlanOptions = USUAL, say: Say = silent, *, workdir: str | None = None
) -> RunPlan:
    """Returns the estimated cost of a run on a machine, like `jaxscale plan`. Does not compile.

    topology: 'v5p:4x4x8', 'h100:32x8', ..., or 'here'. options: price, deadline, budget and similar. say: function that
    logs a line for each dtype that was 'auto', and for each preflight result that cannot be read. workdir: work folder
    of the run, if the plan is for resuming it.
    """
    machine, measured = machine_of(topology)
    position, recorded = run_to_resume(workdir)
    cfg, dtypes = device_dtypes(cfg, machine.devices[0], recorded)
    for one in dtypes:
        say(str(one))
    found = None if machine.name == THIS_MACHINE else compiled.find_compiled_step(cfg, machine.name, say)
    return make_plan(cfg, machine, options, measured=measured, compiled=found, position=position)


def run_to_resume(workdir: str | None) -> tuple[Position, Mapping[str, Any]]:
    """Returns (position, config) of the run in workdir; (BEGINNING, {}) for None. Raises BadInput for a missing run."""
    if workdir is None:
        return BEGINNING, {}
    source = open_source(workdir, named="workdir")
    return recorded_position(source.record["run"], source.step), source.record["run"]["config"]


def machine_of(topology: str | None) -> tuple[Topology, list[Measured]]:
    """Returns (machine, benchmark results of such chips) for a topology. 'here' is this machine, with its results."""
    if topology is None:
        raise BadInput("--topology must be given, such as --topology=v5p:4x4x8, --topology=h100:8x8 or --topology=here")
    if topology != THIS_MACHINE:
        machine = open_machine(topology)
        return machine, measured_on_chip(read_measured(), machine.devices[0].device_kind)
    measured = newest_machine(read_measured())
    if not measured:
        raise BadInput(
            f"--topology=here: {measured_file()} has no measurement of this machine; run: jaxscale bench step --save, "
            "or jaxscale qualify"
        )
    return measured_machine(measured[-1]), measured


def preflight(
    cfg: RunConfig,
    topology: str,
    *,
    name: str = "run",
    fresh: bool = False,
    save_executable: str | None = None,
    say: Say = silent,
    workdir: str | None = None,
) -> PreflightReport:
    """Compiles the training step without the target chips, and reports its memory, like `jaxscale preflight`.

    name: name of the config in the report. fresh: whether to ignore earlier results. save_executable: file for the
    compiled step. workdir: work folder of a run to resume; ramp stages that it has completed are not checked.
    """
    file = None if save_executable is None else pathlib.Path(save_executable)
    machine, (position, recorded) = open_topology(topology), run_to_resume(workdir)
    cfg, dtypes = device_dtypes(cfg, machine.devices[0], recorded)
    for one in dtypes:
        say(str(one))
    return compiled.preflight(
        cfg, machine, config_name=name, keep=not fresh, save_executable=file, say=say, position=position
    )
