"""Renders a conversation with its chat template, finds the spans to learn (the assistant's turns), and encodes it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.system.exits import BadInput
from jaxscale.text.chat.guard import CLOSE, OPEN, Guard
from jaxscale.text.chat.records import ASSISTANT, Chat, Pair
from jaxscale.text.chat.template import ChatTemplate
from jaxscale.text.tokenizer.base import Tokenizer

NO_TURN = "no assistant turn"
LINE_END = "\n"  # no tokenizer joins a text to a line end before it, but some put a space before a text that begins


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
        spans = turn_spans(messages, chat.learned, tools, whole, template, guard)
    return pieces_of(whole, spans, mark, guard)


def write_prompt(messages: Sequence[Mapping[str, Any]], tools: Any, template: ChatTemplate, guard: Guard) -> Written:
    """What the model is asked with for its turn behind these messages: what write_chat has before that turn."""
    mark = guard.choose([list(messages), tools])
    messages, tools = guard.broken(messages, mark), guard.broken(tools, mark) if tools else None
    whole, spans = marked_spans(template.render(messages, tools, True), ())
    spans = spans or turn_spans(messages, [False] * len(messages), tools, whole, template, guard)
    return pieces_of(whole, spans, mark, guard)


def turn_spans(
    messages: Sequence[Mapping[str, Any]],
    learned: Sequence[bool],
    tools: Any,
    whole: str,
    template: ChatTemplate,
    guard: Guard,
) -> list[Span]:
    """turn_span of each turn of the assistant, of those that are not learned where it can be told."""
    spans = []
    for place, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            try:
                span = turn_span(messages, place, tools, whole, template, guard)
                spans.append(span._replace(learned=learned[place]))
            except BadInput:
                if learned[place]:
                    raise  # else no such turn was ever learned, and there is nothing to equal
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
    if inside:
        raise BadInput("has a turn that begins or ends within a special token, so the token cannot be masked")
    cuts = sorted({0, len(whole)} | edges | specials.keys() | set(specials.values()))
    pieces = []
    for begin, end in zip(cuts, cuts[1:]):
        is_learned = any(s.learned and s.begin <= begin and end <= s.end for s in spans)
        text = whole[begin:end].replace(mark, "")
        if text:
            pieces.append(Piece(text, specials.get(begin) == end, is_learned))
    ends_open = bool(pieces) and pieces[-1].learned and not pieces[-1].special
    return Written(tuple(pieces), ends_open)


def encode_written(tokenizer: Tokenizer, documents: Sequence[Written]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(int32[n] ids without the end of the document, bool[n + 1] learned, for that end too) of each document.

    The name of a special token is its id where a piece is one, and plain text elsewhere.
    """
    found = []
    for document, ids in zip(documents, encode_pieces(tokenizer, documents), strict=True):
        learned = [np.full(len(part), piece.learned) for part, piece in zip(ids, document.pieces, strict=True)]
        whole, marks = joined(ids), np.concatenate([*learned, [document.end_learned]]).astype(bool)
        if len(whole) and whole[-1] == tokenizer.eos_id and document.pieces[-1].special:
            whole, marks = whole[:-1], marks[:-1]  # it ends as every document does
        found.append((whole, marks))
    return found


def encode_prompt(tokenizer: Tokenizer, document: Written) -> np.ndarray:
    """int32[n]: the ids of all of it, as encode_written has them."""
    return joined(encode_pieces(tokenizer, [document])[0])


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """int32[n] of all parts."""
    return np.concatenate([np.zeros(0, np.int32), *parts])


def encode_pieces(tokenizer: Tokenizer, documents: Sequence[Written]) -> list[list[np.ndarray]]:
    """The ids of each piece of each document."""
    begins, goes_on = [], []  # texts at a document's beginning, and behind something
    for document in documents:
        for alone, piece in zip(restarts(tokenizer, document), document.pieces):
            if not piece.special:
                (begins if alone else goes_on).append(piece.text)
    first, other = iter(tokenizer.encode_many(begins)), iter(encode_behind(tokenizer, goes_on))

    def ids(alone: bool, piece: Piece) -> np.ndarray:
        found = [tokenizer.special_ids[piece.text]] if piece.special else next(first if alone else other)
        return np.asarray(found, np.int32)

    return [list(map(ids, restarts(tokenizer, document), document.pieces)) for document in documents]


def restarts(tokenizer: Tokenizer, document: Written) -> list[bool]:
    """For each piece, whether its text is encoded as at the beginning of a document."""
    before = [True, *(tokenizer.prefix_after_special and piece.special for piece in document.pieces[:-1])]
    return before[: len(document.pieces)]


def encode_behind(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of texts that stand behind others: without the space that some tokenizers put before a text."""
    line_end = tokenizer.encode(LINE_END)
    behind = tokenizer.encode(f"{LINE_END}a")
    if np.array_equal(behind[len(line_end) :], tokenizer.encode("a")) or not np.array_equal(
        behind[: len(line_end)], line_end
    ):
        return list(tokenizer.encode_many(texts))
    found = tokenizer.encode_many([LINE_END + text for text in texts])
    return [ids[len(line_end) :] for ids in found]
