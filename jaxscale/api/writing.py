"""sample(): text generation, shared by the API and `jaxscale sample`."""

import dataclasses
import datetime
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from jaxscale.api import Say, Trained, silent
from jaxscale.api.inference import LoadedModel, make_generator, open_model, stop_ids_of, tokenizer_of
from jaxscale.runtime.sampling.config import Sampling
from jaxscale.runtime.sampling.generator import Timing, prompt_numbers
from jaxscale.runtime.sampling.text_stream import GeneratedText, WriteSettings, write_ids, write_texts
from jaxscale.runtime.text.chat.spans import Message, open_prompts
from jaxscale.settings.command_line import flag
from jaxscale.system.exits import BadInput

NUMBERS = {int: numbers.Integral, float: numbers.Real}  # include NumPy types
LENGTH_MULTIPLE = 128  # lengths are rounded up to a multiple of this number of tokens, to compile fewer programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions(Sampling):
    """Options of sample(), and flags of `jaxscale sample`."""

    num_tokens: int = flag(100, "maximum number of new tokens", least=1)
    repetition_penalty: float = flag(1.0, "above 1: makes tokens that are already in the text less likely", "1")
    stop: tuple[str, ...] = flag((), "ends a text before this string; may be repeated", "TEXT")
    seed: int = flag(0, "random seed; the text does not depend on the mesh or on other prompts", least=0)
    batch: int = flag(8, "texts generated in parallel", least=1)
    chat: bool = flag(False, "chats in the model's chat template; with --prompt: returns one answer")
    system: str | None = flag(None, "system message of the chat", "TEXT")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), NUMBERS.get(field.type, object)
            if not isinstance(value, kind):
                raise BadInput(f"{field.name}={value!r} must be a {'whole ' * (field.type is int)}number")
        super().__post_init__()
        if min(self.num_tokens, self.batch) < 1:
            raise BadInput(f"num_tokens={self.num_tokens} and batch={self.batch} must be whole numbers of at least 1")
        if not 0 <= self.seed < 2**32:  # jax.random.key uses 32 bits of the seed
            raise BadInput(f"seed={self.seed} must be a whole number from 0 to {2**32 - 1}")

    @property
    def sampling(self) -> Sampling:
        """The settings of token sampling."""
        return Sampling(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Sampling)})

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


@dataclasses.dataclass(frozen=True)
class TextWriter:
    """A model with generation options."""

    model: LoadedModel
    options: SampleOptions
    say: Say

    def write_settings(self, stop_ids: Sequence[int], numbers: Sequence[int] | None = None) -> WriteSettings:
        """Returns the settings of write_texts()."""
        return WriteSettings(
            sampling=self.options.sampling,
            num_tokens=self.options.num_tokens,
            stop_ids=stop_ids,
            stops=self.options.stops,
            seed=self.options.seed,
            numbers=numbers,
        )

    def longest_for(self, prompts: Sequence[Sequence[int]], texts: Sequence[str]) -> int:
        """Returns the maximum length of a prompt with its continuation. Raises BadInput if a prompt is too long."""
        limit = self.model.cfg.max_seq_len
        for text, prompt in zip(texts, prompts):
            if limit is not None and len(prompt) >= limit:
                shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
                raise BadInput(
                    f"the prompt {shown} has {len(prompt)} tokens, but at most {limit} (model.max_seq_len) are "
                    "allowed, including new tokens; shorten the prompt"
                )
        longest = max(map(len, prompts)) + self.options.num_tokens
        if limit is not None and longest > limit:
            self.say(f"texts end at {limit} tokens, the maximum of the model (model.max_seq_len)")
        elif longest > self.model.seq_len:
            self.say(f"texts have up to {longest} tokens, but the model was trained on rows of {self.model.seq_len}")
        longest += -longest % LENGTH_MULTIPLE
        return longest if limit is None else min(longest, limit)

    def log_speed(self, timing: Timing | None, written: Sequence[GeneratedText]) -> None:
        """Logs the speed of prefill and decoding. Tokens after a stop string are not counted."""
        if timing is None:  # interrupted before the first token
            return
        text = f"prefill {timing.prompt_tokens} tokens, {timing.prefill_rate:,.0f} tokens/s"
        if tokens := sum(max(one.tokens - 1, 0) for one in written):  # the prefill computes the first token of each row
            text += f"; decode {tokens} tokens, {tokens / max(timing.decode_seconds, 1e-9):,.0f} tokens/s"
            text += f" in {len(written)} rows" if len(written) > 1 else ""
        self.say(text)


class TextPiece(NamedTuple):
    """A part of a text. `done` is set for the last part."""

    prompt: str
    sample: int
    text: str
    done: GeneratedText | None = None


