"""train: a run in a work folder, to completion."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale import build, schema
from jaxscale.api import Trained
from jaxscale.budget import Budget
from jaxscale.build import Program
from jaxscale.checkpoint.branch import open_source
from jaxscale.checkpoint.storage_errors import stop_if_unreachable
from jaxscale.command_line import whole_number
from jaxscale.config import RunConfig
from jaxscale.config_file import load_config
from jaxscale.hosts import cluster
from jaxscale.hosts.programs import enable_shared_cache
from jaxscale.planning.check import check_machine
from jaxscale.planning.out_of_memory import memory_help, out_of_memory_explained
from jaxscale.reporting.history import read_history
from jaxscale.run.branching import branch_settings
from jaxscale.run.dtypes import resolve_run_dtypes
from jaxscale.run.opening import open_run, train_to_completion
from jaxscale.run.options import RunOptions, allowed_names
from jaxscale.run.resume_checks import has_begun, recorded_settings
from jaxscale.run.services import run_services
from jaxscale.system.exits import BadInput
from jaxscale.system.process import files_as
from jaxscale.training.stopping import raise_on_sigterm


def train(
    cfg: RunConfig,
    workdir: str,
    *,
    stop_after: int | None = None,
    allow_change: str | Sequence[str] = (),
    steal_lock: bool = False,
) -> Trained:
    """The folder of the run, trained to its end: `jaxscale train`, in this process.

    A run that has begun goes on from its newest checkpoint, and one that is complete is left as it is. Interrupting the
    cell saves, and raises Stop with exit code 10: the same call goes on. In a notebook progress is a bar.

    Args: cfg: of load_config. workdir: local or gs://. stop_after: leave after this step, the horizon stays as it is.
    allow_change: settings in which a run that goes on may differ from how it began.
    Raises: BadInput and Stop as `jaxscale train` ends with their codes.
    """
    names = (allow_change,) if isinstance(allow_change, str) else allow_change
    options = RunOptions(
        stop_after=None if stop_after is None else whole_number("stop_after", str(stop_after), 1),
        allow_change=allowed_names("allow_change", ",".join(names)) if names else (),
        steal_lock=steal_lock,
    )
    if not isinstance(cfg, RunConfig):
        raise BadInput(f"cfg={cfg!r} is not a config; train(load_config(FILE), WORKDIR) is how a file is trained")
    train_in(str(workdir), cfg, options, {})
    rows = read_history(workdir).rows
    latest = {name: value for row in rows for name, value in row.items() if isinstance(value, int | float)}
    latest.pop("step", None)  # of the last line of metrics: training may have ended between two
    return Trained(str(workdir), open_source(str(workdir), named="workdir").step, latest)


def train_file(
    file: str,
    overrides: Mapping[str, Any],
    workdir: str,
    options: RunOptions,
    flags: Mapping[str, str],
    branch: tuple[str, str | None] | None = None,
) -> None:
    """Trains what a config file describes in a work folder to completion.

    Args: flags: as of train_in. branch: (run that this is a branch of, tokens over which its rate decays or None); a
    setting of the branch that is in `overrides` stays as it is there.
    """
    recorded = lambda: stop_if_unreachable(lambda: recorded_settings(workdir), workdir)
    if branch is not None:
        if both := [name for name in ("init.from_path", "init.what") if name in overrides]:
            raise BadInput(f"--branch_from={branch[0]} and {both[0]} say what the run begins with; give one of them")
        overrides = {**branch_settings(*branch, recorded()), **overrides}
    train_in(workdir, load_config(file, overrides, recorded), options, flags)


def train_in(workdir: str, cfg: RunConfig, options: RunOptions, flags: Mapping[str, str]) -> None:
    """Trains in a work folder to completion. flags: cluster.FLAGS; where there are none, the cluster is asked."""
    place = cluster.discover_process(flags)
    facts = {"--workdir": workdir} | options.facts | schema.flatten(schema.to_dict(cfg))
    with raise_on_sigterm(), files_as(options.mode), cluster.joined(place, facts, flags) as team:
        enable_shared_cache(workdir)
        resolved, _ = resolve_run_dtypes(cfg, workdir, options.replay)
        check_machine(resolved, begun=stop_if_unreachable(lambda: has_begun(workdir), workdir))
        programs: list[Program] = []

        def make_program(cfg: RunConfig, budget: Budget) -> Program:
            programs.append(build.make_program(cfg, budget))
            return programs[-1]

        explained = out_of_memory_explained(lambda: memory_help(programs[-1] if programs else None))
        with run_services(cfg, workdir, options, team) as services, explained:
            run = open_run(cfg, workdir, team, services=services, options=options, make_program=make_program)
            train_to_completion(run)
