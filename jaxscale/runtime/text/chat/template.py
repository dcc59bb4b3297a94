"""The chat template of a tokenizer: from the settings, from its folder, or built in."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.runtime.text.chat.sandbox import compile_template
from jaxscale.runtime.text.config import ChatConfig
from jaxscale.runtime.text.sources.part import missing_package
from jaxscale.runtime.text.tokenizer.added import DEFAULTS, NAMED, class_of
from jaxscale.runtime.text.tokenizer.base import Tokenizer, begin_names
from jaxscale.runtime.text.tokenizer.load import (
    TOOL_USE,
    TokenizerFolder,
    find_template,
    named_templates,
    read_settings,
    read_source,
    tokenizer_folder,
)
from jaxscale.system import packages
from jaxscale.system.exits import BadInput

START, END = "<|im_start|>", "<|im_end|>"  # ChatML
BUILT_IN = "built-in, in the manner of ChatML"
CHAT = "pip install 'jaxscale[chat]'"

Render = Callable[[Sequence[Mapping[str, Any]], Any, bool], str]  # (messages, tools, add_generation_prompt) -> text


class ChatTemplate(NamedTuple):
    """Renders conversations."""

    name: str  # for messages: its file, or BUILT_IN
    render: Render
    source: str  # in Jinja
    fingerprint: str  # equal fingerprints render equal text
    begin: tuple[str, ...]  # special tokens before a prompt that is not a conversation
    variables: Mapping[str, Any]
    today: str

    @property
    def note(self) -> dict[str, Any]:
        """Returns the part for save_tokenizer, so that generation formats prompts as training did."""
        note = {"template": self.source, "variables": dict(self.variables), "today": self.today}
        return note | {"fingerprint": self.fingerprint}


def load_template(tokenizer: Tokenizer, cfg: ChatConfig) -> ChatTemplate:
    """Returns the template of the settings, the tokenizer's folder, or the built-in one.

    Raises: BadInput for a missing or invalid file, or if jinja2 is not installed.
    """
    about = read_settings(tokenizer_folder(tokenizer))
    if cfg.template:
        name = f"data.chat.template={cfg.template}"
        return make_template(tokenizer, cfg, about, read_source(Path(cfg.template).expanduser(), name), name)
    found = find_template(about)
    return make_template(tokenizer, cfg, about, *found) if found else builtin_template(tokenizer)


def make_template(
    tokenizer: Tokenizer, cfg: ChatConfig, about: TokenizerFolder, source: str, where: str
) -> ChatTemplate:
    """Returns the template of this source from the file `where`. Raises as load_template."""
    if turn_end(tokenizer) and source == (builtin := builtin_template(tokenizer)).source:
        return builtin  # saved by a run; it does not need jinja2
    if not packages.is_installed("jinja2"):  # an extra
        raise missing_package(f"the chat template {where}", "jinja2", CHAT)
    defaults = DEFAULTS.get(class_of(about.settings), {})
    names = {key: name for key, name in defaults.items() if name in tokenizer.special_ids}
    names |= {key: about.token(key) for key in NAMED if about.token(key)}
    names.setdefault("eos_token", end_name(tokenizer))
    variables = dict(cfg.variables)
    digest = hashlib.sha256(json.dumps([source, names, variables, cfg.today], sort_keys=True).encode())
    render = compile_template(source, where, names, variables, cfg.today)
    if not cfg.template and TOOL_USE in named_templates(about)[0]:
        render = without_tools(render, where)
    return ChatTemplate(where, render, source, digest.hexdigest(), begin_names(tokenizer), variables, cfg.today)


def without_tools(render: Render, where: str) -> Render:
    """Returns a render function that rejects conversations with tools, which need another template."""

    def render_or_refuse(messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        if tools:
            raise BadInput(
                f"has tools, for which {where} has the template {TOOL_USE} next to default; write it into a file and "
                "name that in data.chat.template"
            )
        return render(messages, tools, add_generation_prompt)

    return render_or_refuse


def end_name(tokenizer: Tokenizer) -> str:
    """Returns the name of the token that ends a document; '' if it is not a special token."""
    return next((name for name, i in tokenizer.special_ids.items() if i == tokenizer.eos_id), "")


def turn_end(tokenizer: Tokenizer) -> str:
    """Returns the end of a turn of the built-in template; '' for a tokenizer without a special token that could."""
    return f"{END}\n" if END in tokenizer.special_ids else end_name(tokenizer)


def builtin_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the built-in template: each turn is '<|im_start|>role', the text on the next lines, and '<|im_end|>'.

    Without <|im_end|> in the tokenizer, the end-of-document token ends a turn, so that text cannot end one.
    """
    begin = begin_names(tokenizer)
    first, end = "".join(begin), turn_end(tokenizer)
    if not end:
        raise BadInput(
            f"data.tokenizer={tokenizer.name} has no special token that could end a turn; name a template for it in "
            "data.chat.template"
        )

    def render(messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        if tools or any(message.get("tool_calls") for message in messages):
            raise BadInput("has tools, which the built-in template does not write; name one in data.chat.template")
        turns = [f"{START}{message['role']}\n{message['content']}{end}" for message in messages]
        return first + "".join(turns) + f"{START}assistant\n" * add_generation_prompt

    turn = f"{{{{ '{START}' + message['role'] + '\\n' + message['content'] + {json.dumps(end)} }}}}"
    source = f"{first}{{% for message in messages %}}{turn}{{% endfor %}}"
    source += f"{{% if add_generation_prompt %}}{{{{ '{START}assistant\\n' }}}}{{% endif %}}"
    digest = hashlib.sha256(f"built in 1 {first} {end}".encode()).hexdigest()
    return ChatTemplate(BUILT_IN, render, source, digest, begin, {}, "")
