"""Loads the chat template from the settings or the tokenizer's folder, or uses the built-in template.

A single subprocess with limits on memory and time renders all templates.

Names of special tokens in messages are escaped, so that text in a message is never encoded as a special token. A
Unicode noncharacter that is not in the conversation is inserted into each such name before rendering. The rendered text
is split at names without the noncharacter, which are from the template, and the noncharacter is removed.
"""

import contextlib
import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

OPEN, CLOSE = "\ufdee", "\ufdef"  # noncharacters around text in {% generation %} tags
GUARDS = tuple(map(chr, range(0xFDD0, 0xFDEE)))  # noncharacters, not for use in text (Unicode 17.0, section 23.7)
MIN_NAME_CHARACTERS = 2  # shorter names cannot be split, and are never treated as special tokens
START, END = "<|im_start|>", "<|im_end|>"  # ChatML
BUILT_IN = "built-in (ChatML)"
CHAT = "pip install 'jaxscale[chat]'"

Render = Callable[[Sequence[Mapping[str, Any]], Any, bool], str]  # (messages, tools, add_generation_prompt) -> text
PROGRAM = Path(__file__).with_name("jinja.py")
MEMORY_BYTES = 1 << 30  # limit of address space; Python and Jinja use 50 MB
SECONDS = 5.0  # limit of CPU time per conversation; a typical conversation takes about 1 ms
WAIT_SECONDS = 120.0  # limit of wall time, for overloaded machines
LONGEST_ANSWER = 256 << 20  # bytes
READ_BYTES = 1 << 20
NEEDED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "TMPDIR")  # environment variables to pass


class ChatTemplate(NamedTuple):
    """A chat template that renders conversations."""

    name: str  # file of the template, or BUILT_IN, for messages
    render: Render
    source: str  # Jinja source
    fingerprint: str  # templates with equal fingerprints render equal text
    begin: tuple[str, ...]  # special tokens before a prompt that is not a conversation
    variables: Mapping[str, Any]
    today: str

    @property
    def note(self) -> dict[str, Any]:
        """Values to save with the tokenizer, so that generation renders prompts as in training."""
        note = {"template": self.source, "variables": dict(self.variables), "today": self.today}
        return note | {"fingerprint": self.fingerprint}


def load_template(tokenizer: Tokenizer, cfg: ChatConfig) -> ChatTemplate:
    """Returns the template from the settings, the tokenizer's folder, or else the built-in one. Raises BadInput."""
    about = read_settings(tokenizer_folder(tokenizer))
    if cfg.template:
        name = f"data.chat.template={cfg.template}"
        return make_template(tokenizer, cfg, about, read_source(Path(cfg.template).expanduser(), name), name)
    found = find_template(about)
    return make_template(tokenizer, cfg, about, *found) if found else builtin_template(tokenizer)


