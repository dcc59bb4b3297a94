"""The Python interface, for notebooks and programs of one's own: the functions that the command line is made of.

`import jaxscale` gives them all: load_config, train, sample, evaluate, report, open_model. docs/python_api.md has more.
What a person got wrong is a BadInput of one line; what else ends a training is a Stop with its exit code (both of
jaxscale.system.exits).
"""

import dataclasses
import html
import time
from collections.abc import Callable, Mapping, Sequence
from typing import overload

import jax
import numpy as np

from jaxscale import units
from jaxscale.checkpoint.branch import open_source
from jaxscale.checkpoint.storage_errors import written
from jaxscale.cli.evaluate import BATCH_TOKENS, Request, check_context, check_request, make_measure
from jaxscale.cli.evaluate_steps import by_name, record_of, save_record
from jaxscale.cli.report import price_of, read_all
from jaxscale.cli.sample import write_all
from jaxscale.cli.sample_chat import Talk
from jaxscale.config import RunConfig, load_config
from jaxscale.eval.config import NAME, ChoiceEval, ClozeEval, TextEval
from jaxscale.eval.named import GROUP
from jaxscale.eval.tokens import Tokens, open_documents, token_metrics
from jaxscale.inference import (
    LoadedModel,
    check_tokenizer,
    make_generator,
    make_scorer,
    open_model,
    stop_ids_of,
)
from jaxscale.main import train_in
from jaxscale.reporting import make_page
from jaxscale.reporting.history import read_history
from jaxscale.run import options as run_options
from jaxscale.sampling.config import Sampling
from jaxscale.sampling.generator import own_numbers
from jaxscale.sampling.text import write_ids
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

__all__ = ["Report", "Trained", "evaluate", "load_config", "open_model", "report", "sample", "train"]

DEFAULT_SAMPLING = Sampling()
FRAME_PIXELS = 720  # height of a report in a notebook


