"""Lists the documents that a step of a run trained on, or the steps that trained on a document.

  jaxscale trace --workdir=RUN --step=12345      source, file, offset, id, token range and text of every piece
  jaxscale trace --workdir=RUN --doc=ID          every past and future step that has it; also FILE:OFFSET and
                                                 SHARD.bin:NUMBER

Steps and batches are counted from 0: step n trains on the batch that the console and metrics.jsonl report as step n + 1
(completed steps); a note on stderr repeats this. Positions [begin, end) and text refer to the packed row, before an
objective such as span_corruption creates inputs and targets and before seq_len_ramp splits it. "row_tokens" is the
length of the rows in training. Steps after the last checkpoint and the last line of metrics.jsonl have "done": false.

The list is computed from config.json, the last checkpoint and the data, which must be unchanged. If metrics.jsonl has
the hash of a listed step's batch (after the objective), it is compared. If the hashes differ, a message is printed to
stderr and the exit code is 12.
"""

import dataclasses
import json

from jaxscale.api.tracing import BatchTrace, TracedPiece, trace
from jaxscale.runtime.data.ledger import DocumentPiece
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system.exits import BadInput, Exit, print_stderr, put
from jaxscale.system.redact import on_one_line


@dataclasses.dataclass(frozen=True)
class TraceFlags:
    no_config = "the settings are read from the work folder; only --config.data.NAME can be set"

    workdir: str = flag("", None, "RUN")
    step: int | None = flag(None, None, "N", least=0)
    doc: str | None = flag(None, None, "ID")
    batch: int | None = flag(
        None, "instead of --step: the number of the batch (batch_index in metrics.jsonl)", "N", least=0
    )
    row: int | None = flag(None, "only this row of the batch", "R", least=0)
    text: int = flag(200, "characters of text to print per piece; 0: none", least=0)
    json: bool = flag(False, "prints one JSON object per line")
    settings: dict[str, str] = flag(dict, "new paths of moved data: cache_dir, files", "V", name="config.data.NAME")


FIXED_SETTINGS = ("data.mixture", "data.max_epochs", "data.skip_batches", "data.objective")  # they determine batches


@command(TraceFlags)
def main(arguments: Arguments) -> int:
    """Prints the list and returns the exit code."""
    flags = arguments.flags
    if not flags.workdir:
        raise BadInput("--workdir must be given: the work folder of the run")
    if moved := [name for name in arguments.overrides if not name.startswith("data.")]:
        raise BadInput(f"--config.{moved[0]} cannot be set; remove it, or set only data.* for moved data")
    if fixed := [name for name in arguments.overrides if name.startswith(FIXED_SETTINGS)]:
        raise BadInput(f"--config.{fixed[0]} determines the batches and is read from the work folder; remove this flag")
    where = dict(step=flags.step, batch=flags.batch, document=flags.doc, row=flags.row)
    found = trace(flags.workdir, **where, characters=flags.text, moved=arguments.overrides)
    code, piece = 0 if found.batch is None else remarks(found, found.batch), None
    for piece in found.pieces:
        line = piece_line(piece, found.run.ledger.corpus.seq_len, with_step=found.batch is None)
        put(json.dumps(piece.record) if flags.json else line)
    if piece is None and found.batch is None:
        print_stderr(
            f"no past or future step of this run trains on {flags.doc}: it is held out, or comes after the last step"
        )
    return code


def remarks(found: BatchTrace, n: int) -> int:
    """Prints notes about batch n to stderr. Returns the exit code."""
    step, run = found.step, found.run
    if step is None:
        print_stderr(f"batch {n} is skipped: no step trains on it")
    elif step < run.done:
        print_stderr(
            f"step {step}, counted from 0; it is step {step + 1} in the console and in metrics.jsonl, which count "
            "completed steps"
        )
    else:
        print_stderr(f"step {step} is in the future: the work folder has {run.done} completed steps")
    if (length := run.row_tokens.size(n)) < run.ledger.corpus.seq_len:
        print_stderr(f"training splits the rows of batch {n} into rows of {length} tokens (seq_len_ramp)")
    if found.hash_now and step is not None:
        print_stderr(
            f"step {step} did NOT train on this list: metrics.jsonl has tokens_hash {run.hashes[step]} for "
            f'it ("step": {step + 1}), but batch {n}, after the objective, now has {found.hash_now}; restore the '
            "config.json, the checkpoints and the release of the run"
        )
        return Exit.DATA_MISMATCH
    return 0


def piece_line(piece: TracedPiece, seq_len: int, *, with_step: bool) -> str:
    """Returns a part of a document as a line of text. seq_len: number of tokens in a packed sequence."""
    notes = "" if piece.done else ", in the future"
    notes += f", in rows of {piece.row_tokens}" if piece.row_tokens < seq_len else ""
    head = f"step {piece.step} (batch {piece.batch}{notes}) " if with_step else ""
    return head + line_of(piece.entry, piece.text)


def line_of(entry: DocumentPiece, text: str | None) -> str:
    """Returns a line such as 'row 3 [0, 812): web, a.jsonl:1200 ..., tokens [0, 812)', followed by the text."""
    source, file, shard = map(on_one_line, (entry.source, entry.file, entry.shard))
    place = f"row {entry.row} [{entry.begin}, {entry.begin + entry.tokens}): {source}"
    origin = f"{file}:{entry.offset}" if entry.offset >= 0 else f"{file} {shard}:{entry.number}".strip()
    known = f", id {on_one_line(entry.id)}" if entry.id else ""
    range_ = f"tokens [{entry.first_token}, {entry.first_token + entry.tokens})"
    return f"{place}, {origin}{known}, {range_}" + ("" if text is None else f"  {text!r}")
