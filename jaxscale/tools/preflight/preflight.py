"""Preflight, which compiles the training step for a topology and reports if it fits and how fast it can be."""

import pathlib
from collections.abc import Callable
from typing import Any

from jaxscale import units
from jaxscale.build import Program, make_program
from jaxscale.config import RunConfig
from jaxscale.program.budget import BEGINNING, Position, batch_sizes, resolve_budget
from jaxscale.program.fitting_mesh import UNCOUNTED, fitting_program
from jaxscale.program.memory import host_bytes, shard_bytes, stage_elements, stage_weight_bytes
from jaxscale.runtime.hosts.meshes import mesh_layout
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import cache_dir
from jaxscale.tools.planning.collectives import routing_assumption
from jaxscale.tools.planning.measured import CompiledStep
from jaxscale.tools.planning.memory import MemoryRow, usable_memory
from jaxscale.tools.planning.speed import head_flops_fraction
from jaxscale.tools.planning.topology import Topology, open_topology
from jaxscale.tools.preflight.compiled import Compiled, compile_ahead, lower, read_result
from jaxscale.tools.preflight.roofline import Roofline, roofline
from jaxscale.tools.preflight.step_report import PreflightReport, collective_rows, sum_traffic


def preflight(
    cfg: RunConfig,
    topology: Topology,
    *,
    config_name: str,
    keep: bool = True,
    save_executable: pathlib.Path | None = None,
    say: Callable[[str], None] = print,
    position: Position = BEGINNING,
) -> PreflightReport:
    """Returns the report. position: where the run resumes; earlier ramp stages may exceed the memory."""
    program = fitting_program(cfg, topology.devices, position=position)
    compiled = compile_ahead(program, topology, keep=keep, save_executable=save_executable, say=say)
    return make_report(config_name, program, topology, compiled)


def ahead_program(cfg: RunConfig, topology: Topology) -> Program:
    """Returns the program of the last ramp stage on the devices of a topology."""
    return make_program(cfg, resolve_budget(cfg, epoch_tokens=UNCOUNTED).without_ramps, topology.devices)


def find_compiled_step(cfg: RunConfig, topology: str, say: Callable[[str], None]) -> CompiledStep | None:
    """Returns preflight's cached result for this step, or None without a result or a compiler.

    If the cache has any result, traces the step to get its key, which takes seconds. This tests each compiler option of
    the config on a small program, as training does.
    """
    if not any((cache_dir() / "preflight").glob("*.json")):
        return None
    try:
        opened = open_topology(topology)
        program = ahead_program(cfg, opened)
    except BadInput:  # no libtpu or CUDA plugin, or a machine that only plan supports
        return None
    if (cached := read_result(lower(program, opened)[1], say)) is None:
        return None
    report = make_report("", program, opened, cached)
    if report.peak_bytes is None or report.roofline is None:
        return None
    return CompiledStep(report.peak_bytes, report.roofline.mfu_ceiling, report.date)


def make_report(config_name: str, program: Program, topology: Topology, compiled: Compiled) -> PreflightReport:
    """Returns the report of a program."""
    cfg, facts, shortage = program.cfg, compiled.facts, compiled.shortage
    num_devices = len(topology.devices)
    model_flops = cfg.flops_per_token * cfg.tokens_per_step / num_devices
    head, shards_head = head_flops_fraction(cfg), program.plan.pipeline.shards_vocab
    schedule = program.plan.schedule_size
    bounds = facts and roofline(facts, topology.chip, model_flops, schedule, head, shards_head=shards_head)
    usable, usable_source = usable_memory(topology)
    if shortage is not None and shortage.space == "hbm" and shortage.available is not None:
        usable, usable_source = shortage.available, "available to the compiler"
    peak = compiled.memory.peak if compiled.memory else None
    if shortage is not None and shortage.space == "hbm":
        peak = shortage.needed
    return PreflightReport(
        config=config_name,
        topology=topology.name,
        platform=topology.platform,
        chip=topology.chip.name,
        num_devices=num_devices,
        num_hosts=topology.num_hosts,
        num_slices=topology.num_slices,
        layout=mesh_layout(program.mesh),
        settings=settings(program),
        memory=memory_rows(program, compiled, peak),
        host_bytes=host_bytes(program.abstract_state),
        peak_bytes=peak,
        code_bytes=compiled.memory.code if compiled.memory else 0,
        chip_bytes=topology.chip.hbm_bytes,
        usable_bytes=usable,
        usable_why=usable_source,
        shortage=shortage,
        compiled_flops=facts and facts.dot_flops + facts.kernel_flops,
        model_flops=model_flops,
        traffic=sum_traffic(facts.collectives) if facts else (),
        collectives=collective_rows(facts, bounds.played) if facts and bounds and bounds.played else (),
        roofline=bounds,
        notes=notes(program, bounds),
        lower_seconds=compiled.lower_seconds,
        compile_seconds=compiled.compile_seconds,
        versions=compiled.versions,
        date=compiled.date,
        kept=compiled.kept,
        pipeline=str(program.plan.stage_schedule or ""),
    )


