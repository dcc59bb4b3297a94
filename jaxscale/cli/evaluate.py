"""Measures a model, trained or converted: text, multiple choice and cloze by likelihood, and lm-eval's tasks.

  jaxscale evaluate --workdir=runs/quickstart --text=readme=README.md,docs=docs/*.md

  --workdir=RUN           a work folder, or RUN/checkpoints/STEP
  --step=N                its checkpoint of this step; the newest unless given
  --steps=all             every checkpoint, or N,N,...: a table, evals.jsonl and evals.html in the work folder
  --ema                   the running average of the weights, where the run kept one
  --text=NAME=GLOB,...    perplexity and bits per byte of each; a GLOB alone is called by its file
  --choice=NAME=FILE,...  questions with answers to choose from: PIQA, SciQ, ARC, or {context, choices, answer} a line
  --cloze=NAME=FILE,...   texts whose end is to be guessed: LAMBADA, or {context, target} a line
  --lm_eval=TASK,...      tasks of lm-eval (jaxscale[lm_eval]); without any of these four, the evals of the run's config
  --include_path=FOLDER   lm_eval: yaml files of more tasks
  --num_fewshot=N         lm_eval: examples before each question
  --chat                  lm_eval: questions are put as conversations, by the model's chat template
  --limit=N               items of each file or task, documents of each source; all unless given
  --context=TOKENS        that the model reads at a time; the rows it was trained on unless given
  --stride=TOKENS         by which the window over a long document moves on; half of the context unless given
  --text_field=NAME       of .jsonl, .parquet and .arrow; --text_documents=file|line|paragraph of plain text
  --batch_tokens=16384    tokens that are read at a time; no number depends on it
  --save                  one step: also into evals.jsonl and evals.html
  --json                  a line of JSON for each step
  --mesh.AXIS=N           devices along data, fsdp or tensor, as --config.mesh.AXIS of training
  --tokenizer=FILE        tokenizer.json, SentencePiece .model or 'bytes', for a work folder that has none
  --compute_dtype=TYPE    float32, bfloat16 or float16 instead of the run's own
  --devices=N             simulated CPU devices

Numbers stand with their standard error. On several hosts the flags of training apply; the first one writes.
"""

import dataclasses
import math
import re
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from jaxscale import schema
from jaxscale.checkpoint.branch import open_source
from jaxscale.checkpoint.cause import written
from jaxscale.checkpoint.choosing import why_not
from jaxscale.checkpoint.config import CheckpointConfig
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.cli import run_verb
from jaxscale.cli.evaluate_steps import as_line, record_of, save_record, show_lines, show_table
from jaxscale.cli.sample import read_dtype, read_mesh
from jaxscale.command_line import parse_arguments, take_switches, whole_number
from jaxscale.eval.config import ChoiceEval, ClozeEval, Evals, NamedEval, TextEval, check_names, setting_name
from jaxscale.eval.lm_eval_adapter import Served, check_installed, run_tasks
from jaxscale.eval.named import GROUP, Evaluator, check_files, open_evaluators
from jaxscale.eval.text import Reading
from jaxscale.help_text import show_help
from jaxscale.hosts import cluster
from jaxscale.hosts.agree import agreed
from jaxscale.inference import LoadedModel, at_step, check_tokenizer, make_generator, make_scorer, open_model
from jaxscale.run.resume_checks import check_same_evals
from jaxscale.sharding.config import MESH_AXES
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, put, tell

