"""Renders conversations with a chat template, locates the assistant turns for the loss mask, and encodes the text.

The prompt of an assistant turn has the same token ids in training and generation.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.runtime.text.chat.chat_records import ASSISTANT, Conversation, PromptCompletion
from jaxscale.runtime.text.chat.template import CLOSE, GUARDS, OPEN, ChatTemplate, Guard, make_template
from jaxscale.runtime.text.config import ChatConfig
from jaxscale.runtime.text.sources.decode import is_utf8
from jaxscale.runtime.text.tokenizer.base import Tokenizer
from jaxscale.runtime.text.tokenizer.load import SavedTokenizer, find_template
from jaxscale.system.exits import BadInput

NO_TURN = "no assistant turn"
LINE_END = "\n"  # tokenizers do not merge across line ends; some tokenizers add a space at the start of a text
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, with other keys that the template may use
WORD = "answer"
MARK = GUARDS[0]


class TextPiece(NamedTuple):
    """A part of a document that is encoded separately."""

    text: str  # text, or the name of a special token
    special: bool
    in_loss: bool


class TurnSpan(NamedTuple):
    """An assistant turn in a rendered text."""

    begin: int
    end: int
    in_loss: bool


class RenderedDocument(NamedTuple):
    """The pieces of a document. end_in_loss: True if the end-of-document token has a loss."""

    pieces: tuple[TextPiece, ...]
    end_in_loss: bool

    @property
    def text(self) -> str:
        """Returns the whole text, for messages."""
        return "".join(piece.text for piece in self.pieces)


def render_pair(pair: PromptCompletion, begin: Sequence[str] = ()) -> RenderedDocument:
    """Renders a prompt-completion pair. The prompt is the same as in generation. begin: special tokens before it."""
    first = [TextPiece(name, True, False) for name in begin]
    texts = [
        TextPiece(text, False, in_loss) for text, in_loss in ((pair.prompt, False), (pair.completion, True)) if text
    ]
    return RenderedDocument((*first, *texts), bool(pair.completion))


def render_conversation(chat: Conversation, template: ChatTemplate, guard: Guard) -> RenderedDocument:
    """Renders the conversation with the template, and finds the text that has a loss.

    This is the text in {% generation %} tags. Without tags, it is each assistant turn after its prompt, including the
    end-of-turn token. Splits the text at the start of each assistant turn, as in generation.
    Raises: BadInput if the template rejects the conversation, or if the text before a turn differs from the prompt of
    that turn. Callers append the message to the location of the record.
    """
    mark = guard.choose_marker([list(chat.messages), chat.tools])
    messages, tools = guard.escape(chat.messages, mark), guard.escape(chat.tools, mark) if chat.tools else None
    whole = template.render(messages, tools, False)
    if OPEN in whole:
        turns = [flag for flag, message in zip(chat.in_loss, messages) if message["role"] == ASSISTANT]
        whole, spans = marked_spans(whole, turns)
    else:
        spans = turn_spans(messages, chat.in_loss, tools, whole, template, guard)
    return split_pieces(whole, spans, mark, guard)


def render_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Any, template: ChatTemplate, guard: Guard
) -> RenderedDocument:
    """Renders the prompt of the next assistant turn. Raises the errors of render_conversation."""
    mark = guard.choose_marker([list(messages), tools])
    messages, tools = guard.escape(messages, mark), guard.escape(tools, mark) if tools else None
    whole, spans = marked_spans(template.render(messages, tools, True), ())
    spans = spans or turn_spans(messages, [False] * len(messages), tools, whole, template, guard)
    return split_pieces(whole, spans, mark, guard)


def turn_spans(
    messages: Sequence[Mapping[str, Any]],
    in_loss: Sequence[bool],
    tools: Any,
    whole: str,
    template: ChatTemplate,
    guard: Guard,
) -> list[TurnSpan]:
    """Returns the spans of the assistant turns. Skips turns without a loss if they cannot be located."""
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == ASSISTANT:
            try:
                span = turn_span(messages, index, tools, whole, template, guard)
                spans.append(span._replace(in_loss=in_loss[index]))
            except BadInput:
                if in_loss[index]:
                    raise  # only turns with a loss need a span
    return spans


def turn_span(
    messages: Sequence[Mapping[str, Any]], index: int, tools: Any, whole: str, template: ChatTemplate, guard: Guard
) -> TurnSpan:
    """Locates a turn in `whole` by rendering the conversation up to that turn. Raises BadInput if it is not found."""
    before = template.render(messages[:index], tools, True)
    after = template.render(messages[: index + 1], tools, False)
    if not whole.startswith(before) or not after.startswith(before):
        raise BadInput(
            f"has a turn {index + 1} that cannot be located: the template {template.name} renders its prompt and the "
            "text before it differently; in the template, put {% generation %} and {% endgeneration %} around the text "
            "with a loss"
        )
    begin, end = len(before), len(after)
    last = list(guard.pattern.finditer(after, begin))[-1:]
    if last:  # the end-of-turn token; a following line end belongs to the next turn
        end = last[0].end()
    if not whole.startswith(after[:end]):  # templates may shorten earlier turns, for example remove Qwen3's reasoning
        found_at = whole.find(last[0][0], begin) if last else -1
        if found_at < 0:
            raise BadInput(
                f"has a turn {index + 1} whose end cannot be located in the text rendered by {template.name}; in the "
                "template, put {% generation %} and {% endgeneration %} around the text with a loss"
            )
        end = found_at + len(last[0][0])
    return TurnSpan(begin, end, True)


def marked_spans(whole: str, turns: Sequence[bool]) -> tuple[str, list[TurnSpan]]:
    """Returns (text without marks, spans between marks). turns: whether each assistant turn has a loss, or ()."""
    text, spans, begin = "", [], 0
    for part in re.split(f"([{OPEN}{CLOSE}])", whole):
        if part == OPEN:
            begin = len(text)
        elif part == CLOSE:
            spans.append(TurnSpan(begin, len(text), bool(turns)))
        else:
            text += part
    if all(turns):
        return text, spans
    if len(spans) != len(turns):
        raise BadInput(
            f"has {len(turns)} assistant turns, some without loss, but the template marks {len(spans)}; mark each turn"
        )
    return text, [span._replace(in_loss=in_loss) for span, in_loss in zip(spans, turns)]


def split_pieces(whole: str, spans: Sequence[TurnSpan], mark: str, guard: Guard) -> RenderedDocument:
    """Splits the text at special tokens and span boundaries. mark: escape character of Guard, which is removed."""
    edges = {edge for span in spans for edge in (span.begin, span.end)}
    specials = {found.start(): found.end() for found in guard.pattern.finditer(whole)}
    inside = [edge for edge in edges if any(begin < edge < end for begin, end in specials.items())]
    if inside:
        raise BadInput("has a turn that begins or ends inside a special token; correct the chat template")
    cuts = sorted({0, len(whole)} | edges | specials.keys() | set(specials.values()))
    pieces = []
    for begin, end in zip(cuts, cuts[1:]):
        in_loss = any(s.in_loss and s.begin <= begin and end <= s.end for s in spans)
        text = whole[begin:end].replace(mark, "")
        if text:
            pieces.append(TextPiece(text, specials.get(begin) == end, in_loss))
    ends_open = bool(pieces) and pieces[-1].in_loss and not pieces[-1].special
    return RenderedDocument(tuple(pieces), ends_open)


def encode_rendered(tokenizer: Tokenizer, documents: Sequence[RenderedDocument]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (int32[n] ids without the end token, bool[n + 1] loss mask with the end token) of each document."""
    found = []
    for document, ids in zip(documents, encode_pieces(tokenizer, documents), strict=True):
        in_loss = [np.full(len(part), piece.in_loss) for part, piece in zip(ids, document.pieces, strict=True)]
        whole = np.concatenate([np.zeros(0, np.int32), *ids])
        loss_mask = np.concatenate([*in_loss, [document.end_in_loss]]).astype(bool)
        if len(whole) and whole[-1] == tokenizer.eos_id and document.pieces[-1].special:
            whole, loss_mask = whole[:-1], loss_mask[:-1]  # the writer appends the end token
        found.append((whole, loss_mask))
    return found


