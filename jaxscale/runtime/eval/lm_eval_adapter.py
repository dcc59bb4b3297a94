"""Adapter of models to lm-eval (github.com/EleutherAI/lm-evaluation-harness, version 0.4.9 or later).

The class is registered with lm-eval under the name `jaxscale`. The three kinds of requests use the scorer of `jaxscale
evaluate` and the generator of `jaxscale sample`.
"""

import collections
import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.eval.bits_per_byte import EvalReading, document_spans
from jaxscale.runtime.eval.named import encode_pair, span_of
from jaxscale.runtime.eval.scorer import Scorer, Scores, TokenSpan
from jaxscale.runtime.sampling.config import Sampling
from jaxscale.runtime.sampling.generator import Generator
from jaxscale.runtime.sampling.text_stream import WriteSettings, write_texts
from jaxscale.runtime.text.chat.spans import ChatPrompts, open_prompts
from jaxscale.runtime.text.tokenizer.load import SavedTokenizer, find_template
from jaxscale.system import packages
from jaxscale.system.exits import BadInput, print_stderr

NEW_TOKENS = 256  # default of tasks, as for lm-eval's own models
INSTALL = "pip install 'jaxscale[lm_eval]'"


class Served(NamedTuple):
    """A model with everything that lm-eval needs."""

    reading: EvalReading
    tokenizer: SavedTokenizer
    scorer: Scorer
    params: Any
    open_generator: Callable[[int, int], Generator]  # (rows, longest text) -> generator, compiled once for each pair
    rows: int  # number of texts generated at a time
    say: Callable[[str], None] = print_stderr  # logs a line


def check_installed() -> None:
    """Raises BadInput if lm-eval is not installed."""
    if not packages.is_installed("lm_eval"):
        raise BadInput(f"--lm_eval needs the package lm_eval, which is not installed: {INSTALL}")


def log_likelihoods(
    served: Served, pairs: Sequence[tuple[str, str]], chat: ChatPrompts | None = None
) -> list[tuple[float, bool]]:
    """Returns (log-likelihood, whether greedy decoding would produce it) of the continuation in each pair.

    A context that is too long is truncated on the left. `chat` is required if contexts are rendered conversations.
    Raises BadInput for a continuation that has no tokens or exceeds the model's context, as lm-eval's HFLM asserts.
    """
    reading, text_ids = served.reading, chat and chat.text_ids
    spans, num_truncated = [], 0
    for context, continuation in pairs:
        try:
            span, is_truncated = span_of(encode_pair(reading, context, continuation, text_ids), reading.context)
        except BadInput as error:
            raise BadInput(f"lm-eval request with context {context[-80:]!r}: {error}") from None
        spans.append(span)
        num_truncated += is_truncated
    if num_truncated:
        number = f"{num_truncated:,} of {len(pairs):,} contexts"
        served.say(f"lm-eval: {number} truncated on the left to {reading.context:,} tokens")
    scores = score(served, spans)
    return [(-float(nats), bool(likeliest)) for nats, likeliest in zip(scores.nats, scores.likeliest)]


def score(served: Served, spans: Sequence[TokenSpan]) -> Scores:
    """Returns the scores of the spans. Raises BadInput for NaN, which lm-eval would count as an answer."""
    scores = served.scorer.score(served.params, spans)
    if np.isnan(scores.nats).any():
        raise BadInput("this checkpoint gives NaN likelihoods; evaluate another step")
    return scores


def rolling_log_likelihoods(served: Served, texts: Sequence[str]) -> list[float]:
    """Returns the log-likelihood of each text. As in lm-eval, windows are disjoint, but the last window may overlap."""
    reading, encode = served.reading, served.reading.tokenizer.encode
    windows = [document_spans(encode(text), reading.start_ids, reading.context, reading.context) for text in texts]
    nats = iter(score(served, [span for spans in windows for span in spans]).nats.tolist())
    return [0.0 - sum(itertools.islice(nats, len(spans))) for spans in windows]


def write_settings(settings: dict[str, Any]) -> WriteSettings:
    """Converts a task's generation_kwargs. Decodes greedily without do_sample. Raises BadInput for unknown keys."""
    settings = dict(settings)
    stops = settings.pop("until", None) or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    num_tokens = int(settings.pop("max_gen_toks", settings.pop("max_new_tokens", NEW_TOKENS)))
    draws = bool(settings.pop("do_sample", False))
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given: dict[str, Any] = {name: settings.pop(name) for name in names if settings.get(name) is not None}
    if settings := {name: value for name, value in settings.items() if value is not None}:
        raise BadInput(f"generation_kwargs {', '.join(sorted(settings))} are not supported; remove them")
    if not draws:
        given = {"repetition_penalty": given.get("repetition_penalty", 1.0), "temperature": 0.0}
    given.setdefault("temperature", 1.0)
    return WriteSettings(sampling=Sampling(**given), num_tokens=num_tokens, stops=tuple(stop for stop in stops if stop))