def open_chat_prompts(writer: TextWriter) -> tuple[Callable[[Sequence[Message]], list[int]], tuple[int, ...]]:
    """Returns (function that encodes messages as a prompt, token ids that end an answer). Raises the errors of
    open_prompts()."""
    chat_prompts = open_prompts(tokenizer_of(writer.model), datetime.date.today().isoformat())
    before = [{"role": "system", "content": writer.options.system}] if writer.options.system else []
    return lambda messages: chat_prompts.ids([*before, *messages]), chat_prompts.stop_ids


def write_all(
    writer: TextWriter, texts: Sequence[str], *, num_samples: int = 1, chat: bool = False
) -> Iterator[TextPiece]:
    """Yields the text for each prompt in order, in pieces. chat: prompts are user messages, and texts are answers."""
    model, loaded = writer.model, tokenizer_of(writer.model)
    # An empty prompt is replaced by the end token, after which a new document begins.
    ids_of = lambda text: [*loaded.tokenizer.begin_ids, *loaded.tokenizer.encode(text).tolist()]
    prompts, stop_ids = [ids_of(text) or [loaded.tokenizer.eos_id] for text in texts], loaded.stop_ids
    if chat:
        encode_messages, stop_ids = open_chat_prompts(writer)
        prompts = [encode_messages([{"role": "user", "content": text}]) for text in texts]
    rows = [(prompt, number) for prompt in range(len(prompts)) for number in range(num_samples)]
    numbers = prompt_numbers([prompts[prompt] for prompt, _ in rows])
    rows_at_once = min(writer.options.batch, len(rows))
    generator = make_generator(model, batch=rows_at_once, longest=writer.longest_for(prompts, texts), say=writer.say)
    for first in range(0, len(rows), rows_at_once):
        some = rows[first : first + rows_at_once]
        written: list[GeneratedText] = []
        settings = writer.write_settings(stop_ids, numbers[first : first + rows_at_once])
        ids = [prompts[prompt] for prompt, _ in some]
        for row, piece in write_texts(generator, loaded.tokenizer.decode, ids, settings, written):
            if len(some) == 1:  # parallel texts are yielded whole, because their pieces would interleave
                prompt, number = some[row]
                yield TextPiece(texts[prompt], number, piece)
        for (prompt, number), one in zip(some, written):
            yield TextPiece(texts[prompt], number, "" if len(some) == 1 else one.text, done=one)
        writer.log_speed(generator.timing, written)


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
    """Returns the text that the model generates after a prompt, like `jaxscale sample`. Several prompts return a list.

    model: a work folder, WORKDIR/checkpoints/STEP, or the result of train() or open_model(), which loads a model once
    for several calls. prompt: one or several texts or lists of token ids. Token ids need no tokenizer, and return token
    ids. how: fields of SampleOptions: num_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop, seed,
    batch, chat (prompts are user messages in the model's chat template), system.
    """
    options = SampleOptions(**how)
    if options.system is not None and not options.chat:
        raise BadInput(f"system={options.system!r} applies only to a conversation; also give chat=True")
    writer = TextWriter(as_loaded_model(model), options, silent)
    is_single = isinstance(prompt, str) or len(prompt) and all(isinstance(part, (int, np.integer)) for part in prompt)
    prompts = [prompt] if is_single else list(prompt)
    if not prompts:
        return []
    texts = [part for part in prompts if isinstance(part, str)]
    if not texts:
        if options.chat or options.stops:
            raise BadInput("chat and stop apply only to text prompts; remove them for prompts of token ids")
        found = generate_ids(writer, prompts)
        return found[0] if is_single else found
    tokenizer_of(writer.model)
    if len(texts) != len(prompts):
        raise BadInput("prompts must be either all strings or all lists of token ids")
    written = [piece.done.text for piece in write_all(writer, texts, chat=options.chat) if piece.done]
    return written[0] if is_single else written


def generate_ids(writer: TextWriter, given: Sequence[object]) -> list[list[int]]:
    """Returns the ids generated after each prompt. Raises BadInput for a prompt that is not a list of token ids."""
    prompts = []
    for number, prompt in enumerate(given):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise BadInput(f"prompt[{number}]={prompt!r:.80} must be text, or a non-empty list of token ids")
        prompts.append(ids.tolist())
    longest = writer.longest_for(prompts, list(map(str, prompts)))
    numbers, rows = prompt_numbers(prompts), min(writer.options.batch, len(prompts))
    generator, found = make_generator(writer.model, batch=rows, longest=longest), []
    for first in range(0, len(prompts), rows):
        some = slice(first, first + rows)
        found += write_ids(generator, prompts[some], writer.write_settings(stop_ids_of(writer.model), numbers[some]))
    return found


def as_loaded_model(model: str | Trained | LoadedModel) -> LoadedModel:
    """Returns the model, which is opened if it is a work folder."""
    return model if isinstance(model, LoadedModel) else open_model(str(model), say=silent, named="model")
