"""RunConfig -> a run ready to train: data, checkpoints and reports around the program that build.py makes.

It decides whether a run begins, goes on, or is refused.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale import paths, schema, units
from jaxscale.build import Program, make_program
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.config import Budget, RunConfig, resolve_budget
from jaxscale.data.mixture import Mixture, mixture_names, same_past
from jaxscale.data.order import ORDER, batch_index, merge_skips
from jaxscale.data.pipeline import Corpus, open_data
from jaxscale.eval.perplexity import evaluate, make_eval_step
from jaxscale.exits import Exit, Stop
from jaxscale.hardware import find_chip
from jaxscale.hosts.agree import agreed, check_shared, open_board
from jaxscale.models import DECODERS, num_params
from jaxscale.monitor.runinfo import run_info
from jaxscale.monitor.throughput import Throughput
from jaxscale.monitor.writers import Writer
from jaxscale.sample.generate import make_sampler
from jaxscale.sharding.mesh import mesh_layout
from jaxscale.sharding.place import put_rows, replicated
from jaxscale.train.feed import Feed
from jaxscale.train.loop import Run
from jaxscale.train.state import TrainState

DATA_SECONDS = 24 * 3600.0  # the first process may still be tokenising when another is done


def open_run(cfg: RunConfig, workdir: str, say: Callable[[str], None] = print) -> Run | None:
    """A run ready to train, new or gone on from its last checkpoint; None if it is complete already.

    Raises ValueError for input that a person can mend, and Stop with CONFIG_MISMATCH, DATA_MISMATCH or
    CHECKPOINT_CORRUPT where the work folder holds something else. Never begins anew over an old run.
    """
    folder = paths.as_path(workdir)
    check_shared(folder, prepare=lambda: paths.make_run_dir(workdir))
    checkpoints = Checkpoints(folder / "checkpoints", cfg.checkpoint)
    start_step = agreed(checkpoints.latest_step)  # one look at the folder: another host may see a save a moment later
    recorded = None if start_step is None else checkpoints.read_run(start_step)
    check_same_run(cfg, folder, recorded)
    corpus = open_data(cfg.data, seq_len=cfg.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.seed, say=say)
    say(corpus.summary)
    check_hosts_agree(corpus)
    budget = resolve_budget(cfg, corpus.epoch_tokens)
    skipped = check_same_data(cfg, corpus, recorded, start_step or 0)
    if start_step is not None and start_step >= budget.total_steps:
        say(f"{workdir}: this run is complete at step {start_step}; a larger --config.train_tokens goes on from there")
        checkpoints.close()
        return None
    num_batches = batch_index(budget.total_steps - 1, skipped) + 1
    mixture = corpus.plan_mixture(cfg.rows_per_step, budget.total_steps, num_batches)
    check_same_past(cfg, mixture, recorded, start_step or 0, say)
    for line in mixture.lines if mixture else ():
        say(f"data: {line}")

    program = make_program(cfg, budget)
    announce(program, budget, say)
    if recorded is not None:
        if recorded["budget"]["total_steps"] != budget.total_steps:
            last = recorded["budget"]["total_steps"]
            rates = ", ".join(
                f"{float(program.schedule(s)):.3g} at step {s}" for s in (start_step, budget.total_steps - 1)
            )
            say(f"the learning rate follows the new horizon, {budget.total_steps} steps instead of {last}: {rates}")
        say(f"going on from step {start_step}")
    state = program.init() if start_step is None else checkpoints.restore(start_step, program.abstract_state)
    chip = find_chip(program.mesh.devices.flat[0].device_kind)
    resolved = {
        "config": schema.to_dict(cfg),
        "budget": dataclasses.asdict(budget),
        "devices": {"kind": program.mesh.devices.flat[0].device_kind, "number": program.mesh.size},
        "peak": dataclasses.asdict(chip) if chip else None,  # what MFU is measured against
        **run_info(),
    }
    primary = jax.process_index() == 0
    if primary:
        paths.write_json(folder / "config.json", resolved)
    writer = Writer(folder, cfg.monitor, budget.total_steps, start_step or 0, primary=primary)

    def position(step: int) -> dict[str, Any]:
        data = {"batch_index": batch_index(step, skipped), "skipped": [list(r) for r in skipped], "seed": cfg.seed}
        data |= {"fingerprint": corpus.fingerprint, "order": ORDER, "mixture": mixture.record() if mixture else None}
        return resolved | {"step": step, "data": data}

    batches = corpus.batches(cfg.rows_per_step, mixture)
    return Run(
        state=state,
        start_step=start_step or 0,
        total_steps=budget.total_steps,
        tokens_per_step=budget.batch_tokens,
        train_step=program.train_step,
        open_feed=lambda start, stop: Feed(
            batches.rows,
            lambda step: batch_index(step, skipped),
            program.batch_sharding,
            num_rows=cfg.rows_per_step,
            seq_len=cfg.seq_len,
            start=start,
            stop=stop,
        ),
        evaluate=make_evaluate(program, corpus),
        eval_every_steps=cfg.eval.every_steps,
        checkpoints=checkpoints,
        save_every_steps=cfg.checkpoint.save_every_steps,
        position=position,
        writer=writer,
        throughput=Throughput(cfg.flops_per_token, chip.peak_flops if chip else None, program.mesh.size),
        max_skipped_in_row=cfg.train.guard.max_skipped_in_row,
        finish=lambda state: finish(program, corpus, state, folder, writer),
        source_names=mixture_names(cfg.data.mixture),
        board=open_board(),
    )


def check_same_run(cfg: RunConfig, folder: Any, recorded: dict[str, Any] | None) -> None:
    """Raises Stop(CONFIG_MISMATCH) with a line for each setting in which the folder's run differs and may not."""
    if recorded is None:
        if not (folder / "config.json").exists():
            return
        recorded = paths.read_json(folder / "config.json")  # begun, and stopped before its first checkpoint
    old = recorded["config"]
    with contextlib.suppress(ValueError):
        old = schema.to_dict(
            schema.from_dict(RunConfig, old)
        )  # settings that are newer than the run get their defaults
    may = schema.changeable(RunConfig)
    changed = {
        name: values
        for name, values in schema.difference(old, schema.to_dict(cfg)).items()
        if not any(name == free or name.startswith(free + ".") for free in may)
    }
    if changed:
        lines = "; ".join(f"{name}: {was!r} -> {now!r}" for name, (was, now) in changed.items())
        raise Stop(
            Exit.CONFIG_MISMATCH,
            f"{folder} belongs to another config: {lines}; use another --workdir, or set these back",
        )


