"""Evaluates a trained or converted model: text, multiple choice and cloze by likelihood, and lm-eval's tasks.

  jaxscale evaluate --workdir=runs/quickstart --text=readme=README.md,docs=docs/*.md

Metrics are printed with their standard error. On several hosts, use the host flags of training; the first host writes.
"""

import dataclasses
import re
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from jaxscale import schema
from jaxscale.api import measuring
from jaxscale.api.inference import LoadedModel, at_step
from jaxscale.api.measuring import BATCH_TOKENS, EvalRequest, Measure, Record, by_name
from jaxscale.cli.sample import ModelFlags, read_mesh
from jaxscale.program.out_of_memory import out_of_memory_explained
from jaxscale.runtime.checkpoint.branch import open_source
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.restore import record_error
from jaxscale.runtime.checkpoint.storage_errors import stop_if_unwritable
from jaxscale.runtime.eval.config import ChoiceEval, ClozeEval, Evals, TextEval
from jaxscale.runtime.hosts import cluster
from jaxscale.runtime.hosts.agree import agreed
from jaxscale.settings.command_line import Arguments, flag, whole_number
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, print_stderr, put
from jaxscale.units import plural, table

COUNTS = ("documents", "items", "tokens", "bytes", "left_out")
SETTINGS = {"text": TextEval, "choice": ChoiceEval, "cloze": ClozeEval}
TEXT_FLAGS = ("text_field", "text_documents")
NAME_AND_FILES = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.+)")


@dataclasses.dataclass(frozen=True)
class EvaluateFlags(ModelFlags):
    steps: str | None = flag(
        None, "every checkpoint, or N,N,...; prints a table, and writes evals.jsonl and evals.html", "all"
    )
    text: str = flag("", "perplexity and bits per byte of each file; the name defaults to the file's", "NAME=GLOB,...")
    choice: str = flag("", "multiple choice: PIQA, SciQ, ARC, or lines of {context, choices, answer}", "NAME=FILE,...")
    cloze: str = flag("", "texts whose last words are predicted: LAMBADA, or {context, target} lines", "NAME=FILE,...")
    lm_eval: str = flag(
        "",
        "tasks of lm-eval (jaxscale[lm_eval]). Without --text, --choice, --cloze and --lm_eval: the config's evals",
        "TASK,...",
    )
    include_path: str | None = flag(None, "lm_eval: folder with yaml files of additional tasks", "FOLDER")
    num_fewshot: int | None = flag(None, "lm_eval: number of examples before each question", "N", least=0)
    chat: bool = flag(False, "lm_eval: formats questions with the model's chat template")
    limit: int | None = flag(
        None, "at most N items per file or task, or documents per source; default: all", "N", least=1
    )
    context: int | None = flag(None, "context length; default: the sequence length of training", "TOKENS", least=2)
    stride: int | None = flag(
        None, "stride of the window over a long document; default: half of the context", "TOKENS", least=1
    )
    text_field: str | None = flag(
        None, "text field of .jsonl, .parquet and .arrow; for plain text: --text_documents=file|line|paragraph", "NAME"
    )
    text_documents: str | None = flag(None, None, "file|line|paragraph")
    damaged: str | None = flag(
        None, "items that cannot be read or scored: stop (default), or skip and count them", "stop|skip"
    )
    batch_tokens: int = flag(BATCH_TOKENS, "tokens per batch; does not change results", least=1)
    save: bool = flag(False, "also writes evals.jsonl and evals.html if only one step is evaluated")
    json: bool = flag(False, "prints one JSON object per step")


@command(EvaluateFlags, without=cluster.HostFlags)
def main(arguments: Arguments) -> None:
    """Evaluates the model."""
    flags, options = arguments.flags, arguments.options
    request, mesh = read_request(flags), read_mesh(flags.mesh)
    if flags.devices:
        jax.config.update("jax_num_cpu_devices", flags.devices)
    place = cluster.discover_process(options)
    facts = {name: value for name, value in options.items() if name not in cluster.FLAGS}
    smaller = (f"--batch_tokens={max(flags.batch_tokens // 2, 1)}", "more devices (--mesh)")
    with cluster.joined(place, facts, options), out_of_memory_explained(lambda: ("", smaller)):
        first = jax.process_index() == 0
        say = print_stderr if first else lambda line: None
        steps = selected_steps(flags, say)
        model = flags.open(mesh, steps[0], say)
        measure = measuring.make_measure(request, model, say)
        evaluate_steps(flags, model, steps, measure, say, first)


def evaluate_steps(
    flags: EvaluateFlags, model: LoadedModel, steps: Sequence[int | None], measure: Measure, say: Callable, first: bool
) -> None:
    """Evaluates each step, and prints and saves the metrics."""
    workdir = paths.as_path(model.path).parent.parent
    as_json, saves = flags.json, flags.steps is not None or flags.save
    records = []
    for step in steps:
        if step is not None and step != model.step:
            if step not in agreed(Checkpoints(paths.as_path(model.path).parent, CheckpointConfig()).all_steps):
                say(f"step {step} was deleted by the retention policy of the running training")
                continue
            model = at_step(model, step)
        began = time.monotonic()
        record = measuring.record_of(model, measure(model))
        records.append(record)
        say(f"step {model.step}: evaluated in {time.monotonic() - began:.1f} s")
        if first and saves:
            stop_if_unwritable(lambda record=record: measuring.save_record(workdir, record), workdir)
        if first and as_json:
            put(measuring.as_line(record))
    if first and not as_json:
        show_table(records) if flags.steps is not None else show_lines(records[-1])
    if saves:
        say(f"results: {workdir}/evals.jsonl, curves: {workdir}/evals.html")


