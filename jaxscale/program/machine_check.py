"""Checks mesh, kernels, data and memory before compilation, and reports all problems together."""

import dataclasses
import os

import jax

from jaxscale import units
from jaxscale.config import RunConfig
from jaxscale.core.models import AnyModelConfig
from jaxscale.kernels.attention import resolve_attention
from jaxscale.kernels.hardware import Device, find_chip, host_memory_bytes
from jaxscale.program.auto_dtype import for_device
from jaxscale.program.fitting_mesh import fitting_program
from jaxscale.program.memory import MemoryNeed, memory_lower_bound, memory_need
from jaxscale.runtime.data.checks import check_data
from jaxscale.runtime.monitor.sinks import missing_packages
from jaxscale.system.exits import BadInput, Exit, Stop

LAUNCH_HINT = "train with --coordinator=HOST:PORT --num_processes=N --process_id=I on each"
DATA = "data: "  # prefix of problems with the data


def check_machine(cfg: RunConfig, begun: bool = False) -> None:
    """Raises Stop if this config cannot run on the devices of this process. The message lists all problems and fixes.

    begun: True if the run, or the run from which it branches, has started. The exit code is NO_GO if memory is
    insufficient, DATA_MISMATCH if `begun` and all problems are about data, else BAD_INPUT. If `begun`, ramps and
    warmup are not checked here, because they may be complete; runtime.run.opening checks them.
    """
    if begun or cfg.init.what == "run":
        cfg = dataclasses.replace(
            cfg, batch_ramp=(), seq_len_ramp=(), optim=dataclasses.replace(cfg.optim, warmup_tokens=0)
        )
    findings, fits = find_problems(cfg, jax.devices())
    if findings:
        head = f"{len(findings)} reason{'s' * (len(findings) > 1)} why this config cannot run here"
        lines = "".join(f"\n  {number}. {finding}" for number, finding in enumerate(findings, 1))
        code = Exit.BAD_INPUT if fits else Exit.NO_GO
        if begun and all(finding.startswith(DATA) for finding in findings):
            code = Exit.DATA_MISMATCH
        raise Stop(code, head + lines)


def find_problems(cfg: RunConfig, devices: list[Device]) -> tuple[list[str], bool]:
    """Returns (one line per problem, True if the state fits in memory)."""
    cfg = for_device(cfg, devices[0])
    findings = check_hosts() + missing_packages(cfg.monitor.writers)
    kernels = check_kernels(cfg.model, devices[0].platform, prefix=cfg.row_lengths.prefix)
    if kernels:  # other checks do not depend on the kernel
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, attention="auto"))
    findings += kernels + [f"{DATA}{line}" for line in check_data(cfg.data, cfg.seq_len, cfg.model.vocab_size)]
    program = None
    try:  # the number of steps may depend on data of unknown size, but shapes do not
        program = fitting_program(cfg, devices)
    except BadInput as error:
        findings.append(str(error))
    need = memory_need(program) if program else memory_lower_bound(cfg, len(devices))
    available = device_bytes(devices)
    fits = available is None or need.total <= available
    if available is not None and not fits:
        smallest = -(-memory_lower_bound(cfg, 1).state // available)
        findings.append(memory_problem(need, available, devices, smallest, cfg.model.remat))
    return findings, fits


def check_hosts() -> list[str]:
    """Returns a problem if several processes were launched but not connected. All would write to the same folder."""
    if jax.process_count() > 1:
        return []
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if os.environ.get(name, "1") not in ("", "1"):
            return [f"hosts: {name}={os.environ[name]}, but this process runs alone; start one task, or {LAUNCH_HINT}"]
    if len(hosts := os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1:
        return [f"hosts: this slice has {len(hosts)} hosts, but one process runs; use one host, or {LAUNCH_HINT}"]
    return []


def check_kernels(model: AnyModelConfig, platform: str, *, prefix: bool = False) -> list[str]:
    """Returns model settings that this platform does not support. prefix: sequences have a bidirectional prefix."""
    findings = []
    if model.matmul_precision == "tf32" and platform != "gpu":
        findings.append(
            f"kernel: model.matmul_precision='tf32' needs an NVIDIA GPU, but the platform is {platform}; use 'default'"
        )
    try:
        resolve_attention(model.attention, platform, model.attention_needs(prefix=prefix))
    except BadInput as error:
        findings.append(f"kernel: {error}")
    return findings


def device_bytes(devices: list[Device]) -> int | None:
    """Returns the memory of one device in bytes, or None. Simulated CPU devices share the memory of the machine."""
    device = next((device for device in devices if device in jax.local_devices()), devices[0])  # an addressable one
    if device.platform == "cpu":
        return host_memory_bytes() // len(jax.local_devices())
    stats = device.memory_stats() or {}
    chip = find_chip(device.device_kind)
    return stats.get("bytes_limit") or (chip.hbm_bytes if chip else None)


def memory_problem(need: MemoryNeed, available: int, devices: list[Device], smallest: int, remat: str) -> str:
    """Returns the error message, with a fix. smallest: number of devices that the sharded state would fill."""
    line = (
        f"memory: the state needs {units.size(need.state)} per device (parameters {units.size(need.params)}, moments "
        f"{units.size(need.moments)}, gradients {units.size(need.grads)})"
    )
    if need.activations:
        line += f" and activations need about {units.size(need.activations)}"
    line += f", but each of {len(devices)} devices ({devices[0].device_kind}) has {units.size(available)}; "
    if need.state <= available:
        remat_fix = "" if remat == "full" else "set --config.model.remat=full, "
        return f"{line}increase --config.train.num_microbatches, {remat_fix}or reduce the batch"
    if smallest <= len(devices):
        return line + "shard the state with --config.rules=zero3 and --config.mesh.fsdp=-1"
    return (
        f"{line}use more than {smallest} such devices with --config.rules=zero3 and --config.mesh.fsdp=-1, or a "
        "smaller model (--config=configs/quickstart.py runs anywhere)"
    )