@dataclasses.dataclass(frozen=True)
class Trained:
    """A work folder after training in it: what the other calls are given."""

    workdir: str
    step: int  # the last one that was trained
    metrics: Mapping[str, float]  # the last of each that was measured: loss, validation/loss, ...

    def __str__(self) -> str:
        return self.workdir


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The page of `jaxscale report`, shown whole where a notebook shows the value of a cell."""

    page: str  # HTML, without anything from elsewhere
    name: str
    height: int = FRAME_PIXELS  # of the frame in a notebook, pixels

    def save(self, path: str) -> str:
        """Writes the page to a file, local or gs://, and gives back its path."""
        written(lambda: paths.write_text_atomic(path, self.page), path)
        return path

    def _repr_html_(self) -> str:
        """The page in a frame of its own, whose styles and scripts touch nothing else of the notebook."""
        return (
            f'<iframe srcdoc="{html.escape(self.page)}" sandbox="allow-scripts" title="{html.escape(self.name)}" '
            f'style="width:100%;height:{self.height}px;border:0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<report of {self.name}, {units.size(len(self.page.encode()))}; .save(FILE) keeps it>"


def train(
    cfg: RunConfig,
    workdir: str,
    *,
    stop_after: int | None = None,
    allow_change: Sequence[str] = (),
    steal_lock: bool = False,
) -> Trained:
    """The folder of the run, trained to its end: `jaxscale train`, in this process.

    A run that has begun goes on from its newest checkpoint, and one that is complete is left as it is. Interrupting the
    cell saves, and raises Stop with exit code 10: the same call goes on. In a notebook progress is a bar.

    Args: cfg: of load_config. workdir: local or gs://. stop_after: leave after this step, the horizon stays as it is.
    allow_change: settings in which a run that goes on may differ from how it began.
    Raises: BadInput and Stop as `jaxscale train` ends with their codes.
    """
    options = {"allow_change": ",".join(allow_change)} if allow_change else {}
    if stop_after is not None:
        options["stop_after"] = str(stop_after)
    chosen = run_options.parse_options(options, {"steal_lock"} if steal_lock else set())
    if not isinstance(cfg, RunConfig):
        raise BadInput(f"cfg={cfg!r} is no config; train(load_config(FILE), WORKDIR) is how a file is trained")
    train_in(str(workdir), cfg, chosen, {})
    rows = read_history(workdir).rows
    latest = {name: value for row in rows for name, value in row.items() if isinstance(value, int | float)}
    latest.pop("step", None)  # of the last line of metrics: training may have ended between two
    return Trained(str(workdir), open_source(str(workdir), named="workdir").step, latest)


@overload
def sample(model: str | Trained | LoadedModel, prompt: str = "", **how) -> str: ...
@overload
def sample(model: str | Trained | LoadedModel, prompt: Sequence[str], **how) -> list[str]: ...
@overload
def sample(model: str | Trained | LoadedModel, prompt: Sequence[int], **how) -> list[int]: ...
@overload
def sample(model: str | Trained | LoadedModel, prompt: Sequence[Sequence[int]], **how) -> list[list[int]]: ...
def sample(
    model: str | Trained | LoadedModel,
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] = "",
    *,
    num_tokens: int = 100,
    temperature: float = DEFAULT_SAMPLING.temperature,
    top_k: int = DEFAULT_SAMPLING.top_k,
    top_p: float = DEFAULT_SAMPLING.top_p,
    min_p: float = DEFAULT_SAMPLING.min_p,
    repetition_penalty: float = DEFAULT_SAMPLING.repetition_penalty,
    stop: str | Sequence[str] = (),
    seed: int = 0,
    batch: int = 8,
    chat: bool = False,
    system: str | None = None,
) -> str | list[str] | list[int] | list[list[int]]:
    """What the model writes behind a prompt, or behind each of several: `jaxscale sample`.

    Args: model: a work folder (or WORKDIR/checkpoints/STEP), what train gave back, or of open_model, which is read once
    for many calls. prompt: text, or token ids, behind which ids are written: no tokenizer is needed. chat: a prompt is
    what a person says, and the text the answer, by the model's chat template.
    """
    if not all(isinstance(number, int) and number > 0 for number in (num_tokens, batch)):
        raise BadInput(f"num_tokens={num_tokens} and batch={batch} must be whole numbers, 1 or more")
    if system is not None and not chat:
        raise BadInput(f"system={system!r} is what a conversation begins with; give chat=True too")
    loaded = opened(model)
    one = isinstance(prompt, str) or len(prompt) and all(isinstance(part, (int, np.integer)) for part in prompt)
    prompts = [prompt] if one else list(prompt)
    if not prompts:
        return []
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not any(isinstance(part, str) for part in prompts):
        if chat or stops:
            raise BadInput("chat and stop are for prompts of text; leave them out where prompts are token ids")
        found = ids_behind(loaded, prompts, sampling, num_tokens, seed, batch)
        return found[0] if one else found
    check_tokenizer(loaded)
    if not all(isinstance(part, str) for part in prompts):
        raise BadInput("prompts must be texts, or all of them lists of token ids")
    talk = Talk(loaded, sampling, stops, num_tokens, seed, silent, system=system)
    texts = [piece.done.text for piece in write_all(talk, prompts, num_samples=1, batch=batch, chat=chat) if piece.done]
    return texts[0] if one else texts


def ids_behind(
    model: LoadedModel, prompts: Sequence[Sequence[int]], sampling: Sampling, num_tokens: int, seed: int, batch: int
) -> list[list[int]]:
    """The ids that the model writes behind each prompt. Raises BadInput for a prompt that is no list of ids."""
    prompts = [id_list(f"prompt[{number}]", prompt) for number, prompt in enumerate(prompts)]
    longest = Talk(model, sampling, (), num_tokens, seed, silent).longest_for(prompts, list(map(str, prompts)))
    numbers, rows = own_numbers(prompts), min(batch, len(prompts))
    generator, found = make_generator(model, batch=rows, longest=longest), []
    how = dict(num_tokens=num_tokens, stop_ids=stop_ids_of(model), seed=seed)
    for first in range(0, len(prompts), rows):
        some = slice(first, first + rows)
        found += write_ids(generator, prompts[some], sampling, numbers=numbers[some], **how)
    return found


def id_list(name: str, given: Sequence[int]) -> list[int]:
    """The ids of a prompt."""
    ids = np.asarray(given)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise BadInput(f"{name}={given!r:.80} must be text, or a list of one or more token ids")
    return ids.tolist()


