"""The program that renders Jinja chat templates in a sandbox: a template is somebody else's code.

A program of its own, which `sandbox` starts: a template is a program too, and may never end or want all memory. It
reads requests and writes answers, a line of JSON each, and is killed by the system where one takes too long.

What a template is given is what Transformers gives it (huggingface.co/docs/transformers/chat_templating):
trim_blocks and lstrip_blocks, loop controls, tojson without escapes, raise_exception, and the tag generation around
what is learned.
"""

import contextlib
import datetime
import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

LONGEST_ERROR = 1000  # characters
TOO_MUCH_MEMORY = '{"error": "it needs too much memory"}\n'  # written where there is none left to make it


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment of a template. marks: what surrounds the text that a template marks as generated."""

    marks: tuple[str, str] = ("", "")


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: what stands between them comes out between `marks`."""

    tags = {"generation"}
    environment: Environment

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """The node of the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        """Returns the text of the body, between the marks."""
        begin, end = self.environment.marks
        return f"{begin}{caller()}{end}"


class Refused(Exception):
    """The message of a template about a conversation that it refuses."""


def refuse(message: str) -> None:
    """raise_exception of templates."""
    raise Refused(message)


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """The filter of that name, which escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def compiled(source: str, marks: tuple[str, str], today: str) -> jinja2.Template:
    """The template of this source. Raises jinja2.TemplateError if it is none."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.marks = marks
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    if today:
        environment.globals["strftime_now"] = datetime.date.fromisoformat(today).strftime
    return environment.from_string(source)


def answer(request: Mapping[str, Any], templates: dict[str, jinja2.Template]) -> dict[str, Any]:
    """{"text"} of a template, {} where one was compiled, {"error"} for whatever a program in Jinja does wrong."""
    try:
        if "source" in request:
            templates[request["key"]] = compiled(request["source"], tuple(request["marks"]), request["today"])
            return {}
        return {"text": templates[request["key"]].render(**request["given"])}
    except MemoryError:
        raise
    except Exception as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        return {"error": " ".join(str(error).split())[:LONGEST_ERROR] or type(error).__name__, "line": line}


def main(memory_bytes: int, seconds: float) -> None:
    """Answers until nobody asks. Processor time of a request beyond `seconds` ends the process, by SIGPROF."""
    with contextlib.suppress(ValueError, OSError):  # a lower limit holds already, or a system that has none
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # who started this may ignore or block it, and so would this
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    templates: dict[str, jinja2.Template] = {}
    for request in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            line = json.dumps(answer(json.loads(request), templates)) + "\n"
        except MemoryError:
            line = TOO_MUCH_MEMORY
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
