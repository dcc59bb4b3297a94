"""Measurements of a training step's speed, memory and overlap, compared with the compiler's estimates."""

import dataclasses
import datetime
import math
import statistics
from collections.abc import Iterator
from typing import Any

import jax

from jaxscale import schema, units
from jaxscale.build import Program, make_program
from jaxscale.config import RunConfig
from jaxscale.program.budget import resolve_budget
from jaxscale.program.fitting_mesh import UNCOUNTED
from jaxscale.program.machine_check import device_bytes
from jaxscale.program.memory import memory_need
from jaxscale.runtime.hosts.agree import agreed, gathered, in_all, next_key
from jaxscale.runtime.monitor.machine import memory_metrics
from jaxscale.runtime.monitor.runinfo import versions
from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.measured import Measured
from jaxscale.tools.planning.topology import Topology, link_domains
from jaxscale.tools.preflight.compiled import Compiled, installed_versions, read_executable
from jaxscale.tools.preflight.preflight import make_report
from jaxscale.tools.preflight.step_report import PreflightReport
from jaxscale.tools.qualify.kernels import compute_dtype
from jaxscale.tools.qualify.overlap import overlap_figures
from jaxscale.tools.qualify.result import Machine, Probe, Reading, first_words
from jaxscale.tools.qualify.step import COMMON, SPECS, StepRunner, logit_variance, loss_problem

# Llama with TinyLlama's shape (arXiv:2401.02385) and head_dim 128, and smaller models for devices with less memory.
WIDTHS = {
    "1B": dict(num_layers=22, embed_dim=2048, num_heads=16, num_kv_heads=4, mlp_dim=5632),
    "0.4B": dict(num_layers=22, embed_dim=1152, num_heads=9, num_kv_heads=3, mlp_dim=3072),
    "0.1B": dict(num_layers=12, embed_dim=768, num_heads=6, num_kv_heads=2, mlp_dim=2048),
}
MOST_SHARDS = 128  # most shards of each parameter, which divides every width; more devices replicate parameters
SEQ_LEN, VOCAB_SIZE, HEAD_DIM = 4096, 32_768, 128
# (rows per device, remat), fastest first: no recomputation, then more recomputation, then fewer rows.
WAYS = [(8, "none"), (4, "none"), (8, "minimal"), (4, "minimal"), (2, "none"), (4, "full"), (1, "full")]
USABLE = 0.9  # fraction of device memory to use; the rest allows for estimate errors, the compiler and other probes
WARMUP, LEAST_STEPS, MOST_STEPS, TRACED_STEPS = 2, 3, 20, 3
BY_6N = "MFU, counting only 6 FLOPs per parameter and token"  # omits attention and counts the embedding lookup
TIMED_SHARE = 1 / 8  # fraction of the time limit of all probes


def measure_model(machine: Machine) -> tuple[Probe, Measured | None]:
    """Measures the first of candidates() that fits. Returns (probe, record for `jaxscale plan` or None)."""
    for name, cfg in candidates(machine):
        compiled = in_all(lambda cfg=cfg: compile_step(cfg, machine), machine.wait_seconds)
        in_all_processes = gathered(next_key("fits"), compiled is not None, made_of=all)
        if compiled is not None and in_all_processes:
            return measure_program(name, *compiled, machine)
    return Probe(name="step", problem="the step of the smallest model does not fit in device memory"), None


def compile_step(cfg: RunConfig, machine: Machine) -> tuple[Program, Any] | None:
    """Returns (program, compiled step), or None if the step does not fit in device memory."""
    program = make_program(cfg, resolve_budget(cfg, epoch_tokens=UNCOUNTED), machine.devices)
    memory_bytes = device_bytes(list(machine.devices))
    if memory_bytes is not None and memory_need(program).total > USABLE * memory_bytes:
        return None
    try:
        return program, program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        return None  # the compiler overrides the estimate


