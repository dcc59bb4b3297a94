"""Text in turns: prompts from a terminal, a conversation there, or on a page of this machine's own."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from jaxscale.api.writing import Talk, asking_of
from jaxscale.inference import make_generator, tokenizer_of
from jaxscale.sampling.generator import Generator
from jaxscale.sampling.serve import open_chat
from jaxscale.sampling.text import GeneratedText, write_texts
from jaxscale.system.exits import BadInput, put, put_raw, silence_closed_streams
from jaxscale.system.redact import printable
from jaxscale.text.chat.prompts import Message

PORT = 8643


def converse(talk: Talk, context: int | None, *, prompts: Sequence[str], serve: int | None) -> int:
    """Talks until the other side ends it, and returns the exit code. context: tokens of the longest text."""
    context = context or talk.model.cfg.max_seq_len or talk.model.seq_len
    if context > talk.model.seq_len:
        talk.say(f"texts of up to {context} tokens; the model was trained on rows of {talk.model.seq_len}")
    generator = make_generator(talk.model, batch=1, longest=context, say=talk.say)
    if not talk.how.chat:
        return go_on_from_lines(talk, generator)
    asked, stop_ids = asking_of(talk)

    def answer(messages: Sequence[Message], written: list[GeneratedText]) -> Iterator[str]:
        yield from continued(talk, generator, asked(messages), stop_ids, written)

    if serve is not None:
        return serve_page(talk, answer, serve, generator.engine.longest)
    messages: list[Message] = []
    for line in prompts or lines_of_person():
        messages.append({"role": "user", "content": line})
        written: list[GeneratedText] = []
        if prompts:
            show(answer(messages, written))
        else:
            show_to_person(talk, answer(messages, written))
        talk.tell_speed(generator.timing, written)
        if written and written[0].tokens >= talk.how.num_tokens:
            talk.say(f"the answer is cut at --num_tokens={talk.how.num_tokens}")
        if written and written[0].text:
            messages.append({"role": "assistant", "content": written[0].text})
        else:  # as if it had not been asked
            messages.pop()
    return 0


def go_on_from_lines(talk: Talk, generator: Generator) -> int:
    """Goes on from each line that a person writes."""
    kept = tokenizer_of(talk.model)
    for line in lines_of_person():
        ids, written = [*kept.tokenizer.begin_ids, *kept.tokenizer.encode(line).tolist()], list[GeneratedText]()
        show_to_person(talk, behind(line, continued(talk, generator, ids, kept.stop_ids, written)))
        talk.tell_speed(generator.timing, written)
    return 0


def behind(prompt: str, pieces: Iterator[str]) -> Iterator[str]:
    """Yields the pieces of a text, the prompt before the first: so it is printed after the line on compilation."""
    yield prompt + next(pieces, "")
    yield from pieces


def continued(
    talk: Talk, generator: Generator, ids: Sequence[int], stop_ids: Sequence[int], written: list[GeneratedText]
) -> Iterator[str]:
    """Yields the pieces of the text that follows these ids. Raises BadInput where they leave no room for one."""
    generator.timing = None
    if len(ids) >= generator.engine.longest:
        raise BadInput(
            f"this has {len(ids)} tokens, and a text here has at most {generator.engine.longest}; start over, write "
            "less, or give --context"
        )
    for _, piece in write_texts(
        generator, tokenizer_of(talk.model).tokenizer, [ids], talk.write_settings(stop_ids), written
    ):
        yield piece


def show(pieces: Iterator[str]) -> None:
    """Prints a text as it comes, and the end of its line."""
    shown = printable if sys.stdout.isatty() else str
    try:
        for piece in pieces:
            put_raw(shown(piece))  # unchanged, for another program
    finally:
        put("")


def show_to_person(talk: Talk, pieces: Iterator[str]) -> None:
    """The same in a session that goes on: an error is printed, and Ctrl-C ends this text alone."""
    try:
        show(pieces)
    except BadInput as error:
        talk.say(f"error: {error}")
    except KeyboardInterrupt:
        talk.say("interrupted; Ctrl-D ends the program")


def lines_of_person() -> Iterator[str]:
    """Yields what a person writes, a line at a time, until Ctrl-D."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)  # noqa: T201
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def serve_page(
    talk: Talk, answer: Callable[[Sequence[Message], list[GeneratedText]], Iterator[str]], port: int, longest: int
) -> int:
    """Serves the page until Ctrl-C, which also ends an answer that is being written."""
    with open_chat(answer, talk.model.path, port, longest) as server:
        with contextlib.suppress(KeyboardInterrupt):
            talk.say(f"http://127.0.0.1:{server.server_address[1]}/ for this machine alone; Ctrl-C ends it")
            server.serve_forever()
        ended = False
        with contextlib.suppress(KeyboardInterrupt):
            ended = server.end_answer()
        if not ended:
            # Its thread is in the compiler. Python would end around it, and abort when it comes back.
            silence_closed_streams()
            os._exit(0)
    return 0
