"""Chat prompts for generation: a conversation up to the assistant's turn, as the token ids seen in training."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.system.exits import BadInput
from jaxscale.text.chat.guard import CLOSE, GUARDS, Guard
from jaxscale.text.chat.records import ASSISTANT
from jaxscale.text.chat.spans import Written, encode_prompt, marked_spans, pieces_of, write_prompt
from jaxscale.text.chat.template import ChatTemplate, compiled
from jaxscale.text.config import ChatConfig
from jaxscale.text.sources.decode import is_utf8
from jaxscale.text.tokenizer.load import find_template
from jaxscale.text.tokenizer.saved import SavedTokenizer

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, and what else the template knows
WORD = "answer"
MARK = GUARDS[0]


class ChatPrompts(NamedTuple):
    """Functions that turn conversations into prompts, for one model."""

    ids: Callable[[Sequence[Message]], list[int]]  # BadInput where the template refuses the messages
    text: Callable[[Sequence[Message], bool], str]  # for text_ids; the flag: with what begins the model's turn
    text_ids: Callable[[str, str], list[int]]  # (of `text`, a plain text behind it) -> their ids
    stop_ids: tuple[int, ...]  # each ends the model's turn


def open_prompts(kept: SavedTokenizer, today: str) -> ChatPrompts:
    """Chat prompts for the model of this tokenizer, formatted as in its run or by its folder's template.

    today: YYYY-MM-DD, for a template that asks for the date, unless the run has noted another.
    Raises BadInput where there is no template, or it cannot be read.
    """
    tokenizer, about = kept.tokenizer, kept.about
    found = find_template(about)
    if found is None:
        raise BadInput(
            f"{tokenizer.name} has no chat template (chat_template in tokenizer_config.json, or chat_template.jinja "
            "beside it): this model was not made for chat; write text with --interactive"
        )
    noted = about.note.get("chat", {})
    cfg = ChatConfig(variables=noted.get("variables", {}), today=noted.get("today", today))
    template, guard = compiled(tokenizer, cfg, about, *found), Guard(tokenizer.special_ids)

    def encoded(written: Written) -> list[int]:
        if not is_utf8(written.text):
            raise BadInput("holds half a surrogate pair, which no text should")
        return encode_prompt(tokenizer, written).tolist()

    def ids(messages: Sequence[Message]) -> list[int]:
        with told_of("this conversation"):
            return encoded(write_prompt(messages, None, template, guard))

    def text(messages: Sequence[Message], answer: bool) -> str:
        with told_of("this conversation"):
            return written_text(messages, answer, template, guard)

    def text_ids(written: str, behind: str = "") -> list[int]:
        whole = written + guard.broken_text(behind, MARK)
        with told_of("this conversation"):
            return encoded(pieces_of(whole, (), MARK, guard))

    with told_of("a conversation of two turns, by which the token that ends one is found,"):
        ends = tuple(tokenizer.special_ids[name] for name in turn_end(template, guard))
    return ChatPrompts(ids, text, text_ids, tuple(dict.fromkeys((*kept.stop_ids, *ends))))


@contextlib.contextmanager
def told_of(subject: str) -> Iterator[None]:
    """Around the writing of a conversation, whose errors follow its name."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{subject} {error}") from None


def written_text(messages: Sequence[Message], answer: bool, template: ChatTemplate, guard: Guard) -> str:
    """The conversation as the template has it, the names of special tokens in its messages broken by MARK.

    answer: with what begins the model's turn; without, a last message of the model is left open, to be gone on from.
    """
    if guard.choose(list(messages)) != MARK:
        raise BadInput("holds noncharacters (U+FDD0 to U+FDEF), which no text should")
    if not answer and messages and messages[-1]["role"] == ASSISTANT:
        begun = written_text(messages[:-1], True, template, guard)
        return begun + guard.broken_text(messages[-1]["content"], MARK)
    return marked_spans(template.render(guard.broken(messages, MARK), None, answer), ())[0]


def turn_end(template: ChatTemplate, guard: Guard) -> tuple[str, ...]:
    """The special token by which the template ends a turn of the model; () if it ends it by text alone."""
    turns = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": WORD}]
    try:
        text = template.render(turns, None, False)
    except BadInput:  # some templates want a system message before the first turn
        text = template.render([{"role": "system", "content": "?"}, *turns], None, False)
    behind = text.rpartition(WORD)[2].replace(CLOSE, "")
    found = guard.pattern.match(behind)
    return (found[0],) if found else ()
