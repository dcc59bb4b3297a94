"""Resolves dtypes that are 'auto', for a device or from the record of a run."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxscale import schema
from jaxscale.config import RunConfig
from jaxscale.core.models import AnyModelConfig
from jaxscale.kernels.hardware import Device, DtypeChoice, choose_compute_dtype

AUTO = "auto"
COMPUTE_DTYPE, MUON_DTYPE = "model.compute_dtype", "optim.muon_dtype"


class Resolved(NamedTuple):
    """The dtype of a setting that was 'auto'."""

    name: str
    dtype: str
    reason: str
    recorded: bool = False  # True if an earlier start recorded it

    def __str__(self) -> str:
        return f"{self.name}=auto: {self.dtype}, {self.reason}"


def is_auto(cfg: RunConfig) -> bool:
    """Returns True if a dtype of the config is 'auto'."""
    return cfg.model.compute_dtype == AUTO or (cfg.optim.name == "muon" and cfg.optim.muon_dtype == AUTO)


def resolve_dtypes(
    cfg: RunConfig, choice: DtypeChoice, recorded: Mapping[str, Any] | None = None, source: str = ""
) -> tuple[RunConfig, tuple[Resolved, ...]]:
    """Returns (config without 'auto', dtype of each setting that was 'auto').

    choice: result of choose_compute_dtype() for the devices. recorded: config of a run whose dtypes take precedence.
    source: name of this run in Resolved.reason.
    """
    resolved = []
    if cfg.model.compute_dtype == AUTO:
        resolved.append(from_record(COMPUTE_DTYPE, recorded, source, choice) or Resolved(COMPUTE_DTYPE, *choice))
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, compute_dtype=resolved[0].dtype))
    if cfg.optim.muon_dtype == AUTO:
        dtype = "bfloat16" if cfg.model.compute_dtype == "bfloat16" else "float32"
        reason = f"because {COMPUTE_DTYPE} is {cfg.model.compute_dtype}"
        muon = from_record(MUON_DTYPE, recorded, source) or Resolved(MUON_DTYPE, dtype, reason)
        cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, muon_dtype=muon.dtype))
        if cfg.optim.name == "muon":
            resolved.append(muon)
    return cfg, tuple(resolved)


def from_record(
    name: str, recorded: Mapping[str, Any] | None, source: str, choice: DtypeChoice | None = None
) -> Resolved | None:
    """Returns the recorded dtype of a setting, or None if it is not recorded. choice: default on this hardware."""
    dtype = schema.look_up(recorded or {}, name)
    if dtype is dataclasses.MISSING or dtype == AUTO:
        return None
    reason = f"recorded in {source}"
    if choice and choice.dtype != dtype:
        reason += (
            f"; the default on this hardware is {choice.dtype}: {choice.reason}; use --config.{name}={choice.dtype} to "
            "change it"
        )
    return Resolved(name, dtype, reason, recorded=True)


def device_dtypes(
    cfg: RunConfig, device: Device, recorded: Mapping[str, Any] | None = None
) -> tuple[RunConfig, tuple[Resolved, ...]]:
    """Same as resolve_dtypes(), for an attached device or a compile-only device. recorded: config of a resumed run."""
    return resolve_dtypes(cfg, choose_compute_dtype(device), recorded, "the run") if is_auto(cfg) else (cfg, ())


def for_device(cfg: RunConfig, device: Device) -> RunConfig:
    """Returns the config with dtypes resolved for a device."""
    return device_dtypes(cfg, device)[0]


def model_for_device(model: AnyModelConfig, device: Device) -> AnyModelConfig:
    """Returns the model config with its compute dtype resolved for a device."""
    if model.compute_dtype != AUTO:
        return model
    return dataclasses.replace(model, compute_dtype=choose_compute_dtype(device).dtype)
