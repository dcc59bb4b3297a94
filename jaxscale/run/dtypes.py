"""The dtypes of a run: resolved for its hardware when it begins, and kept by every later start and branch."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxscale.auto_dtype import Resolved, is_auto, resolve_dtypes
from jaxscale.checkpoint.branch import open_source
from jaxscale.config import RunConfig
from jaxscale.hardware import DtypeChoice, choose_compute_dtype
from jaxscale.hosts.agree import agreed
from jaxscale.run.resume_checks import recorded_run
from jaxscale.system import paths


def resolve_run_dtypes(
    cfg: RunConfig, workdir: Any, replay: str | None = None
) -> tuple[RunConfig, tuple[Resolved, ...]]:
    """The config without 'auto', and what each such setting has become. The same in all processes.

    A run that has begun keeps the dtypes that it has recorded. One that replays another run, or begins with the weights
    of one, takes the dtypes of that run. replay: the work folder of --replay. Raises BadInput where init.from_path has
    no checkpoint.
    """
    if not is_auto(cfg):
        return cfg, ()
    choice = DtypeChoice(*agreed(lambda: choose_compute_dtype(jax.devices()[0])))  # hosts may differ in their CPUs
    return resolve_dtypes(cfg, choice, *recorded_config(cfg, paths.as_path(workdir), replay))


def recorded_config(cfg: RunConfig, folder: Any, replay: str | None) -> tuple[Mapping[str, Any], str]:
    """(the config of the run whose dtypes are kept, or {}; where it is recorded)."""
    if begun := recorded_run(folder).get("config"):
        return begun, "this run"
    if replay and (replayed := recorded_run(paths.as_path(replay)).get("config")):
        return replayed, replay
    if cfg.init.from_path is not None:
        source = open_source(cfg.init.from_path, log=lambda line: None)  # resolve_start opens it again, and logs
        return source.record["run"].get("config") or {}, str(source)
    return {}, ""


def dtype_record(resolved: tuple[Resolved, ...], past: Mapping[str, Any]) -> dict[str, Any]:
    """{setting: {"dtype", "reason"}} for the record of the run; reasons of an earlier start stay."""
    known = past.get("dtypes", {})
    new = {one.name: {"dtype": one.dtype, "reason": one.reason} for one in resolved}
    stays = lambda name, found: name not in new or new[name]["dtype"] == found["dtype"]
    return new | {name: found for name, found in known.items() if stays(name, found)}
