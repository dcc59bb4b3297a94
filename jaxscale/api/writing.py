"""sample: text behind prompts, and what the verbs that write text share."""

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import overload

import numpy as np

from jaxscale.api import Trained
from jaxscale.inference import (
    LoadedModel,
    check_tokenizer,
    make_generator,
    open_model,
    stop_ids_of,
)
from jaxscale.sampling.config import Sampling
from jaxscale.sampling.generator import Timing, own_numbers
from jaxscale.sampling.text import Written, write_ids, write_texts
from jaxscale.system.exits import BadInput
from jaxscale.text.chat.prompts import Message, open_prompts

DEFAULT_SAMPLING = Sampling()
SHAPE = 128  # texts are made for a multiple of so many tokens, so that fewer programs are compiled


@dataclasses.dataclass(frozen=True)
class Talk:
    """A model and how it is to write."""

    model: LoadedModel
    sampling: Sampling
    stops: tuple[str, ...]
    num_tokens: int
    seed: int
    say: Callable[[str], None]
    context: int | None = None  # tokens of the longest text, where somebody goes on with it
    system: str | None = None

    def __post_init__(self):
        check_seed(self.seed)

    def longest_for(self, prompts: Sequence[Sequence[int]], texts: Sequence[str]) -> int:
        """Tokens of the longest text that these prompts become. Raises BadInput for one that cannot be read."""
        limit = self.model.cfg.max_seq_len
        for text, prompt in zip(texts, prompts):
            if limit is not None and len(prompt) >= limit:
                raise BadInput(
                    f"the prompt {short(text)} has {len(prompt)} tokens, and the model reads at most {limit} "
                    "(model.max_seq_len), its own included; shorten it"
                )
        longest = max(map(len, prompts)) + self.num_tokens
        if limit is not None and longest > limit:
            self.say(f"texts end at {limit} tokens, all that the model can read (model.max_seq_len)")
        elif longest > self.model.seq_len:
            self.say(f"texts of up to {longest} tokens; the model was trained on rows of {self.model.seq_len}")
        longest += -longest % SHAPE
        return longest if limit is None else min(longest, limit)

    def tell_speed(self, timing: Timing | None, written: Sequence[Written]) -> None:
        """Says how fast prompts were read and tokens written: those of the texts, not those behind a stop text."""
        if timing is None:  # interrupted before the first token
            return
        tokens = sum(max(one.tokens - 1, 0) for one in written)  # each row's first is the prefill's
        rows = f" in {len(written)} rows" if len(written) > 1 else ""
        decode = (
            f"; decode {tokens} tokens, {tokens / max(timing.decode_seconds, 1e-9):,.0f} tokens/s{rows}"
            if tokens
            else ""
        )
        self.say(f"prefill {timing.prompt_tokens} tokens, {timing.prefill_rate:,.0f} tokens/s{decode}")


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some of a text, or its end."""

    prompt: str
    sample: int
    text: str
    done: Written | None = None


def check_seed(seed: int) -> None:
    """Raises BadInput for a seed that the generator does not tell from another one."""
    if not 0 <= seed < 2**32:
        raise BadInput(f"seed={seed} must be a whole number from 0 to {2**32 - 1}")


def short(text: str) -> str:
    """The beginning of a prompt, for a message."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def asking_of(talk: Talk) -> tuple[Callable[[Sequence[Message]], list[int]], tuple[int, ...]]:
    """(messages -> the ids up to where the model's answer begins, the ids that end it). Raises as open_prompts does."""
    asking = open_prompts(talk.model.kept, datetime.date.today().isoformat())
    before = [{"role": "system", "content": talk.system}] if talk.system else []
    return lambda messages: asking.ids([*before, *messages]), asking.stop_ids


def write_all(talk: Talk, texts: Sequence[str], *, num_samples: int, batch: int, chat: bool = False) -> Iterator[Piece]:
    """Yields the pieces of each text: all of one prompt's first sample, then its second, ... as they come.

    chat: each prompt is what a person says, and the text the answer.
    """
    model = talk.model
    prompts, stop_ids = [prompt_ids(model, text) for text in texts], model.kept.stop_ids
    if chat:
        asked, stop_ids = asking_of(talk)
        prompts = [asked([{"role": "user", "content": text}]) for text in texts]
    rows = [(prompt, number) for prompt in range(len(prompts)) for number in range(num_samples)]
    numbers = own_numbers([prompts[prompt] for prompt, _ in rows])
    rows_at_once = min(batch, len(rows))
    generator = make_generator(model, batch=rows_at_once, longest=talk.longest_for(prompts, texts), say=talk.say)
    for first in range(0, len(rows), rows_at_once):
        some, written = rows[first : first + rows_at_once], []
        of = lambda row: dict(prompt=texts[row[0]], sample=row[1])
        pieces = write_texts(
            generator,
            model.tokenizer,
            [prompts[prompt] for prompt, _ in some],
            talk.sampling,
            num_tokens=talk.num_tokens,
            stop_ids=stop_ids,
            stops=talk.stops,
            seed=talk.seed,
            numbers=numbers[first : first + rows_at_once],
            written=written,
        )
        for row, piece in pieces:
            if len(some) == 1:  # several at once would be mixed: they are shown whole
                yield Piece(text=piece, **of(some[row]))
        for row, one in zip(some, written):
            yield Piece(text="" if len(some) == 1 else one.text, done=one, **of(row))
        talk.tell_speed(generator.timing, written)


def prompt_ids(model: LoadedModel, text: str) -> list[int]:
    """The ids of a prompt; where it has none, those from which a document goes on."""
    return [*model.tokenizer.begin_ids, *model.tokenizer.encode(text).tolist()] or [model.tokenizer.eos_id]


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


def opened(model: str | Trained | LoadedModel) -> LoadedModel:
    """The model itself."""
    return model if isinstance(model, LoadedModel) else open_model(str(model), say=silent, named="model")


silent: Callable[[str], None] = lambda line: None