def check_same_data(cfg: RunConfig, corpus: Corpus, recorded: dict[str, Any] | None, start_step: int):
    """The skipped ranges of the run. Raises Stop(DATA_MISMATCH) if the tokens are not those the run began with."""
    if recorded is None:
        return merge_skips((), cfg.data.skip_batches, 0)
    data = recorded["data"]
    if data["fingerprint"] != corpus.fingerprint:
        raise Stop(
            Exit.DATA_MISMATCH,
            f"the data have changed since the run began: fingerprint {corpus.fingerprint[:16]} now, "
            f"{data['fingerprint'][:16]} then (text, tokenizer, held-out part or the order of a release differ); bring "
            "the old ones back, or begin another --workdir",
        )
    return merge_skips([tuple(r) for r in data["skipped"]], cfg.data.skip_batches, start_step)


def check_hosts_agree(corpus: Corpus) -> None:
    """Raises Stop(DATA_MISMATCH) at a process whose data are not those of the first one."""
    first = agreed(lambda: corpus.fingerprint, DATA_SECONDS)
    if first != corpus.fingerprint:
        raise Stop(
            Exit.DATA_MISMATCH,
            f"the data of process {jax.process_index()} are not those of process 0: fingerprint "
            f"{corpus.fingerprint[:16]} here, {first[:16]} there; give all hosts the same files, and where a cache of "
            "tokenised text is older than the text, delete it",
        )


def check_same_past(
    cfg: RunConfig,
    mixture: Mixture | None,
    recorded: dict[str, Any] | None,
    start_step: int,
    say: Callable[[str], None],
) -> None:
    """Raises Stop(DATA_MISMATCH) if the mixture would have given other rows to steps that are done."""
    if not start_step:
        return
    old, new = recorded["data"].get("mixture"), mixture.record() if mixture else None
    last = batch_index(start_step - 1, [tuple(r) for r in recorded["data"]["skipped"]])
    if not same_past(old, new, (last + 1) * cfg.rows_per_step):
        raise Stop(
            Exit.DATA_MISMATCH,
            f"data.mixture and data.max_epochs give other rows to the {start_step} steps that are done; only stages "
            f"that start after batch {last} may change (write their starts in tokens or steps: '%' follows "
            "train_tokens); set these back, or begin another --workdir",
        )
    if old != new:
        say("data: the mixture has changed for what lies ahead; the change is recorded with the next checkpoint")


