"""A page to talk with a model, for this machine alone: what is written comes token by token, and one talks at a time.

POST /say {"messages": [{"role": ..., "content": ...}, ...]} is answered by lines of JSON: {"text": piece} as pieces
come, then {"done": reason, "tokens": n} or {"error": text}. A page of somebody else's can neither ask (it has another
Origin, and JSON needs a permission that is never given) nor read what is answered.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxscale.reporting.local_server import ADDRESS, LocalHandler, LocalServer
from jaxscale.sampling.page import SCRIPT, STYLE, chat_page
from jaxscale.sampling.text import Written
from jaxscale.system.exits import BadInput, Stop, tell
from jaxscale.system.foreign import parse_json

MOST_BYTES = 1 << 20  # of a conversation
MOST_TURNS = 400  # of a conversation: its template is laid out in 0.1 s
MOST_CHARACTERS = 32  # for each token that a text may have; English has about 4, lines of spaces up to 16
ROLES = ("user", "assistant")
END_SECONDS = 3.0  # for an answer to end when the program does

Answer = Callable[[Sequence[dict[str, str]], list[Written]], Iterator[str]]


# The reader went away, or has taken nothing for STALL_SECONDS.
GONE = (ConnectionError, TimeoutError)


class TooLong(BadInput):
    """A conversation that no text here has room for."""


class ChatServer(LocalServer):
    """Answers each request in a thread that ends with the program."""

    answer: Answer
    title: str
    longest: int  # tokens of a text
    busy: threading.Lock
    ending: threading.Event  # an answer that is being written is broken off

    def end_answer(self, seconds: float = END_SECONDS) -> bool:
        """Breaks off what is being written; no other answer begins. False if it has not ended in time."""
        self.ending.set()
        return self.busy.acquire(timeout=seconds)


def open_chat(answer: Answer, title: str, port: int, longest: int) -> ChatServer:
    """A server that listens; serve_forever() runs it. Raises BadInput where the port is not to be had.

    answer(messages, written) yields the pieces of the model's turn, and puts what it is in all into `written`. longest:
    tokens that a text has at most; what is surely longer is refused before the model is taken.
    """
    busy, ending = threading.Lock(), threading.Event()
    return ChatServer(ChatHandler, port, answer=answer, title=title, longest=longest, busy=busy, ending=ending)


def allowed(content: str) -> str:
    """What a Content-Security-Policy calls this script or style, and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


class ChatHandler(LocalHandler):
    """GET / is the page, POST /say a turn of the model."""

    server: ChatServer
    policy = f"default-src 'none'; style-src {allowed(STYLE)}; script-src {allowed(SCRIPT)}; connect-src 'self'"

    def do_GET(self) -> None:
        """The page."""
        if not self.is_for_us():
            return
        if self.path.partition("?")[0] != "/":
            self.answer(404, "There is only one page: /", "text/plain")
            return
        self.answer(200, chat_page(self.server.title), "text/html")

    def do_POST(self) -> None:
        """A turn of the model, or why there is none."""
        if not self.is_for_us():
            return
        try:
            messages = self.read_messages()
        except BadInput as error:
            self.refuse(413 if isinstance(error, TooLong) else 400, str(error))
            return
        if not self.server.busy.acquire(blocking=False):
            self.refuse(503, "the model is writing for somebody; wait until it is done")
            return
        try:
            self.stream(messages)
        except GONE:
            self.close_connection = True  # nothing more is written for it
        finally:
            self.server.busy.release()

    def stream(self, messages: list[dict[str, str]]) -> None:
        """Sends the model's turn as it comes."""
        written: list[Written] = []
        self.begin(200, "application/x-ndjson")
        try:
            for piece in self.server.answer(messages, written):
                self.send_line({"text": piece})
                if self.server.ending.is_set():
                    raise BadInput("the server has been ended")
        except (BadInput, Stop) as error:
            self.send_line({"error": str(error)})
            return
        except GONE:
            raise
        except Exception as error:  # the page is told, and the cause is shown where the program runs
            tell(f"chat: {type(error).__name__}: {error}")
            self.send_line({"error": "the model could not go on; see the terminal"})
            raise
        self.send_line({"done": written[0].reason, "tokens": written[0].tokens})

    def read_messages(self) -> list[dict[str, str]]:
        """The conversation that was sent. Raises BadInput if it is none, or not from our own page."""
        port = self.server.server_address[1]
        if self.path != "/say":
            raise BadInput("a turn is asked for at /say")
        if self.headers.get("Origin") not in (None, *(f"http://{name}:{port}" for name in (ADDRESS, "localhost"))):
            raise BadInput("another page may not talk here")
        if self.headers.get_content_type() != "application/json":
            raise BadInput("a conversation is sent as application/json")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 19) or not 0 < int(length) <= MOST_BYTES:
            raise BadInput(f"a conversation has 1 to {MOST_BYTES} bytes, told in Content-Length")
        body = self.rfile.read(int(length))
        self.server.has_asked(self.connection)
        messages = check_messages(parse_json(body))
        check_length(messages, self.server.longest)
        return messages

    def refuse(self, code: int, why: str) -> None:
        """Answers that there is nothing, and why."""
        self.close_connection = True  # what was sent may not have been read
        self.answer(code, json.dumps({"error": why}) + "\n", "application/x-ndjson")

    def send_line(self, value: dict[str, Any]) -> None:
        """Sends a line of JSON at once."""
        self.wfile.write(json.dumps(value).encode() + b"\n")
        self.wfile.flush()


def check_messages(sent: Any) -> list[dict[str, str]]:
    """The messages of a request: turns of user and model by turns, the last of them the user's."""
    messages = sent.get("messages") if isinstance(sent, dict) else None
    if not isinstance(messages, list) or not messages:
        raise BadInput("messages must be a list of turns")
    found = []
    for number, message in enumerate(messages):
        role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
        if role != ROLES[number % 2] or not isinstance(content, str):
            raise BadInput(f"message {number + 1} must have role {ROLES[number % 2]!r} and a text as content")
        found.append({"role": role, "content": content})
    if len(found) % 2 == 0:
        raise BadInput("the last message must be the user's")
    return found


def check_length(messages: Sequence[dict[str, str]], longest: int) -> None:
    """Raises TooLong for what is surely more than `longest` tokens, or would take long to lay out."""
    turns, characters = len(messages), sum(len(message["content"]) for message in messages)
    if turns > min(MOST_TURNS, longest) or characters > MOST_CHARACTERS * longest:
        raise TooLong(
            f"this has {turns:,} turns and {characters:,} characters; here are at most {min(MOST_TURNS, longest):,} "
            f"turns, and texts of {longest:,} tokens; begin anew, or write less"
        )
