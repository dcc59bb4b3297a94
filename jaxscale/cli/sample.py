"""Writes text with a model: of a training run, or converted.

  jaxscale sample --workdir=runs/quickstart --prompt='def main' --num_tokens=200

  --workdir=RUN           a work folder, or RUN/checkpoints/STEP
  --step=N                its checkpoint of this step; the newest unless given
  --ema                   the running average of the weights, where the run kept one
  --prompt=TEXT           text to go on from; may be given several times; without one, from where a document begins
  --prompts=FILE          many: each line of a .txt, or of a .jsonl as text or as {"prompt": TEXT}
  --num_samples=1         texts for each prompt
  --num_tokens=100        tokens to write, at most
  --temperature=0.8       1: as the model says; 0: always the likeliest token
  --top_k=0               among the k likeliest tokens; 0: all
  --top_p=1.0             among the likeliest that together have this probability
  --min_p=0.0             among those with this part of the likeliest one's probability
  --repetition_penalty=1  above 1: tokens that the text has become less likely
  --stop=TEXT             a text ends before it; may be given several times
  --seed=0                same seed, same text, whatever the mesh and the other prompts
  --batch=8               texts that are written at a time
  --json                  a line of JSON for each text
  --interactive           prompts from the terminal, one a line; Ctrl-D ends
  --chat                  a conversation, by the model's chat template; with --prompt, one answer
  --system=TEXT           chat: what the model is told first
  --serve[=PORT]          chat: a page at http://127.0.0.1:PORT for this machine alone; default 8643, 0: any free port
  --context=TOKENS        interactive, chat: the longest text; default what the model was trained to read
  --mesh.AXIS=N           devices along data, fsdp or tensor, as --config.mesh.AXIS of training
  --tokenizer=FILE        tokenizer.json, SentencePiece .model or 'bytes', for a work folder that has none
  --compute_dtype=TYPE    float32, bfloat16 or float16 instead of the run's own
  --devices=N             simulated CPU devices

Text goes to stdout as it comes, all else to stderr. On several hosts the flags of training apply; the first one writes.
"""

import contextlib
import dataclasses
import json
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxscale import schema
from jaxscale.cli import run_verb, sample_chat
from jaxscale.command_line import parse_arguments, take_switches, whole_number
from jaxscale.help_text import show_help
from jaxscale.hosts import cluster
from jaxscale.inference import LoadedModel, check_tokenizer, make_generator, open_model
from jaxscale.models.config import Dtype
from jaxscale.sampling.config import Sampling
from jaxscale.sampling.generator import own_numbers
from jaxscale.sampling.text import Written, write_texts
from jaxscale.sharding.config import MESH_AXES, MeshConfig
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, put, tell
from jaxscale.system.foreign import parse_json
from jaxscale.system.redact import printable

DRAWING = tuple(field.name for field in dataclasses.fields(Sampling))
OPTIONS = ("workdir", "step", "prompts", "num_samples", "num_tokens", "seed", "batch", "system", "serve", "context")
OPTIONS += ("tokenizer", "compute_dtype", "devices", *DRAWING, *(f"mesh.{axis}" for axis in MESH_AXES), *cluster.FLAGS)
SWITCHES = ("ema", "json", "interactive", "chat")


