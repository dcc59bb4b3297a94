"""Chat prompts for generation: a conversation up to the assistant's turn, with the token ids of training."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.runtime.text.chat.chat_records import ASSISTANT
from jaxscale.runtime.text.chat.spans import RenderedDocument, encode_prompt, marked_spans, render_prompt, split_pieces
from jaxscale.runtime.text.chat.special_tokens import CLOSE, GUARDS, Guard
from jaxscale.runtime.text.chat.template import ChatTemplate, make_template
from jaxscale.runtime.text.config import ChatConfig
from jaxscale.runtime.text.sources.decode import is_utf8
from jaxscale.runtime.text.tokenizer.load import find_template
from jaxscale.runtime.text.tokenizer.saved import SavedTokenizer
from jaxscale.system.exits import BadInput

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, and other keys of the template
WORD = "answer"
MARK = GUARDS[0]


class ChatPrompts(NamedTuple):
    """Functions that turn conversations into prompts, for one model."""

    ids: Callable[[Sequence[Message]], list[int]]  # raises BadInput if the template rejects the messages
    text: Callable[[Sequence[Message], bool], str]  # for text_ids; the flag adds the generation prompt
    text_ids: Callable[[str, str], list[int]]  # (result of `text`, plain text to append) -> ids
    stop_ids: tuple[int, ...]  # each ends the model's turn


def open_prompts(saved: SavedTokenizer, today: str) -> ChatPrompts:
    """Chat prompts for the model of this tokenizer, formatted as in its run or by its folder's template.

    today: YYYY-MM-DD, for templates that use the date, unless the run recorded one.
    Raises: BadInput if the template is missing or cannot be read.
    """
    tokenizer, about = saved.tokenizer, saved.about
    found = find_template(about)
    if found is None:
        raise BadInput(
            f"{tokenizer.name} has no chat template (chat_template in tokenizer_config.json, or "
            "chat_template.jinja): this model is not a chat model; generate text with --interactive"
        )
    recorded = about.note.get("chat", {})
    cfg = ChatConfig(variables=recorded.get("variables", {}), today=recorded.get("today", today))
    template, guard = make_template(tokenizer, cfg, about, *found), Guard(tokenizer.special_ids)

    def encode(rendered: RenderedDocument) -> list[int]:
        if not is_utf8(rendered.text):
            raise BadInput("holds half a surrogate pair, which no text should")
        return encode_prompt(tokenizer, rendered).tolist()

    def ids(messages: Sequence[Message]) -> list[int]:
        with prefix_errors("this conversation"):
            return encode(render_prompt(messages, None, template, guard))

    def text(messages: Sequence[Message], answer: bool) -> str:
        with prefix_errors("this conversation"):
            return render_text(messages, answer, template, guard)

    def text_ids(rendered: str, suffix: str = "") -> list[int]:
        whole = rendered + guard.escape_text(suffix, MARK)
        with prefix_errors("this conversation"):
            return encode(split_pieces(whole, (), MARK, guard))

    with prefix_errors("the two-turn conversation that detects the end-of-turn token"):
        turn_ends = tuple(tokenizer.special_ids[name] for name in turn_end(template, guard))
    return ChatPrompts(ids, text, text_ids, tuple(dict.fromkeys((*saved.stop_ids, *turn_ends))))


@contextlib.contextmanager
def prefix_errors(subject: str) -> Iterator[None]:
    """Prefixes BadInput messages with the subject."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{subject} {error}") from None


def render_text(messages: Sequence[Message], answer: bool, template: ChatTemplate, guard: Guard) -> str:
    """Renders the conversation, with MARK inserted into names of special tokens in messages.

    answer: append the generation prompt; otherwise a last assistant message is left open, to be continued.
    """
    if guard.choose_marker(list(messages)) != MARK:
        raise BadInput("holds noncharacters (U+FDD0 to U+FDEF), which no text should")
    if not answer and messages and messages[-1]["role"] == ASSISTANT:
        prefix = render_text(messages[:-1], True, template, guard)
        return prefix + guard.escape_text(messages[-1]["content"], MARK)
    return marked_spans(template.render(guard.escape(messages, MARK), None, answer), ())[0]


def turn_end(template: ChatTemplate, guard: Guard) -> tuple[str, ...]:
    """Returns the special token that ends an assistant turn; () if the template ends it with plain text."""
    turns = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": WORD}]
    try:
        text = template.render(turns, None, False)
    except BadInput:  # some templates require a system message first
        text = template.render([{"role": "system", "content": "?"}, *turns], None, False)
    suffix = text.rpartition(WORD)[2].replace(CLOSE, "")
    found = guard.pattern.match(suffix)
    return (found[0],) if found else ()