def encode_prompt(tokenizer: Tokenizer, document: RenderedDocument) -> np.ndarray:
    """Returns int32[n], the ids of a rendered prompt."""
    return np.concatenate([np.zeros(0, np.int32), *encode_pieces(tokenizer, [document])[0]])


def encode_pieces(tokenizer: Tokenizer, documents: Sequence[RenderedDocument]) -> list[list[np.ndarray]]:
    """Returns the ids of each piece of each document."""
    begins, continuations = [], []  # texts at the start of a document; other texts
    for document in documents:
        for is_start, piece in zip(starts_document(tokenizer, document), document.pieces):
            if not piece.special:
                (begins if is_start else continuations).append(piece.text)
    first, other = iter(tokenizer.encode_many(begins)), iter(encode_continuations(tokenizer, continuations))

    def ids(is_start: bool, piece: TextPiece) -> np.ndarray:
        found = [tokenizer.special_ids[piece.text]] if piece.special else next(first if is_start else other)
        return np.asarray(found, np.int32)

    return [list(map(ids, starts_document(tokenizer, document), document.pieces)) for document in documents]


def starts_document(tokenizer: Tokenizer, document: RenderedDocument) -> list[bool]:
    """Returns for each piece whether its text is encoded like text at the start of a document."""
    before = [True, *(tokenizer.prefix_after_special and piece.special for piece in document.pieces[:-1])]
    return before[: len(document.pieces)]


