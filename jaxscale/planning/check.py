"""Checks before anything is compiled, with all problems reported together: mesh, kernel, data, memory."""

import dataclasses
import os

import jax

from jaxscale import units
from jaxscale.auto_dtype import for_device
from jaxscale.config import RunConfig
from jaxscale.data.checks import check_data
from jaxscale.hardware import Device, find_chip, host_memory_bytes
from jaxscale.models import AnyModelConfig
from jaxscale.monitor.sinks import missing_packages
from jaxscale.ops.kernels import resolve_kernels
from jaxscale.planning.fitting import fitting_program
from jaxscale.planning.memory import MemoryNeed, least_memory, memory_need
from jaxscale.system.exits import BadInput, Exit, Stop

JOIN = "train with --coordinator=HOST:PORT --num_processes=N --process_id=I on each"
DATA = "data: "  # how a line about the data begins


def check_machine(cfg: RunConfig, begun: bool = False) -> None:
    """Raises Stop if this config cannot run on the devices of this process: one line each, with what to change.

    The code is NO_GO where memory is among the reasons, else BAD_INPUT; where data alone are, and the run has `begun`
    with them, DATA_MISMATCH.
    begun: also of a branch. Where it resumes is not known here, so that stages of batch_ramp and seq_len_ramp and the
    warmup, which may be over, are left to run.opening.
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
    """(one line a problem, whether the state fits in memory)."""
    cfg = for_device(cfg, devices[0])
    findings = check_hosts() + missing_packages(cfg.monitor.writers)
    kernels = check_kernels(cfg.model, devices[0].platform, prefix=cfg.row_lengths.prefix)
    if kernels:  # the other checks can be made with another kernel
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, attention="auto"))
    findings += kernels + [f"{DATA}{line}" for line in check_data(cfg.data, cfg.seq_len, cfg.model.vocab_size)]
    program = None
    try:  # the horizon may be in epochs of data that nobody has counted yet; shapes do not depend on it
        program = fitting_program(cfg, devices)
    except BadInput as error:
        findings.append(str(error))
    need = memory_need(program) if program else least_memory(cfg, len(devices))
    there = device_bytes(devices)
    fits = there is None or need.total <= there
    if there is not None and not fits:
        smallest = -(-least_memory(cfg, 1).state // there)
        findings.append(memory_line(need, there, devices, smallest, cfg.model.remat))
    return findings, fits


def check_hosts() -> list[str]:
    """Signs that this process was started as one of several, and stands alone: each would train into one folder."""
    if jax.process_count() > 1:
        return []
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if os.environ.get(name, "1") not in ("", "1"):
            return [f"hosts: {name}={os.environ[name]}, and this process works alone; start one task, or {JOIN}"]
    if len(hosts := os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1:
        return [f"hosts: this slice has {len(hosts)}, and this process works alone; use a slice of one host, or {JOIN}"]
    return []


def check_kernels(model: AnyModelConfig, platform: str, *, prefix: bool = False) -> list[str]:
    """Settings of the model that this platform cannot honour. prefix: whether its rows have one."""
    findings = []
    if model.matmul_precision == "tf32" and platform != "gpu":
        findings.append(
            f"kernel: model.matmul_precision='tf32' exists on NVIDIA GPUs, and this is {platform}; use 'default'"
        )
    try:
        resolve_kernels(platform, model.attention, model.attention_needs(prefix=prefix))
    except BadInput as error:
        findings.append(f"kernel: {error}")
    return findings


def device_bytes(devices: list[Device]) -> int | None:
    """Memory of one device; simulated CPU devices share the machine's. None where it is unknown."""
    device = next((device for device in devices if device in jax.local_devices()), devices[0])  # one that can be asked
    if device.platform == "cpu":
        return host_memory_bytes() // len(jax.local_devices())
    stats = device.memory_stats() or {}
    chip = find_chip(device.device_kind)
    return stats.get("bytes_limit") or (chip.hbm_bytes if chip else None)


def memory_line(need: MemoryNeed, there: int, devices: list[Device], smallest: int, remat: str) -> str:
    """What is needed, what is there, and what to do. smallest: devices of this kind that the state alone fills."""
    parts = (
        f"memory: {units.size(need.state)} a device for the state (parameters {units.size(need.params)}, moments "
        f"{units.size(need.moments)}, gradients {units.size(need.grads)})"
    )
    if need.activations:
        parts += f" and about {units.size(need.activations)} for activations"
    parts += f", and there are {units.size(there)} on each of {len(devices)} ({devices[0].device_kind}); "
    if need.state <= there:
        more = "" if remat == "full" else "set --config.model.remat=full, "
        return f"{parts}raise --config.train.num_microbatches, {more}or shorten the batch"
    if smallest <= len(devices):
        return parts + "share the state with --config.rules=zero3 and mesh fsdp=-1"
    return (
        f"{parts}use more than {smallest} such devices with --config.rules=zero3 and mesh fsdp=-1, or a smaller model "
        "(--config=configs/quickstart.py runs anywhere)"
    )