def evaluate(
    model: str | Trained | LoadedModel,
    *,
    text: Mapping[str, str] | None = None,
    choice: Mapping[str, str] | None = None,
    cloze: Mapping[str, str] | None = None,
    tokens: Mapping[str, Tokens] | None = None,
    lm_eval: str | Sequence[str] = (),
    chat: bool = False,
    limit: int = 0,
    stride: int = 0,
    context: int | None = None,
    batch_tokens: int = 16_384,
    save: bool = False,
) -> dict[str, dict[str, float]]:
    """{name: metrics} of a model: `jaxscale evaluate`. Without anything to measure, what the run's own config names.

    Args: text: {name: files}, perplexity and bits per byte of each. choice, cloze: {name: file}. tokens: {name: token
    files, or a list of documents as ids}, perplexity without a tokenizer. lm_eval: its tasks; chat: their questions are
    put by the model's chat template. limit: items of each file, 0 for all. stride, context: tokens. save: into the work
    folder too, for the report.
    """
    if chat and not lm_eval:
        raise BadInput("chat=True is for the tasks of lm_eval; name some, or leave it out")
    for name, given in dict(text=text, choice=choice, cloze=cloze, tokens=tokens).items():
        if given is not None and not isinstance(given, Mapping):
            raise BadInput(f"{name}={given!r} must name what it measures: {name}={{'NAME': {given!r}}}")
    evals = {name: TextEval(files=files, limit=limit, stride=stride) for name, files in (text or {}).items()}
    for kind, given in ((ChoiceEval, choice), (ClozeEval, cloze)):
        for name, file in (given or {}).items():
            if name in evals:
                raise BadInput(f"{name!r} is the name of two evaluators; call one of them something else")
            evals[name] = kind(file=file, limit=limit)
    tasks = (lm_eval,) if isinstance(lm_eval, str) else tuple(lm_eval)
    numbers = dict(limit=limit or None, stride=stride or None, context=context, batch_tokens=batch_tokens)
    options = {name: str(number) for name, number in numbers.items() if number is not None}
    switches = {name for name, on in (("save", save), ("chat", chat)) if on}
    named = lambda name, settings: f"{settings.kind}[{name!r}]"
    check_request(Request(options, evals, tasks, switches), named)
    loaded = opened(model)
    request = Request(options | {"workdir": loaded.path}, evals, tasks, switches)
    metrics = {} if tokens and not evals and not tasks else make_measure(request, loaded, silent)(loaded)
    record = record_of(loaded, metrics | measure_tokens(request, loaded, tokens or {}))
    if save and jax.process_index() == 0:
        workdir = paths.as_path(loaded.path).parent.parent
        written(lambda: save_record(workdir, record), workdir)
    return by_name(record)


def measure_tokens(request: Request, model: LoadedModel, tokens: Mapping[str, Tokens]) -> dict[str, float]:
    """The metrics of token ids. Raises BadInput for what is none, and for names that are taken."""
    context = request.number("context", model.seq_len, 2)
    stride = request.number("stride", max(context // 2, 1), 1)
    check_context(model, context)
    if stride > context:
        raise BadInput(f"stride={stride} is more than the {context} tokens that the model reads")
    found, scorer = {}, make_scorer(model, batch_tokens=request.number("batch_tokens", BATCH_TOKENS, 1))
    for name, given in tokens.items():
        where = f"tokens[{name!r}]"
        if name in request.evals or not NAME.fullmatch(name):
            raise BadInput(f"{where}: another evaluator has that name, or it is not of letters, digits, _ . and -")
        documents = open_documents(where, given, model.cfg.vocab_size, request.number("limit", 0, 0))
        told = token_metrics(where, documents(), scorer, model.params, context, stride)
        found |= {f"{GROUP}/{name}/{metric}": value for metric, value in told.items()}
    return found


def report(*runs: str | Trained, price: float | None = None, height: int = FRAME_PIXELS) -> Report:
    """The page about a run, or several beside each other: `jaxscale report`. The value of a cell is shown whole.

    Args: price: dollars an hour of one chip. height: of the frame in the notebook, pixels.
    """
    if not runs:
        raise BadInput("report needs a work folder; more than one are compared")
    workdirs, hourly = [str(run) for run in runs], None if price is None else price_of(str(price))
    return Report(make_page(read_all(workdirs), price=hourly, now=time.time()), ", ".join(workdirs), height)


def opened(model: str | Trained | LoadedModel) -> LoadedModel:
    """The model itself."""
    return model if isinstance(model, LoadedModel) else open_model(str(model), say=silent, named="model")


silent: Callable[[str], None] = lambda line: None