def make_template(
    tokenizer: Tokenizer, cfg: ChatConfig, about: TokenizerFolder, source: str, where: str
) -> ChatTemplate:
    """Returns a template with the Jinja code `source` from the file `where`. Raises BadInput."""
    if turn_end(tokenizer) and source == (builtin := builtin_template(tokenizer)).source:
        return builtin  # saved by a run; does not need jinja2
    if not packages.is_installed("jinja2"):  # optional dependency
        raise missing_package(f"the chat template {where}", "jinja2", CHAT)
    defaults = DEFAULTS.get(class_of(about.settings), {})
    names = {key: name for key, name in defaults.items() if name in tokenizer.special_ids}
    names |= {key: about.token(key) for key in NAMED if about.token(key)}
    names.setdefault("eos_token", end_name(tokenizer))
    variables = dict(cfg.variables)
    digest = hashlib.sha256(json.dumps([source, names, variables, cfg.today], sort_keys=True).encode())
    compiled = compile_template(source, where, names, variables, cfg.today)
    has_other_for_tools = not cfg.template and TOOL_USE in named_templates(about)[0]

    def render(messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        if tools and has_other_for_tools:
            raise BadInput(
                f"has tools, but {where} has a separate template {TOOL_USE} for them; save that template to a file, "
                "and set data.chat.template to the file"
            )
        return compiled(messages, tools, add_generation_prompt)

    return ChatTemplate(where, render, source, digest.hexdigest(), begin_names(tokenizer), variables, cfg.today)


def end_name(tokenizer: Tokenizer) -> str:
    """Returns the name of the end-of-document token, or '' if it is not a special token."""
    return next((name for name, i in tokenizer.special_ids.items() if i == tokenizer.eos_id), "")


def turn_end(tokenizer: Tokenizer) -> str:
    """Returns the text that ends a turn in the built-in template, or '' if no special token is suitable."""
    return f"{END}\n" if END in tokenizer.special_ids else end_name(tokenizer)


def builtin_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the built-in template. A turn is '<|im_start|>role', a line end, the text, and '<|im_end|>'.

    If the tokenizer has no <|im_end|>, the end-of-document token ends a turn, because plain text must not end a turn.
    """
    begin = begin_names(tokenizer)
    first, end = "".join(begin), turn_end(tokenizer)
    if not end:
        raise BadInput(
            f"data.tokenizer={tokenizer.name} has no special token that can end a turn; set data.chat.template to a "
            "template file"
        )

    def render(messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        if tools or any(message.get("tool_calls") for message in messages):
            raise BadInput(
                "has tools, which the built-in template does not support; set data.chat.template to a template file"
            )
        turns = [f"{START}{message['role']}\n{message['content']}{end}" for message in messages]
        return first + "".join(turns) + f"{START}assistant\n" * add_generation_prompt

    turn = f"{{{{ '{START}' + message['role'] + '\\n' + message['content'] + {json.dumps(end)} }}}}"
    source = f"{first}{{% for message in messages %}}{turn}{{% endfor %}}"
    source += f"{{% if add_generation_prompt %}}{{{{ '{START}assistant\\n' }}}}{{% endif %}}"
    digest = hashlib.sha256(f"built in 1 {first} {end}".encode()).hexdigest()
    return ChatTemplate(BUILT_IN, render, source, digest, begin, {}, "")


class ProcessEnded(Exception):
    """Raised if the process has ended; the message is the reason."""


class TemplateProcess:
    """A subprocess that renders templates. Starts at first use, and restarts after a failure."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: set[str] = set()  # keys of compiled templates
        self.process: subprocess.Popen[bytes] | None = None
        self.end: Callable[[], Any] = lambda: None

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the process if needed; returns the running process."""
        if self.process is None:
            environment = {k: v for k, v in os.environ.items() if k in NEEDED or k.startswith("PYTHON")}
            command = [sys.executable, "-P", str(PROGRAM), str(MEMORY_BYTES), str(SECONDS)]  # -P: safe sys.path
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, env=environment, start_new_session=True, stdin=pipe, stdout=pipe, bufsize=0
            )
            self.end = weakref.finalize(self, end_process, self.process)
            self.known = set()
        return self.process

    def ask(self, compile_it: Mapping[str, Any], render_it: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Compiles a template if needed, and renders it if asked. Returns the last response. Raises ProcessEnded."""
        with self.lock:
            process = self.start()
            found: dict[str, Any] = {}
            try:
                if compile_it["key"] not in self.known:
                    found = exchange(process, compile_it)
                    if "error" not in found:
                        self.known.add(compile_it["key"])
                return found if render_it is None or "error" in found else exchange(process, render_it)
            except BaseException:  # a late response could be taken for the response to the next request
                self.end()
                self.process = None
                raise


def exchange(process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> dict[str, Any]:
    """Sends a request and returns the response. Raises ProcessEnded."""
    assert process.stdin is not None and process.stdout is not None, "start() opens stdin and stdout"
    unsent = memoryview(json.dumps(request).encode() + b"\n")
    try:
        while unsent:
            unsent = unsent[process.stdin.write(unsent) :]
    except BrokenPipeError:
        raise ProcessEnded(cause_of_end(process)) from None
    parts, size, deadline = [], 0, time.monotonic() + WAIT_SECONDS
    while not parts or not parts[-1].endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0))
        part = os.read(process.stdout.fileno(), READ_BYTES) if ready else b""
        size += len(part)
        if not part or size > LONGEST_ANSWER:
            slow = "its output is too long" if part else f"it takes more than {WAIT_SECONDS:.0f} s"
            raise ProcessEnded(cause_of_end(process) if ready and not part else slow)
        parts.append(part)
    return json.loads(b"".join(parts))


