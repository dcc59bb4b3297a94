"""Chat templates in Jinja, in a sandbox: they come with a tokenizer that somebody else has made.

What a template is given is what Transformers gives it (huggingface.co/docs/transformers/chat_templating):
trim_blocks and lstrip_blocks, loop controls, tojson without escapes, raise_exception, and the tag generation around
what is learned.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from jaxscale.data.chat.guard import CLOSE, OPEN
from jaxscale.exits import BadInput


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: what stands between them comes out between OPEN and CLOSE."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """The node of the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        """What the body gives, between the marks."""
        return f"{OPEN}{caller()}{CLOSE}"


class Refused(Exception):
    """What a template says of a conversation that it is not for."""


# What a program in Jinja can do wrong.
FAILURES = (jinja2.TemplateError, Refused, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)


def compile_template(
    source: str, where: str, names: Mapping[str, str], variables: Mapping[str, Any], today: str
) -> Callable[[Sequence[Mapping[str, Any]], Any, bool], str]:
    """render(messages, tools, add_generation_prompt) of the template, BadInput where it fails or refuses.

    Args: where: its file, for messages. names: bos_token and the like. variables: more that it is given. today: the
    date, or ''.
    """

    def refuse(message: str) -> None:
        raise Refused(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    if today:
        environment.globals["strftime_now"] = datetime.date.fromisoformat(today).strftime
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        line = f", line {error.lineno}" if getattr(error, "lineno", None) else ""
        raise BadInput(f"{where}{line} is no chat template: {' '.join(str(error).split())}") from None

    def render(messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        given = dict(messages=list(messages), tools=tools, documents=None, add_generation_prompt=add_generation_prompt)
        try:
            return template.render(**{**names, **variables, **given})
        except FAILURES as error:
            told = " ".join(str(error).split())
            hint = "; set data.chat.today" if "strftime_now" in told and not today else ""
            raise BadInput(f"cannot be written by the template {where}: {told}{hint}") from None

    return render
