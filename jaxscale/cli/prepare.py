"""Turns raw text into token shards: read, screened, deduplicated, tokenised, shuffled, each document traceable.

  jaxscale prepare --config=configs/data/web.py --input='raw/*.jsonl.gz' --output=FOLDER

Killed at any moment, the same command goes on. Exit code 0: the set is complete.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

from jaxscale import schema
from jaxscale.api.corpora import prepare, room_in
from jaxscale.cli import run_verb
from jaxscale.command_line import Arguments, flag
from jaxscale.config_file import config_values
from jaxscale.corpus.indexes import publish_indexes
from jaxscale.corpus.prepare.config import PrepareConfig, RowsConfig
from jaxscale.corpus.prepare.dedup import Executor
from jaxscale.corpus.prepare.engine import PreparePlan, make_plan
from jaxscale.corpus.prepare.local import LocalExecutor
from jaxscale.corpus.prepare.progress import Progress
from jaxscale.corpus.prepare.report import rewrite_report
from jaxscale.data.array_record import export_array_record
from jaxscale.data.manifest import NAME as MANIFEST
from jaxscale.data.manifest import open_set, read_manifest
from jaxscale.data.megatron import export_megatron
from jaxscale.help_text import command
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import is_remote
from jaxscale.text.sources.files import size_of

EXPORTS = {"megatron": export_megatron, "array_record": export_array_record}


@dataclasses.dataclass(frozen=True)
class PrepareFlags:
    """The flags of `jaxscale prepare`."""

    config: str = flag("", "a recipe; without one, the default stages", "FILE")
    settings: dict[str, str] = flag(
        dict, "sets any setting of the recipe by its dotted name", "VALUE", name="config.NAME"
    )
    input: str | None = flag(
        None, "files of the recipe's one source, or of one named text; else the recipe's own", "GLOB"
    )
    output: str = flag(
        "", "where the shards, manifest.json and report.html go: a folder, or gs://BUCKET/FOLDER", "FOLDER"
    )
    workers: int | None = flag(None, "processes; default: all cores. The output does not depend on it", "N", least=1)
    runner: str = flag(
        "local",
        "an Apache Beam runner, such as DirectRunner, DataflowRunner, FlinkRunner; its own flags come after --, as in: "
        "--runner=DataflowRunner -- --project=P --temp_location=gs://B/tmp",
        "local|NAME",
    )
    work_dir: str | None = flag(
        None,
        "for an output under gs://: the local folder in which it is made, and from which it is copied",
        "FOLDER",
    )
    keep_work: bool = flag(False, "leaves it there in the end")
    index: bool = flag(
        False,
        "makes the indexes of a finished --output that it lacks, as of a set by an earlier version: its documents by "
        "name, for jaxscale trace, and the row plans of --config.rows.seq_len; and nothing else",
    )
    strict: bool = flag(
        False,
        "exit code 2 if reading left out more than 1% of documents or bytes, or a broken file, or if the tokenizer "
        "loses more than 1% of the characters of samples",
    )
    report: bool = flag(False, "writes report.html of a finished --output again, and nothing else")
    export: str | None = flag(
        None,
        "writes a finished --output again as megatron:BASE (BASE.bin and BASE.idx) or array_record:FILE (a record for "
        "each document, its ids as little-endian numbers), and does nothing else",
        "KIND:FILE",
    )
    plan: bool = flag(False, "says what would be done, and does nothing")


@command(PrepareFlags, settings=PrepareConfig, passes_on=True)
def main(arguments: Arguments) -> int:
    """Prepares the set and returns the exit code."""
    flags, progress = arguments.flags, Progress()
    output = flags.output
    if not output and not flags.plan:
        raise BadInput("--output must be given: the folder for shards, manifest and report")
    if is_remote(output) and (flags.report or flags.export or flags.index):
        raise BadInput(f"--output={output}: a report is written, and a set indexed and exported, in a local folder")
    if flags.report:
        rewrite_report(pathlib.Path(output).expanduser())
        progress.say(f"wrote {output}/report.html")
        return 0
    if flags.index:
        folder, rows = pathlib.Path(output).expanduser(), load_rows(arguments.config, arguments.overrides)
        with room_in(folder):
            publish_indexes(folder, rows, progress.say)
        return 0
    if flags.export:
        progress.say(export(pathlib.Path(output).expanduser(), flags.export))
        return 0
    recipe = load_recipe(arguments.config, arguments.overrides, flags.input)
    if flags.plan:
        progress.say(describe(make_plan(recipe)))
        return 0
    check_places(flags)
    with make_executor(flags, arguments.behind) as executor:
        made = prepare(
            recipe,
            output,
            work_dir=flags.work_dir,
            keep_work=flags.keep_work,
            strict=flags.strict,
            executor=executor,
            progress=progress,
        )
    progress.say(
        f"{made['num_documents']:,} documents, {made['num_tokens']:,} tokens in {len(made['shards']):,} shards; "
        f"tokenizer {made['tokenizer']['name']}"
    )
    progress.say(f"{output}: complete; look at report.html, train with --config.data.files={output}/manifest.json")
    return 0


def load_recipe(file: str, overrides: Mapping[str, str], input: str | None) -> PrepareConfig:
    """The settings of file and flags. Raises BadInput for those that are wrong."""
    values = config_values(file) if file else {}
    if input:
        sources = values.get("sources") or {"text": {}}
        if not isinstance(sources, Mapping) or not all(isinstance(one, Mapping) for one in sources.values()):
            return schema.from_dict(PrepareConfig, values)  # which says what is wrong with them
        if len(sources) > 1:
            raise BadInput(
                f"--input={input} names files of one source, and the recipe has "
                f"{', '.join(sources)}; write --config.sources.NAME.files=GLOB for each"
            )
        values["sources"] = {name: {**source, "files": input} for name, source in sources.items()}
    return schema.from_dict(PrepareConfig, schema.merge(values, overrides))


def load_rows(file: str, overrides: Mapping[str, str]) -> RowsConfig:
    """The settings of row plans in a recipe and flags. Raises BadInput for other flags, which --index does not read."""
    if others := [name for name in overrides if not name.startswith("rows.")]:
        raise BadInput(f"--config.{others[0]}: --index reads rows.* alone; leave this out")
    values = schema.merge(config_values(file) if file else {}, overrides)
    return schema.from_dict(RowsConfig, values.get("rows", {}))


def check_places(flags: PrepareFlags) -> None:
    """Raises BadInput unless --work_dir is given where the output is remote, and there alone."""
    if flags.work_dir and not is_remote(flags.output):
        raise BadInput(f"--work_dir is for an output under gs://; --output={flags.output} keeps its work in itself")
    if is_remote(flags.output) and not flags.work_dir:
        raise BadInput(
            f"--output={flags.output} is remote; give --work_dir=FOLDER, a local one with room for all shards"
        )


def make_executor(flags: PrepareFlags, beam_flags: Sequence[str]) -> Executor:
    """Where the pieces of work are done."""
    if flags.runner == "local":
        if beam_flags:
            raise BadInput(f"flags after -- are for a Beam runner, and --runner is local: {' '.join(beam_flags)}")
        return LocalExecutor(flags.workers or os.cpu_count() or 1)
    from jaxscale.corpus.prepare.beam import BeamExecutor  # Apache Beam is an extra, and slow to load

    return BeamExecutor(flags.runner, beam_flags)


def export(output: pathlib.Path, wish: str) -> str:
    """Writes the finished set in another program's format, and says so."""
    kind, _, file = wish.partition(":")
    if kind not in EXPORTS or not file:
        raise BadInput(f"--export={wish} must be KIND:FILE, with KIND one of {', '.join(EXPORTS)}")
    shards = open_set(read_manifest(output / MANIFEST))
    EXPORTS[kind](shards, pathlib.Path(file).expanduser())
    return f"wrote {sum(shard.header['num_documents'] for shard in shards):,} documents to {file}"


def describe(plan: PreparePlan) -> str:
    """The passes over how many pieces of which files."""
    files = {file.path for file in plan.pieces.files}
    size = sum(size_of(path) or 0 for path in files)  # of a stream, nobody knows
    lines = [f"{len(files):,} files, {size / 1e6:,.1f} MB as they lie, in {len(plan.pieces):,} pieces"]
    for number, step in enumerate(plan.passes):
        then = {"joins": ", ".join(step.joins), "sample": "training the tokenizer", "tokens": "shards"}[step.ends]
        lines.append(f"pass {number + 1}: {', '.join(step.stages) or 'nothing'}; then {then}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_verb("prepare")
