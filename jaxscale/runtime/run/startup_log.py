"""Startup and shutdown messages, and the text sample at the end of a run."""

from collections.abc import Callable
from typing import Any

import jax

from jaxscale import units
from jaxscale.build import Program
from jaxscale.core.optim.groups import DEFAULT_GROUPS, dotted
from jaxscale.core.state import TrainState, ema_params
from jaxscale.kernels.hardware import find_chip
from jaxscale.program.budget import Budget, batch_sizes
from jaxscale.runtime.data.pipeline import Corpus
from jaxscale.runtime.hosts.meshes import mesh_layout
from jaxscale.runtime.monitor.writers import Writer
from jaxscale.runtime.run.options import Log
from jaxscale.runtime.sampling.config import SampleConfig, Sampling
from jaxscale.runtime.sampling.generator import Engine, Generator, NotFinite
from jaxscale.system import paths
from jaxscale.system.redact import redact

Sample = Callable[[TrainState], str]


def log_model(program: Program, budget: Budget, log: Log) -> None:
    """Logs the model, mesh, schedule and parameters."""
    cfg, mesh = program.cfg, program.mesh
    device = mesh.devices.flat[0]
    attention = program.plan.attention
    reason = f" ({attention.reason})" if attention.reason else ""
    params, active = units.count(cfg.model.num_params), units.count(cfg.model.active_params)
    through = f", active per token: {active}" if cfg.model.active_params < cfg.model.num_params else ""
    log(
        f"{cfg.model.name}: {params} parameters{through}, {cfg.model.compute_dtype}, "
        f"{attention.name} attention{reason}; {mesh.size} x {device.device_kind}"
        + (f", mesh {mesh_layout(mesh)}, {cfg.rules}" if mesh.size > 1 else "")
    )
    for line in program.plan.describe():
        log(line)
    if sizes := batch_sizes(program.configs):
        log(f"batches: {sizes}")
    if program.plan.stage_schedule:
        log(f"pipeline: {program.plan.stage_schedule}")
    if cfg.lora.on:
        learned = sum(leaf.size for leaf in jax.tree.leaves(program.abstract_grads))
        log(f"lora: {units.count(learned)} trained parameters in rank-{cfg.lora.rank} adapters; the rest are frozen")
    if options := str(program.plan.compiler_options):
        log(f"compiler options: {options}")
    chip = find_chip(device.device_kind)
    peak = (
        f"{chip.peak_flops / 1e12:g} TFLOP/s per chip ({chip.source})"
        if chip
        else "unknown for this device: MFU is n/a"
    )
    flops = cfg.flops_per_token
    log(f"{budget}; {flops / 1e6:.4g} MFLOP per token; peak {peak}")
    for line in units.table(group_table(program.model.shapes, program.model.shardings, program.groups)):
        log(line)


def log_resume(program: Program, recorded: dict[str, Any], step: int, budget: Budget, log: Log) -> None:
    """Logs the step at which the run resumes. If the number of steps has changed, also logs learning rates."""
    if recorded["budget"]["total_steps"] != budget.total_steps:
        last = recorded["budget"]["total_steps"]
        rates = ", ".join(f"{float(program.schedule(s)):.3g} at step {s}" for s in (step, budget.total_steps - 1))
        log(f"the learning rate follows the new schedule of {budget.total_steps} steps instead of {last}: {rates}")
    log(f"resuming from step {step}")


def finish(cfg: SampleConfig, sample: Sample | None, state: TrainState, folder: Any, writer: Writer) -> None:
    """Logs why this process stops. If the run is complete, also samples text, if this is configured."""
    step = int(state.step)
    if step < writer.total_steps:
        return writer.say(f"saved step {step} of {writer.total_steps}; the same command without --stop_after continues")
    if sample is not None:
        text = sample(state)  # collective
        if jax.process_index() == 0:
            paths.write_text_atomic(folder / "sample.txt", redact(text))
        if cfg.every_steps:
            writer.sample(step, cfg.prompt, text)
        writer.say(f"--- sample, {len(text)} characters ---\n{text}\n---")
    writer.say(f"done: {step} steps; checkpoints, metrics.jsonl and config.json are in {folder}")


def sample_of_run(program: Program, corpus: Corpus, log: Log) -> Sample | None:
    """Returns a function state -> sampled text. If the run cannot sample, logs the reason and returns None."""
    if not program.cfg.sample.num_tokens:
        return None
    if program.cfg.model.kind != "decoder":
        log(f"no sample: {program.cfg.model.name} is not a decoder")
        return None
    if corpus.tokenizer is None:
        log(f"no sample: data.name={program.cfg.data.name!r} has no tokenizer")
        return None
    return make_sample(program, corpus.tokenizer, log)


def make_sample(program: Program, tokenizer: Any, log: Log = lambda line: None) -> Sample:
    """Returns a function state -> text: the prompt and sample.num_tokens sampled tokens. Compiles at the first call.

    Never samples the end-of-document token. The context has at most seq_len tokens, as in training. When it is full,
    its first half is dropped. The seed is fixed, so that samples differ only because of training. Collective.
    """
    cfg, longest = program.cfg, program.cfg.seq_len
    prompt = [*tokenizer.begin_ids, *tokenizer.encode(cfg.sample.prompt).tolist()]
    prompt = prompt or [tokenizer.eos_id]  # an empty prompt begins a document
    engine = Engine(
        program.model.unstaged,
        batch=1,
        longest=longest,
        num_ids=tokenizer.vocab_size,
        never=[tokenizer.eos_id],
        say=lambda line: log(f"sample: {line}"),
    )
    sampling = Sampling(temperature=cfg.sample.temperature, top_k=cfg.sample.top_k)

    def sample(state: TrainState) -> str:
        generator = Generator(engine, ema_params(state) if cfg.sample.ema else state.params)
        ids, total, rows = list(prompt), len(prompt) + cfg.sample.num_tokens, 0
        while len(ids) < total:
            row = ids if len(ids) < longest else ids[-(longest // 2) :]
            steps = generator.generate([row], sampling, total - len(ids), seed=cfg.seed, numbers=[rows])
            try:
                ids += [int(step_B[0]) for step_B in steps]
            except NotFinite as error:  # the guard and recovery decide about a diverged run
                return f"(no text: {error})"
            rows += 1
        return tokenizer.decode([i for i in ids if i != tokenizer.eos_id])

    return sample


def group_table(shapes: Any, shardings: Any, groups: Any) -> list[tuple[str, str, str, str, str]]:
    """Returns rows (parameter, shape, dtype, sharding, group), for the log at startup."""
    rows = []
    leaves = zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(shardings), jax.tree.leaves(groups))
    for (path, shape), sharding, group in leaves:
        axes = tuple(sharding.spec)
        spec = ", ".join("-" if axis is None else axis if isinstance(axis, str) else "*".join(axis) for axis in axes)
        summary = "frozen" if group.frozen else f"decay {group.weight_decay:g}"
        if group.lr_multiplier != 1 and not group.frozen:
            summary += f", lr x{group.lr_multiplier:g}"
        if group.name not in DEFAULT_GROUPS:
            summary += f" ({group.name})"
        rows.append((dotted(path), "x".join(map(str, shape.shape)) or "scalar", str(shape.dtype), spec or "-", summary))
    return rows
