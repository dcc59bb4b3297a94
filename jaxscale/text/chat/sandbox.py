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

from jaxscale.system.exits import BadInput
from jaxscale.text.chat.guard import CLOSE, OPEN

PROGRAM = pathlib.Path(__file__).with_name("jinja.py")
MEMORY_BYTES = 1 << 30  # of addresses; Python and Jinja themselves take 50 MB
SECONDS = 5.0  # of processor time for one conversation, which takes about a millisecond
PATIENCE = 120.0  # seconds by the clock, on a machine that has none for us
LONGEST_ANSWER = 256 << 20  # bytes
READ_BYTES = 1 << 20
NEEDED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "TMPDIR")  # of the environment; no secrets


class Ended(Exception):
    """The process is gone. Its message says why, for people."""


class TemplateProcess:
    """The process, which is started when it is first asked, and again where a template has ended it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: set[str] = set()  # templates that it has compiled
        self.process: subprocess.Popen[bytes] | None = None
        self.end: Callable[[], Any] = lambda: None

    def start(self) -> subprocess.Popen[bytes]:
        """Returns the running process."""
        if self.process is None:
            environment = {k: v for k, v in os.environ.items() if k in NEEDED or k.startswith("PYTHON")}
            command = [sys.executable, "-P", str(PROGRAM), str(MEMORY_BYTES), str(SECONDS)]  # -P: no module beside it
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, env=environment, start_new_session=True, stdin=pipe, stdout=pipe, bufsize=0
            )
            self.end = weakref.finalize(self, end_process, self.process)
            self.known = set()
        return self.process

    def ask(self, compile_it: Mapping[str, Any], render_it: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a template that is to be compiled, if it is not yet, and rendered. Raises Ended."""
        with self.lock:
            process = self.start()
            found: dict[str, Any] = {}
            try:
                if compile_it["key"] not in self.known:
                    found = exchange(process, compile_it)
                    if "error" not in found:
                        self.known.add(compile_it["key"])
                return found if render_it is None or "error" in found else exchange(process, render_it)
            except BaseException:  # it is gone, or an answer that nobody waits for is under way
                self.end()
                self.process = None
                raise


def exchange(process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer to one request. Raises Ended."""
    assert process.stdin is not None and process.stdout is not None, "start has opened both"
    left = memoryview(json.dumps(request).encode() + b"\n")
    try:
        while left:
            left = left[process.stdin.write(left) :]
    except BrokenPipeError:
        raise Ended(cause_of_end(process)) from None
    pieces, size, deadline = [], 0, time.monotonic() + PATIENCE
    while not pieces or not pieces[-1].endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0))
        piece = os.read(process.stdout.fileno(), READ_BYTES) if ready else b""
        size += len(piece)
        if not piece or size > LONGEST_ANSWER:
            slow = "it writes without end" if piece else f"it takes more than {PATIENCE:.0f} s"
            raise Ended(cause_of_end(process) if ready and not piece else slow)
        pieces.append(piece)
    return json.loads(b"".join(pieces))


def cause_of_end(process: subprocess.Popen[bytes]) -> str:
    """Returns why the process ended, for people."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(timeout=PATIENCE)
        if code == -signal.SIGPROF:
            return f"it takes more than {SECONDS:g} s"
        return f"its process ended with code {code}"
    return "its process does not answer"


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Ends it and closes its pipes."""
    process.kill()
    process.wait()
    for pipe in filter(None, (process.stdin, process.stdout)):
        pipe.close()


TEMPLATES = TemplateProcess()


def reset_after_fork() -> None:
    """After a fork: the process is the parent's, and a lock may be held by a thread that is not here."""
    global TEMPLATES
    if isinstance(TEMPLATES.end, weakref.finalize):
        TEMPLATES.end.detach()
    TEMPLATES = TemplateProcess()


os.register_at_fork(after_in_child=reset_after_fork)


def compile_template(
    source: str, where: str, names: Mapping[str, str], variables: Mapping[str, Any], today: str
) -> Callable[[Sequence[Mapping[str, Any]], Any, bool], str]:
    """render(messages, tools, add_generation_prompt) of the template, BadInput where it fails or refuses.

    Args: where: its file, for messages. names: bos_token and the like. variables: more that it is given. today: the
    date, or ''. Raises: BadInput for a source that is not a template, or takes too long.
    """
    key = hashlib.sha256(json.dumps([source, today]).encode()).hexdigest()
    compile_it = {"key": key, "source": source, "marks": [OPEN, CLOSE], "today": today}

    def asked(render_it: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            return TEMPLATES.ask(compile_it, render_it)
        except Ended as error:
            return {"error": str(error)}

    found = asked(None)
    if "error" in found:
        raise BadInput(f"{where}{found.get('line', '')} is no chat template: {found['error']}")

    def render(messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        given = dict(messages=list(messages), tools=tools, documents=None, add_generation_prompt=add_generation_prompt)
        found = asked({"key": key, "given": {**names, **variables, **given}})
        if error := found.get("error"):
            hint = "; set data.chat.today" if "strftime_now" in error and not today else ""
            raise BadInput(f"cannot be written by the template {where}: {error}{hint}")
        return found["text"]

    return render