DATA = {"text": TextEval, "choice": ChoiceEval, "cloze": ClozeEval}
READING = ("text_field", "text_documents")
OPTIONS = ("workdir", "step", "steps", *DATA, "lm_eval", "include_path", "num_fewshot", "limit", "context", "stride")
OPTIONS += (*READING, "batch_tokens", "tokenizer", "compute_dtype", "devices")
OPTIONS += (*(f"mesh.{axis}" for axis in MESH_AXES), *cluster.FLAGS)
LEAST = {"limit": 1, "context": 2, "stride": 1, "batch_tokens": 1, "num_fewshot": 0, "step": 0}
SWITCHES = ("ema", "save", "json", "chat")
BATCH_TOKENS = 16384
NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)=(.+)")
GENERATED_AT_ONCE = 8  # texts that lm-eval's tasks have written at a time
Measure = Callable[[LoadedModel], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked for, read before anything is opened."""

    options: Mapping[str, str]
    evals: Evals  # of the flags
    tasks: tuple[str, ...]  # of lm-eval
    switches: set[str]

    def number(self, name: str, default: int, least: int) -> int:
        """The value of --name. Raises BadInput if it is no such number."""
        return whole_number(name, self.options.get(name, str(default)), least)

    @property
    def steps(self) -> str | None:
        """The value of --steps."""
        return self.options.get("steps")


def main(argv: list[str]) -> int:
    """Measures what argv names and returns the exit code."""
    rest, switches = take_switches(argv, (), SWITCHES)
    arguments = parse_arguments(rest, OPTIONS)
    if arguments.help:
        show_help(__doc__)
        return 0
    if arguments.config:
        raise BadInput("evaluate takes no --config: the settings of a model are read from its work folder")
    request = read_request(arguments.options, switches)
    mesh, dtype = read_mesh(arguments.options, arguments.overrides), read_dtype(arguments.options.get("compute_dtype"))
    options = dict(arguments.options)
    if "devices" in options:
        jax.config.update("jax_num_cpu_devices", whole_number("devices", options["devices"], 1))
    place = cluster.find_own_place(options)
    facts = {name: value for name, value in options.items() if name not in cluster.FLAGS}
    with cluster.joined(place, facts | {"switches": sorted(switches)}, options):
        first = jax.process_index() == 0
        say = tell if first else lambda line: None
        steps = chosen_steps(request, say)
        what = "ema" if "ema" in switches else "params"
        how = dict(mesh=mesh, compute_dtype=dtype, tokenizer=options.get("tokenizer", ""), say=say)
        model = open_model(options["workdir"], step=steps[0], what=what, **how)
        measure = make_measure(request, model, say)
        return evaluate_steps(request, model, steps, measure, say, first)


def evaluate_steps(
    request: Request, model: LoadedModel, steps: Sequence[int | None], measure: Measure, say: Callable, first: bool
) -> int:
    """Measures each step, shows and saves what was found, and returns the exit code."""
    workdir = paths.as_path(model.path).parent.parent
    as_json, saves = "json" in request.switches, request.steps is not None or "save" in request.switches
    records = []
    for step in steps:
        if step is not None and step != model.step:
            if step not in agreed(Checkpoints(paths.as_path(model.path).parent, CheckpointConfig()).all_steps):
                say(f"step {step} is gone since: a run that goes on keeps few")
                continue
            model = at_step(model, step)
        began = time.monotonic()
        record = record_of(model, measure(model))
        records.append(record)
        if not first:
            continue
        say(f"step {model.step}: measured in {time.monotonic() - began:.1f} s")
        if saves:
            written(lambda record=record: save_record(workdir, record), workdir)
        if as_json:
            put(as_line(record))
    if first and not as_json:
        show_table(records) if request.steps is not None else show_lines(records[-1])
    if first and saves:
        say(f"{workdir}/evals.jsonl has the numbers, {workdir}/evals.html the curves")
    return 0


def read_request(options: Mapping[str, str], switches: set[str]) -> Request:
    """What the flags ask for. Raises BadInput for flags that exclude each other, and for a file that is not there."""
    if "workdir" not in options:
        raise BadInput("--workdir must be given: the work folder of a run, or of a converted model")
    if "step" in options and "steps" in options:
        raise BadInput("--step is one checkpoint and --steps several; give one of them")
    tasks = tuple(task for task in options.get("lm_eval", "").split(",") if task)
    for name in ("include_path", "num_fewshot", "chat"):
        if (name in options or name in switches) and not tasks:
            raise BadInput(f"--{name} is for --lm_eval; give that too")
    if "include_path" in options and not Path(options["include_path"]).is_dir():
        raise BadInput(f"--include_path={options['include_path']} is no folder")
    request = Request(options, read_evals(options), tasks, switches)
    check_request(request)
    return request


def check_request(request: Request, named: Callable[[str, NamedEval], str] | None = None) -> None:
    """Raises BadInput for a number out of range, a name of no use, a file that is not there, and without lm-eval."""
    if request.tasks:
        check_installed()
    for name, least in LEAST.items():
        request.number(name, least, least)
    check_names(request.evals)
    check_files(request.evals, named or flag_name)


def read_evals(options: Mapping[str, str]) -> Evals:
    """The evaluators that --text, --choice and --cloze name. Raises BadInput for a name that is given twice."""
    found: Evals = {}
    shared = {"limit": whole_number("limit", options["limit"], 1)} if "limit" in options else {}
    hints = typing.get_type_hints(TextEval)
    for kind, settings in DATA.items():
        more = dict(shared)
        if kind == "text":
            given = [name for name in READING if name in options]
            more |= {name: schema.convert(options[name], hints[name], f"--{name}") for name in given}
            if "stride" in options:
                more["stride"] = whole_number("stride", options["stride"], 1)
        for part in filter(None, options.get(kind, "").split(",")):
            match = NAMED.fullmatch(part)
            name, pattern = match.groups() if match else (own_name(part, kind), part)
            if name in found:
                raise BadInput(f"--{kind}={part}: the name {name} is given twice; write --{kind}=NAME={pattern}")
            found[name] = settings(**more | {"files" if kind == "text" else "file": pattern})
    if "text" not in options and any(name in options for name in (*READING, "stride")):
        raise BadInput("--stride and --text_... are for --text; give that too")
    return found


def own_name(pattern: str, kind: str) -> str:
    """A name for a file that was given none: its own up to the first point, or the kind for a pattern."""
    stem = Path(pattern).name.partition(".")[0]
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", stem).strip("_-")
    return plain if plain and not set("*?[") & set(pattern) else kind


def flag_name(name: str, settings: NamedEval) -> str:
    """'--text wiki', for messages."""
    return f"--{settings.kind} {name}"


def chosen_steps(request: Request, say: Callable[[str], None]) -> list[int | None]:
    """The steps to measure; [None] for the newest. Says of --steps=all which cannot be believed and are left out.

    Raises BadInput for one that is no number, or not there.
    """
    if request.steps is None:
        return [request.number("step", 0, 0) if "step" in request.options else None]
    workdir = request.options["workdir"]
    if paths.as_path(workdir).name.isdecimal() and not (paths.as_path(workdir) / "checkpoints").exists():
        raise BadInput(f"--workdir={workdir} is one checkpoint; give the work folder for --steps")
    checkpoints = open_source(workdir, named="--workdir", say=lambda line: None).checkpoints
    steps = agreed(checkpoints.all_steps)
    if request.steps == "all":
        wrong = {step: why for step in steps if (why := why_not(checkpoints, step))}
        for why in wrong.values():
            say(f"WARNING: {why}; it is left out")
        return [step for step in steps if step not in wrong]
    wanted = [whole_number("steps", text, 0) for text in request.steps.split(",")]
    if missing := [step for step in wanted if step not in steps]:
        there = ", ".join(map(str, steps))
        raise BadInput(f"--steps={request.steps}: step {missing[0]} is no checkpoint; there are {there}")
    return sorted(set(wanted))


def make_measure(request: Request, model: LoadedModel, say: Callable[[str], None]) -> Measure:
    """model -> metrics of all that is asked for. Raises BadInput for data and models that do not fit it."""
    reading = reading_of(model, request.number("context", model.seq_len, 2))
    if reading.context > model.seq_len:
        say(f"{reading.context} tokens are read at a time; the model was trained on rows of {model.seq_len}")
    own = not request.evals and not request.tasks
    evals, named = (own_evals(model, request), setting_name) if own else (request.evals, flag_name)
    several = jax.process_count() > 1  # which must not find other text in a file than the first one does
    evaluators = open_evaluators(evals, reading, named, hold=several)
    check_same_evals(evaluators)
    for one in evaluators:
        say(f"{one.name}: {one.summary}")
    scorer = make_scorer(model, batch_tokens=request.number("batch_tokens", BATCH_TOKENS, 1))
    tasks = lm_eval_measure(request, model, reading, scorer) if request.tasks else lambda model: {}
    return lambda model: measure_all(evaluators, scorer, model) | tasks(model)


def reading_of(model: LoadedModel, context: int) -> Reading:
    """How the model reads text. Raises BadInput for a model that cannot, and for a context that is too long."""
    check_context(model, context)
    check_tokenizer(model)
    return Reading.of(model.kept.tokenizer, context)


def check_context(model: LoadedModel, context: int) -> None:
    """Raises BadInput for a model that does not read from left to right, and for more tokens than it can read."""
    if model.cfg.kind != "decoder":
        raise BadInput(f"model.name={model.cfg.name!r} does not read from left to right; llama and gpt2 do")
    limit = model.cfg.max_seq_len
    if limit is not None and context > limit:
        raise BadInput(f"--context={context} is longer than the model can read, max_seq_len={limit}")


def own_evals(model: LoadedModel, request: Request) -> Evals:
    """The evaluators of the run's own config, by the limit that is asked for. Raises BadInput where it has none."""
    evals = schema.convert(model.run.get("config", {}).get("evals") or {}, Evals, GROUP)
    if not evals:
        raise BadInput("nothing to measure: the config has no evals; give --text, --choice, --cloze or --lm_eval")
    limit = {"limit": request.number("limit", 0, 1)} if "limit" in request.options else {}
    return {name: dataclasses.replace(settings, **limit) for name, settings in evals.items()}


def measure_all(evaluators: Sequence[Evaluator], scorer, model: LoadedModel) -> dict[str, float]:
    """The metrics of all evaluators."""
    return {name: value for one in evaluators for name, value in one.metrics(scorer, model.params).items()}


def lm_eval_measure(request: Request, model: LoadedModel, reading: Reading, scorer) -> Measure:
    """model -> metrics of lm-eval's tasks; what is compiled for the first step serves all."""
    generators = {}

    def open_generator(params, rows: int, longest: int):
        if (rows, longest) not in generators:
            generators[rows, longest] = make_generator(model, batch=rows, longest=longest)
        return dataclasses.replace(generators[rows, longest], params=params)

    numbers = [name for name in ("limit", "num_fewshot") if name in request.options]
    how = dict(folder=request.options.get("include_path"), chat="chat" in request.switches)
    how |= {name: request.number(name, 0, 0) for name in numbers}

    def measure(model: LoadedModel) -> dict[str, float]:
        opened = lambda rows, longest: open_generator(model.params, rows, longest)
        served = Served(reading, model.kept, scorer, model.params, opened, GENERATED_AT_ONCE)
        found = run_tasks(served, request.tasks, **how)
        told = {name: value for name, value in found.items() if math.isfinite(value) or "_stderr" not in name}
        return {f"{GROUP}/{name}": value for name, value in told.items()}

    return measure


if __name__ == "__main__":
    run_verb("evaluate")
