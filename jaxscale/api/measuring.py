"""evaluate(): metrics of a model, and their record in a work folder."""

import dataclasses
import datetime
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxscale import schema
from jaxscale.api import Say, Trained, silent
from jaxscale.api.inference import LoadedModel, make_generator, tokenizer_of
from jaxscale.api.writing import as_loaded_model
from jaxscale.runtime.checkpoint.storage_errors import stop_if_unwritable
from jaxscale.runtime.eval import config as eval_config
from jaxscale.runtime.eval.bits_per_byte import EvalReading, Tokens, open_documents, token_metrics
from jaxscale.runtime.eval.config import ChoiceEval, ClozeEval, Evals, NamedEval, TextEval, setting_name
from jaxscale.runtime.eval.lm_eval_adapter import Served, check_installed, run_tasks
from jaxscale.runtime.eval.named import GROUP, check_files, open_evaluators
from jaxscale.runtime.eval.scorer import Scorer
from jaxscale.runtime.monitor.history import read_history
from jaxscale.runtime.monitor.records import append
from jaxscale.runtime.monitor.run_files import finite
from jaxscale.runtime.run.resume_checks import check_same_evals
from jaxscale.settings.command_line import whole_number
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.tools.reporting.page import make_evals_page

LEAST = {"limit": 1, "context": 2, "stride": 1, "batch_tokens": 1, "num_fewshot": 0}
BATCH_TOKENS = 16384
GENERATE_BATCH = 8  # number of texts that lm-eval's tasks generate in parallel
Measure = Callable[[LoadedModel], dict[str, float]]
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class EvalRequest:
    """Evaluators, lm-eval tasks and options of an evaluation. None selects the default of the model or run."""

    evals: Evals  # without evaluators and tasks, the evaluators of the run's config are used
    tasks: tuple[str, ...] = ()  # tasks of lm-eval
    limit: int | None = None
    context: int | None = None
    stride: int | None = None
    batch_tokens: int = BATCH_TOKENS
    num_fewshot: int | None = None
    include_path: str | None = None
    chat: bool = False


def check_request(request: EvalRequest, named: Callable[[str, NamedEval], str] | None = None) -> None:
    """Raises BadInput for a number out of range, an invalid name, a missing file, or tasks without lm-eval."""
    if request.tasks:
        check_installed()
    for name, least in LEAST.items():
        if (number := getattr(request, name)) is not None:
            whole_number(name, str(number), least)
    eval_config.check_names(request.evals)
    check_files(request.evals, named or flag_name)


def flag_name(name: str, settings: NamedEval) -> str:
    """Returns text such as '--text wiki', for messages."""
    return f"--{settings.kind} {name}"


def make_measure(request: EvalRequest, model: LoadedModel, say: Say) -> Measure:
    """Returns a function that computes the requested metrics of a model. Raises BadInput for unsuitable data."""
    context = request.context or model.seq_len
    check_context(model, context)
    reading = EvalReading.of(tokenizer_of(model).tokenizer, context)
    if context > model.seq_len:
        say(f"the context has {context} tokens, but the model was trained on rows of {model.seq_len}")
    evals, named = request.evals, flag_name
    if not evals and not request.tasks:  # use the evaluators of the run's config
        named, limit = setting_name, {"limit": request.limit} if request.limit else {}
        evals = schema.convert(model.run.get("config", {}).get("evals") or {}, Evals, GROUP)
        evals = {name: dataclasses.replace(settings, **limit) for name, settings in evals.items()}
        if not evals:
            raise BadInput("the config has no evals; give --text, --choice, --cloze or --lm_eval")
    several = jax.process_count() > 1  # all processes must read the same text
    evaluators = open_evaluators(evals, reading, named, hold=several)
    check_same_evals(evaluators)
    for one in evaluators:
        say(f"{one.name}: {one.summary}")
    scorer = Scorer.of(model.sharded, request.batch_tokens)
    tasks = lm_eval_measure(request, model, reading, scorer, say) if request.tasks else lambda model: {}

    def measure(model: LoadedModel) -> dict[str, float]:
        found = {name: value for one in evaluators for name, value in one.metrics(scorer, model.params).items()}
        return found | tasks(model)

    return measure


def check_context(model: LoadedModel, context: int) -> None:
    """Raises BadInput if the model is not a decoder, or the context is longer than model.max_seq_len."""
    if model.cfg.kind != "decoder":
        raise BadInput(f"model.name={model.cfg.name!r} is not a decoder; use a decoder, such as llama or gpt2")
    limit = model.cfg.max_seq_len
    if limit is not None and context > limit:
        raise BadInput(f"--context={context} is longer than model.max_seq_len={limit}; reduce --context")


def lm_eval_measure(
    request: EvalRequest, model: LoadedModel, reading: EvalReading, scorer: Scorer, say: Say
) -> Measure:
    """Returns a function that computes lm-eval's metrics of a model. Models of all steps share compiled programs."""
    compiled = functools.cache(lambda rows, longest: make_generator(model, batch=rows, longest=longest))

    def measure(model: LoadedModel) -> dict[str, float]:
        make = lambda rows, longest: dataclasses.replace(compiled(rows, longest), params=model.params)
        served = Served(reading, tokenizer_of(model), scorer, model.params, make, GENERATE_BATCH, say)
        found = run_tasks(
            served,
            request.tasks,
            folder=request.include_path,
            num_fewshot=request.num_fewshot,
            limit=request.limit,
            chat=request.chat,
        )
        valid = {name: value for name, value in found.items() if math.isfinite(value) or "_stderr" not in name}
        return {f"{GROUP}/{name}": value for name, value in valid.items()}

    return measure


