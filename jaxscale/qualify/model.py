"""A training step of a size that fits: its speed, memory and overlap, beside what the compiler says of it."""

import datetime
import math
import statistics
from collections.abc import Iterator
from typing import Any

import jax

from jaxscale import schema, units
from jaxscale.ahead.compiled import Compiled, installed_versions, read_executable
from jaxscale.ahead.preflight import make_report
from jaxscale.ahead.report import Report
from jaxscale.budget import resolve_budget
from jaxscale.build import Program, make_program
from jaxscale.config import RunConfig
from jaxscale.hosts.agree import agreed
from jaxscale.monitor.machine import memory_metrics
from jaxscale.monitor.runinfo import run_info
from jaxscale.planning.check import device_bytes
from jaxscale.planning.fitting import UNCOUNTED
from jaxscale.planning.measured import Measured
from jaxscale.planning.memory import memory_need
from jaxscale.planning.topology import Topology, link_domains
from jaxscale.qualify.kernels import compute_dtype
from jaxscale.qualify.overlap import overlap_figures
from jaxscale.qualify.result import Figure, Machine, Probe, first_words
from jaxscale.qualify.step import COMMON, SPECS, logit_variance, loss_problem, random_batches, run_step
from jaxscale.system.exits import BadInput

# Llama in TinyLlama's shape (arXiv:2401.02385) with heads of 128, and narrower ones for small memories. Rows of 4096.
WIDTHS = {
    "1B": dict(num_layers=22, embed_dim=2048, num_heads=16, num_kv_heads=4, mlp_dim=5632),
    "0.4B": dict(num_layers=22, embed_dim=1152, num_heads=9, num_kv_heads=3, mlp_dim=3072),
    "0.1B": dict(num_layers=12, embed_dim=768, num_heads=6, num_kv_heads=2, mlp_dim=2048),
}
MOST_SHARDS = 128  # of each parameter: divides every width; more devices hold copies
SEQ_LEN, VOCAB_SIZE, HEAD_DIM = 4096, 32_768, 128
# Of one device, the fastest first: no recomputation, then more of it, then fewer rows.
WAYS = [(8, "none"), (4, "none"), (8, "minimal"), (4, "minimal"), (2, "none"), (4, "full"), (1, "full")]
USABLE = 0.9  # of the memory: the estimate is one, and the compiler and the other probes take their part
WARMUP, LEAST_STEPS, MOST_STEPS, TRACED_STEPS = 2, 3, 20, 3
TIMED_SHARE = 1 / 8  # of the time for all probes


def measure_model(machine: Machine) -> tuple[Probe, Measured | None]:
    """Tokens/s, MFU, memory and overlap of the largest of WIDTHS that fits; and what `jaxscale plan` keeps of it."""
    for name, cfg in candidates(machine):
        try:
            program = make_program(cfg, resolve_budget(cfg, epoch_tokens=UNCOUNTED), machine.devices)
            if not fits(program, machine):
                continue
            executable = program.train_step.lower(program.abstract_state, program.abstract_batch).compile()
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("RESOURCE_EXHAUSTED"):
                raise
            continue  # the estimate was wrong, and the compiler knows
        return measure_program(name, program, executable, machine)
    return Probe(name="step", problem="no step of the smallest model fits into the memory of a device"), None


def candidates(machine: Machine) -> Iterator[tuple[str, RunConfig]]:
    """(name, config) of what may be timed, the largest and fastest first; on a CPU the smaller spec of `bench step`."""
    if machine.own_model is not None:
        yield machine.own_model
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


def fits(program: Program, machine: Machine) -> bool:
    """Whether the estimate leaves some of the devices' memory; true where that is not known."""
    there = device_bytes(list(machine.devices))
    return there is None or memory_need(program).total <= USABLE * there


