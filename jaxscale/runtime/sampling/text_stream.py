"""Streaming of texts from a generator and a tokenizer, without incomplete characters and stop texts."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from jaxscale.runtime.sampling.config import Sampling
from jaxscale.runtime.sampling.generator import ENDED, Generator
from jaxscale.system.exits import BadInput

REPLACED = "\ufffd"  # decoded from bytes that are not a complete character
CHARACTER_TOKENS = 4  # maximum per character: it has at most four bytes (RFC 3629), and a token at least one
CONTEXT = 8  # prompt tokens decoded before new tokens: some decoders drop a space at the beginning of a text
Reason = Literal["end", "stop", "length"]  # an end token, a stop text, or the limit of tokens


@dataclasses.dataclass
class GeneratedText:
    """Text that the model has added to a prompt."""

    text: str = ""
    tokens: int = 0
    reason: Reason = "length"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteSettings:
    """Settings of Generator.generate, and stop texts."""

    sampling: Sampling
    num_tokens: int
    stop_ids: Sequence[int] = ()
    stops: Sequence[str] = ()  # a text ends before any of these texts, which may span tokens
    seed: int = 0
    numbers: Sequence[int] | None = None

    def steps(self, generator: Generator, prompts: Sequence[Sequence[int]]) -> Iterator[np.ndarray]:
        """Yields the next token of every prompt."""
        return generator.generate(prompts, self.sampling, self.num_tokens, self.stop_ids, self.seed, self.numbers)


def write_ids(generator: Generator, prompts: Sequence[Sequence[int]], settings: WriteSettings) -> list[list[int]]:
    """Returns the ids that the model adds to each prompt, without the stop id."""
    found: list[list[int]] = [[] for _ in prompts]
    for step_B in settings.steps(generator, prompts):
        for ids, token in zip(found, step_B.tolist(), strict=True):
            if token != ENDED:
                ids.append(token)
    return found


def write_texts(
    generator: Generator,
    decode: Callable[[Sequence[int]], str],
    prompts: Sequence[Sequence[int]],
    settings: WriteSettings,
    written: list[GeneratedText],
) -> Iterator[tuple[int, str]]:
    """Yields (row, piece of text) without stop texts. Updates `written`. Raises the errors of generate()."""
    streams = [TextStream(decode, prompt, settings.stops) for prompt in prompts]
    written[:] = [GeneratedText() for _ in prompts]
    active = set(range(len(prompts)))
    for step_B in settings.steps(generator, prompts):
        for row in sorted(active):
            token, stream, output = int(step_B[row]), streams[row], written[row]
            if token == ENDED:
                active.remove(row)
                continue
            output.tokens += 1
            if piece := stream.push(token):
                output.text += piece
                yield row, piece
            if stream.stopped:
                active.remove(row)
        if not active:
            break
    for row, (stream, output) in enumerate(zip(streams, written)):
        piece = stream.end()
        full = output.tokens >= settings.num_tokens or len(prompts[row]) + output.tokens >= generator.engine.longest
        output.reason = "stop" if stream.stopped else "length" if full else "end"
        if piece:
            output.text += piece
            yield row, piece


class TextStream:
    """Converts tokens to text that later tokens cannot change. Ends before the first completed stop text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (), stops: Sequence[str] = ()):
        if "" in stops:
            raise BadInput("a stop string is empty; remove it")
        self.decode, self.stops = decode, tuple(stops)
        self.ids = list(prompt)[-CONTEXT:]  # tokens to decode; tokens before `begin` are only context
        self.begin, self.num_emitted = len(self.ids), 0  # num_emitted: characters returned after the context
        self.context = decode(self.ids) if self.ids else ""
        self.pending, self.stopped = "", False

    def push(self, token: int) -> str:
        """Returns the text that becomes final with this token."""
        if self.stopped:
            return ""
        self.ids.append(token)
        text = self.decode(self.ids)
        whole = not text.endswith(REPLACED)
        if not whole:  # maybe an incomplete character: only text that does not depend on the newest bytes is final
            older = self.ids[: -(CHARACTER_TOKENS - 1)]
            text = os.path.commonprefix([self.decode(older), text]) if len(older) > self.begin else self.context
        found = text[len(os.path.commonprefix([self.context, text])) :]
        new, self.num_emitted = found[self.num_emitted :], max(self.num_emitted, len(found))
        if whole:  # the newest tokens are enough context for later tokens
            self.ids, self.begin, self.num_emitted = self.ids[-CONTEXT:], min(CONTEXT, len(self.ids)), 0
            self.context = self.decode(self.ids)
        return self.cut_at_stop(new)

    def end(self) -> str:
        """Returns the remaining text after the last token."""
        if self.stopped:
            return ""
        text = self.decode(self.ids) if self.ids else ""
        found = text[len(os.path.commonprefix([self.context, text])) :]
        return self.cut_at_stop(found[self.num_emitted :], last=True)

    def cut_at_stop(self, new: str, last: bool = False) -> str:
        """Returns pending text plus `new`, up to a stop text. A possible prefix of a stop text stays pending."""
        self.pending += new
        found = [(begin + len(stop), begin) for stop in self.stops if (begin := self.pending.find(stop)) >= 0]
        if found:
            self.stopped, out = True, self.pending[: min(found)[1]]  # up to the stop text that is completed first
            self.pending = ""
            return out
        keep = 0 if last else max((overlap(self.pending, stop) for stop in self.stops), default=0)
        out, self.pending = self.pending[: len(self.pending) - keep], self.pending[len(self.pending) - keep :]
        return out


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
