"""sample: text behind prompts, and what the verbs that write text share."""

import dataclasses
import datetime
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from jaxscale.api import Trained
from jaxscale.command_line import flag
from jaxscale.inference import (
    LoadedModel,
    make_generator,
    open_model,
    stop_ids_of,
    tokenizer_of,
)
from jaxscale.sampling.config import Sampling
from jaxscale.sampling.generator import Timing, prompt_numbers
from jaxscale.sampling.text import GeneratedText, WriteSettings, write_ids, write_texts
from jaxscale.system.exits import BadInput
from jaxscale.text.chat.prompts import Message, open_prompts
from jaxscale.text.tokenizer.base import Tokenizer

NUMBERS = {int: numbers.Integral, float: numbers.Real}  # of NumPy too
SHAPE = 128  # tokens; lengths are rounded up to a multiple of it, so that fewer programs are compiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions(Sampling):
    """How text is written: what `sample` takes, and flags of `jaxscale sample`."""

    num_tokens: int = flag(100, "tokens to write, at most", least=1)
    repetition_penalty: float = flag(1.0, "above 1: tokens that the text has become less likely", "1")
    stop: tuple[str, ...] = flag((), "a text ends before it; may be given several times", "TEXT")
    seed: int = flag(0, "same seed, same text, whatever the mesh and the other prompts", least=0)
    batch: int = flag(8, "texts that are written at a time", least=1)
    chat: bool = flag(False, "a conversation, by the model's chat template; with --prompt, one answer")
    system: str | None = flag(None, "chat: what the model is told first", "TEXT")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), NUMBERS.get(field.type, object)
            if not isinstance(value, kind):
                raise BadInput(f"{field.name}={value!r} must be a {'whole ' * (field.type is int)}number")
        super().__post_init__()
        if min(self.num_tokens, self.batch) < 1:
            raise BadInput(f"num_tokens={self.num_tokens} and batch={self.batch} must be whole numbers, 1 or more")
        if not 0 <= self.seed < 2**32:  # the generator does not tell it from another one
            raise BadInput(f"seed={self.seed} must be a whole number from 0 to {2**32 - 1}")

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Sampling)})

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts before which a text ends."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclasses.dataclass(frozen=True)
class Talk:
    """A model and how it is to write."""

    model: LoadedModel
    how: SampleOptions
    say: Callable[[str], None]

    def write_settings(self, stop_ids: Sequence[int], numbers: Sequence[int] | None = None) -> WriteSettings:
        """How its texts are written."""
        return WriteSettings(
            sampling=self.how.sampling,
            num_tokens=self.how.num_tokens,
            stop_ids=stop_ids,
            stops=self.how.stops,
            seed=self.how.seed,
            numbers=numbers,
        )

    def longest_for(self, prompts: Sequence[Sequence[int]], texts: Sequence[str]) -> int:
        """Tokens of the longest text that these prompts become. Raises BadInput for one that cannot be read."""
        limit = self.model.cfg.max_seq_len
        for text, prompt in zip(texts, prompts):
            if limit is not None and len(prompt) >= limit:
                raise BadInput(
                    f"the prompt {short(text)} has {len(prompt)} tokens, and the model reads at most {limit} "
                    "(model.max_seq_len), its own included; shorten it"
                )
        longest = max(map(len, prompts)) + self.how.num_tokens
        if limit is not None and longest > limit:
            self.say(f"texts end at {limit} tokens, all that the model can read (model.max_seq_len)")
        elif longest > self.model.seq_len:
            self.say(f"texts of up to {longest} tokens; the model was trained on rows of {self.model.seq_len}")
        longest += -longest % SHAPE
        return longest if limit is None else min(longest, limit)

    def tell_speed(self, timing: Timing | None, written: Sequence[GeneratedText]) -> None:
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
    done: GeneratedText | None = None


