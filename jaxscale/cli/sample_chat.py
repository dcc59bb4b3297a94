"""Interactive sampling: prompts or a chat in a terminal, or a chat page on this machine."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from jaxscale.api.inference import make_generator, tokenizer_of
from jaxscale.api.writing import TextWriter, open_chat_prompts
from jaxscale.runtime.sampling.chat_server import open_chat
from jaxscale.runtime.sampling.generator import Generator
from jaxscale.runtime.sampling.text_stream import GeneratedText, write_texts
from jaxscale.runtime.text.chat.spans import Message
from jaxscale.system.exits import BadInput, put, put_raw, silence_closed_streams
from jaxscale.system.redact import printable

PORT = 8643


def converse(writer: TextWriter, context: int | None, *, prompts: Sequence[str], serve: int | None) -> int:
    """Runs the session until its input ends, and returns the exit code. context: tokens of the longest text."""
    context = context or writer.model.cfg.max_seq_len or writer.model.seq_len
    if context > writer.model.seq_len:
        writer.say(f"texts of up to {context} tokens; the model was trained on rows of {writer.model.seq_len}")
    generator = make_generator(writer.model, batch=1, longest=context, say=writer.say)
    if not writer.options.chat:
        return continue_lines(writer, generator)
    encode_messages, stop_ids = open_chat_prompts(writer)

    def answer(messages: Sequence[Message], written: list[GeneratedText]) -> Iterator[str]:
        yield from generate_pieces(writer, generator, encode_messages(messages), stop_ids, written)

    if serve is not None:
        return serve_page(writer, answer, serve, generator.engine.longest)
    messages: list[Message] = []
    for line in prompts or read_lines():
        messages.append({"role": "user", "content": line})
        written: list[GeneratedText] = []
        if prompts:
            show(answer(messages, written))
        else:
            show_in_session(writer, answer(messages, written))
        writer.log_speed(generator.timing, written)
        if written and written[0].tokens >= writer.options.num_tokens:
            writer.say(f"the answer is cut at --num_tokens={writer.options.num_tokens}")
        if written and written[0].text:
            messages.append({"role": "assistant", "content": written[0].text})
        else:  # drop the question
            messages.pop()
    return 0


def continue_lines(writer: TextWriter, generator: Generator) -> int:
    """Continues each line of the input."""
    loaded = tokenizer_of(writer.model)
    for line in read_lines():
        ids, written = [*loaded.tokenizer.begin_ids, *loaded.tokenizer.encode(line).tolist()], list[GeneratedText]()
        show_in_session(writer, prepend_prompt(line, generate_pieces(writer, generator, ids, loaded.stop_ids, written)))
        writer.log_speed(generator.timing, written)
    return 0


def prepend_prompt(prompt: str, pieces: Iterator[str]) -> Iterator[str]:
    """Yields the pieces of a text with the prompt before the first, so that it prints after the compilation message."""
    yield prompt + next(pieces, "")
    yield from pieces


def generate_pieces(
    writer: TextWriter, generator: Generator, ids: Sequence[int], stop_ids: Sequence[int], written: list[GeneratedText]
) -> Iterator[str]:
    """Yields the pieces of the text that follows `ids`. Raises BadInput if they leave no room for one."""
    generator.timing = None
    if len(ids) >= generator.engine.longest:
        raise BadInput(
            f"this has {len(ids)} tokens, but a text can have at most {generator.engine.longest}; start over, write "
            "less, or give --context"
        )
    for _, piece in write_texts(
        generator, tokenizer_of(writer.model).tokenizer, [ids], writer.write_settings(stop_ids), written
    ):
        yield piece


def show(pieces: Iterator[str]) -> None:
    """Streams a text and a final newline."""
    shown = printable if sys.stdout.isatty() else str
    try:
        for piece in pieces:
            put_raw(shown(piece))  # not wrapped or cleaned, as another program may read it
    finally:
        put("")


def show_in_session(writer: TextWriter, pieces: Iterator[str]) -> None:
    """Streams a text in a session: an error is printed, and Ctrl-C ends only this text."""
    try:
        show(pieces)
    except BadInput as error:
        writer.say(f"error: {error}")
    except KeyboardInterrupt:
        writer.say("interrupted; Ctrl-D ends the program")


def read_lines() -> Iterator[str]:
    """Yields the lines of stdin, with a prompt in a terminal, until Ctrl-D."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)  # noqa: T201
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def serve_page(
    writer: TextWriter,
    answer: Callable[[Sequence[Message], list[GeneratedText]], Iterator[str]],
    port: int,
    longest: int,
) -> int:
    """Serves the page until Ctrl-C, which also ends an unfinished answer."""
    with open_chat(answer, writer.model.path, port, longest) as server:
        with contextlib.suppress(KeyboardInterrupt):
            writer.say(f"http://127.0.0.1:{server.server_address[1]}/ for this machine only; Ctrl-C ends it")
            server.serve_forever()
        ended = False
        with contextlib.suppress(KeyboardInterrupt):
            ended = server.end_answer()
        if not ended:
            # Its thread is in the compiler, and would abort when it returns after the interpreter has shut down.
            silence_closed_streams()
            os._exit(0)
    return 0