def main(argv: list[str]) -> int:
    """Writes what is asked for and returns the exit code."""
    argv = [f"--serve={sample_chat.PORT}" if flag == "--serve" else flag for flag in argv]
    rest, several = take_several(argv, ("prompt", "stop"))
    rest, switches = take_switches(rest, (), SWITCHES)
    arguments = parse_arguments(rest, OPTIONS)
    if arguments.help:
        show_help(__doc__)
        return 0
    options = dict(arguments.options)
    sampling, num_tokens, seed = read_numbers(options)
    mesh = read_mesh(options, arguments.overrides)
    if arguments.config:
        raise BadInput("sampling takes no --config: the settings of a model are read from its work folder")
    if "workdir" not in options:
        raise BadInput("--workdir must be given: the work folder of a run, or of a converted model")
    talking = check_ways(options, switches, several["prompt"])
    texts = [] if talking else read_prompts(several["prompt"], options.get("prompts"))
    if "devices" in options:
        jax.config.update("jax_num_cpu_devices", whole_number("devices", options["devices"], 1))
    place = cluster.find_own_place(options)
    if place is not None and talking:
        raise BadInput("--interactive and --chat are for one host; give --prompt or --prompts on several")
    facts = {name: value for name, value in options.items() if name not in cluster.FLAGS} | {"prompts": texts}
    with cluster.joined(place, facts | {"switches": sorted(switches)}, options):
        say = tell if jax.process_index() == 0 else lambda line: None
        model = open_model(
            options["workdir"],
            step=whole_number("step", options["step"], 0) if "step" in options else None,
            what="ema" if "ema" in switches else "params",
            mesh=mesh,
            compute_dtype=read_dtype(options.get("compute_dtype")),
            tokenizer=options.get("tokenizer", ""),
            say=say,
        )
        check_tokenizer(model)
        talk = sample_chat.Talk(model, sampling, tuple(several["stop"]), num_tokens, seed, say)
        if talking:
            context = whole_number("context", options["context"], 2) if "context" in options else None
            talk = dataclasses.replace(talk, context=context, system=options.get("system"))
            how = dict(chat="chat" in switches, prompts=several["prompt"], serve=options.get("serve"))
            return sample_chat.converse(talk, **how)
        number = whole_number("num_samples", options.get("num_samples", "1"), 1)
        batch = whole_number("batch", options.get("batch", "8"), 1)
        found = write_all(talk, texts, num_samples=number, batch=batch)
        show = show_json if "json" in switches else show_text
        show(found, alone=len(texts) * number == 1, silent=jax.process_index() != 0)
    return 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some of a text, or its end."""

    prompt: str
    sample: int
    text: str
    done: Written | None = None


def write_all(
    talk: sample_chat.Talk, texts: Sequence[str], *, num_samples: int, batch: int, chat: bool = False
) -> Iterator[Piece]:
    """Yields the pieces of each text: all of one prompt's first sample, then its second, ... as they come.

    chat: each prompt is what a person says, and the text the answer.
    """
    model = talk.model
    prompts, stop_ids = [prompt_ids(model, text) for text in texts], model.kept.stop_ids
    if chat:
        asked, stop_ids = sample_chat.asking_of(talk)
        prompts = [asked([{"role": "user", "content": text}]) for text in texts]
    rows = [(prompt, number) for prompt in range(len(prompts)) for number in range(num_samples)]
    numbers = own_numbers([prompts[prompt] for prompt, _ in rows])
    rows_at_once = min(batch, len(rows))
    generator = make_generator(model, batch=rows_at_once, longest=talk.longest_for(prompts, texts), say=talk.say)
    for first in range(0, len(rows), rows_at_once):
        some, written = rows[first : first + rows_at_once], []
        of = lambda row: dict(prompt=texts[row[0]], sample=row[1])
        pieces = write_texts(
            generator,
            model.tokenizer,
            [prompts[prompt] for prompt, _ in some],
            talk.sampling,
            num_tokens=talk.num_tokens,
            stop_ids=stop_ids,
            stops=talk.stops,
            seed=talk.seed,
            numbers=numbers[first : first + rows_at_once],
            written=written,
        )
        for row, piece in pieces:
            if len(some) == 1:  # several at once would be mixed: they are shown whole
                yield Piece(text=piece, **of(some[row]))
        for row, one in zip(some, written):
            yield Piece(text="" if len(some) == 1 else one.text, done=one, **of(row))
        talk.tell_speed(generator.timing, written)


def prompt_ids(model: LoadedModel, text: str) -> list[int]:
    """The ids of a prompt; where it has none, those from which a document goes on."""
    return [*model.tokenizer.begin_ids, *model.tokenizer.encode(text).tolist()] or [model.tokenizer.eos_id]


def show_text(pieces: Iterator[Piece], *, alone: bool, silent: bool) -> None:
    """Prints texts behind their prompts; of several, with a line before each."""
    count, begun = 0, False
    shown = printable if sys.stdout.isatty() else str  # a model's bytes may drive a terminal
    for piece in pieces:
        if silent:
            continue
        if not begun:
            count, begun = count + 1, True
            head = "" if alone else f"--- {count}\n"
            print(f"{head}{shown(piece.prompt)}", end="", flush=True)  # noqa: T201  as it is, for another program
        print(shown(piece.text), end="", flush=True)  # noqa: T201
        if piece.done is not None:
            put("")
            begun = False


def show_json(pieces: Iterator[Piece], *, alone: bool, silent: bool) -> None:
    """Prints a line of JSON for each text, when it is complete."""
    shown = printable if sys.stdout.isatty() else str  # JSON leaves U+009B as it is, which begins a terminal's command
    for piece in pieces:
        if piece.done is not None and not silent:
            line = {"prompt": piece.prompt, "sample": piece.sample, **dataclasses.asdict(piece.done)}
            print(shown(json.dumps(line, ensure_ascii=False)), flush=True)  # noqa: T201


def take_several(argv: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """(the other arguments, the values of each of these flags in order). Raises BadInput for one without a value."""
    found, rest, pending = {name: [] for name in names}, [], list(argv)
    while pending:
        flag = pending.pop(0)
        name, equals, value = flag.partition("=")
        if name.removeprefix("--") not in names or not name.startswith("--"):
            rest.append(flag)
            continue
        value = value if equals or not pending else pending.pop(0)
        if not value or not equals and value.startswith("--"):  # a flag that follows is not meant as text
            raise BadInput(f"{name} needs a value: {name}=TEXT")
        found[name.removeprefix("--")].append(value)
    return rest, found


def check_ways(options: Mapping[str, str], switches: set[str], prompts: Sequence[str]) -> bool:
    """Whether text comes from a person as it goes. Raises BadInput for ways that exclude each other."""
    talking = bool({"interactive", "chat"} & switches) or "serve" in options
    if {"interactive", "chat"} <= switches:
        raise BadInput("--interactive goes on from text and --chat answers; give one of them")
    if "interactive" in switches and (prompts or "serve" in options):
        raise BadInput("--interactive reads its prompts from the terminal; leave out --prompt and --serve")
    if "serve" in options and "chat" not in switches:
        raise BadInput("--serve is a page to chat on: give --chat too")
    for name in ("prompts", "num_samples", "batch", "json"):
        if talking and name in {*options, *switches}:
            raise BadInput(f"--{name} is for texts that are written without anybody; leave it out")
    for name in ("system", "context"):
        if not talking and name in options:
            raise BadInput(f"--{name} is for --chat" + (" and --interactive" if name == "context" else ""))
    return talking


def read_numbers(options: Mapping[str, str]) -> tuple[Sampling, int, int]:
    """(how tokens are drawn, tokens to write, seed). Raises BadInput for what is no number or out of range."""
    hints = typing.get_type_hints(Sampling)
    chosen = {name: schema.convert(options[name], hints[name], f"--{name}") for name in DRAWING if name in options}
    num_tokens = whole_number("num_tokens", options.get("num_tokens", "100"), 1)
    seed = whole_number("seed", options.get("seed", "0"), 0)
    sample_chat.check_seed(seed)
    return Sampling(**chosen), num_tokens, seed


def read_mesh(options: Mapping[str, str], overrides: Mapping[str, str]) -> MeshConfig:
    """The mesh of --mesh.AXIS=N or --config.mesh.AXIS=N. Raises BadInput for another setting."""
    values = {name.removeprefix("mesh."): text for name, text in options.items() if name.startswith("mesh.")}
    for name, text in overrides.items():
        if not name.startswith("mesh."):
            raise BadInput(f"--config.{name}: only the mesh may be set; the model is as it was trained")
        values[name.removeprefix("mesh.")] = text
    if "-1" in values.values():
        values.setdefault("fsdp", "1")  # only one axis takes what is left
    return schema.from_dict(MeshConfig, values, "mesh")


def read_dtype(name: str | None) -> str | None:
    """The value of --compute_dtype."""
    return name and schema.convert(name, Dtype, "--compute_dtype")


def read_prompts(given: Sequence[str], file: str | None) -> list[str]:
    """All prompts; one that is empty where there is none. Raises BadInput for a file that holds none."""
    if file is None:
        return list(given) or [""]
    path = paths.as_path(file)
    if not path.is_file():
        raise BadInput(f"--prompts={file} is no file")
    try:
        text = path.read_bytes().decode("utf-8-sig")  # some editors begin a file with a mark of its encoding
    except UnicodeDecodeError:
        raise BadInput(f"--prompts={file} is no text in UTF-8") from None
    read = json_prompt if file.endswith(".jsonl") else lambda file, number, line: line.removesuffix("\r")
    # by line feeds alone: JSON may hold what else str.splitlines() takes for the end of a line, such as U+2028
    found = [read(file, n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not found:
        raise BadInput(f"--prompts={file} is empty; write a prompt on each line")
    return [*given, *found]


def json_prompt(file: str, number: int, line: str) -> str:
    """The prompt of a line of a .jsonl: text, or an object with `prompt` or `text`."""
    with contextlib.suppress(ValueError):
        value: Any = parse_json(line)
        value = value.get("prompt", value.get("text")) if isinstance(value, dict) else value
        if isinstance(value, str):
            return value
    raise BadInput(f"--prompts={file}: line {number} is neither text in JSON nor an object with a prompt")


if __name__ == "__main__":
    run_verb("sample")
