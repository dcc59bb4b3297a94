"""Generates text with a trained or converted model.

  jaxscale sample --workdir=runs/quickstart --prompt='def main' --num_tokens=200

Text is streamed to stdout, all other output to stderr. On several hosts, use the host flags of training; the first host
writes.
"""

import collections
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxscale import schema
from jaxscale.api.inference import LoadedModel, make_generator, open_model, tokenizer_of
from jaxscale.api.writing import SampleOptions, TextPiece, TextWriter, open_chat_prompts, write_all
from jaxscale.core.config import MESH_AXES, MeshConfig
from jaxscale.core.models.config import Dtype
from jaxscale.program.out_of_memory import out_of_memory_explained
from jaxscale.runtime.hosts import cluster
from jaxscale.runtime.sampling.chat_server import ChatServer, open_chat
from jaxscale.runtime.sampling.generator import Generator
from jaxscale.runtime.sampling.text_stream import GeneratedText, write_texts
from jaxscale.runtime.text.chat.spans import Message
from jaxscale.runtime.text.sources.jsonl import JSON_LINES
from jaxscale.runtime.text.sources.records import json_records, kind_of, text_lines
from jaxscale.settings.command_line import Arguments, flag, port_of
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, print_stderr, put, put_raw, silence_closed_streams
from jaxscale.system.redact import printable

PORT = 8643


@dataclasses.dataclass(frozen=True)
class ModelFlags(cluster.HostFlags):
    """Flags that select the model and its devices."""

    no_config = "the settings are read from the work folder; only --mesh.AXIS can be set"

    workdir: str = flag("", "a work folder, or RUN/checkpoints/STEP", "RUN")
    step: int | None = flag(None, "step of the checkpoint; default: the newest", "N", least=0)
    ema: bool = flag(False, "uses the exponential moving average of the weights, if the run has one")
    mesh: dict[str, str] = flag(
        dict,
        "number of devices along the mesh axis data, fsdp or tensor, like --config.mesh.AXIS in training",
        "N",
        name="mesh.AXIS",
        keys=MESH_AXES,
    )
    tokenizer: str = flag("", "tokenizer.json, SentencePiece .model or 'bytes', for a work folder without one", "FILE")
    compute_dtype: Dtype | None = flag(None, "float32, bfloat16 or float16; default: the run's", "TYPE")
    devices: int | None = flag(None, "simulated CPU devices", "N", least=1)

    def open(self, mesh: MeshConfig, step: int | None, say: Callable[[str], None]) -> LoadedModel:
        """Returns the model at a step; None is the newest step."""
        how: dict[str, Any] = dict(mesh=mesh, compute_dtype=self.compute_dtype, tokenizer=self.tokenizer)
        return open_model(self.workdir, step=step, what="ema" if self.ema else "params", **how, say=say)


@dataclasses.dataclass(frozen=True)
class SampleFlags(ModelFlags, SampleOptions):
    prompt: tuple[str, ...] = flag(
        (), "text to continue; may be repeated; default: the beginning of a document", "TEXT"
    )
    prompts: str | None = flag(
        None, 'file with one prompt per line: .txt, or .jsonl with strings or {"prompt": TEXT}', "FILE"
    )
    num_samples: int = flag(1, "texts per prompt", least=1)
    json: bool = flag(False, "prints one JSON object per text")
    interactive: bool = flag(False, "reads prompts from the terminal, one per line; Ctrl-D exits")
    serve: int | None = flag(
        None,
        f"chat: serves a page at http://127.0.0.1:PORT to this machine only; default {PORT}, 0: any free port",
        "PORT",
        bare=str(PORT),
        read=port_of,
    )
    context: int | None = flag(
        None, "interactive, chat: maximum length of a text; default: the context length of training", "TOKENS", least=2
    )