def settings(program: Program) -> dict[str, Any]:
    """Returns the settings that affect memory and speed. Keys are the last parts of the setting names."""
    cfg = program.cfg
    found: dict[str, Any] = {
        "rules": cfg.rules,
        "remat": cfg.model.remat,
        "num_microbatches": cfg.train.num_microbatches,
        "attention": program.plan.attention.name,
        "compute_dtype": cfg.model.compute_dtype,
        "seq_len": cfg.seq_len,
        "rows": cfg.rows_per_step,
    }
    for name in ("offload_moments", "offload_params"):
        if getattr(cfg.optim, name):
            found[name] = True
    if cfg.model.row_parts > 1:
        found["row_parts"] = cfg.model.row_parts
    if program.mesh.shape["pipeline"] > 1:
        found |= {"schedule": cfg.pipeline.schedule, "chunks": cfg.pipeline.chunks, "head": cfg.pipeline.head}
    if program.mesh.shape["context"] > 1:
        found["context"] = cfg.context.attention
    if cfg.model.remat_offload:
        found["remat_offload"] = ",".join(cfg.model.remat_offload)
    if options := str(program.plan.compiler_options):
        found["compiler"] = f"({options})"
    return found


def memory_rows(program: Program, compiled: Compiled, peak: int | None) -> tuple[MemoryRow, ...]:
    """Returns the peak memory by kind. State sizes are exact. Temporaries are the rest of the peak."""
    state = program.abstract_state
    params, moments, average = (shard_bytes(tree) for tree in (state.params, state.opt_state, state.ema))
    gradients, weights = shard_bytes(program.abstract_grads), stage_weight_bytes(program)
    source = "from their shardings"
    if weights:
        gradients, source = 4 * sum(stage_elements(program, program.abstract_grads)), "of a stage, in float32"
    known = params + moments + average
    arguments = compiled.memory.arguments if compiled.memory else known + shard_bytes(program.abstract_batch)
    rows = [
        MemoryRow("parameters", params, "from their shardings"),
        MemoryRow("moments", moments, "from their shardings"),
        MemoryRow("batch, counters, padding", max(0, arguments - known), "the other arguments"),
    ]
    if average:
        rows.insert(2, MemoryRow("average of parameters", average, "from their shardings"))
    if peak is None:
        return (*rows, MemoryRow("gradients", gradients, source))
    remaining = max(0, peak - arguments)  # gradients may be freed one by one, so not all are live
    if weights:
        weights = min(weights, remaining)
        remaining -= weights
        rows.append(MemoryRow("gathered weights", weights, "of a stage, at most the remaining peak"))
    gradients = min(gradients, remaining)
    rows += [
        MemoryRow("gradients", gradients, f"{source}, at most the remaining peak"),
        MemoryRow("activations, temporaries", remaining - gradients, "the remaining peak"),
    ]
    return tuple(rows)


def notes(program: Program, bounds: Roofline | None) -> tuple[str, ...]:
    """Returns notes about assumptions and omissions of the report."""
    sizes = batch_sizes(program.configs)
    lines = [f"batches: values are for the last of {sizes}"] if sizes else []
    attention = program.plan.attention
    if attention.reason:
        lines.append(f"attention is {attention.name}: {attention.reason}")
    lines += program.plan.describe()
    model = program.cfg.model
    if model.active_params != model.num_params:
        active, params = units.count(model.active_params), units.count(model.num_params)
        lines.append(f"FLOPs and MFU count {active} active parameters, memory counts all {params}")
    if program.plan.expert_exchange.name == "send":
        lines.append(f"routing is assumed {routing_assumption(program)}")
    return (*lines, *(f"times exclude {line}" for line in (bounds.unpriced if bounds else ())))