def encode_continuations(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Encodes texts that are not at the start of a document, without the space that some tokenizers add there."""
    line_end = tokenizer.encode(LINE_END)
    after_line_end = tokenizer.encode(f"{LINE_END}a")
    if np.array_equal(after_line_end[len(line_end) :], tokenizer.encode("a")) or not np.array_equal(
        after_line_end[: len(line_end)], line_end
    ):
        return list(tokenizer.encode_many(texts))
    found = tokenizer.encode_many([LINE_END + text for text in texts])
    return [ids[len(line_end) :] for ids in found]


class ChatPrompts(NamedTuple):
    """Functions of a model that convert conversations to prompts."""

    ids: Callable[[Sequence[Message]], list[int]]  # raises BadInput if the template rejects the messages
    text: Callable[[Sequence[Message], bool], str]  # (messages, add generation prompt) -> text for text_ids
    text_ids: Callable[[str, str], list[int]]  # (result of `text`, plain text to append) -> ids
    stop_ids: tuple[int, ...]  # ids that end the model's turn


def open_prompts(saved: SavedTokenizer, today: str) -> ChatPrompts:
    """Returns the prompt functions for a saved tokenizer. today: date for templates, if the run recorded none."""
    tokenizer, about = saved.tokenizer, saved.about
    found = find_template(about)
    if found is None:
        raise BadInput(
            f"{tokenizer.name} has no chat template in tokenizer_config.json or chat_template.jinja, so this model is "
            "not a chat model; generate text with --interactive"
        )
    recorded = about.note.get("chat", {})
    cfg = ChatConfig(variables=recorded.get("variables", {}), today=recorded.get("today", today))
    template, guard = make_template(tokenizer, cfg, about, *found), Guard(tokenizer.special_ids)

    def encode(rendered: RenderedDocument) -> list[int]:
        if not is_utf8(rendered.text):
            raise BadInput("contains an unpaired surrogate, which is not valid text; remove it")
        return encode_prompt(tokenizer, rendered).tolist()

    @prefix_errors("this conversation")
    def ids(messages: Sequence[Message]) -> list[int]:
        return encode(render_prompt(messages, None, template, guard))

    @prefix_errors("this conversation")
    def text(messages: Sequence[Message], answer: bool) -> str:
        return render_text(messages, answer, template, guard)

    @prefix_errors("this conversation")
    def text_ids(rendered: str, suffix: str = "") -> list[int]:
        return encode(split_pieces(rendered + guard.escape_text(suffix, MARK), (), MARK, guard))

    with prefix_errors("the two-turn conversation that detects the end-of-turn token"):
        turn_ends = tuple(tokenizer.special_ids[name] for name in turn_end(template, guard))
    return ChatPrompts(ids, text, text_ids, tuple(dict.fromkeys((*saved.stop_ids, *turn_ends))))


@contextlib.contextmanager
def prefix_errors(subject: str) -> Iterator[None]:
    """Adds the subject at the start of BadInput messages."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{subject} {error}") from None


def render_text(messages: Sequence[Message], answer: bool, template: ChatTemplate, guard: Guard) -> str:
    """Renders messages with escaped names. answer: True adds a generation prompt, False continues the last message."""
    if guard.choose_marker(list(messages)) != MARK:
        raise BadInput("contains noncharacters (U+FDD0 to U+FDEF), which are reserved; remove them")
    if not answer and messages and messages[-1]["role"] == ASSISTANT:
        prefix = render_text(messages[:-1], True, template, guard)
        return prefix + guard.escape_text(messages[-1]["content"], MARK)
    return marked_spans(template.render(guard.escape(messages, MARK), None, answer), ())[0]


def turn_end(template: ChatTemplate, guard: Guard) -> tuple[str, ...]:
    """Returns a tuple with the special token that ends assistant turns, or () if plain text ends them."""
    turns = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": WORD}]
    try:
        text = template.render(turns, None, False)
    except BadInput:  # some templates require a system message first
        text = template.render([{"role": "system", "content": "?"}, *turns], None, False)
    suffix = text.rpartition(WORD)[2].replace(CLOSE, "")
    found = guard.pattern.match(suffix)
    return (found[0],) if found else ()
