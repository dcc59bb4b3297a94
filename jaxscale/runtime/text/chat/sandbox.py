"""Renders chat templates in a subprocess with limits on memory and time; one process serves all templates."""

import contextlib
import hashlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.runtime.text.chat.special_tokens import CLOSE, OPEN
from jaxscale.system.exits import BadInput

PROGRAM = pathlib.Path(__file__).with_name("jinja.py")
MEMORY_BYTES = 1 << 30  # of address space; Python and Jinja take 50 MB
SECONDS = 5.0  # of CPU time per conversation; a typical one takes about 1 ms
WAIT_SECONDS = 120.0  # of wall time, in case the machine is overloaded
LONGEST_ANSWER = 256 << 20  # bytes
READ_BYTES = 1 << 20
NEEDED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "TMPDIR")  # environment; no secrets


class ProcessEnded(Exception):
    """The process has ended, for the reason in the message."""


class TemplateProcess:
    """The subprocess, started on first use and restarted after a template has ended it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: set[str] = set()  # keys of compiled templates
        self.process: subprocess.Popen[bytes] | None = None
        self.end: Callable[[], Any] = lambda: None

    def start(self) -> subprocess.Popen[bytes]:
        """Returns the running process."""
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
        """Compiles a template if needed, then renders it; returns the last response. Raises ProcessEnded."""
        with self.lock:
            process = self.start()
            found: dict[str, Any] = {}
            try:
                if compile_it["key"] not in self.known:
                    found = exchange(process, compile_it)
                    if "error" not in found:
                        self.known.add(compile_it["key"])
                return found if render_it is None or "error" in found else exchange(process, render_it)
            except BaseException:  # it has ended, or a late response would be mistaken for the next one
                self.end()
                self.process = None
                raise


def exchange(process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the response to one request. Raises ProcessEnded."""
    assert process.stdin is not None and process.stdout is not None, "start opens both"
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
            slow = "its output does not end" if part else f"it takes more than {WAIT_SECONDS:.0f} s"
            raise ProcessEnded(cause_of_end(process) if ready and not part else slow)
        parts.append(part)
    return json.loads(b"".join(parts))


def cause_of_end(process: subprocess.Popen[bytes]) -> str:
    """Returns why the process ended, for messages."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(timeout=WAIT_SECONDS)
        if code == -signal.SIGPROF:
            return f"it takes more than {SECONDS:g} s"
        return f"its process ended with code {code}"
    return "its process does not answer"


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and closes its pipes."""
    process.kill()
    process.wait()
    for pipe in filter(None, (process.stdin, process.stdout)):
        pipe.close()


TEMPLATES = TemplateProcess()


def reset_after_fork() -> None:
    """Replaces TEMPLATES after a fork: the process belongs to the parent, and another thread may have held the lock."""
    global TEMPLATES
    if isinstance(TEMPLATES.end, weakref.finalize):
        TEMPLATES.end.detach()
    TEMPLATES = TemplateProcess()


os.register_at_fork(after_in_child=reset_after_fork)


def compile_template(
    source: str, where: str, names: Mapping[str, str], variables: Mapping[str, Any], today: str
) -> Callable[[Sequence[Mapping[str, Any]], Any, bool], str]:
    """Returns render(messages, tools, add_generation_prompt), which raises BadInput if the template fails.

    Args: where: its file, for messages. names: bos_token etc. variables: other inputs. today: the date, or ''.
    Raises: BadInput if the template is invalid or takes too long.
    """
    key = hashlib.sha256(json.dumps([source, today]).encode()).hexdigest()
    compile_it = {"key": key, "source": source, "marks": [OPEN, CLOSE], "today": today}

    def send(render_it: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            return TEMPLATES.ask(compile_it, render_it)
        except ProcessEnded as error:
            return {"error": str(error)}

    found = send(None)
    if "error" in found:
        raise BadInput(f"{where}{found.get('line', '')} is not a chat template: {found['error']}")

    def render(messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        given = dict(messages=list(messages), tools=tools, documents=None, add_generation_prompt=add_generation_prompt)
        found = send({"key": key, "given": {**names, **variables, **given}})
        if error := found.get("error"):
            hint = "; set data.chat.today" if "strftime_now" in error and not today else ""
            raise BadInput(f"cannot be rendered by the template {where}: {error}{hint}")
        return found["text"]

    return render
