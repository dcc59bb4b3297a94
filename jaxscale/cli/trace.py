"""Lists the documents that a step of a run has trained on, or the steps that saw a document.

  jaxscale trace --workdir=RUN --step=12345      source, file, offset, id, token range and text of every piece
  jaxscale trace --workdir=RUN --doc=ID          every step, so far and to come, that has it; also FILE:OFFSET and
                                                 SHARD.bin:NUMBER

Steps count from 0, as batches do: step n trains on the batch that the console and metrics.jsonl report as step n + 1,
for these count steps that are done. That is said on stderr each time. Places, [begin, end), and
text are those of the packed row of text, which an objective such as span_corruption turns into inputs and targets, and
which seq_len_ramp cuts: "row_tokens" is the length of the rows that the batch was trained on in. A step behind the last
checkpoint and the last line of metrics.jsonl counts as still to come ("done": false).

What is listed is computed as training would go on: from config.json, which each start of the run writes, the last
checkpoint, and the data, which must be those of the run. Where metrics.jsonl tells the hash of a listed step's batch,
as it was after the objective, the two are compared; if they differ, that is said on stderr and the exit code is 12.
"""

import dataclasses
import json

from jaxscale.api.tracing import Piece, Trace, trace
from jaxscale.cli import run_verb
from jaxscale.command_line import Arguments, flag
from jaxscale.data.ledger import Entry
from jaxscale.help_text import command
from jaxscale.system.exits import BadInput, Exit, print_stderr, put
from jaxscale.system.redact import on_one_line


@dataclasses.dataclass(frozen=True)
class TraceFlags:
    """The flags of `jaxscale trace`."""

    no_config = "what the run trains on is read from its work folder, and only --config.data.NAME may be set"

    workdir: str = flag("", None, "RUN")
    step: int | None = flag(None, None, "N", least=0)
    doc: str | None = flag(None, None, "ID")
    batch: int | None = flag(
        None, "in place of --step: by the number of the batch (metrics.jsonl has it as batch_index)", "N", least=0
    )
    row: int | None = flag(None, "only this row of the batch", "R", least=0)
    text: int = flag(200, "characters of each piece that are shown; 0: none", least=0)
    json: bool = flag(False, "one JSON object a line")
    settings: dict[str, str] = flag(
        dict, "where the data lie now, if they have moved: cache_dir, files", "V", name="config.data.NAME"
    )


WHAT_WAS_TRAINED_ON = ("data.mixture", "data.max_epochs", "data.skip_batches", "data.objective")  # stays as it was


@command(TraceFlags)
def main(arguments: Arguments) -> int:
    """Prints the list and returns the exit code."""
    flags = arguments.flags
    if not flags.workdir:
        raise BadInput("--workdir must be given, the folder of the run, which holds its config")
    if moved := [name for name in arguments.overrides if not name.startswith("data.")]:
        raise BadInput(f"--config.{moved[0]}: only settings of data may be given, to say where the data lie now")
    if fixed := [name for name in arguments.overrides if name.startswith(WHAT_WAS_TRAINED_ON)]:
        raise BadInput(f"--config.{fixed[0]}: what the run trains on is read from its work folder; leave this out")
    found = trace(
        flags.workdir,
        step=flags.step,
        batch=flags.batch,
        document=flags.doc,
        row=flags.row,
        characters=flags.text,
        moved=arguments.overrides,
    )
    code, piece = 0 if found.batch is None else remarks(found, found.batch), None
    for piece in found.pieces:
        line = piece_line(piece, found.run.ledger.corpus.seq_len, of_document=found.batch is None)
        put(json.dumps(piece.record) if flags.json else line)
    if piece is None and found.batch is None:
        print_stderr(
            f"no step of this run, done or to come, has {flags.doc}: it is held out, or lies behind the last step"
        )
    return code


def remarks(found: Trace, n: int) -> int:
    """Says on stderr what a reader of the list of batch n must know, and returns the exit code."""
    step, run = found.step, found.run
    if step is None:
        print_stderr(f"batch {n} is skipped: no step trains on it")
    elif step < run.done:
        print_stderr(
            f"step {step}, counted from 0; the console and metrics.jsonl call it {step + 1}, of steps that are done"
        )
    else:
        print_stderr(f"step {step} is still to come: the run has done {run.done} steps, as far as its folder tells")
    if (length := run.row_tokens.size(n)) < run.ledger.corpus.seq_len:
        print_stderr(
            f"batch {n} is trained on in rows of {length} tokens, into which each of its rows is cut (seq_len_ramp)"
        )
    if found.hash_now and step is not None:
        print_stderr(
            f"what is listed is NOT what step {step} trained on: metrics.jsonl has tokens_hash {run.hashes[step]} for "
            f'it ("step": {step + 1}), and batch {n}, after the objective, has {found.hash_now} now; bring back the '
            "config.json, the checkpoints and the release of the run"
        )
        return Exit.DATA_MISMATCH
    return 0


def piece_line(piece: Piece, seq_len: int, *, of_document: bool) -> str:
    """The line for people. seq_len: tokens in a row of the data."""
    to_come = "" if piece.done else ", still to come"
    to_come += f", in rows of {piece.row_tokens}" if piece.row_tokens < seq_len else ""
    head = f"step {piece.step} (batch {piece.batch}{to_come}) " if of_document else ""
    return head + line_of(piece.entry, piece.text)


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
