"""Lists the documents that a step of a run has trained on, or the steps that saw a document.

  jaxscale trace --workdir=RUN --step=12345      source, file, offset, id, token range and text of every piece
  jaxscale trace --workdir=RUN --doc=ID          every step, so far and to come, that has it; also FILE:OFFSET and
                                                 SHARD.bin:NUMBER
  --batch=N               in place of --step: by the number of the batch (metrics.jsonl has it as batch_index)
  --row=R                 only this row of the batch
  --text=200              characters of each piece that are shown; 0: none
  --json                  one JSON object a line
  --config.data.NAME=V    where the data lie now, if they have moved: cache_dir, files

Steps count from 0, as batches do: step n trains on the batch that the console and metrics.jsonl report as step n + 1,
for these count steps that are done. That is said on stderr each time. Places, [begin, end), and
text are those of the packed row of text, which an objective such as span_corruption turns into inputs and targets. A
step behind the last checkpoint and the last line of metrics.jsonl counts as still to come ("done": false).

What is listed is computed as training would go on: from config.json, which each start of the run writes, the last
checkpoint, and the data, which must be those of the run. Where metrics.jsonl tells the hash of a listed step's batch,
as it was after the objective, the two are compared; if they differ, that is said on stderr and the exit code is 12.
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from jaxscale import schema
from jaxscale.checkpoint.choosing import newest_to_read
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.cli import run_verb
from jaxscale.command_line import parse_arguments, whole_number
from jaxscale.config import RunConfig
from jaxscale.data.batch import tokens_hash
from jaxscale.data.ledger import Entry, Ledger
from jaxscale.data.mixture import Mixture, same_past
from jaxscale.data.order import ORDER, Ranges, batch_index, merge_skips, step_of
from jaxscale.data.pipeline import Corpus, open_data
from jaxscale.help_text import show_help
from jaxscale.monitor.events import read_events
from jaxscale.monitor.records import read_records
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, Exit, Stop, put, tell
from jaxscale.system.redact import on_one_line
from jaxscale.training.decisions import Decisions, decisions_of

OPTIONS = ("workdir", "step", "batch", "row", "doc", "text", "json")
WHAT_WAS_TRAINED_ON = ("data.mixture", "data.max_epochs", "data.skip_batches", "data.objective")  # stays as it was


@dataclasses.dataclass(frozen=True)
class Traced:
    """A run whose documents can be listed."""

    ledger: Ledger
    total_steps: int
    done: int  # steps, as far as the last checkpoint and metrics.jsonl tell
    hashes: dict[int, str]  # of the batch of a step, as metrics.jsonl has it


def main(argv: list[str]) -> int:
    """Prints the list and returns the exit code."""
    argv = ["--json=true" if flag == "--json" else flag for flag in argv]
    arguments = parse_arguments(argv, OPTIONS)
    if arguments.help:
        show_help(__doc__)
        return 0
    options = arguments.options
    if "workdir" not in options or arguments.config:
        raise BadInput("--workdir must be given, the folder of the run, which holds its config")
    if sum(name in options for name in ("step", "batch", "doc")) != 1:
        raise BadInput("give one of --step, --batch and --doc")
    if moved := [name for name in arguments.overrides if not name.startswith("data.")]:
        raise BadInput(f"--config.{moved[0]}: only settings of data may be given, to say where the data lie now")
    if fixed := [name for name in arguments.overrides if name.startswith(WHAT_WAS_TRAINED_ON)]:
        raise BadInput(f"--config.{fixed[0]}: what the run trains on is read from its work folder; leave this out")
    characters = whole_number("text", options.get("text", "200"), 0)
    numbers = {name: whole_number(name, options[name], 0) for name in ("step", "batch", "row") if name in options}
    run = open_run_folder(options["workdir"], arguments.overrides)
    code = 0
    if "doc" in options:
        lines = sights(run, options["doc"])
    else:
        step, n = step_and_batch(run, numbers)
        code = remarks(run, step, n)
        lines = contents(run, step, n, numbers.get("row"), characters)
    for record, line in lines:
        put(json.dumps(record) if options.get("json") == "true" else line)
    return code


def open_run_folder(workdir: str, overrides: dict[str, str]) -> Traced:
    """The run in a work folder.

    Raises BadInput where there is none, Stop(CHECKPOINT_CORRUPT) where none of its checkpoints can be believed, and
    Stop(DATA_MISMATCH) where the data are not those of the run.
    """
    folder = paths.as_path(workdir)
    if not (folder / "config.json").exists():
        raise BadInput(f"--workdir={workdir} holds no config.json: it is not the folder of a run")
    written = paths.read_json(folder / "config.json")
    cfg = schema.from_dict(RunConfig, schema.merge(written["config"], overrides))
    checkpoints = Checkpoints(folder / "checkpoints", cfg.checkpoint)
    decisions = decisions_of(read_events(folder))
    pending = decisions.pending  # what lies behind its step is moved away by the next start
    step = newest_to_read(checkpoints, tell, before=pending.to + 1 if pending else None)
    recorded = checkpoints.read_run(step)["data"] if step is not None else None
    corpus = open_data(
        cfg.data, seq_len=cfg.seq_len, vocab_size=cfg.model.vocab_size, seed=cfg.seed, say=lambda _: None
    )
    total_steps = written["budget"]["total_steps"]
    skipped, mixture = reckoned(cfg, corpus, recorded, step or 0, total_steps, decisions.with_recorded(recorded))
    hashes = {n: found for n, found in hashes_of(folder).items() if not pending or n < pending.to}
    done = max(step or 0, 1 + max(hashes, default=-1))
    return Traced(Ledger(corpus, corpus.batches(cfg.rows_per_step, mixture), skipped), total_steps, done, hashes)


def reckoned(
    cfg: RunConfig,
    corpus: Corpus,
    recorded: dict[str, Any] | None,
    step: int,
    total_steps: int,
    decisions: Decisions,
) -> tuple[Ranges, Mixture | None]:
    """(skipped batches, mixture) as run.open_run has them: what the last checkpoint, of `step`, has recorded, and what
    the newest start and the run's rewinds have changed ahead of it.

    Raises Stop(DATA_MISMATCH) where that would give other batches to the steps up to the checkpoint.
    """
    before = [tuple(part) for part in recorded["skipped"]] if recorded else []
    if recorded and (recorded["fingerprint"], recorded.get("order")) != (corpus.fingerprint, ORDER):
        raise Stop(
            Exit.DATA_MISMATCH,
            f"the data are not those of the run: fingerprint {corpus.fingerprint[:16]} now, "
            f"{recorded['fingerprint'][:16]} then; bring the old data back (or the release that made the order)",
        )
    skipped = merge_skips(before, [*cfg.data.skip_batches, *decisions.skip_batches], step)
    num_batches = batch_index(total_steps - 1, skipped) + 1
    mixture = corpus.plan_mixture(cfg.rows_per_step, total_steps, num_batches, detours=decisions.detours)
    rows = (batch_index(step - 1, before) + 1) * cfg.rows_per_step if step else 0
    if recorded and not same_past(recorded.get("mixture"), mixture.record() if mixture else None, rows):
        raise Stop(
            Exit.DATA_MISMATCH,
            f"data.mixture and data.max_epochs of config.json give other rows to the {step} steps that are done than "
            "the checkpoint has recorded; bring back the config.json of the run's last start (or the release it ran)",
        )
    return skipped, mixture


def hashes_of(folder: Any) -> dict[int, str]:
    """{step: the hash of its batch} from metrics.jsonl."""
    records = read_records(folder / "metrics.jsonl")
    hashed = (record for record in records if "tokens_hash" in record and isinstance(record.get("step"), int))
    return {record["step"] - 1: str(record["tokens_hash"]) for record in hashed}


def step_and_batch(run: Traced, numbers: dict[str, int]) -> tuple[int | None, int]:
    """(step, or None for a skipped batch, batch) of --step or --batch.

    Raises BadInput for one behind the end of the run, and for a row that no batch has.
    """
    rows = run.ledger.batches.rows_per_batch
    if numbers.get("row", 0) >= rows:
        raise BadInput(f"--row={numbers['row']} is not among the {rows} rows of a batch; give 0 to {rows - 1}")
    name = "step" if "step" in numbers else "batch"
    number = numbers[name]
    last = run.total_steps - 1 if name == "step" else run.ledger.batch_of(run.total_steps - 1)
    if number > last:
        raise BadInput(
            f"--{name}={number} lies behind the end of the run, which has {run.total_steps} steps by its config.json; "
            f"give 0 to {last}"
        )
    return (number, run.ledger.batch_of(number)) if name == "step" else (step_of(number, run.ledger.skipped), number)


def remarks(run: Traced, step: int | None, n: int) -> int:
    """Says on stderr what a reader of the list must know, and returns the exit code."""
    if step is None:
        tell(f"batch {n} is skipped: no step trains on it")
    elif step < run.done:
        tell(f"step {step}, counted from 0; the console and metrics.jsonl call it {step + 1}, of steps that are done")
    else:
        tell(f"step {step} is still to come: the run has done {run.done} steps, as far as its folder tells")
    if step in run.hashes and run.hashes[step] != (now := tokens_hash(run.ledger.batches.batch(n))):
        tell(
            f"what is listed is NOT what step {step} trained on: metrics.jsonl has tokens_hash {run.hashes[step]} for "
            f'it ("step": {step + 1}), and batch {n}, after the objective, has {now} now; bring back the config.json, '
            "the checkpoints and the release of the run"
        )
        return Exit.DATA_MISMATCH
    return 0


def contents(
    run: Traced, step: int | None, n: int, row: int | None, characters: int
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields (the record, the line for people) of each piece of a batch, which `step` trains on, or of one row."""
    tokens_BT = run.ledger.tokens(n) if characters else None
    for entry in run.ledger.batch(n):
        if row is None or entry.row == row:
            text = run.ledger.text(entry, tokens_BT, characters) if characters else None
            yield record_of(run, entry, step, n) | ({} if text is None else {"text": text}), line_of(entry, text)