def short(text: str) -> str:
    """The beginning of a prompt, for a message."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def asking_of(talk: Talk) -> tuple[Callable[[Sequence[Message]], list[int]], tuple[int, ...]]:
    """(messages -> the ids up to where the model's answer begins, the ids that end it). Raises as open_prompts does."""
    asking = open_prompts(tokenizer_of(talk.model), datetime.date.today().isoformat())
    before = [{"role": "system", "content": talk.how.system}] if talk.how.system else []
    return lambda messages: asking.ids([*before, *messages]), asking.stop_ids


def write_all(talk: Talk, texts: Sequence[str], *, num_samples: int = 1, chat: bool = False) -> Iterator[Piece]:
    """Yields the pieces of each text: all of one prompt's first sample, then its second, ... as they come.

    chat: each prompt is what a person says, and the text the answer.
    """
    model, kept = talk.model, tokenizer_of(talk.model)
    prompts, stop_ids = [prompt_ids(kept.tokenizer, text) for text in texts], kept.stop_ids
    if chat:
        asked, stop_ids = asking_of(talk)
        prompts = [asked([{"role": "user", "content": text}]) for text in texts]
    rows = [(prompt, number) for prompt in range(len(prompts)) for number in range(num_samples)]
    numbers = prompt_numbers([prompts[prompt] for prompt, _ in rows])
    rows_at_once = min(talk.how.batch, len(rows))
    generator = make_generator(model, batch=rows_at_once, longest=talk.longest_for(prompts, texts), say=talk.say)
    for first in range(0, len(rows), rows_at_once):
        some = rows[first : first + rows_at_once]
        written: list[GeneratedText] = []
        how = talk.write_settings(stop_ids, numbers[first : first + rows_at_once])
        ids = [prompts[prompt] for prompt, _ in some]
        for row, piece in write_texts(generator, kept.tokenizer, ids, how, written):
            if len(some) == 1:  # several at once would be mixed: they are shown whole
                prompt, number = some[row]
                yield Piece(texts[prompt], number, piece)
        for (prompt, number), one in zip(some, written):
            yield Piece(texts[prompt], number, "" if len(some) == 1 else one.text, done=one)
        talk.tell_speed(generator.timing, written)


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the ids of a prompt, or the end token, which a new document follows, where it has none."""
    return [*tokenizer.begin_ids, *tokenizer.encode(text).tolist()] or [tokenizer.eos_id]


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
    **how: Any,
) -> str | list[str] | list[int] | list[list[int]]:
    """What the model writes behind a prompt, or behind each of several: `jaxscale sample`.

    Args: model: a work folder (or WORKDIR/checkpoints/STEP), what train gave back, or of open_model, which is read once
    for many calls. prompt: text, or token ids, behind which ids are written: no tokenizer is needed. how: fields of
    SampleOptions: num_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop (a text or several), seed,
    batch, chat (a prompt is what a person says, and the text the answer, by the model's chat template), system.
    """
    options = SampleOptions(**how)
    if options.system is not None and not options.chat:
        raise BadInput(f"system={options.system!r} is what a conversation begins with; give chat=True too")
    talk = Talk(opened(model), options, silent)
    one = isinstance(prompt, str) or len(prompt) and all(isinstance(part, (int, np.integer)) for part in prompt)
    prompts = [prompt] if one else list(prompt)
    if not prompts:
        return []
    texts = [part for part in prompts if isinstance(part, str)]
    if not texts:
        if options.chat or options.stops:
            raise BadInput("chat and stop are for prompts of text; leave them out where prompts are token ids")
        found = ids_behind(talk, prompts)
        return found[0] if one else found
    tokenizer_of(talk.model)
    if len(texts) != len(prompts):
        raise BadInput("prompts must be texts, or all of them lists of token ids")
    written = [piece.done.text for piece in write_all(talk, texts, chat=options.chat) if piece.done]
    return written[0] if one else written


def ids_behind(talk: Talk, given: Sequence[object]) -> list[list[int]]:
    """Returns the ids that the model writes after each prompt. Raises BadInput for a prompt that is no list of ids."""
    prompts = [id_list(f"prompt[{number}]", prompt) for number, prompt in enumerate(given)]
    longest = talk.longest_for(prompts, list(map(str, prompts)))
    numbers, rows = prompt_numbers(prompts), min(talk.how.batch, len(prompts))
    generator, found = make_generator(talk.model, batch=rows, longest=longest), []
    for first in range(0, len(prompts), rows):
        some = slice(first, first + rows)
        found += write_ids(generator, prompts[some], talk.write_settings(stop_ids_of(talk.model), numbers[some]))
    return found


def id_list(name: str, given: object) -> list[int]:
    """The ids of a prompt."""
    ids = np.asarray(given)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise BadInput(f"{name}={given!r:.80} must be text, or a list of one or more token ids")
    return ids.tolist()


def opened(model: str | Trained | LoadedModel) -> LoadedModel:
    """The model itself."""
    return model if isinstance(model, LoadedModel) else open_model(str(model), say=silent, named="model")


silent: Callable[[str], None] = lambda line: None