def read_request(flags: EvaluateFlags) -> EvalRequest:
    """Returns the evaluation that the flags request. Raises BadInput for conflicting flags and missing files."""
    if not flags.workdir:
        raise BadInput("--workdir must be given: the work folder of a run, or of a converted model")
    if flags.step is not None and flags.steps is not None:
        raise BadInput("--step and --steps cannot be combined; use one of them")
    tasks = tuple(task for task in flags.lm_eval.split(",") if task)
    for name in ("include_path", "num_fewshot", "chat"):
        if getattr(flags, name) not in (None, False) and not tasks:
            raise BadInput(f"--{name} applies only to --lm_eval; also set --lm_eval=TASK")
    if flags.include_path and not Path(flags.include_path).is_dir():
        raise BadInput(f"--include_path={flags.include_path} is not a folder")
    names = [field.name for field in dataclasses.fields(EvalRequest) if field.name not in ("evals", "tasks")]
    request = EvalRequest(read_evals(flags), tasks, **{name: getattr(flags, name) for name in names})
    measuring.check_request(request)
    return request


def read_evals(flags: EvaluateFlags) -> Evals:
    """Returns the evaluators of --text, --choice and --cloze. Raises BadInput for a duplicate name."""
    found: Evals = {}
    hints = typing.get_type_hints(TextEval)
    given = {name: value for name in (*TEXT_FLAGS, "stride") if (value := getattr(flags, name)) is not None}
    shared: dict[str, typing.Any] = {"limit": flags.limit} if flags.limit else {}
    if flags.damaged is not None:
        shared["damaged"] = schema.convert(flags.damaged, hints["damaged"], "--damaged")
    for kind, settings in SETTINGS.items():
        more = dict(shared)
        if kind == "text":
            more |= {name: schema.convert(value, hints[name], f"--{name}") for name, value in given.items()}
        for part in filter(None, getattr(flags, kind).split(",")):
            match = NAME_AND_FILES.fullmatch(part)
            name, pattern = match.groups() if match else (default_name(part, kind), part)
            if name in found:
                raise BadInput(f"--{kind}={part}: the name {name} is used twice; use --{kind}=NAME={pattern}")
            found[name] = settings(**more | {"files" if kind == "text" else "file": pattern})
    if given and not flags.text:
        raise BadInput("--stride, --text_field and --text_documents apply only to --text; also set --text=GLOB")
    if flags.damaged is not None and not found:
        raise BadInput("--damaged applies only to --text, --choice and --cloze; also set one of them")
    return found


def default_name(pattern: str, kind: str) -> str:
    """Returns the file name up to its first dot, or `kind` if the path is a glob pattern."""
    stem = Path(pattern).name.partition(".")[0]
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", stem).strip("_-")
    return plain if plain and not set("*?[") & set(pattern) else kind


def selected_steps(flags: EvaluateFlags, say: Callable[[str], None]) -> Sequence[int | None]:
    """Returns the steps to evaluate (None: newest). 'all' skips damaged steps. Raises BadInput for missing steps."""
    if flags.steps is None:
        return [flags.step]
    workdir = flags.workdir
    if paths.as_path(workdir).name.isdecimal() and not (paths.as_path(workdir) / "checkpoints").exists():
        raise BadInput(f"--workdir={workdir} is a single checkpoint; with --steps, set the work folder of the run")
    checkpoints = open_source(workdir, named="--workdir", log=lambda line: None).checkpoints
    steps = agreed(checkpoints.all_steps)
    if flags.steps == "all":
        errors = {step: error for step in steps if (error := record_error(checkpoints, step))}
        for error in errors.values():
            say(f"WARNING: {error}; skipped")
        return [step for step in steps if step not in errors]
    requested = [whole_number("--steps", text, 0) for text in flags.steps.split(",")]
    if missing := [step for step in requested if step not in steps]:
        existing = ", ".join(map(str, steps))
        raise BadInput(f"--steps={flags.steps}: no checkpoint of step {missing[0]}; existing steps: {existing}")
    return sorted(set(requested))


def with_error(metrics: Mapping[str, float], metric: str) -> str:
    """Returns a metric with its standard error, such as '1.234 ± 0.012'."""
    error = metrics.get(f"{metric}_stderr")
    return f"{metrics[metric]:.4g}" + (f" ± {error:.2g}" if error is not None else "")


def measured(metrics: Mapping[str, float]) -> list[str]:
    """Returns the names of the metrics, without counts and standard errors."""
    return [name for name in metrics if name not in COUNTS and not name.endswith("_stderr")]


def show_lines(record: Record) -> None:
    """Prints a line for each evaluator of one step, with counts such as '2 documents, 3 left out'."""
    counted = lambda n, what: f"{n:,} left out" if what == "left_out" else plural(int(n), what.removesuffix("s"))
    for name, metrics in by_name(record).items():
        values = ", ".join(f"{metric} {with_error(metrics, metric)}" for metric in measured(metrics))
        counts = ", ".join(counted(metrics[count], count) for count in COUNTS if count in metrics)
        put(f"{name}: {values}" + (f"; {counts}" if counts else ""))


def show_table(records: Sequence[Record]) -> None:
    """Prints a row for each step and a column for each metric. Omits losses, since perplexities are shown."""
    rows = [(str(record["step"]), by_name(record)) for record in records]
    evaluators = [pair for _, found in rows for pair in found.items()]
    columns = dict.fromkeys(
        (name, metric) for name, found in evaluators for metric in measured(found) if metric != "loss"
    )
    cells = [["step", *(f"{name}/{metric}" for name, metric in columns)]]
    for step, found in rows:
        values = [with_error(found[name], metric) if metric in found.get(name, {}) else "-" for name, metric in columns]
        cells.append([step, *values])
    put(*table(cells, indent=""))
