"""Renders Jinja chat templates, which are untrusted code, in a subprocess.

template.py starts this program, because a template may not terminate or may use all memory. The program reads requests
and writes responses, each a line of JSON. A signal kills the program if a request takes too long.

Templates have the environment of Transformers (huggingface.co/docs/transformers/chat_templating): trim_blocks and
lstrip_blocks, loop controls, tojson without escapes, raise_exception, and the generation tag around text with a loss.
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
TOO_MUCH_MEMORY = '{"error": "it needs too much memory"}\n'  # a constant, because formatting would need memory


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Environment of a template. marks: strings to insert before and after the text in generation tags."""

    marks: tuple[str, str] = ("", "")


class Generation(jinja2.ext.Extension):
    """Jinja extension for {% generation %} ... {% endgeneration %}, which inserts `marks` around the text."""

    tags = {"generation"}
    environment: Environment

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """Returns the syntax node of a generation tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        """Returns the text of the tag's body between the marks."""
        begin, end = self.environment.marks
        return f"{begin}{caller()}{end}"


def raise_exception(message: str) -> None:
    """Implements the function raise_exception of templates."""
    raise jinja2.TemplateError(message)


def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Implements the filter tojson of templates, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def compile_source(source: str, marks: tuple[str, str], today: str) -> jinja2.Template:
    """Compiles a template. Raises jinja2.TemplateError for invalid source. today: date for strftime_now."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.marks = marks
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    if today:
        environment.globals["strftime_now"] = datetime.date.fromisoformat(today).strftime
    return environment.from_string(source)


def handle_request(request: Mapping[str, Any], templates: dict[str, jinja2.Template]) -> dict[str, Any]:
    """Compiles or renders a template. Returns {} if compiled, {"text"} if rendered, {"error", "line"} on failure."""
    try:
        if "source" in request:
            templates[request["key"]] = compile_source(request["source"], tuple(request["marks"]), request["today"])
            return {}
        return {"text": templates[request["key"]].render(**request["given"])}
    except MemoryError:
        raise
    except Exception as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        return {"error": " ".join(str(error).split())[:LONGEST_ERROR] or type(error).__name__, "line": line}


def main(memory_bytes: int, seconds: float) -> None:
    """Handles requests until stdin ends. SIGPROF kills the process if a request takes `seconds` of CPU time."""
    with contextlib.suppress(ValueError, OSError):  # the limit is already lower, or not supported
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent process may ignore or block the signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    templates: dict[str, jinja2.Template] = {}
    for request in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            line = json.dumps(handle_request(json.loads(request), templates)) + "\n"
        except MemoryError:
            line = TOO_MUCH_MEMORY
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