def candidates(machine: Machine) -> Iterator[tuple[str, RunConfig]]:
    """Yields (name, config): user_model if set, spec T of `bench step` on CPU, else all WIDTHS, fastest first."""
    if machine.user_model is not None:
        yield machine.user_model
        return
    number = len(machine.devices)
    fsdp = math.gcd(number, MOST_SHARDS)
    shared = COMMON | {"rules": "zero3", "mesh.fsdp": fsdp, "mesh.data": number // fsdp}
    if machine.on_cpu:
        rows = {"batch_tokens": f"{max(16, 2 * number)} rows"}
        yield "T", schema.from_dict(RunConfig, schema.merge(SPECS["T"], shared | rows))
        return
    shared |= {"model.compute_dtype": compute_dtype(machine), "model.head_dim": HEAD_DIM}
    for name, width in WIDTHS.items():
        for rows, remat in WAYS:
            model = dict(width, vocab_size=VOCAB_SIZE, remat=remat)
            values = dict(seq_len=SEQ_LEN, batch_tokens=rows * number * SEQ_LEN, model=model)
            yield name, schema.from_dict(RunConfig, schema.merge(values, shared))


def measure_program(name: str, program: Program, executable: Any, machine: Machine) -> tuple[Probe, Measured]:
    """Times a compiled step. Returns its probe and the record for `jaxscale plan`."""
    runner = StepRunner(program, executable, WARMUP + 1 + MOST_STEPS + TRACED_STEPS)
    before = device_peak()
    runner.run(WARMUP + 1)
    wanted = machine.seconds * TIMED_SHARE / runner.seconds[-1]
    number = agreed(lambda: int(min(max(wanted, LEAST_STEPS), MOST_STEPS)))
    runner.run(number)
    timed, peak = runner.seconds[-number:], device_peak()
    report = describe(name, program, executable, machine)
    figures = [*speed_figures(program.cfg, timed, report, machine), *memory_figures(before, peak, report, machine)]
    try:
        overlap, notes = overlap_figures(executable.as_text(), lambda: runner.run(TRACED_STEPS))
    except (BadInput, OSError, RuntimeError) as error:
        overlap, notes = [], [f"overlap: not measured, {first_words(error)}"]
    cfg = program.cfg
    what = (
        f"{name}: {units.count(cfg.model.num_params)} parameters, {cfg.rows_per_step} rows of {cfg.seq_len} tokens, "
        f"{cfg.model.compute_dtype}, remat {cfg.model.remat}, {program.plan.attention.name} attention, "
        f"{number} steps timed"
    )
    if peak is not None and before is not None and peak <= before:
        notes = [*notes, "memory: not measured, because an earlier probe had a higher peak"]
    log_vocab = math.log(cfg.model.vocab_size)
    problem = loss_problem(runner.losses[0], runner.losses[-1], log_vocab, logit_variance(cfg.model)) or ""
    probe = Probe(name="step", figures=(*figures, *overlap), notes=(what, *notes), problem=problem)
    return probe, measured_of(name, program, statistics.median(timed))


def device_peak() -> float | None:
    """Returns the highest peak memory in bytes of this process's devices, or None if it is not available."""
    return memory_metrics([device.memory_stats() for device in jax.local_devices()])["device_peak_bytes"]


def describe(name: str, program: Program, executable: Any, machine: Machine) -> PreflightReport | None:
    """Returns the preflight report of the executable, or None without a datasheet."""
    if machine.chip is None:
        return None
    devices = list(machine.devices)
    hosts = len({device.process_index for device in devices})
    slices = len(set(link_domains(devices))) if machine.platform == "tpu" else 1
    kind = f"{len(devices)} x {devices[0].device_kind}"
    topology = Topology(kind, machine.platform, machine.chip, devices, slices, hosts)
    memory, facts = read_executable(executable, program, topology)
    today = datetime.date.today().isoformat()
    return make_report(name, program, topology, Compiled(memory, facts, None, 0.0, 0.0, installed_versions(), today))


def speed_figures(
    cfg: RunConfig, timed: list[float], report: PreflightReport | None, machine: Machine
) -> list[Reading]:
    """Returns tokens/s, the step time with its roofline, and two values of MFU if the datasheet is known.

    "MFU" counts 6 FLOPs per token for each parameter that is used in a matmul (not the embedding lookup), and the
    attention matmuls over the visible keys.
    """
    step, low, high = statistics.median(timed), min(timed), max(timed)
    tokens = cfg.tokens_per_step
    slow, fast = tokens / high, tokens / low
    found = [Reading(name="step throughput", value=tokens / step, unit="tokens/s", low=slow, high=fast)]
    time = Reading(name="step time", value=step, unit="s", low=low, high=high)
    if report is not None and report.roofline is not None:
        bound, source = report.roofline.at_least_s, "lower bound of the roofline, as in jaxscale preflight"
        time = dataclasses.replace(time, against=bound, source=source)
    found.append(time)
    if machine.chip is not None:
        for name, flops, least in (
            ("MFU", cfg.flops_per_token, machine.floors.mfu), (BY_6N, 6 * cfg.model.active_params, None)
        ):  # fmt: skip
            peak = flops * tokens / (machine.chip.peak_flops * len(machine.devices))
            mfu = Reading(name=name, value=peak / step, unit="share", low=peak / high, high=peak / low, least=least)
            found.append(mfu)
    return found


def memory_figures(
    before: float | None, peak: float | None, report: PreflightReport | None, machine: Machine
) -> list[Reading]:
    """Returns the peak memory compared with the compiler's, or [] if unknown or if earlier probes used more."""
    if peak is None or report is None or report.peak_bytes is None or peak <= (before or 0):
        return []
    expected, within = report.peak_bytes, machine.floors.memory_within
    return [
        Reading(
            name="peak memory per device", value=peak, unit="bytes", against=expected,
            source="the compiler's, as in jaxscale preflight",
            least=expected * (1 - within), most=expected * (1 + within),
        )
    ]  # fmt: skip


def measured_of(name: str, program: Program, step_seconds: float) -> Measured:
    """Returns the record of the step for `jaxscale plan`, in the format of `bench step --save`."""
    cfg, devices = program.cfg, list(program.mesh.devices.flat)
    flops = cfg.flops_per_token * cfg.tokens_per_step
    return Measured(
        spec=name,
        device_kind=devices[0].device_kind,
        platform=devices[0].platform,
        num_devices=len(devices),
        memory_bytes=device_bytes(devices) or 0,
        dtype=cfg.model.compute_dtype,
        pass_flops=flops / cfg.train.num_microbatches,
        step_seconds=step_seconds,
        flops_per_second=flops / step_seconds,
        date=datetime.date.today().isoformat(),
        versions=versions(),
    )
