"""Creates token shards from raw text: reads, filters, deduplicates, tokenizes and shuffles documents.

  jaxscale prepare --config=configs/data/web.py --input='raw/*.jsonl.gz' --output=FOLDER

Documents can be traced to their sources. The same command resumes after a kill. Exit code 0: the dataset is complete.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

from jaxscale import schema
from jaxscale.api.corpora import prepare, storage_errors
from jaxscale.runtime.data.manifest import NAME as MANIFEST
from jaxscale.runtime.data.manifest import open_set, read_manifest
from jaxscale.runtime.data.other_formats import export_array_record, export_megatron
from jaxscale.runtime.text.sources.files import size_of
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.config_file import config_values
from jaxscale.settings.help_text import command
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import is_remote
from jaxscale.tools.corpus.prepare.config import PrepareConfig, RowsConfig
from jaxscale.tools.corpus.prepare.dedup import Executor
from jaxscale.tools.corpus.prepare.engine import PreparePlan, make_plan
from jaxscale.tools.corpus.prepare.local import LocalExecutor
from jaxscale.tools.corpus.prepare.preparation_page import rewrite_report
from jaxscale.tools.corpus.prepare.progress import PrepareProgress
from jaxscale.tools.corpus.publish import publish_indexes

EXPORTS = {"megatron": export_megatron, "array_record": export_array_record}


@dataclasses.dataclass(frozen=True)
class PrepareFlags:
    config: str = flag("", "a recipe; default: the default stages", "FILE")
    settings: dict[str, str] = flag(
        dict, "sets any setting of the recipe by its dotted name", "VALUE", name="config.NAME"
    )
    input: str | None = flag(
        None, "files of the recipe's only source, or of a source named text; default: the recipe's files", "GLOB"
    )
    output: str = flag("", "folder of the shards, manifest.json and report.html; may be gs://BUCKET/FOLDER", "FOLDER")
    workers: int | None = flag(None, "processes; default: all cores. Does not change the output", "N", least=1)
    runner: str = flag(
        "local",
        "an Apache Beam runner, such as DirectRunner, DataflowRunner, FlinkRunner, with its flags after --: "
        "--runner=DataflowRunner -- --project=P --temp_location=gs://B/tmp",
        "local|NAME",
    )
    work_dir: str | None = flag(None, "local folder for intermediate files, if --output is under gs://", "FOLDER")
    keep_work: bool = flag(False, "keeps --work_dir when the dataset is complete")
    index: bool = flag(
        False,
        "only writes missing indexes of a complete --output, such as one from an earlier version: documents by name, "
        "for jaxscale trace, and the row plans of --config.rows.seq_len",
    )
    strict: bool = flag(
        False,
        "exits with code 2 if more than 1% of documents or bytes, or a damaged file, is skipped, or if the tokenizer "
        "loses more than 1% of the characters of samples",
    )
    report: bool = flag(False, "only rewrites report.html of a complete --output")
    export: str | None = flag(
        None,
        "only exports a complete --output as megatron:BASE (BASE.bin and BASE.idx) or array_record:FILE (one record "
        "per document, token ids as little-endian numbers)",
        "KIND:FILE",
    )
    plan: bool = flag(False, "prints the passes without running them")


@command(PrepareFlags, settings=PrepareConfig, passes_on=True)
def main(arguments: Arguments) -> None:
    """Prepares the dataset."""
    flags, progress = arguments.flags, PrepareProgress()
    output, folder = flags.output, pathlib.Path(flags.output).expanduser()
    if not output and not flags.plan:
        raise BadInput("--output must be given: the folder for shards, manifest and report")
    if is_remote(output) and (flags.report or flags.export or flags.index):
        raise BadInput(f"--output={output}: --report, --index and --export require a local folder")
    if flags.report:
        rewrite_report(folder)
        progress.say(f"wrote {output}/report.html")
        return
    if flags.index:
        rows = load_rows(arguments.config, arguments.overrides)
        with storage_errors(folder):
            publish_indexes(folder, rows, progress.say)
        return
    if flags.export:
        progress.say(export(folder, flags.export))
        return
    recipe = load_recipe(arguments.config, arguments.overrides, flags.input)
    if flags.plan:
        progress.say(describe(make_plan(recipe)))
        return
    if flags.work_dir and not is_remote(output):
        raise BadInput(f"--output={output} is local, but --work_dir applies only to gs://; remove --work_dir")
    if is_remote(output) and not flags.work_dir:
        raise BadInput(f"--output={output} is remote; set --work_dir=FOLDER, a local folder with space for all shards")
    with make_executor(flags, arguments.behind) as executor:
        how = dict(work_dir=flags.work_dir, keep_work=flags.keep_work, strict=flags.strict)
        made = prepare(recipe, output, **how, executor=executor, progress=progress)
    progress.say(
        f"{made['num_documents']:,} documents, {made['num_tokens']:,} tokens in {len(made['shards']):,} shards; "
        f"tokenizer {made['tokenizer']['name']}"
    )
    progress.say(f"{output}: complete; see report.html; train with --config.data.files={output}/manifest.json")


def load_recipe(file: str, overrides: Mapping[str, str], input: str | None) -> PrepareConfig:
    """Returns the recipe of file and flags. Raises BadInput for invalid settings."""
    values = config_values(file) if file else {}
    if input:
        sources = values.get("sources") or {"text": {}}
        if not isinstance(sources, Mapping) or not all(isinstance(one, Mapping) for one in sources.values()):
            return schema.from_dict(PrepareConfig, values)  # raises with the reason
        if len(sources) > 1:
            raise BadInput(
                f"--input={input} sets the files of one source, but the recipe has several: "
                f"{', '.join(sources)}; set --config.sources.NAME.files=GLOB for each"
            )
        values["sources"] = {name: {**source, "files": input} for name, source in sources.items()}
    return schema.from_dict(PrepareConfig, schema.merge(values, overrides))


def load_rows(file: str, overrides: Mapping[str, str]) -> RowsConfig:
    """Returns the rows.* settings of a recipe and flags. Raises BadInput for flags that do not apply to --index."""
    if others := [name for name in overrides if not name.startswith("rows.")]:
        raise BadInput(f"--config.{others[0]} does not apply to --index, which uses only rows.*; remove it")
    values = schema.merge(config_values(file) if file else {}, overrides)
    return schema.from_dict(RowsConfig, values.get("rows", {}))


def make_executor(flags: PrepareFlags, beam_flags: Sequence[str]) -> Executor:
    """Returns the executor that runs the tasks."""
    if flags.runner == "local":
        if beam_flags:
            raise BadInput(
                f"flags after -- apply only to a Beam runner; set --runner=NAME or remove {' '.join(beam_flags)}"
            )
        return LocalExecutor(flags.workers or os.cpu_count() or 1)
    from jaxscale.tools.corpus.prepare.beam import BeamExecutor  # Apache Beam is optional, and slow to import

    return BeamExecutor(flags.runner, beam_flags)


def export(output: pathlib.Path, target: str) -> str:
    """Exports the complete dataset. Returns a message."""
    kind, _, file = target.partition(":")
    if kind not in EXPORTS or not file:
        raise BadInput(f"--export={target} must be KIND:FILE, with KIND one of {', '.join(EXPORTS)}")
    shards = open_set(read_manifest(output / MANIFEST))
    EXPORTS[kind](shards, pathlib.Path(file).expanduser())
    return f"wrote {sum(shard.header['num_documents'] for shard in shards):,} documents to {file}"


def describe(plan: PreparePlan) -> str:
    """Returns a description of the passes and their inputs."""
    files = {file.path for file in plan.files}
    size = sum(size_of(path) or 0 for path in files)  # the size of a stream is unknown
    lines = [f"{len(files):,} files, {size / 1e6:,.1f} MB on disk, in {len(plan.pieces):,} pieces"]
    for number, step in enumerate(plan.passes):
        then = {"joins": ", ".join(step.joins), "sample": "training the tokenizer", "tokens": "shards"}[step.ends]
        lines.append(f"pass {number + 1}: {', '.join(step.stages) or 'nothing'}; then {then}")
    return "\n".join(lines)
