"""Texts from a generator and a tokenizer, piece by piece as they are written."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from jaxscale.sampling.config import Sampling
from jaxscale.sampling.generator import ENDED, Generator
from jaxscale.sampling.stream import TextStream

Reason = Literal["end", "stop", "length"]  # an end token, a stop text, or as many tokens as may be


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""


@dataclasses.dataclass
class Written:
    """What the model added to a prompt."""

    text: str = ""
    tokens: int = 0
    reason: Reason = "length"


def write_ids(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    num_tokens: int,
    stop_ids: Sequence[int] = (),
    seed: int = 0,
    numbers: Sequence[int] | None = None,
) -> list[list[int]]:
    """The ids that the model writes behind each prompt, without the one that ends it. The rest as in write_texts."""
    found: list[list[int]] = [[] for _ in prompts]
    for step_B in generator.generate(prompts, sampling, num_tokens, stop_ids, seed, numbers):
        for ids, token in zip(found, step_B.tolist(), strict=True):
            if token != ENDED:
                ids.append(token)
    return found


def write_texts(
    generator: Generator,
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    num_tokens: int,
    stop_ids: Sequence[int] = (),
    stops: Sequence[str] = (),
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    written: list[Written],
) -> Iterator[tuple[int, str]]:
    """Yields (row, piece of its text) as the text comes; `written` is filled with what each row has so far.

    stops: a text ends before any of them, also where it lies across tokens; it is not part of the text. The others are
    as in Generator.generate, and so is what is raised.
    """
    streams = [TextStream(decoder.decode, prompt, stops) for prompt in prompts]
    written[:] = [Written() for _ in prompts]
    going = set(range(len(prompts)))
    for step_B in generator.generate(prompts, sampling, num_tokens, stop_ids, seed, numbers):
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
        full = written[row].tokens >= num_tokens or len(prompts[row]) + written[row].tokens >= generator.engine.longest
        written[row].reason = "length" if full else "end"
    for row, stream in enumerate(streams):
        if piece := stream.end():
            written[row].text += piece
            if stream.stopped:
                written[row].reason = "stop"
            yield row, piece