@command(SampleFlags, without=cluster.HostFlags)
def main(arguments: Arguments) -> None:
    """Generates the requested texts."""
    flags, options = arguments.flags, arguments.options
    mesh = read_mesh(flags.mesh)
    if not flags.workdir:
        raise BadInput("--workdir must be given: the work folder of a run, or of a converted model")
    is_session = check_modes(flags, options)
    texts = [] if is_session else read_prompts(flags.prompt, flags.prompts)
    if flags.devices:
        jax.config.update("jax_num_cpu_devices", flags.devices)
    place = cluster.discover_process(options)
    if place is not None and is_session:
        raise BadInput("--interactive and --chat run on one host only; use --prompt or --prompts on several hosts")
    facts = {name: value for name, value in options.items() if name not in cluster.FLAGS} | {"prompts": texts}
    smaller = (f"--batch={max(flags.batch // 2, 1)}", f"--num_tokens={max(flags.num_tokens // 2, 1)}")
    with cluster.joined(place, facts, options), out_of_memory_explained(lambda: ("", smaller)):
        say = print_stderr if jax.process_index() == 0 else lambda line: None
        model = flags.open(mesh, flags.step, say)
        tokenizer_of(model)
        writer = TextWriter(model, flags, say)
        if is_session:
            return converse(writer, flags.context, prompts=flags.prompt, serve=flags.serve)
        found = write_all(writer, texts, num_samples=flags.num_samples)
        if jax.process_index() != 0:
            collections.deque(found, maxlen=0)  # generates the texts without printing them
        elif flags.json:
            show_json(found)
        else:
            show_text(found, alone=len(texts) * flags.num_samples == 1)


def show_text(pieces: Iterator[TextPiece], *, alone: bool) -> None:
    """Prints each prompt followed by its text. If there are several texts, each has a heading."""
    count, begun = 0, False
    shown = printable if sys.stdout.isatty() else str  # a model's bytes may contain terminal escape sequences
    for piece in pieces:
        if not begun:
            count, begun = count + 1, True
            head = "" if alone else f"--- {count}\n"
            put_raw(f"{head}{shown(piece.prompt)}")  # not wrapped or cleaned, since another program may read it
        put_raw(shown(piece.text))
        if piece.done is not None:
            put("")
            begun = False


def show_json(pieces: Iterator[TextPiece]) -> None:
    """Prints a JSON object for each complete text."""
    shown = printable if sys.stdout.isatty() else str  # JSON does not escape U+009B, which starts a terminal command
    for piece in pieces:
        if piece.done is not None:
            line = {"prompt": piece.prompt, "sample": piece.sample, **dataclasses.asdict(piece.done)}
            put_raw(f"{shown(json.dumps(line, ensure_ascii=False))}\n")


def check_modes(flags: SampleFlags, given: Collection[str]) -> bool:
    """Returns True for an interactive session or chat. Raises BadInput for conflicting flags."""
    serves = flags.serve is not None
    is_session = flags.interactive or flags.chat or serves
    if flags.interactive and flags.chat:
        raise BadInput("--interactive and --chat cannot be combined; use one of them")
    if flags.interactive and (flags.prompt or serves):
        raise BadInput("--interactive reads its prompts from the terminal; remove --prompt and --serve")
    if serves and not flags.chat:
        raise BadInput("--serve requires --chat; set both")
    for name in ("prompts", "num_samples", "batch", "json"):
        if is_session and name in given:
            raise BadInput(f"--{name} does not apply to --interactive and --chat; remove it")
    for name in ("system", "context"):
        if not is_session and name in given:
            raise BadInput(f"--{name} applies only to --chat" + (" and --interactive" if name == "context" else ""))
    return is_session


def read_mesh(axes: Mapping[str, str]) -> MeshConfig:
    """Returns the mesh of --mesh.AXIS=N or --config.mesh.AXIS=N."""
    values = dict(axes)
    if "-1" in values.values():
        values.setdefault("fsdp", "1")  # only one axis may be -1
    return schema.from_dict(MeshConfig, values, "mesh")


def read_prompts(given: Sequence[str], file: str | None) -> list[str]:
    """Returns all prompts, or [''] if there are none. Raises BadInput if the file has no prompts."""
    if file is None:
        return list(given) or [""]
    if not paths.as_path(file).is_file():
        raise BadInput(f"--prompts={file} is not a file")
    path = os.path.expanduser(file)
    if kind_of(path) in JSON_LINES:
        found = []
        for number, value in json_records(path):
            found.append(value.get("prompt", value.get("text")) if isinstance(value, dict) else value)
            if not isinstance(found[-1], str):
                place = f"{file} line {number}"
                raise BadInput(f"--prompts: {place} is neither a JSON string nor an object with a prompt")
    else:
        found = [line for _, line in text_lines(path) if line.strip()]
    if not found:
        raise BadInput(f"--prompts={file} is empty; write one prompt per line")
    return [*given, *found]


