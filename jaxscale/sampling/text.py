"""Texts from a generator and a tokenizer, piece by piece as they are written: never half a character, and nothing of
what ends them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np

from jaxscale.sampling.config import Sampling
from jaxscale.sampling.generator import ENDED, Generator
from jaxscale.system.exits import BadInput

REPLACED = "\ufffd"  # what a decoder shows for bytes that are no character, or not one yet
CHARACTER_TOKENS = 4  # a character has at most four bytes (RFC 3629), and a token at least one
CONTEXT = 8  # tokens of the prompt that the first new one is read with: some decoders drop a space at the beginning
Reason = Literal["end", "stop", "length"]  # an end token, a stop text, or as many tokens as may be


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        ...


@dataclasses.dataclass
class Written:
    """What the model added to a prompt."""

    text: str = ""
    tokens: int = 0
    reason: Reason = "length"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteSettings:
    """How texts are written: as in Generator.generate, but for `stops`."""

    sampling: Sampling
    num_tokens: int
    stop_ids: Sequence[int] = ()
    stops: Sequence[str] = ()  # a text ends before any of them, also where it lies across tokens
    seed: int = 0
    numbers: Sequence[int] | None = None

    def steps(self, generator: Generator, prompts: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
        """Yields the next token of every prompt."""
        return generator.generate(prompts, self.sampling, self.num_tokens, self.stop_ids, self.seed, self.numbers)


def write_ids(generator: Generator, prompts: Sequence[Sequence[int]], how: WriteSettings) -> list[list[int]]:
    """The ids that the model writes behind each prompt, without the one that ends it."""
    found: list[list[int]] = [[] for _ in prompts]
    for step_B in how.steps(generator, prompts):
        for ids, token in zip(found, step_B.tolist(), strict=True):
            if token != ENDED:
                ids.append(token)
    return found


def write_texts(
    generator: Generator,
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    how: WriteSettings,
    written: list[Written],
) -> Iterator[tuple[int, str]]:
    """Yields (row, piece of its text) as the text comes; `written` is filled with what each row has so far.

    A stop text is not part of the text. Raises what Generator.generate raises.
    """
    streams = [TextStream(decoder.decode, prompt, how.stops) for prompt in prompts]
    written[:] = [Written() for _ in prompts]
    going = set(range(len(prompts)))
    for step_B in how.steps(generator, prompts):
        for row in sorted(going):
            token, stream, own = int(step_B[row]), streams[row], written[row]
            if token == ENDED:
                going.remove(row)
                full = len(prompts[row]) + own.tokens >= generator.engine.longest
                own.reason = "length" if full else "end"
                continue
            own.tokens += 1
            if piece := stream.push(token):
                own.text += piece
                yield row, piece
            if stream.stopped:
                own.reason = "stop"
                going.remove(row)
        if not going:
            break
    for row in going:  # the generator ends by itself where all of them end in one step
        full = (
            written[row].tokens >= how.num_tokens or len(prompts[row]) + written[row].tokens >= generator.engine.longest
        )
        written[row].reason = "length" if full else "end"
    for row, stream in enumerate(streams):
        if piece := stream.end():
            written[row].text += piece
            if stream.stopped:
                written[row].reason = "stop"
            yield row, piece


class TextStream:
    """Tokens in, text out that will not change any more.

    stops: the text ends before the first of these to be complete, wherever tokens begin and end, and `stopped` is true.
    Raises BadInput for an empty one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (), stops: Sequence[str] = ()):
        if "" in stops:
            raise BadInput("a stop text is empty, and would end every text before it begins; leave it out")
        self.decode, self.stops = decode, tuple(stops)
        self.ids = list(prompt)[-CONTEXT:]  # that the text is read from; those before `begin` are only context
        self.begin, self.told = len(self.ids), 0  # told: characters behind the context's that are out
        self.context = decode(self.ids) if self.ids else ""
        self.held, self.stopped = "", False

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        if self.stopped:
            return ""
        self.ids.append(token)
        text = self.decode(self.ids)
        whole = not text.endswith(REPLACED)
        if not whole:  # perhaps a character that is not complete: only what the newest bytes cannot change is certain
            older = self.ids[: -(CHARACTER_TOKENS - 1)]
            text = text[: common_prefix(self.decode(older), text)] if len(older) > self.begin else self.context
        found = text[common_prefix(self.context, text) :]
        new, self.told = found[self.told :], max(self.told, len(found))
        if whole:  # the newest token is context enough for those to come
            self.ids, self.begin, self.told = self.ids[-CONTEXT:], min(CONTEXT, len(self.ids)), 0
            self.context = self.decode(self.ids)
        return self.checked(new)

    def end(self) -> str:
        """What was held back, when no token comes any more."""
        if self.stopped:
            return ""
        text = self.decode(self.ids) if self.ids else ""
        found = text[common_prefix(self.context, text) :]
        return self.checked(found[self.told :], last=True)

    def checked(self, new: str, last: bool = False) -> str:
        """`new` and what was held, up to what may be the beginning of a stop text."""
        self.held += new
        found = [(place + len(stop), place) for stop in self.stops if (place := self.held.find(stop)) >= 0]
        if found:
            self.stopped, out = True, self.held[: min(found)[1]]  # the first to be complete, as if it came by letters
            self.held = ""
            return out
        keep = 0 if last else max((overlap(self.held, stop) for stop in self.stops), default=0)
        out, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return out


def overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def common_prefix(left: str, right: str) -> int:
    """Characters with which both begin."""
    size = min(len(left), len(right))
    return next((i for i in range(size) if left[i] != right[i]), size)
