"""trace(): the documents of a training step, or the steps that train on a document."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxscale import schema
from jaxscale.config import RunConfig
from jaxscale.program.budget import recorded_rows
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.restore import newest_readable_step
from jaxscale.runtime.data.ledger import DocumentPiece, Ledger
from jaxscale.runtime.data.mixture import same_prefix
from jaxscale.runtime.data.order import ORDER, batch_index, merge_skips, step_of
from jaxscale.runtime.data.pipeline import Corpus, open_data
from jaxscale.runtime.data.stacking import tokens_hash
from jaxscale.runtime.monitor.events import read_events
from jaxscale.runtime.monitor.records import read_records
from jaxscale.runtime.run.resume_checks import data_mismatch, recorded_position
from jaxscale.runtime.training.decisions import Decisions, parse_decisions
from jaxscale.settings.command_line import whole_number
from jaxscale.settings.config_file import current_overrides
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, print_stderr
from jaxscale.units import BatchSizes, recorded_sizes


class TracedRun(NamedTuple):
    """A run opened for tracing."""

    ledger: Ledger
    total_steps: int
    done: int  # number of completed steps, from the last checkpoint and metrics.jsonl
    hashes: dict[int, str]  # {step: hash of its batch} from metrics.jsonl
    row_tokens: BatchSizes  # tokens per row of each batch in training

    def piece(self, step: int | None, batch: int, entry: DocumentPiece, text: str | None = None) -> "TracedPiece":
        """Returns a part of a document in a batch. step: step that trains on the batch, or None."""
        done = step is not None and step < self.done
        return TracedPiece(step, batch, done, entry, self.row_tokens.size(batch), text)


def open_run_folder(workdir: str, overrides: dict[str, str]) -> TracedRun:
    """Returns the run in a work folder.

    Raises BadInput if no run exists, Stop(CHECKPOINT_CORRUPT) if no checkpoint is valid, and Stop(DATA_MISMATCH) if
    the data have changed since the run read them.
    """
    folder = paths.as_path(workdir)
    if not (folder / "config.json").exists():
        raise BadInput(f"workdir={workdir} has no config.json; give the work folder of a run")
    written = paths.read_json(folder / "config.json")
    cfg = schema.from_dict(RunConfig, schema.merge(written["config"], current_overrides(overrides)))
    checkpoints = Checkpoints(folder / "checkpoints", cfg.checkpoint)
    decisions = parse_decisions(read_events(folder))
    pending = decisions.pending  # the next start will move later steps to a different folder
    step = newest_readable_step(checkpoints, print_stderr, before=pending.to + 1 if pending else None)
    run = checkpoints.read_run(step) if step is not None else None
    corpus = open_data(
        cfg.data, seq_len=cfg.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.seed, say=lambda _: None
    )
    ledger = plan_batches(cfg, corpus, written["budget"], run, step or 0, decisions)
    records = read_records(folder / "metrics.jsonl")
    hashed = (record for record in records if "tokens_hash" in record and isinstance(record.get("step"), int))
    hashes = {record["step"] - 1: str(record["tokens_hash"]) for record in hashed}
    hashes = {n: found for n, found in hashes.items() if not pending or n < pending.to}
    done = max(step or 0, 1 + max(hashes, default=-1))
    row_tokens = recorded_rows(written["budget"], cfg.seq_len)
    return TracedRun(ledger, written["budget"]["total_steps"], done, hashes, row_tokens)


def plan_batches(
    cfg: RunConfig, corpus: Corpus, budget: dict[str, Any], run: dict[str, Any] | None, step: int, found: Decisions
) -> Ledger:
    """Returns the documents of every batch, in the order of training.

    Skipped batches and the mixture are those of the last checkpoint (`run`, at `step`), with later changes in
    config.json and by rewinds. Raises Stop(DATA_MISMATCH) if the data, or the batches of completed steps, would differ.
    """
    total_steps, sizes = budget["total_steps"], recorded_sizes(budget, cfg.seq_len)
    recorded = run["data"] if run else None
    decisions, begun = found.with_recorded_detours(recorded), recorded_position(run, step).begun
    before = [tuple(part) for part in recorded["skipped"]] if recorded else []
    if recorded and (recorded["fingerprint"], recorded.get("order")) != (corpus.fingerprint, ORDER):
        raise data_mismatch(
            f"the data differ from those of the run: fingerprint {corpus.fingerprint[:16]} instead of "
            f"{recorded['fingerprint'][:16]}; restore the original data (or the release that defines the order)"
        )
    skipped = merge_skips(before, [*cfg.data.skip_batches, *decisions.skip_batches], step)
    num_batches = batch_index(total_steps - 1, skipped) + 1
    mixture = corpus.plan_mixture(sizes, total_steps, num_batches, detours=decisions.detours, begun=begun)
    rows = sizes.begin(batch_index(step - 1, before) + 1) if step else 0
    if recorded and not same_prefix(recorded.get("mixture"), mixture.record() if mixture else None, rows):
        raise data_mismatch(
            f"with data.mixture and data.max_epochs of config.json, the {step} completed steps have other rows than "
            "recorded in the checkpoint; restore the config.json of the run's last start (or its release)"
        )
    return Ledger(corpus, corpus.batches(sizes, mixture), skipped)


class TracedPiece(NamedTuple):
    """A part of a document in a batch."""

    step: int | None  # step that trains on the batch; None for a skipped batch
    batch: int
    done: bool  # True if the step is completed
    entry: DocumentPiece
    row_tokens: int  # tokens per row in training, below seq_len if seq_len_ramp splits the row
    text: str | None = None

    @property
    def record(self) -> dict[str, Any]:
        """The piece as a JSON object."""
        found = {"step": self.step, "batch": self.batch, "done": self.done, "row_tokens": self.row_tokens}
        found |= dataclasses.asdict(self.entry)
        return found | ({} if self.text is None else {"text": self.text})


class BatchTrace(NamedTuple):
    """The pieces of a step's batch, or every piece of a document."""

    run: TracedRun
    pieces: Iterator[TracedPiece]
    step: int | None = None  # None for a skipped batch or a document
    batch: int | None = None  # None for a document
    hash_now: str = ""  # hash of the batch if metrics.jsonl has a different hash, from training on different data


