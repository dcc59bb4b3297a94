"""What a model is asked with: a conversation up to the beginning of its turn, in the ids that it was trained on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.data.chat.config import ChatConfig
from jaxscale.data.chat.encode import encode_prompt
from jaxscale.data.chat.guard import CLOSE, Guard
from jaxscale.data.chat.records import ASSISTANT
from jaxscale.data.chat.spans import write_prompt
from jaxscale.data.chat.template import ChatTemplate, compiled
from jaxscale.data.tokenizer.about import find_template
from jaxscale.data.tokenizer.kept import KeptTokenizer

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, and what else the template knows
WORD = "answer"


class Asking(NamedTuple):
    """How conversations are put to a model."""

    ids: Callable[[Sequence[Message]], list[int]]  # ValueError where the template refuses the messages
    text: Callable[[Sequence[Message], bool], str]  # the same for people; the flag: with what begins the model's turn
    stop_ids: tuple[int, ...]  # each ends the model's turn


def open_asking(kept: KeptTokenizer, today: str) -> Asking:
    """How the model of this tokenizer is asked: as its run wrote conversations, or as the folder's template does.

    today: YYYY-MM-DD, for a template that asks for the date, unless the run has noted another.
    Raises ValueError where there is no template, or it cannot be read.
    """
    tokenizer, about = kept.tokenizer, kept.about
    found = find_template(about)
    if found is None:
        raise ValueError(
            f"{tokenizer.name} has no chat template (chat_template in tokenizer_config.json, or chat_template.jinja "
            "beside it): this model was not made for chat; write text with --interactive"
        )
    noted = about.note.get("chat", {})
    cfg = ChatConfig(variables=noted.get("variables", {}), today=noted.get("today", today))
    template, guard = compiled(tokenizer, cfg, about, *found), Guard(tokenizer.special_ids)

    def ids(messages: Sequence[Message]) -> list[int]:
        try:
            return encode_prompt(tokenizer, write_prompt(messages, None, template, guard)).tolist()
        except ValueError as error:
            raise ValueError(f"this conversation {error}") from None

    ends = tuple(tokenizer.special_ids[name] for name in turn_end(template, guard))
    text = lambda messages, answer: template.render(messages, None, answer)
    return Asking(ids, text, tuple(dict.fromkeys((*kept.stop_ids, *ends))))


def turn_end(template: ChatTemplate, guard: Guard) -> tuple[str, ...]:
    """The special token by which the template ends a turn of the model; () if it ends it by text alone."""
    text = template.render([{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": WORD}], None, False)
    behind = text.rpartition(WORD)[2].replace(CLOSE, "")
    found = guard.pattern.match(behind)
    return (found[0],) if found else ()