def measure_program(name: str, program: Program, executable: Any, machine: Machine) -> tuple[Probe, Measured]:
    """The figures of a compiled step."""
    run = Run(program, executable)
    before = device_peak()
    run.steps(WARMUP + 1)
    wanted = machine.seconds * TIMED_SHARE / run.seconds[-1]
    number = agreed(lambda: int(min(max(wanted, LEAST_STEPS), MOST_STEPS)))
    run.steps(number)
    timed, peak = run.seconds[-number:], device_peak()
    report = describe(name, program, executable, machine)
    figures = [*speed_figures(program, timed, report, machine), *memory_figures(before, peak, report, machine)]
    try:
        overlap, notes = overlap_figures(executable.as_text(), lambda: run.steps(TRACED_STEPS))
    except (BadInput, OSError, RuntimeError) as error:
        overlap, notes = [], [f"overlap: cannot be told, {first_words(error)}"]
    cfg = program.cfg
    what = (
        f"{name}: {units.count(cfg.model.num_params)} parameters, {cfg.rows_per_step} rows of {cfg.seq_len} tokens, "
        f"{cfg.model.compute_dtype}, remat {cfg.model.remat}, {program.attention} attention, {number} steps timed"
    )
    if peak is not None and before is not None and peak <= before:
        notes = [*notes, "memory: cannot be told, an earlier probe held more than the step"]
    log_vocab = math.log(cfg.model.vocab_size)
    problem = loss_problem(run.losses[0], run.losses[-1], log_vocab, logit_variance(cfg.model)) or ""
    probe = Probe(name="step", figures=(*figures, *overlap), notes=(what, *notes), problem=problem)
    return probe, measured_of(name, program, statistics.median(timed))


class Run:
    """The state of a step that is run again and again, and the batches that are still to come."""

    def __init__(self, program: Program, executable: Any):
        self.program, self.executable = program, executable
        self.state = jax.block_until_ready(program.init())
        # all different: a model learns what it sees twice, and its loss is looked at
        self.batches = random_batches(program, WARMUP + 1 + MOST_STEPS + TRACED_STEPS)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def steps(self, number: int) -> None:
        """Runs so many steps, each waited for."""
        for _ in range(number):
            took, _, loss, self.state = run_step(self.program, self.executable, self.state, self.batches.pop())
            self.seconds.append(took)
            self.losses.append(loss)


def device_peak() -> int | None:
    """The most bytes that a device of this process has held; None where the platform does not say."""
    return memory_metrics([device.memory_stats() for device in jax.local_devices()])["device_peak_bytes"]


def describe(name: str, program: Program, executable: Any, machine: Machine) -> Report | None:
    """What preflight reports of a step, of the executable that runs here; None without a datasheet."""
    if machine.chip is None:
        return None
    devices = list(machine.devices)
    hosts = len({device.process_index for device in devices})
    slices = len(set(link_domains(devices))) if machine.platform == "tpu" else 1
    here = Topology(
        f"{len(devices)} x {devices[0].device_kind}", machine.platform, machine.chip, devices, slices, hosts
    )
    memory, facts = read_executable(executable, program, here)
    today = datetime.date.today().isoformat()
    return make_report(name, program, here, Compiled(memory, facts, None, 0.0, 0.0, installed_versions(), today))


def speed_figures(program: Program, timed: list[float], report: Report | None, machine: Machine) -> list[Figure]:
    """Tokens/s; MFU and the time beside the roofline where there is a datasheet."""
    cfg = program.cfg
    step, low, high = statistics.median(timed), min(timed), max(timed)
    tokens = cfg.tokens_per_step
    found = [
        Figure(name="speed of the step", value=tokens / step, unit="tokens/s", low=tokens / high, high=tokens / low)
    ]
    against = {}
    if report is not None and report.roofline is not None:
        against = dict(against=report.roofline.at_least_s, source="the least by the roofline, as preflight shows it")
    found.append(Figure(name="time of a step", value=step, unit="s", low=low, high=high, **against))
    if machine.chip is not None:
        peak_seconds = cfg.flops_per_token * tokens / (machine.chip.peak_flops * len(machine.devices))
        mfu = {"value": peak_seconds / step, "low": peak_seconds / high, "high": peak_seconds / low}
        found.append(Figure(name="MFU", unit="share", least=machine.floors.mfu, **mfu))
    return found


def memory_figures(before: int | None, peak: int | None, report: Report | None, machine: Machine) -> list[Figure]:
    """The most that a device held, beside what the compiler said; none where an earlier probe held more."""
    if peak is None or report is None or report.peak_bytes is None or peak <= (before or 0):
        return []
    said, within = report.peak_bytes, machine.floors.memory_within
    return [
        Figure(
            name="peak memory of a device", value=peak, unit="bytes", against=said,
            source="the compiler's, as preflight shows it", least=said * (1 - within), most=said * (1 + within),
        )
    ]  # fmt: skip


def measured_of(name: str, program: Program, step_seconds: float) -> Measured:
    """What `jaxscale plan` keeps of the step, as `bench step --save` does."""
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
        versions=run_info()["versions"],
    )