def trace(
    workdir: str,
    *,
    step: int | None = None,
    batch: int | None = None,
    document: str | None = None,
    row: int | None = None,
    characters: int = 200,
    moved: Mapping[str, str] | None = None,
) -> BatchTrace:
    """Returns the documents of a training step, or the steps that train on a document, like `jaxscale trace`.

    step, batch: counted from 0. document: ID, FILE:OFFSET or SHARD.bin:NUMBER. row: index of a sequence in the batch;
    default: all. characters: maximum number of characters of each text; 0: no text. moved: {data setting: new path}.
    Raises BadInput for invalid arguments, and Stop for corrupt checkpoints or data that have changed since the run.
    """
    if sum(value is not None for value in (step, batch, document)) != 1:
        raise BadInput("give exactly one of step, batch and document (--doc)")
    for name, number in dict(step=step, batch=batch, row=row, characters=characters).items():
        if number is not None:
            whole_number(name, str(number), 0)
    run = open_run_folder(str(workdir), dict(moved or {}))
    if document is not None:
        found = run.ledger.steps_of(document, run.total_steps)
        return BatchTrace(run, (run.piece(step, run.ledger.batch_of(step), entry) for step, entry in found))
    step, n = step_and_batch(run, step, batch, row or 0)
    unchanged = not run.ledger.corpus.cfg.transforms  # trace hashes tokens before transforms
    recorded = run.hashes.get(step) if unchanged and step is not None else None
    now = tokens_hash(run.ledger.batches.batch(n)) if recorded else ""
    return BatchTrace(run, batch_pieces(run, step, n, row, characters), step, n, now if now != recorded else "")


def step_and_batch(run: TracedRun, step: int | None, batch: int | None, row: int) -> tuple[int | None, int]:
    """Returns (step, batch) for a step or a batch. The step is None if the batch was skipped.

    Raises BadInput if the step is after the end of the run, or the batch does not have this row.
    """
    name, number = ("batch", batch) if step is None else ("step", step)
    assert number is not None, "one of step and batch is given"
    last = run.total_steps - 1 if name == "step" else run.ledger.batch_of(run.total_steps - 1)
    if number > last:
        raise BadInput(
            f"{name}={number} is after the end of the run, which has {run.total_steps} steps according to its "
            f"config.json; use 0 to {last}"
        )
    n = run.ledger.batch_of(number) if name == "step" else number
    if row >= (rows := run.ledger.batches.sizes.size(n)):
        raise BadInput(f"row={row} does not exist: there are {rows} rows in batch {n}; use 0 to {rows - 1}")
    return step_of(n, run.ledger.skipped), n


def batch_pieces(run: TracedRun, step: int | None, n: int, row: int | None, characters: int) -> Iterator[TracedPiece]:
    """Yields the parts of documents in a batch or in one of its rows. step: step that trains on the batch, or None."""
    tokens_BT = run.ledger.batches.text(n).tokens if characters else None
    for entry in run.ledger.batch(n):
        if row is None or entry.row == row:
            text = None if tokens_BT is None else run.ledger.text(entry, tokens_BT, characters)
            yield run.piece(step, n, entry, text)