def converse(writer: TextWriter, context: int | None, *, prompts: Sequence[str], serve: int | None) -> None:
    """Runs an interactive session or chat until its input ends. context: maximum number of tokens of a text."""
    context = context or writer.model.cfg.max_seq_len or writer.model.seq_len
    if context > writer.model.seq_len:
        writer.say(f"texts have up to {context} tokens, but the model was trained with seq_len={writer.model.seq_len}")
    generator = make_generator(writer.model, batch=1, longest=context, say=writer.say)
    if not writer.options.chat:
        return continue_lines(writer, generator)
    encode_messages, stop_ids = open_chat_prompts(writer)

    def answer(messages: Sequence[Message], written: list[GeneratedText]) -> Iterator[str]:
        yield from generate_pieces(writer, generator, encode_messages(messages), stop_ids, written)

    if serve is not None:
        return serve_page(writer, open_chat(answer, writer.model.path, serve, generator.engine.longest))
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
            writer.say(f"the answer was cut off at --num_tokens={writer.options.num_tokens}")
        if written and written[0].text:
            messages.append({"role": "assistant", "content": written[0].text})
        else:  # the question has no answer
            messages.pop()


def continue_lines(writer: TextWriter, generator: Generator) -> None:
    """Generates a continuation of each input line."""
    loaded = tokenizer_of(writer.model)
    for line in read_lines():
        ids, written = [*loaded.tokenizer.begin_ids, *loaded.tokenizer.encode(line).tolist()], list[GeneratedText]()
        show_in_session(writer, generate_pieces(writer, generator, ids, loaded.stop_ids, written), line)
        writer.log_speed(generator.timing, written)


def generate_pieces(
    writer: TextWriter, generator: Generator, ids: Sequence[int], stop_ids: Sequence[int], written: list[GeneratedText]
) -> Iterator[str]:
    """Yields the text generated after `ids`, in pieces. Raises BadInput if `ids` already have the maximum length."""
    generator.timing = None
    if len(ids) >= generator.engine.longest:
        raise BadInput(
            f"the prompt has {len(ids)} tokens, but prompt and answer together can have at most "
            f"{generator.engine.longest}; start over, shorten the prompt, or increase --context"
        )
    settings = writer.write_settings(stop_ids)
    for _, piece in write_texts(generator, tokenizer_of(writer.model).tokenizer.decode, [ids], settings, written):
        yield piece


def show(pieces: Iterator[str], prompt: str = "") -> None:
    """Prints a text while it is generated, then a newline. The prompt is printed together with the first piece."""
    shown = printable if sys.stdout.isatty() else str
    try:
        put_raw(shown(prompt + next(pieces, "")))  # not wrapped or cleaned, since another program may read it
        for piece in pieces:
            put_raw(shown(piece))
    finally:
        put("")


def show_in_session(writer: TextWriter, pieces: Iterator[str], prompt: str = "") -> None:
    """Prints a text during generation in a session. Prints errors. Ctrl-C ends only this text."""
    try:
        show(pieces, prompt)
    except BadInput as error:
        writer.say(f"error: {error}")
    except KeyboardInterrupt:
        writer.say("interrupted; Ctrl-D exits the program")


def read_lines() -> Iterator[str]:
    """Yields the lines of stdin until Ctrl-D. A terminal shows '> ' before each line."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)  # noqa: T201
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def serve_page(writer: TextWriter, server: ChatServer) -> None:
    """Serves the page until Ctrl-C, which also ends an unfinished answer."""
    with server:
        with contextlib.suppress(KeyboardInterrupt):
            writer.say(f"http://127.0.0.1:{server.server_address[1]}/ (only on this machine); Ctrl-C stops it")
            server.serve_forever()
        ended = False
        with contextlib.suppress(KeyboardInterrupt):
            ended = server.end_answer()
        if not ended:
            # The answer's thread is in the compiler and would abort on returning after the interpreter has shut down.
            silence_closed_streams()
            os._exit(0)
