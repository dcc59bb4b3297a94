"""Settings of fine-tuning data."""

import dataclasses
import datetime
from typing import Literal

from jaxscale.schema import setting
from jaxscale.system.exits import BadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """How the records of data.name='chat' become documents."""

    template: str = setting(
        "",
        "file of a Jinja chat template; empty: the one in the tokenizer's folder (chat_template.jinja, or in "
        "tokenizer_config.json), or else a built-in one in the manner of ChatML",
    )
    variables: dict[str, bool | int | float | str] = setting(
        {}, "what the template is given beside the messages, such as {'enable_thinking': False}"
    )
    today: str = setting("", "YYYY-MM-DD: the date for a template that asks for it (strftime_now); empty: it gets none")
    too_long: Literal["drop", "cut"] = setting(
        "drop", "a document with more tokens than a row: drop it, or keep as many as fit; either is counted"
    )
    prompt_field: str = setting("prompt", "the field of a record that is given")
    completion_field: str = setting("completion", "the field that is learned")

    def __post_init__(self):
        if self.today:
            try:
                datetime.date.fromisoformat(self.today)
            except ValueError:
                raise BadInput(f"today={self.today!r} is no date, such as 2026-11-22") from None
        if not self.prompt_field or not self.completion_field:
            raise BadInput("prompt_field and completion_field must each name a field")