def cause_of_end(process: subprocess.Popen[bytes]) -> str:
    """Returns the reason why the process has ended, for messages."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(timeout=WAIT_SECONDS)
        if code == -signal.SIGPROF:
            return f"it takes more than {SECONDS:g} s"
        return f"its process exited with code {code}"
    return "its process does not respond"


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and closes its pipes."""
    process.kill()
    process.wait()
    for pipe in filter(None, (process.stdin, process.stdout)):
        pipe.close()


TEMPLATES = TemplateProcess()


def reset_after_fork() -> None:
    """Replaces TEMPLATES after a fork, because its process belongs to the parent and its lock may be held."""
    global TEMPLATES
    if isinstance(TEMPLATES.end, weakref.finalize):
        TEMPLATES.end.detach()
    TEMPLATES = TemplateProcess()


os.register_at_fork(after_in_child=reset_after_fork)


def compile_template(
    source: str, where: str, names: Mapping[str, str], variables: Mapping[str, Any], today: str
) -> Callable[[Sequence[Mapping[str, Any]], Any, bool], str]:
    """Returns render(messages, tools, add_generation_prompt). names: such as {'bos_token': '<s>'}. Raises BadInput."""
    key = hashlib.sha256(json.dumps([source, today]).encode()).hexdigest()
    compile_it = {"key": key, "source": source, "marks": [OPEN, CLOSE], "today": today}

    def send(render_it: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            return TEMPLATES.ask(compile_it, render_it)
        except ProcessEnded as error:
            return {"error": str(error)}

    found = send(None)
    if "error" in found:
        raise BadInput(f"{where}{found.get('line', '')} is not a valid chat template: {found['error']}")

    def render(messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        given = dict(messages=list(messages), tools=tools, documents=None, add_generation_prompt=add_generation_prompt)
        found = send({"key": key, "given": {**names, **variables, **given}})
        if error := found.get("error"):
            hint = "; set data.chat.today" if "strftime_now" in error and not today else ""
            raise BadInput(f"cannot be rendered by the template {where}: {error}{hint}")
        return found["text"]

    return render


class Guard:
    """Finds and escapes names of a tokenizer's special tokens."""

    def __init__(self, names: Iterable[str]):
        self.names = sorted((name for name in names if len(name) >= MIN_NAME_CHARACTERS), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")
        self._beginnings = tuple({name[:n] for name in self.names for n in range(1, len(name))})
        self._ends = tuple({name[n:] for name in self.names for n in range(1, len(name))})

    def choose_marker(self, value: Any) -> str:
        """Returns a noncharacter that `value` lacks. Raises BadInput if it lacks none, or contains OPEN or CLOSE."""
        whole = "".join(strings_in(value))
        free = [guard for guard in GUARDS if guard not in whole]
        if not free or OPEN in whole or CLOSE in whole:
            raise BadInput("contains noncharacters (U+FDD0 to U+FDEF), which are reserved; remove them")
        return free[0]

    def escape(self, value: Any, guard: str) -> Any:
        """Escapes special token names in all strings of a value, including partial names at the ends of a string."""
        if isinstance(value, Mapping):
            key_of = lambda key: self.escape_text(key, guard) if self.pattern.search(key) else key
            return {key_of(str(key)): self.escape(inner, guard) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape(inner, guard) for inner in value]
        return self.escape_text(value, guard) if isinstance(value, str) else value

    def escape_text(self, text: str, guard: str) -> str:
        """Escapes names in a string."""
        while found := self.pattern.search(text):  # repeated, because names may overlap
            text = text[: found.start() + 1] + guard + text[found.start() + 1 :]
        if text.endswith(self._beginnings):
            text += guard
        return guard + text if text.startswith(self._ends) else text


def strings_in(value: Any) -> Iterable[str]:
    """Yields all strings in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from strings_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from strings_in(inner)
