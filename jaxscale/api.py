"""The Python interface, for notebooks and programs of one's own: the functions that the command line is made of.

`import jaxscale` gives them all: load_config, train, sample, evaluate, report, open_model. docs/python_api.md has more.
What a person got wrong is a BadInput of one line; what else ends a training is jaxscale.exits.Stop, with its code.
"""

import sys

from jaxscale import process
from jaxscale.exits import BadInput

if "jax" not in sys.modules:
    process.keep_compiled_programs()  # read by jax when it is imported, which comes next

import dataclasses  # noqa: E402
import html  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from typing import overload  # noqa: E402

import jax  # noqa: E402

from jaxscale import paths, start, units  # noqa: E402
from jaxscale.checkpoint.branch import open_source  # noqa: E402
from jaxscale.checkpoint.cause import written  # noqa: E402
from jaxscale.cli.evaluate import Request, check_request, make_measure  # noqa: E402
from jaxscale.cli.evaluate_steps import by_name, record_of, save_record  # noqa: E402
from jaxscale.cli.report import price_of, read_all  # noqa: E402
from jaxscale.cli.sample import check_tokenizer, write_all  # noqa: E402
from jaxscale.cli.sample_chat import Talk  # noqa: E402
from jaxscale.config import RunConfig, load_config  # noqa: E402
from jaxscale.eval.config import ChoiceEval, ClozeEval, TextEval  # noqa: E402
from jaxscale.inference import LoadedModel, open_model  # noqa: E402
from jaxscale.main import train_in  # noqa: E402
from jaxscale.monitor.history import read_history  # noqa: E402
from jaxscale.monitor.report import make_page  # noqa: E402
from jaxscale.sample.choose import Sampling  # noqa: E402

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
    wishes = start.wishes_of(options, {"steal_lock"} if steal_lock else set())
    if not isinstance(cfg, RunConfig):
        raise BadInput(f"cfg={cfg!r} is no config; train(load_config(FILE), WORKDIR) is how a file is trained")
    train_in(str(workdir), cfg, wishes, {})
    rows = read_history(workdir).rows
    latest = {name: value for row in rows for name, value in row.items() if isinstance(value, int | float)}
    latest.pop("step", None)  # of the last line of metrics: training may have ended between two
    return Trained(str(workdir), open_source(str(workdir), named="workdir").step, latest)


@overload
def sample(model: str | Trained | LoadedModel, prompt: str = "", **how) -> str: ...
@overload
def sample(model: str | Trained | LoadedModel, prompt: Sequence[str], **how) -> list[str]: ...
def sample(
    model: str | Trained | LoadedModel,
    prompt: str | Sequence[str] = "",
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
) -> str | list[str]:
    """What the model writes behind a prompt, or behind each of several: `jaxscale sample`.

    Args: model: a work folder (or WORKDIR/checkpoints/STEP), what train gave back, or of open_model, which is read once
    for many calls. chat: a prompt is what a person says, and the text the answer, by the model's chat template.
    """
    if not all(isinstance(number, int) and number > 0 for number in (num_tokens, batch)):
        raise BadInput(f"num_tokens={num_tokens} and batch={batch} must be whole numbers, 1 or more")
    if system is not None and not chat:
        raise BadInput(f"system={system!r} is what a conversation begins with; give chat=True too")
    loaded = opened(model)
    check_tokenizer(loaded, str(model) if not isinstance(model, LoadedModel) else loaded.path)
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not prompts:
        return []
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    talk = Talk(loaded, sampling, stops, num_tokens, seed, silent, system=system)
    texts = [piece.done.text for piece in write_all(talk, prompts, num_samples=1, batch=batch, chat=chat) if piece.done]
    return texts[0] if isinstance(prompt, str) else texts


def evaluate(
    model: str | Trained | LoadedModel,
    *,
    text: Mapping[str, str] | None = None,
    choice: Mapping[str, str] | None = None,
    cloze: Mapping[str, str] | None = None,
    lm_eval: str | Sequence[str] = (),
    chat: bool = False,
    limit: int = 0,
    stride: int = 0,
    context: int | None = None,
    batch_tokens: int = 16_384,
    save: bool = False,
) -> dict[str, dict[str, float]]:
    """{name: metrics} of a model: `jaxscale evaluate`. Without anything to measure, what the run's own config names.

    Args: text: {name: files}, perplexity and bits per byte of each. choice, cloze: {name: file}. lm_eval: its tasks;
    chat: their questions are put by the model's chat template. limit: items of each file, 0 for all. stride, context:
    tokens. save: into the work folder too, for the report.
    """
    if chat and not lm_eval:
        raise BadInput("chat=True is for the tasks of lm_eval; name some, or leave it out")
    for name, given in dict(text=text, choice=choice, cloze=cloze).items():
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
    record = record_of(loaded, make_measure(request, loaded, silent)(loaded))
    if save and jax.process_index() == 0:
        workdir = paths.as_path(loaded.path).parent.parent
        written(lambda: save_record(workdir, record), workdir)
    return by_name(record)


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