def sights(run: Traced, document: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields (the record, the line for people) of each time that a step sees the document."""
    for step, entry in run.ledger.steps_of(document, run.total_steps):
        n = run.ledger.batch_of(step)
        to_come = "" if step < run.done else ", still to come"
        yield record_of(run, entry, step, n), f"step {step} (batch {n}{to_come}) {line_of(entry, None)}"


def record_of(run: Traced, entry: Entry, step: int | None, n: int) -> dict[str, Any]:
    """Plain data; a step of None is a batch that is skipped."""
    done = step is not None and step < run.done
    return {"step": step, "batch": n, "done": done, **dataclasses.asdict(entry)}


def line_of(entry: Entry, text: str | None) -> str:
    """'row 3 [0, 812): web, a.jsonl:1200 ..., tokens [0, 812)', and the text behind it on one line."""
    source, file, shard = map(on_one_line, (entry.source, entry.file, entry.shard))
    place = f"row {entry.row} [{entry.begin}, {entry.begin + entry.tokens}): {source}"
    origin = f"{file}:{entry.offset}" if entry.offset >= 0 else f"{file} {shard}:{entry.number}".strip()
    known = f", id {on_one_line(entry.id)}" if entry.id else ""
    range_ = f"tokens [{entry.first_token}, {entry.first_token + entry.tokens})"
    return f"{place}, {origin}{known}, {range_}" + ("" if text is None else f"  {text!r}")


if __name__ == "__main__":
    run_verb("trace")
