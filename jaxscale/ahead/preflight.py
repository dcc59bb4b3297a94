"""The training step of a config, compiled for a topology and judged: does it fit, and what can it reach at best."""

import pathlib
from collections.abc import Callable
from typing import Any

from jaxscale import units
from jaxscale.ahead.compiled import Compiled, compile_ahead, lower, read_result
from jaxscale.ahead.overlap import collective_rows
from jaxscale.ahead.report import Report, sum_traffic
from jaxscale.ahead.roofline import Roofline, roofline
from jaxscale.budget import BEGINNING, Position, batch_sizes, resolve_budget
from jaxscale.build import Program, make_program
from jaxscale.config import RunConfig
from jaxscale.planning.experts import routing_text
from jaxscale.planning.fitting import UNCOUNTED, fitting_program
from jaxscale.planning.measured import Kept
from jaxscale.planning.memory import MemoryRow, host_bytes, shard_bytes, stage_weights, usable_memory
from jaxscale.planning.speed import head_share
from jaxscale.planning.stages import held_numbers, stages_of
from jaxscale.planning.topology import Topology, open_topology
from jaxscale.sharding.mesh import mesh_layout
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import cache_dir


def preflight(
    cfg: RunConfig,
    topology: Topology,
    *,
    config_name: str,
    keep: bool = True,
    save_executable: pathlib.Path | None = None,
    say: Callable[[str], None] = print,
    position: Position = BEGINNING,
) -> Report:
    """The report on a config on a topology. Raises BadInput for a config that no such machine can run.

    position: where a run resumes on these devices: stages of its ramps that are over need not fit.
    """
    program = fitting_program(cfg, topology.devices, position=position)
    compiled = compile_ahead(program, topology, keep=keep, save_executable=save_executable, say=say)
    return make_report(config_name, program, topology, compiled)


def ahead_program(cfg: RunConfig, topology: Topology) -> Program:
    """The program of the last stage that training makes, for the devices of a topology."""
    return make_program(cfg, resolve_budget(cfg, epoch_tokens=UNCOUNTED).without_ramps, topology.devices)


def find_kept(cfg: RunConfig, topology: str, say: Callable[[str], None]) -> Kept | None:
    """What preflight kept about this very step; None where nothing is, or no package here could tell.

    The step is not compiled, but traced to find its name, which takes seconds; nothing is where nothing is kept.
    Options for the compiler, where the config has any, are each tried on a small program, as before training.
    """
    if not any((cache_dir() / "preflight").glob("*.json")):
        return None
    try:
        opened = open_topology(topology)
        program = ahead_program(cfg, opened)
    except BadInput:  # no libtpu or CUDA plugin here, or a machine that only plan knows
        return None
    if (found := read_result(lower(program, opened)[1], say)) is None:
        return None
    report = make_report("", program, opened, found)
    if report.peak_bytes is None or report.roofline is None:
        return None
    return Kept(report.peak_bytes, report.roofline.mfu_ceiling, report.date)


def make_report(config_name: str, program: Program, topology: Topology, compiled: Compiled) -> Report:
    """What was found out about a program, put together."""
    cfg, facts, shortage = program.cfg, compiled.facts, compiled.shortage
    num_devices = len(topology.devices)
    model_flops = cfg.flops_per_token * cfg.tokens_per_step / num_devices
    stages, head = stages_of(cfg, program.mesh.shape), head_share(cfg)
    bounds = facts and roofline(facts, topology.chip, model_flops, stages, head)
    usable, why = usable_memory(topology)
    if shortage is not None and shortage.space == "hbm" and shortage.available is not None:
        usable, why = shortage.available, "what the compiler may use"
    peak = compiled.memory.peak if compiled.memory else None
    if shortage is not None and shortage.space == "hbm":
        peak = shortage.needed
    return Report(
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
        usable_why=why,
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
        pipeline=program.stages,
    )


def settings(program: Program) -> dict[str, Any]:
    """The settings that decide memory and speed, by their last name."""
    cfg = program.cfg
    found: dict[str, Any] = {
        "rules": cfg.rules,
        "remat": cfg.model.remat,
        "num_microbatches": cfg.train.num_microbatches,
        "attention": program.attention,
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
    if options := str(program.compiler_options):
        found["compiler"] = f"({options})"
    return found


def memory_rows(program: Program, compiled: Compiled, peak: int | None) -> tuple[MemoryRow, ...]:
    """The peak, divided by kind. State is known exactly from its shardings; what XLA makes for itself is the rest."""
    state = program.abstract_state
    params, moments, average = (shard_bytes(tree) for tree in (state.params, state.opt_state, state.ema))
    gradients, weights = shard_bytes(program.abstract_grads), stage_weights(program)
    how = "from their shardings"
    if weights:
        gradients, how = 4 * sum(held_numbers(program, program.abstract_grads)), "of a stage, in float32"
    known = params + moments + average
    arguments = compiled.memory.arguments if compiled.memory else known + shard_bytes(program.abstract_batch)
    rows = [
        MemoryRow("parameters", params, "from their shardings"),
        MemoryRow("moments", moments, "from their shardings"),
        MemoryRow("batch, counters, padding", max(0, arguments - known), "the rest of the arguments"),
    ]
    if average:
        rows.insert(2, MemoryRow("average of parameters", average, "from their shardings"))
    if peak is None:
        return (*rows, MemoryRow("gradients", gradients, how))
    inside = max(0, peak - arguments)  # gradients may be used up one by one, and then are less than all of them
    if weights:
        weights = min(weights, inside)
        inside -= weights
        rows.append(MemoryRow("gathered weights", weights, "of a stage, at most what is left of the peak"))
    gradients = min(gradients, inside)
    rows += [
        MemoryRow("gradients", gradients, f"{how}, at most what is left of the peak"),
        MemoryRow("activations, temporaries", inside - gradients, "what is left of the peak"),
    ]
    return tuple(rows)


def notes(program: Program, bounds: Roofline | None) -> tuple[str, ...]:
    """What a reader of the figures must know."""
    sizes = batch_sizes(program.configs)
    plain = [f"batches: the figures are of the last of {sizes}"] if sizes else []
    if reason := program.attention_fallback:
        plain.append(f"attention is {program.attention}: {reason}")
    plain += [f"context: {program.sharing}"] if program.sharing else []
    plain += [f"expert: {program.exchange}"] if program.exchange else []
    if why := program.model.slots_fallback_reason:
        plain.append(f"experts: their products run in slots: {why}")
    model = program.cfg.model
    if model.active_params != model.num_params:
        active, params = units.count(model.active_params), units.count(model.num_params)
        plain.append(f"FLOPs and MFU are of the {active} parameters that a token goes through, memory of all {params}")
    if program.model.exchange.form == "send":
        plain.append(f"counted with {routing_text(program)}")
    return (*plain, *(f"in none of the times: {line}" for line in (bounds.unpriced if bounds else ())))
