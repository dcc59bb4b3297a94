"""Dtypes of a run: resolved for its hardware at the first start, reused by later starts and branches."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxscale.config import RunConfig
from jaxscale.kernels.hardware import DtypeChoice, choose_compute_dtype
from jaxscale.program.auto_dtype import Resolved, is_auto, resolve_dtypes
from jaxscale.runtime.checkpoint.branch import open_source
from jaxscale.runtime.hosts.agree import agreed
from jaxscale.runtime.run.resume_checks import recorded_run
from jaxscale.system import paths


def resolve_run_dtypes(
    cfg: RunConfig, workdir: Any, replay: str | None = None
) -> tuple[RunConfig, tuple[Resolved, ...]]:
    """Returns the config without 'auto', and each resolved setting. The same in all processes.

    An existing run keeps its recorded dtypes. A replay, or a run initialized from another one, uses that run's dtypes.
    Args: replay: the work folder of --replay. Raises BadInput if init.from_path has no checkpoint.
    """
    if not is_auto(cfg):
        return cfg, ()
    choice = DtypeChoice(*agreed(lambda: choose_compute_dtype(jax.devices()[0])))  # hosts may differ in their CPUs
    return resolve_dtypes(cfg, choice, *recorded_config(cfg, paths.as_path(workdir), replay))


def recorded_config(cfg: RunConfig, folder: Any, replay: str | None) -> tuple[Mapping[str, Any], str]:
    """Returns (config of the run whose dtypes apply, or {}; name of that run)."""
    if recorded := recorded_run(folder).get("config"):
        return recorded, "this run"
    if replay and (replayed := recorded_run(paths.as_path(replay)).get("config")):
        return replayed, replay
    if cfg.init.from_path is not None:
        source = open_source(cfg.init.from_path, log=lambda line: None)  # resolve_start opens it again, and logs
        return source.record["run"].get("config") or {}, str(source)
    return {}, ""


def dtype_record(resolved: tuple[Resolved, ...], past: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {setting: {"dtype", "reason"}} for the run's record; unchanged dtypes keep their first reason."""
    old = past.get("dtypes", {})
    new = {one.name: {"dtype": one.dtype, "reason": one.reason} for one in resolved}
    unchanged = lambda name, entry: name not in new or new[name]["dtype"] == entry["dtype"]
    return new | {name: entry for name, entry in old.items() if unchanged(name, entry)}
