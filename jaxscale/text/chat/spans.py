"""Renders a conversation with its chat template and finds the spans to learn: the assistant's turns."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.text.chat.guard import CLOSE, OPEN, Guard
from jaxscale.text.chat.records import ASSISTANT, Chat, Pair
from jaxscale.text.chat.template import ChatTemplate

NO_TURN = "no assistant turn"


class Piece(NamedTuple):
    """A part of a document that is encoded by itself."""

    text: str  # or the name of a special token
    special: bool
    learned: bool


class Span(NamedTuple):
    """A turn of the assistant in a text."""

    begin: int
    end: int
    learned: bool


class Written(NamedTuple):
    """A document in pieces, and whether its end is learned."""

    pieces: tuple[Piece, ...]
    end_learned: bool

    @property
    def text(self) -> str:
        """All of it, for people."""
        return "".join(piece.text for piece in self.pieces)


def write_pair(pair: Pair, begin: Sequence[str] = ()) -> Written:
    """A prompt that is given, encoded as one is when the model is asked, and its completion.

    begin: the special tokens before a prompt.
    """
    first = [Piece(name, True, False) for name in begin]
    texts = [Piece(text, False, learned) for text, learned in ((pair.prompt, False), (pair.completion, True)) if text]
    return Written((*first, *texts), bool(pair.completion))


def write_chat(chat: Chat, template: ChatTemplate, guard: Guard) -> Written:
    """The conversation as the template has it.

    Learned is what follows the prompt of each of the assistant's turns, up to and with the token that ends the turn; or
    what the template itself marks by {% generation %}. Text is cut where a turn of the assistant begins, learned or
    not: there a prompt ends.
    Raises: BadInput, a message that follows the record's place, where the template does not take the conversation, or
    writes what came before a turn in another way than when that turn was asked for.
    """
    mark = guard.choose([list(chat.messages), chat.tools])
    messages, tools = guard.broken(chat.messages, mark), guard.broken(chat.tools, mark) if chat.tools else None
    whole = template.render(messages, tools, False)
    if OPEN in whole:
        turns = [flag for flag, message in zip(chat.learned, messages) if message["role"] == ASSISTANT]
        whole, spans = marked_spans(whole, turns)
    else:
        spans = [turn_span(messages, place, tools, whole, template, guard) for place in np.flatnonzero(chat.learned)]
        spans += given_spans(messages, chat.learned, tools, whole, template, guard)
    return pieces_of(whole, spans, mark, guard)


def write_prompt(messages: Sequence[Mapping[str, Any]], tools: Any, template: ChatTemplate, guard: Guard) -> Written:
    """What the model is asked with for its turn behind these messages: what write_chat has before that turn."""
    mark = guard.choose([list(messages), tools])
    messages, tools = guard.broken(messages, mark), guard.broken(tools, mark) if tools else None
    whole, spans = marked_spans(template.render(messages, tools, True), ())
    spans = spans or given_spans(messages, [False] * len(messages), tools, whole, template, guard)
    return pieces_of(whole, spans, mark, guard)


def given_spans(
    messages: Sequence[Mapping[str, Any]],
    learned: Sequence[bool],
    tools: Any,
    whole: str,
    template: ChatTemplate,
    guard: Guard,
) -> list[Span]:
    """turn_span of each turn of the assistant that is not learned, where it can be told."""
    spans = []
    for place, message in enumerate(messages):
        if message["role"] == ASSISTANT and not learned[place]:
            with contextlib.suppress(BadInput):  # then no such turn was ever learned, and there is nothing to equal
                spans.append(turn_span(messages, place, tools, whole, template, guard)._replace(learned=False))
    return spans


def turn_span(
    messages: Sequence[Mapping[str, Any]], place: int, tools: Any, whole: str, template: ChatTemplate, guard: Guard
) -> Span:
    """Where in `whole` a turn is, found by writing the conversation up to it.

    Raises BadInput where the template writes what came before in another way than when the turn was asked for.
    """
    before = template.render(messages[:place], tools, True)
    after = template.render(messages[: place + 1], tools, False)
    if not whole.startswith(before) or not after.startswith(before):
        raise BadInput(
            f"is written by the template {template.name} so that what stands before turn {place + 1} is not what "
            "the model is asked with; mark what is learned in the template by {% generation %}"
        )
    begin, end = len(before), len(after)
    last = list(guard.pattern.finditer(after, begin))[-1:]
    if last:  # what ends the turn; a line end behind it belongs to the next
        end = last[0].end()
    if not whole.startswith(after[:end]):  # the turn is shorter once others follow, as Qwen3 drops what was thought
        shown = whole.find(last[0][0], begin) if last else -1
        if shown < 0:
            raise BadInput(
                f"is written by the template {template.name} so that the end of turn {place + 1} is not known; "
                "mark what is learned in the template by {% generation %}"
            )
        end = shown + len(last[0][0])
    return Span(begin, end, True)


def marked_spans(whole: str, turns: Sequence[bool]) -> tuple[str, list[Span]]:
    """(the text without the template's marks, what stood between them).

    turns: for each turn of the assistant, whether it is to be learned; () if there is nothing to learn. Raises
    BadInput where a template does not mark each of them once, and some are not.
    """
    text, spans, begin = "", [], 0
    for part in re.split(f"([{OPEN}{CLOSE}])", whole):
        if part == OPEN:
            begin = len(text)
        elif part == CLOSE:
            spans.append(Span(begin, len(text), bool(turns)))
        else:
            text += part
    if all(turns):
        return text, spans
    if len(spans) != len(turns):
        raise BadInput(
            f"has {len(turns)} turns of the assistant, not all to be learned, and the template marks {len(spans)}"
        )
    return text, [span._replace(learned=wanted) for span, wanted in zip(spans, turns)]


def pieces_of(whole: str, spans: Sequence[Span], mark: str, guard: Guard) -> Written:
    """The text cut at special tokens and at both ends of each span. mark: the guard, which is taken out."""
    edges = {edge for span in spans for edge in (span.begin, span.end)}
    specials = {found.start(): found.end() for found in guard.pattern.finditer(whole)}
    inside = [edge for edge in edges if any(begin < edge < end for begin, end in specials.items())]
    assert not inside, "a turn begins or ends within a special token"
    cuts = sorted({0, len(whole)} | edges | specials.keys() | set(specials.values()))
    pieces = []
    for begin, end in zip(cuts, cuts[1:]):
        is_learned = any(s.learned and s.begin <= begin and end <= s.end for s in spans)
        text = whole[begin:end].replace(mark, "")
        if text:
            pieces.append(Piece(text, specials.get(begin) == end, is_learned))
    ends_open = bool(pieces) and pieces[-1].learned and not pieces[-1].special
    return Written(tuple(pieces), ends_open)