def record_of(model: LoadedModel, metrics: Mapping[str, float]) -> Record:
    """Returns the record of these metrics for evals.jsonl. For an EMA, the names of metrics begin with evals_ema/."""
    group = f"{GROUP}_ema" if model.what == "ema" else GROUP
    named = {f"{group}{name.removeprefix(GROUP)}": value for name, value in metrics.items()}
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"step": model.step, "what": model.what, "time": time, **named}


def as_line(record: Record) -> str:
    """Returns the record as JSON. Numbers that are not finite, or have a magnitude above 1e100, become null."""
    return json.dumps(finite(record), allow_nan=False)


def save_record(workdir: Any, record: Record) -> None:
    """Appends the record to WORKDIR/evals.jsonl and updates WORKDIR/evals.html."""
    append(workdir / "evals.jsonl", f"{as_line(record)}\n".encode())
    paths.write_text_atomic(workdir / "evals.html", make_evals_page(read_history(workdir)))


def by_name(record: Record) -> dict[str, dict[str, float]]:
    """Returns {evaluator: {metric: value}}. Evaluators of an EMA are named 'NAME (average)'."""
    found: dict[str, dict[str, float]] = {}
    for full, value in record.items():
        group, _, path = full.partition("/")
        name, _, metric = path.rpartition("/")
        if group in (GROUP, f"{GROUP}_ema") and name:
            found.setdefault(name if group == GROUP else f"{name} (average)", {})[metric] = value
    return found


def evaluate(
    model: str | Trained | LoadedModel,
    *,
    text: Mapping[str, str] | None = None,
    choice: Mapping[str, str] | None = None,
    cloze: Mapping[str, str] | None = None,
    tokens: Mapping[str, Tokens] | None = None,
    lm_eval: str | Sequence[str] = (),
    save: bool = False,
    **how: Any,
) -> dict[str, dict[str, float]]:
    """Returns {evaluator: metrics} of a model, like `jaxscale evaluate`. By default, uses the evaluators of the run.

    text: {name: files} for perplexity and bits per byte. choice, cloze: {name: file}. tokens: {name: token files, or a
    list of documents as lists of token ids} for perplexity without a tokenizer. lm_eval: lm-eval tasks. save: whether
    to save the metrics in the work folder, for the report.

    how: fields of EvalRequest: limit (items per file; 0: all), stride, context and batch_tokens (in tokens), chat
    (whether to use the model's chat template in lm_eval tasks), num_fewshot, include_path. Also damaged='skip', which
    counts items that cannot be read or scored instead of raising an error.
    """
    if how.get("chat") and not lm_eval:
        raise BadInput("chat=True applies only to lm_eval tasks; also give lm_eval, or remove chat")
    for name, given in dict(text=text, choice=choice, cloze=cloze, tokens=tokens).items():
        if given is not None and not isinstance(given, Mapping):
            raise BadInput(f"{name}={given!r} must be a dict of named evaluators; use {name}={{'NAME': {given!r}}}")
    limit, stride, damaged = how.get("limit") or 0, how.get("stride") or 0, how.pop("damaged", "stop")
    if damaged not in ("stop", "skip"):
        raise BadInput(f"damaged={damaged!r} must be 'stop' or 'skip'")
    shared: dict[str, Any] = dict(limit=limit, damaged=damaged)
    evals: Evals = {name: TextEval(files=files, stride=stride, **shared) for name, files in (text or {}).items()}
    for kind, given in ((ChoiceEval, choice), (ClozeEval, cloze)):
        for name, file in (given or {}).items():
            if name in evals:
                raise BadInput(f"{name!r} is the name of two evaluators; rename one")
            evals[name] = kind(file=file, **shared)
    tasks = (lm_eval,) if isinstance(lm_eval, str) else tuple(lm_eval)
    how |= {"limit": limit or None, "stride": stride or None}
    request = EvalRequest(evals, tasks, **how)
    check_request(request, lambda name, settings: f"{settings.kind}[{name!r}]")
    loaded = as_loaded_model(model)
    metrics = {} if tokens and not evals and not tasks else make_measure(request, loaded, silent)(loaded)
    record = record_of(loaded, metrics | measure_tokens(request, loaded, tokens or {}))
    if save and jax.process_index() == 0:
        workdir = paths.as_path(loaded.path).parent.parent
        stop_if_unwritable(lambda: save_record(workdir, record), workdir)
    return by_name(record)


def measure_tokens(request: EvalRequest, model: LoadedModel, tokens: Mapping[str, Tokens]) -> dict[str, float]:
    """Returns metrics for token ids. Raises BadInput for invalid ids, and for invalid or duplicate names."""
    context = request.context or model.seq_len
    stride = request.stride or max(context // 2, 1)
    check_context(model, context)
    if stride > context:
        raise BadInput(f"stride={stride} must be at most the context of {context} tokens")
    found, scorer = {}, Scorer.of(model.sharded, request.batch_tokens)
    for name, given in tokens.items():
        label = f"tokens[{name!r}]"
        if name in request.evals or not eval_config.NAME.fullmatch(name):
            raise BadInput(f"{label}: the name must be unique and consist of letters, digits, _ . and -")
        documents = open_documents(label, given, model.cfg.vocab_size, request.limit or 0)
        metrics = token_metrics(label, documents(), scorer, model.params, context, stride)
        found |= {f"{GROUP}/{name}/{metric}": value for metric, value in metrics.items()}
    return found
