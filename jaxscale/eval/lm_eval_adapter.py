"""Our models as lm-eval sees one: github.com/EleutherAI/lm-evaluation-harness, version 0.4.9 or later.

The class is registered there under the name `jaxscale`. Its three kinds of request use what `jaxscale evaluate` and
`jaxscale sample` use: the scorer and the generator with its cache.
"""

import contextlib
import dataclasses
import datetime
import functools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.eval.choice import encode_pair, span_of
from jaxscale.eval.scorer import Scorer, Scores
from jaxscale.eval.text import Reading, document_spans
from jaxscale.sampling.config import Sampling
from jaxscale.sampling.generator import Generator
from jaxscale.sampling.text import WriteSettings, write_texts
from jaxscale.system import packages
from jaxscale.system.exits import BadInput, tell
from jaxscale.text.chat.prompts import ChatPrompts, open_prompts
from jaxscale.text.tokenizer.load import find_template
from jaxscale.text.tokenizer.saved import SavedTokenizer

NEW_TOKENS = 256  # where a task does not say, as lm-eval's own models have it
INSTALL = "pip install 'jaxscale[lm_eval]'"


class Served(NamedTuple):
    """A model with all that lm-eval asks of one."""

    reading: Reading
    kept: SavedTokenizer
    scorer: Scorer
    params: Any
    open_generator: Callable[[int, int], Generator]  # (rows, longest text) -> generator, compiled once for each
    rows: int  # texts that are written at a time
    say: Callable[[str], None] = tell  # logs a line


def check_installed() -> None:
    """Raises BadInput where lm-eval is not there."""
    if not packages.is_installed("lm_eval"):
        raise BadInput(f"--lm_eval needs the package lm_eval, which is not installed: {INSTALL}")


def log_likelihoods(
    served: Served, pairs: Sequence[tuple[str, str]], asking: ChatPrompts | None = None
) -> list[tuple[float, bool]]:
    """Returns (log-likelihood, whether it is what greedy decoding writes) of each continuation of its context.

    A context that is too long is truncated on the left, and the number of these is logged.
    Args: asking: by which the contexts were written, where they are conversations.
    Raises: BadInput for a continuation without a token, or longer than the model reads, as lm-eval's HFLM asserts.
    """
    reading, text_ids = served.reading, asking and asking.text_ids
    spans, num_truncated = [], 0
    for context, continuation in pairs:
        try:
            span, is_truncated = span_of(encode_pair(reading, context, continuation, text_ids), reading.context)
        except BadInput as error:
            raise BadInput(f"lm-eval's request with the context {context[-80:]!r}: {error}") from None
        spans.append(span)
        num_truncated += is_truncated
    if num_truncated:
        number = f"{num_truncated:,} of {len(pairs):,} contexts"
        served.say(f"lm-eval: {number} truncated on the left to {reading.context:,} tokens")
    scores = checked(served.scorer.score(served.params, spans))
    return [(-float(nats), bool(likeliest)) for nats, likeliest in zip(scores.nats, scores.likeliest)]


def checked(scores: Scores) -> Scores:
    """The scores. Raises BadInput for what is not a number, which lm-eval would count as an answer like others."""
    if np.isnan(scores.nats).any():
        raise BadInput("the weights of this checkpoint give likelihoods that are not numbers; measure another step")
    return scores


def rolling_log_likelihoods(served: Served, texts: Sequence[str]) -> list[float]:
    """The log-likelihood of each text, read in windows that do not overlap but for the last one, as lm-eval has it."""
    reading, spans, owners = served.reading, [], []
    for number, text in enumerate(texts):
        ids = reading.tokenizer.encode(text)
        own = document_spans(ids, reading.start_ids, reading.context, stride=reading.context)
        spans, owners = spans + own, owners + [number] * len(own)
    sums = [0.0] * len(texts)
    for number, nats in zip(owners, checked(served.scorer.score(served.params, spans)).nats):
        sums[number] -= float(nats)
    return sums


def write_settings(settings: dict[str, Any]) -> WriteSettings:
    """A task's generation_kwargs as ours; greedy unless it says do_sample. Raises BadInput for what is not known."""
    settings = dict(settings)
    stops = settings.pop("until", None) or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    num_tokens = int(settings.pop("max_gen_toks", settings.pop("max_new_tokens", NEW_TOKENS)))
    draws = bool(settings.pop("do_sample", False))
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given: dict[str, Any] = {name: settings.pop(name) for name in names if settings.get(name) is not None}
    if settings := {name: value for name, value in settings.items() if value is not None}:
        raise BadInput(f"generation_kwargs {', '.join(sorted(settings))} are not known here; leave them out")
    if not draws:
        given = {"repetition_penalty": given.get("repetition_penalty", 1.0), "temperature": 0.0}
    given.setdefault("temperature", 1.0)
    return WriteSettings(sampling=Sampling(**given), num_tokens=num_tokens, stops=tuple(stop for stop in stops if stop))