def announce(program: Program, budget: Budget, say: Callable[[str], None]) -> None:
    """Says what is about to run: model, mesh, horizon, and a table of the parameters."""
    cfg, mesh = program.cfg, program.mesh
    device = mesh.devices.flat[0]
    why = f" ({program.why_plain})" if program.why_plain else ""
    say(
        f"{cfg.model.name}: {units.count(num_params(cfg.model))} parameters, {cfg.model.compute_dtype}, "
        f"{program.attention} attention{why}; {mesh.size} x {device.device_kind}"
        + (f", mesh {mesh_layout(mesh)}, {cfg.rules}" if mesh.size > 1 else "")
    )
    if options := str(program.compiler_options):
        say(f"compiler options: {options}")
    chip = find_chip(device.device_kind)
    peak = (
        f"{chip.peak_flops / 1e12:g} TFLOP/s a chip ({chip.source})" if chip else "unknown for this device: MFU is n/a"
    )
    flops = cfg.flops_per_token
    say(f"{budget}; {flops / 1e6:.4g} MFLOP a token; peak {peak}")
    widths = [max(len(row[i]) for row in program.parameter_table) for i in range(5)]
    for row in program.parameter_table:
        say("  " + "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip())


def make_evaluate(program: Program, corpus: Corpus) -> Callable[[Any], dict[str, float]] | None:
    """params -> validation metrics, over a fixed set that is put on the devices once; None without held-out text."""
    cfg = program.cfg
    if not cfg.eval.num_rows or corpus.valid_rows is None:
        return None
    rows = max(program.batch_shards, cfg.rows_per_step // cfg.train.num_microbatches)
    on_mesh = functools.partial(put_rows, rows=list(range(rows)), num_rows=rows, sharding=program.batch_sharding)
    step = jax.jit(
        make_eval_step(program.token_losses, len(corpus.source_names)), out_shardings=replicated(program.mesh)
    )

    @functools.cache
    def placed() -> list:
        return [on_mesh(batch) for batch in corpus.valid_batches(cfg.eval.num_rows, rows)]

    return lambda params: evaluate(step, params, placed(), corpus.source_names)


def finish(program: Program, corpus: Corpus, state: TrainState, folder: Any, writer: Writer) -> None:
    """Says that the run is done, and samples text if the config asks for it."""
    cfg = program.cfg.sample
    if cfg.num_tokens and not isinstance(program.cfg.model, DECODERS):
        writer.say(f"no sample: {program.cfg.model.name} writes no text from left to right")
    elif cfg.num_tokens and corpus.tokenizer is not None:
        text = sample_text(program, corpus.tokenizer, state)  # computed by all processes together
        if jax.process_index() == 0:
            paths.write_text_atomic(folder / "sample.txt", text)
        writer.say(f"--- sample, {len(text)} characters ---\n{text}\n---")
    writer.say(f"done: {int(state.step)} steps; checkpoints, metrics.jsonl and config.json are in {folder}")


def sample_text(program: Program, tokenizer: Any, state: TrainState) -> str:
    """The prompt and sample.num_tokens tokens that the model adds to it; the end of a document is never chosen."""
    cfg = program.cfg
    prompt = list(tokenizer.encode(cfg.sample.prompt)) or [tokenizer.eos_id]  # from nothing: from where a document ends
    tokens_BT = np.zeros((program.batch_shards, len(prompt) + cfg.sample.num_tokens), np.int32)  # one row is shown
    tokens_BT[:, : len(prompt)] = prompt
    ids_1V = np.arange(cfg.model.vocab_size)[None]
    is_text_1V = (ids_1V < tokenizer.vocab_size) & (ids_1V != tokenizer.eos_id)
    text_logits = lambda params, tokens, last: jnp.where(
        is_text_1V, program.next_logits(params, tokens, last), -jnp.inf
    )
    sampler = make_sampler(text_logits, window=cfg.seq_len, temperature=cfg.sample.temperature, top_k=cfg.sample.top_k)
    sampler = jax.jit(sampler, out_shardings=replicated(program.mesh))
    rows = sampler(state.params, tokens_BT, len(prompt), jax.random.key(cfg.seed))
    return tokenizer.decode([id for id in np.asarray(rows)[0] if id != tokenizer.eos_id])