def generated(
    served: Served, requests: Sequence[tuple[str, dict[str, Any]]], chat: ChatPrompts | None = None
) -> list[str]:
    """Returns the generated continuation of each context, without the stop text.

    A context that leaves too little room is truncated on the left. With `chat`, generation also stops after the turn.
    """
    reading, stop_ids = served.reading, chat.stop_ids if chat else served.tokenizer.stop_ids
    plain = lambda text: [*reading.begin_ids, *reading.tokenizer.encode(text).tolist()] or [*reading.start_ids]
    ids_of = (lambda text: chat.text_ids(text, "")) if chat else plain
    groups: dict[WriteSettings, list[int]] = collections.defaultdict(list)
    for number, (_, settings) in enumerate(requests):
        groups[write_settings(settings)].append(number)
    texts, num_truncated = [""] * len(requests), 0
    for settings, numbers in groups.items():
        max_prompt = reading.context - settings.num_tokens
        if max_prompt < 1:
            raise BadInput(f"{settings.num_tokens} new tokens do not fit in a context of {reading.context}; use fewer")
        generator = served.open_generator(min(served.rows, len(numbers)), reading.context)
        whole = {number: ids_of(requests[number][0]) for number in numbers}
        num_truncated += sum(len(ids) > max_prompt for ids in whole.values())
        prompts = {number: ids[-max_prompt:] for number, ids in whole.items()}
        numbers = sorted(numbers, key=lambda number: len(prompts[number]))  # similar lengths need less padding
        for first in range(0, len(numbers), served.rows):
            batch, written = numbers[first : first + served.rows], []
            ids = [prompts[number] for number in batch]
            row_settings = dataclasses.replace(settings, stop_ids=stop_ids, numbers=batch)
            collections.deque(write_texts(generator, reading.tokenizer.decode, ids, row_settings, written), maxlen=0)
            for number, one in zip(batch, written):
                texts[number] = one.text
    if num_truncated:
        number = f"{num_truncated:,} of {len(requests):,} prompts"
        served.say(f"lm-eval: {number} truncated on the left to leave room for new tokens in {reading.context:,}")
    return texts


@functools.cache
def adapter_class() -> type:
    """Returns the registered class. Raises BadInput if lm-eval is not installed."""
    check_installed()
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model

    @register_model("jaxscale")
    class JaxscaleLM(LM):
        """A Served model as lm-eval's LM."""

        def __init__(self, served: Served):
            super().__init__()
            self.served = served
            self.chat: ChatPrompts | None = None  # set when a conversation is rendered; then all contexts are

        def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            found = log_likelihoods(self.served, [request.args for request in requests], self.chat)
            return self.cached("loglikelihood", requests, found)

        def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
            found = rolling_log_likelihoods(self.served, [request.args[0] for request in requests])
            return self.cached("loglikelihood_rolling", requests, found)

        def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
            found = generated(self.served, [request.args for request in requests], self.chat)
            return self.cached("generate_until", requests, found)

        def cached(self, kind: str, requests: list, found: list) -> list:
            """Adds the answers to lm-eval's cache and returns them."""
            for request, answer in zip(requests, found):
                self.cache_hook.add_partial(kind, request.args, answer)
            return found

        @property
        def tokenizer_name(self) -> str:
            """Key for lm-eval's cache of requests."""
            return self.served.tokenizer.tokenizer.fingerprint

        def chat_template(self, chat_template: bool | str = False) -> str:
            """Returns the source of the model's chat template, if one is requested."""
            found = find_template(self.served.tokenizer.about) if chat_template else None
            return found[0] if found else ""

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            """Renders a conversation as text for ChatPrompts.text_ids."""
            self.chat = self.chat or open_prompts(self.served.tokenizer, datetime.date.today().isoformat())
            return self.chat.text(chat_history, add_generation_prompt)

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
    """Returns {'TASK/METRIC': value, 'TASK/METRIC_stderr': ...}. Raises BadInput for unknown tasks.

    folder: YAML files of additional tasks. limit: number of items per task. chat: True to use the chat template.
    """
    model = adapter_class()(served)
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folder)
    known = set(manager.all_tasks)
    if missing := [task for task in tasks if task not in known]:
        where = f" or {folder}" if folder else "; --include_path=FOLDER adds tasks"
        raise BadInput(f"--lm_eval={','.join(missing)} not found in lm-eval {lm_eval.__version__}{where}")
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # otherwise lm-eval forks this process, which has jax threads
    with contextlib.redirect_stdout(sys.stderr):  # lm-eval prints, and stdout may be parsed as JSON
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
    """Converts lm-eval's results by task: 'acc,none' to 'TASK/acc', 'acc,FILTER' to 'TASK/acc.FILTER'."""
    metrics = {}
    for task, values in results.items():
        for name, value in values.items():
            metric, _, chosen = name.partition(",")
            if isinstance(value, (int, float)) and not isinstance(value, bool) and chosen:
                metrics[f"{task}/{metric}" + ("" if chosen == "none" else f".{chosen}")] = float(value)
    return metrics
