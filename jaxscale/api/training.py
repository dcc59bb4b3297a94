"""train(): a run in a work folder, to completion."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale import build, schema
from jaxscale.api import Trained
from jaxscale.build import Program
from jaxscale.config import RunConfig
from jaxscale.program.budget import Budget
from jaxscale.program.machine_check import check_machine
from jaxscale.program.out_of_memory import memory_help, out_of_memory_explained
from jaxscale.runtime.checkpoint.branch import open_source
from jaxscale.runtime.checkpoint.storage_errors import stop_if_unreachable
from jaxscale.runtime.hosts import cluster
from jaxscale.runtime.hosts.programs import enable_shared_cache
from jaxscale.runtime.monitor.history import read_history
from jaxscale.runtime.monitor.sinks import missing_packages
from jaxscale.runtime.run.branching import branch_settings
from jaxscale.runtime.run.opening import open_run, train_to_completion
from jaxscale.runtime.run.options import RunOptions, allowed_names
from jaxscale.runtime.run.resume_checks import recorded_settings
from jaxscale.runtime.run.services import run_services
from jaxscale.runtime.run.start import resolve_run_dtypes
from jaxscale.runtime.training.stopping import raise_on_sigterm
from jaxscale.settings.command_line import whole_number
from jaxscale.settings.config_file import load_config
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.system.process import files_as


def train(
    cfg: RunConfig,
    workdir: str,
    *,
    stop_after: int | None = None,
    allow_change: str | Sequence[str] = (),
    steal_lock: bool = False,
) -> Trained:
    """Trains a run to completion in this process, like `jaxscale train`. Returns its folder, last step and metrics.

    Resumes from the newest checkpoint. A complete run is not changed. Interrupting a notebook cell saves a checkpoint
    and raises Stop with exit code 10; the same call then resumes the run. Notebooks show a progress bar.

    cfg: from load_config(). workdir: local or gs:// folder. stop_after: step after which to stop, without changing the
    schedule. allow_change: settings that a resumed run may change. Raises BadInput or Stop where `jaxscale train` would
    exit with an error code.
    """
    names = (allow_change,) if isinstance(allow_change, str) else allow_change
    options = RunOptions(
        stop_after=None if stop_after is None else whole_number("stop_after", str(stop_after), 1),
        allow_change=allowed_names("allow_change", ",".join(names)) if names else (),
        steal_lock=steal_lock,
    )
    if not isinstance(cfg, RunConfig):
        raise BadInput(f"cfg={cfg!r} is not a config; to train from a file, use train(load_config(FILE), WORKDIR)")
    train_in(str(workdir), cfg, options, {})
    rows = read_history(workdir).rows
    latest = {name: value for row in rows for name, value in row.items() if isinstance(value, int | float)}
    latest.pop("step", None)  # the step of the last metrics line, which may be before the last step
    return Trained(str(workdir), open_source(str(workdir), named="workdir").step, latest)


def load_train_config(
    file: str, overrides: Mapping[str, Any], workdir: str, branch: tuple[str, str | None] | None = None
) -> RunConfig:
    """Returns the config of a file for a run in this work folder.

    branch: (run to branch from, length of a learning rate decay or None). `overrides` take precedence over settings of
    the branch.
    """
    recorded = functools.partial(recorded_settings, workdir)
    if branch is not None:
        if both := [name for name in ("init.from_path", "init.what") if name in overrides]:
            raise BadInput(f"--branch_from={branch[0]} and {both[0]} both set the initial state; set only one of them")
        overrides = {**branch_settings(*branch, recorded()), **overrides}
    cfg = load_config(file, overrides, recorded)
    if missing := missing_packages(cfg.monitor.writers):
        raise BadInput("; ".join(missing))
    return cfg


def train_in(workdir: str, cfg: RunConfig, options: RunOptions, flags: Mapping[str, str]) -> None:
    """Trains in a work folder to completion. flags: values of cluster.FLAGS, which override process discovery."""
    process_info = cluster.discover_process(flags)
    facts = {"--workdir": workdir} | options.facts | schema.flatten(schema.to_dict(cfg))
    with raise_on_sigterm(), files_as(options.mode), cluster.joined(process_info, facts, flags) as team:
        enable_shared_cache(workdir)
        resolved, _ = resolve_run_dtypes(cfg, workdir, options.replay)
        check_machine(resolved, begun=stop_if_unreachable((paths.as_path(workdir) / "config.json").exists, workdir))
        programs: list[Program] = []

        def make_program(cfg: RunConfig, budget: Budget) -> Program:
            programs.append(build.make_program(cfg, budget))
            return programs[-1]

        explain_oom = out_of_memory_explained(lambda: memory_help(programs[-1] if programs else None))
        with run_services(cfg, workdir, options, team) as services, explain_oom:
            run = open_run(cfg, workdir, team, services=services, options=options, make_program=make_program)
            train_to_completion(run)