def generated(
    served: Served, requests: Sequence[tuple[str, dict[str, Any]]], asking: ChatPrompts | None = None
) -> list[str]:
    """Returns the text that the model writes after each context, by its own settings, without the stop text.

    A context that leaves too little room is truncated on the left, and the number of these is logged.
    Args: asking: as of log_likelihoods; then a text also ends with the model's turn.
    """
    reading, stop_ids = served.reading, asking.stop_ids if asking else served.kept.stop_ids
    ids_of = (lambda text: asking.text_ids(text, "")) if asking else functools.partial(prompt_ids, reading)
    groups: dict[WriteSettings, list[int]] = defaultdict(list)
    for number, (_, settings) in enumerate(requests):
        groups[write_settings(settings)].append(number)
    texts, num_truncated = [""] * len(requests), 0
    for wish, numbers in groups.items():
        room = reading.context - wish.num_tokens
        if room < 1:
            raise BadInput(f"{wish.num_tokens} new tokens leave no room in the {reading.context} that the model reads")
        generator = served.open_generator(min(served.rows, len(numbers)), reading.context)
        whole = {number: ids_of(requests[number][0]) for number in numbers}
        num_truncated += sum(len(ids) > room for ids in whole.values())
        prompts = {number: ids[-room:] for number, ids in whole.items()}
        numbers = sorted(numbers, key=lambda number: len(prompts[number]))  # alike beside each other: little padding
        for first in range(0, len(numbers), served.rows):
            some, written = numbers[first : first + served.rows], []
            ids = [prompts[number] for number in some]
            how = dataclasses.replace(wish, stop_ids=stop_ids, numbers=some)
            for _ in write_texts(generator, reading.tokenizer, ids, how, written):
                pass
            for number, one in zip(some, written):
                texts[number] = one.text
    if num_truncated:
        number = f"{num_truncated:,} of {len(requests):,} prompts"
        served.say(f"lm-eval: {number} truncated on the left to leave room for new tokens in {reading.context:,}")
    return texts


def prompt_ids(reading: Reading, text: str) -> list[int]:
    """The ids of a context; where it has none, the start mark."""
    return [*reading.begin_ids, *reading.tokenizer.encode(text).tolist()] or list(reading.start_ids)


@functools.cache
def adapter_class() -> type:
    """The class, registered. Raises BadInput where lm-eval is not installed."""
    check_installed()
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model

    @register_model("jaxscale")
    class JaxscaleLM(LM):
        """A Served model."""

        def __init__(self, served: Served):
            super().__init__()
            self.served = served
            self.asking: ChatPrompts | None = None  # once conversations were written: then every context is one

        def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            """As log_likelihoods."""
            return self.kept("loglikelihood", requests, self.answers(log_likelihoods, requests))

        def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
            """As rolling_log_likelihoods."""
            found = rolling_log_likelihoods(self.served, [request.args[0] for request in requests])
            return self.kept("loglikelihood_rolling", requests, found)

        def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
            """As generated."""
            return self.kept("generate_until", requests, self.answers(generated, requests))

        def answers(self, ask: Callable, requests: list) -> list:
            """What the function finds of the requests."""
            return ask(self.served, [request.args for request in requests], self.asking)

        def kept(self, kind: str, requests: list, found: list) -> list:
            """The answers, told to lm-eval's cache."""
            for request, answer in zip(requests, found):
                self.cache_hook.add_partial(kind, request.args, answer)
            return found

        @property
        def tokenizer_name(self) -> str:
            """What lm-eval knows requests by."""
            return self.served.kept.tokenizer.fingerprint

        def chat_template(self, chat_template: bool | str = False) -> str:
            """The source of the model's own template, where one is asked for."""
            found = find_template(self.served.kept.about) if chat_template else None
            return found[0] if found else ""

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            """A conversation as text, to be read by text_ids: only the special tokens of the template are whole."""
            self.asking = self.asking or open_prompts(self.served.kept, datetime.date.today().isoformat())
            return self.asking.text(chat_history, add_generation_prompt)

    return JaxscaleLM


def run_tasks(
    served: Served,
    tasks: Sequence[str],
    *,
    folder: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    chat: bool = False,
) -> dict[str, float]:
    """{'TASK/METRIC': value, 'TASK/METRIC_stderr': ...} of lm-eval's tasks.

    Args: folder: with yaml files of more tasks. limit: items of each task. chat: questions, and the examples before
    them, are turns of a conversation by the model's chat template.
    Raises BadInput for tasks that there are not.
    """
    model = adapter_class()(served)
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folder)
    known = set(manager.all_tasks)
    if missing := [task for task in tasks if task not in known]:
        where = f" and in {folder}" if folder else "; --include_path=FOLDER has more"
        raise BadInput(f"--lm_eval={','.join(missing)}: no task of lm-eval {lm_eval.__version__}{where}")
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval's: else it forks this process, whose jax has threads
    with contextlib.redirect_stdout(sys.stderr):  # it prints, and stdout may be read as JSON
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
        )
    return flattened(found["results"])


def flattened(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """lm-eval's results by task: 'acc,none' as 'TASK/acc', of another filter than none as 'TASK/acc.FILTER'."""
    metrics = {}
    for task, values in results.items():
        for name, value in values.items():
            metric, _, chosen = name.partition(",")
            if isinstance(value, (int, float)) and not isinstance(value, bool) and chosen:
                metrics[f"{task}/{metric}" + ("" if chosen == "none" else f".{chosen}")] = float(value)
    return metrics
