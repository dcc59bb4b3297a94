"""Turns raw text into token shards: read, screened, deduplicated, tokenised, shuffled, each document traceable.

  jaxscale prepare --config=configs/data/web.py --input='raw/*.jsonl.gz' --output=FOLDER
  --config=FILE          a recipe; without one, the default stages
  --config.NAME=VALUE    sets any setting of the recipe by its dotted name
  --input=GLOB           files of the recipe's one source, or of one named text; else the recipe's own
  --output=FOLDER        where the shards, manifest.json and report.html go: a folder, or gs://BUCKET/FOLDER
  --workers=N            processes; default: all cores. The output does not depend on it
  --runner=local|NAME    an Apache Beam runner, such as DirectRunner, DataflowRunner, FlinkRunner; its own flags come
                         after --, as in: --runner=DataflowRunner -- --project=P --temp_location=gs://B/tmp
  --work_dir=FOLDER      for an output under gs://: the local folder in which it is made, and from which it is copied
  --keep_work            leaves it there in the end
  --report               writes report.html of a finished --output again, and nothing else
  --export=KIND:FILE     writes a finished --output again as megatron:BASE (BASE.bin and BASE.idx) or array_record:FILE
                         (a record for each document, its ids as little-endian numbers), and does nothing else
  --plan                 says what would be done, and does nothing

Killed at any moment, the same command goes on. Exit code 0: the set is complete.
"""

import errno
import os
import pathlib

from jaxscale import schema
from jaxscale.cli import run_verb
from jaxscale.command_line import (
    Arguments,
    config_values,
    parse_arguments,
    take_switches,
    whole_number,
)
from jaxscale.corpus.prepare.config import PrepareConfig
from jaxscale.corpus.prepare.engine import Plan, make_plan, prepare
from jaxscale.corpus.prepare.joins import Executor
from jaxscale.corpus.prepare.local import LocalExecutor
from jaxscale.corpus.prepare.outcome import FACTS, PAGE, rewrite_report
from jaxscale.corpus.prepare.progress import Progress
from jaxscale.corpus.publish import publish
from jaxscale.data.array_record import export_array_record
from jaxscale.data.manifest import NAME as MANIFEST
from jaxscale.data.manifest import open_set, read_manifest
from jaxscale.data.megatron import export_megatron
from jaxscale.help_text import show_help
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.paths import is_remote
from jaxscale.text.sources.files import size_of

SWITCHES = ("report", "keep_work", "plan")
OPTIONS = ("input", "output", "workers", "runner", "work_dir", "export")
EXPORTS = {"megatron": export_megatron, "array_record": export_array_record}


def main(argv: list[str]) -> int:
    """Prepares the set and returns the exit code."""
    own, beam_flags = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    rest, switches = take_switches(own, OPTIONS, SWITCHES)
    arguments = parse_arguments(rest, (*OPTIONS, *SWITCHES))
    if arguments.help:
        show_help(__doc__, PrepareConfig, arguments.topic)
        return 0
    progress = Progress()
    output = arguments.options.get("output", "")
    if not output and "plan" not in switches:
        raise BadInput("--output must be given: the folder for shards, manifest and report")
    if is_remote(output) and ("report" in switches or "export" in arguments.options):
        raise BadInput(f"--output={output}: a report is written, and a set exported, from a local folder")
    if "report" in switches:
        rewrite_report(pathlib.Path(output).expanduser())
        progress.say(f"wrote {output}/report.html")
        return 0
    if "export" in arguments.options:
        progress.say(export(pathlib.Path(output).expanduser(), arguments.options["export"]))
        return 0
    plan = make_plan(load_recipe(arguments))
    if "plan" in switches:
        progress.say(describe(plan))
        return 0
    folder = local_output(arguments)
    try:
        with make_executor(arguments, beam_flags) as executor:
            prepare(plan, folder, executor, progress, keep_work="keep_work" in switches)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Stop(Exit.STORAGE, f"{folder} is full; make room, and run the same command again to go on") from None
        raise
    if is_remote(output):
        progress.say(f"copying to {output}")
        publish(folder, output, beside=(FACTS, PAGE))
    made = read_manifest(folder / MANIFEST).content
    progress.say(
        f"{made['num_documents']:,} documents, {made['num_tokens']:,} tokens in {len(made['shards']):,} shards; "
        f"tokenizer {made['tokenizer']['name']}"
    )
    progress.say(f"{output}: complete; look at report.html, train with --config.data.files={output}/manifest.json")
    return 0


def load_recipe(arguments: Arguments) -> PrepareConfig:
    """The settings of file and flags. Raises BadInput for those that are wrong."""
    values = config_values(arguments.config) if arguments.config else {}
    if "input" in arguments.options:
        sources = values.get("sources") or {"text": {}}
        if len(sources) > 1:
            raise BadInput(
                f"--input={arguments.options['input']} names files of one source, and the recipe has "
                f"{', '.join(sources)}; write --config.sources.NAME.files=GLOB for each"
            )
        values["sources"] = {name: {**source, "files": arguments.options["input"]} for name, source in sources.items()}
    return schema.from_dict(PrepareConfig, schema.merge(values, arguments.overrides))


def local_output(arguments: Arguments) -> pathlib.Path:
    """The folder that the set is made in, from where a gs:// one is copied."""
    output = arguments.options["output"]
    if not is_remote(output):
        if "work_dir" in arguments.options:
            raise BadInput(f"--work_dir is for an output under gs://; --output={output} keeps its work in itself")
        return pathlib.Path(output).expanduser()
    if "work_dir" not in arguments.options:
        raise BadInput(f"--output={output} is remote; give --work_dir=FOLDER, a local one with room for all shards")
    return pathlib.Path(arguments.options["work_dir"]).expanduser()


def make_executor(arguments: Arguments, beam_flags: list[str]) -> Executor:
    """Where the pieces of work are done."""
    runner = arguments.options.get("runner", "local")
    if runner == "local":
        if beam_flags:
            raise BadInput(f"flags after -- are for a Beam runner, and --runner is local: {' '.join(beam_flags)}")
        return LocalExecutor(whole_number("workers", arguments.options.get("workers", str(os.cpu_count() or 1)), 1))
    from jaxscale.corpus.prepare.beam import BeamExecutor  # Apache Beam is an extra, and slow to load

    return BeamExecutor(runner, beam_flags)


def export(output: pathlib.Path, wish: str) -> str:
    """Writes the finished set in another program's format, and says so."""
    kind, _, file = wish.partition(":")
    if kind not in EXPORTS or not file:
        raise BadInput(f"--export={wish} must be KIND:FILE, with KIND one of {', '.join(EXPORTS)}")
    shards = open_set(read_manifest(output / MANIFEST))
    EXPORTS[kind](shards, pathlib.Path(file).expanduser())
    return f"wrote {sum(shard.header['num_documents'] for shard in shards):,} documents to {file}"


def describe(plan: Plan) -> str:
    """The passes over how many pieces of which files."""
    files = {file.path for file, _ in plan.pieces}
    size = sum(size_of(path) or 0 for path in files)  # of a stream, nobody knows
    lines = [f"{len(files):,} files, {size / 1e6:,.1f} MB as they lie, in {len(plan.pieces):,} pieces"]
    for number, step in enumerate(plan.passes):
        then = {"joins": ", ".join(step.joins), "sample": "training the tokenizer", "tokens": "shards"}[step.ends]
        lines.append(f"pass {number + 1}: {', '.join(step.stages) or 'nothing'}; then {then}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_verb("prepare")
