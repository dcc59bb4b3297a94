"""A local server with a page for chatting with a model. It streams one answer at a time, token by token.

The response to POST /say {"messages": [{"role": ..., "content": ...}, ...]} has lines of JSON: {"text": piece} for each
piece, then {"done": reason, "tokens": n} or {"error": text}. Pages of other origins can neither send requests (their
Origin differs, and JSON requests need a CORS permission that is never given) nor read an answer.
"""

import base64
import hashlib
import importlib.resources
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxscale.runtime.sampling.text_stream import GeneratedText
from jaxscale.system.exits import BadInput, Stop, print_stderr
from jaxscale.system.foreign import parse_json
from jaxscale.system.local_server import ADDRESS, LocalHandler, LocalServer
from jaxscale.system.redact import in_html

FILES = importlib.resources.files("jaxscale.runtime.sampling")
STYLE, SCRIPT = (FILES.joinpath(name).read_text("utf-8") for name in ("chat.css", "chat.js"))
MAX_BYTES = 1 << 20  # size of a conversation
MAX_TURNS = 400  # of a conversation; a chat template renders them in 0.1 s
MAX_CHARACTERS_PER_TOKEN = 32  # English has about 4, lines of spaces up to 16
ROLES = ("user", "assistant")
END_SECONDS = 3.0  # timeout for the answer in progress when the program ends
Answer = Callable[[Sequence[dict[str, str]], list[GeneratedText]], Iterator[str]]
DISCONNECTED = (ConnectionError, TimeoutError)  # TimeoutError: the client has read nothing for STALL_SECONDS


def chat_page(title: str) -> str:
    """Returns the HTML of the page. `title` describes the model."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>jaxscale chat</title><style>{STYLE}</style></head><body>"
        f"<header>{in_html(title)}</header>"
        '<main id="turns" aria-live="polite"></main><div class="note" id="note" role="status"></div>'
        '<form id="form"><textarea id="box" rows="2" aria-label="Your message" placeholder="Your message"></textarea>'
        '<button id="send">Send</button><button id="new" type="button">New</button></form>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


class TooLong(BadInput):
    """Raised if a conversation does not fit into the model's context."""


class ChatServer(LocalServer):
    """A server that handles each request in a daemon thread."""

    answer: Answer
    title: str
    longest: int  # maximum tokens of a text
    busy: threading.Lock
    ending: threading.Event  # interrupts the answer in progress

    def end_answer(self, seconds: float = END_SECONDS) -> bool:
        """Interrupts the current answer and prevents further ones. Returns False if it does not end in time."""
        self.ending.set()
        return self.busy.acquire(timeout=seconds)


def open_chat(answer: Answer, title: str, port: int, longest: int) -> ChatServer:
    """Returns a listening server. `answer(messages, written)` yields the pieces of a turn."""
    busy, ending = threading.Lock(), threading.Event()
    return ChatServer(ChatHandler, port, answer=answer, title=title, longest=longest, busy=busy, ending=ending)


def csp_source(content: str) -> str:
    """Returns the Content-Security-Policy source that allows only this script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


class ChatHandler(LocalHandler):
    """Handles GET /, which returns the page, and POST /say, which returns the answer of the model."""

    server: ChatServer
    policy = f"default-src 'none'; style-src {csp_source(STYLE)}; script-src {csp_source(SCRIPT)}; connect-src 'self'"

    def do_GET(self) -> None:
        """Sends the page or an error."""
        if not self.is_for_us():
            return
        if self.path.partition("?")[0] != "/":
            self.answer(404, "There is only one page: /", "text/plain")
            return
        self.answer(200, chat_page(self.server.title), "text/html")

    def do_POST(self) -> None:
        """Streams a turn of the model or sends an error."""
        if not self.is_for_us():
            return
        try:
            messages = self.read_messages()
        except BadInput as error:
            self.refuse(413 if isinstance(error, TooLong) else 400, str(error))
            return
        if not self.server.busy.acquire(blocking=False):
            self.refuse(503, "the model is answering another request; wait until it is done")
            return
        try:
            self.stream(messages)
        except DISCONNECTED:
            self.close_connection = True  # nothing more is sent
        finally:
            self.server.busy.release()

    def stream(self, messages: list[dict[str, str]]) -> None:
        """Sends the pieces of the model's turn."""
        written: list[GeneratedText] = []
        self.begin(200, "application/x-ndjson")
        try:
            for piece in self.server.answer(messages, written):
                self.send_line({"text": piece})
                if self.server.ending.is_set():
                    raise BadInput("the server was stopped")
        except (BadInput, Stop) as error:
            self.send_line({"error": str(error)})
            return
        except DISCONNECTED:
            raise
        except Exception as error:  # the page shows a short error, the terminal the cause
            print_stderr(f"chat: {type(error).__name__}: {error}")
            self.send_line({"error": "the model failed; see the terminal"})
            raise
        self.send_line({"done": written[0].reason, "tokens": written[0].tokens})

    def read_messages(self) -> list[dict[str, str]]:
        """Returns the conversation in the request. Raises BadInput if it is invalid or sent by another page."""
        port = self.server.server_address[1]
        if self.path != "/say":
            raise BadInput("this path does not exist; send messages to /say")
        if self.headers.get("Origin") not in (None, *(f"http://{name}:{port}" for name in (ADDRESS, "localhost"))):
            raise BadInput("requests from other pages are not allowed")
        if self.headers.get_content_type() != "application/json":
            raise BadInput("the conversation must have Content-Type: application/json")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 19) or not 0 < int(length) <= MAX_BYTES:
            raise BadInput(f"the request must have 1 to {MAX_BYTES} bytes; set Content-Length")
        body = self.rfile.read(int(length))
        self.server.has_asked(self.connection)
        messages, longest = check_messages(parse_json(body)), self.server.longest
        turns, characters = len(messages), sum(len(message["content"]) for message in messages)
        # the text has more than `longest` tokens, or the template would be slow to render
        if turns > min(MAX_TURNS, longest) or characters > MAX_CHARACTERS_PER_TOKEN * longest:
            raise TooLong(
                f"the conversation has {turns:,} turns and {characters:,} characters; the limits are "
                f"{min(MAX_TURNS, longest):,} turns and {longest:,} tokens; start a new conversation, or write less"
            )
        return messages

    def refuse(self, code: int, reason: str) -> None:
        """Sends an error response with this status code."""
        self.close_connection = True  # the request may not have been read
        self.answer(code, json.dumps({"error": reason}) + "\n", "application/x-ndjson")

    def send_line(self, value: dict[str, Any]) -> None:
        """Sends a line of JSON immediately."""
        self.wfile.write(json.dumps(value).encode() + b"\n")
        self.wfile.flush()


def check_messages(sent: Any) -> list[dict[str, str]]:
    """Returns the messages of a request. Raises BadInput unless user and model alternate, ending with the user."""
    messages = sent.get("messages") if isinstance(sent, dict) else None
    if not isinstance(messages, list) or not messages:
        raise BadInput("messages must be a list of at least one message")
    found = []
    for number, message in enumerate(messages):
        role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
        if role != ROLES[number % 2] or not isinstance(content, str):
            raise BadInput(f"message {number + 1} must have role {ROLES[number % 2]!r} and text as content")
        found.append({"role": role, "content": content})
    if len(found) % 2 == 0:
        raise BadInput("the last message must have role 'user'")
    return found
