"""Writes text with a model: of a training run, or converted.

  jaxscale sample --workdir=runs/quickstart --prompt='def main' --num_tokens=200

Text goes to stdout as it comes, all else to stderr. On several hosts the flags of training apply; the first one writes.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxscale import schema
from jaxscale.api.writing import Piece, SampleOptions, Talk, write_all
from jaxscale.cli import run_verb, sample_chat
from jaxscale.command_line import Arguments, flag, port_of
from jaxscale.help_text import command
from jaxscale.hosts import cluster
from jaxscale.inference import open_model, tokenizer_of
from jaxscale.models.config import Dtype
from jaxscale.planning.out_of_memory import out_of_memory_explained
from jaxscale.sharding.config import MESH_AXES, MeshConfig
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, print_stderr, put, put_raw
from jaxscale.system.redact import printable
from jaxscale.text.sources.jsonl import JSON_LINES
from jaxscale.text.sources.records import json_records, kind_of, text_lines


@dataclasses.dataclass(frozen=True)
class ModelFlags(cluster.HostFlags):
    """The model that a verb opens, and the devices that it is placed on."""

    no_config = "the settings of a model are read from its work folder, and only --mesh.AXIS may be set"

    workdir: str = flag("", "a work folder, or RUN/checkpoints/STEP", "RUN")
    step: int | None = flag(None, "its checkpoint of this step; the newest unless given", "N", least=0)
    ema: bool = flag(False, "the running average of the weights, where the run kept one")
    mesh: dict[str, str] = flag(
        dict,
        "devices along data, fsdp or tensor, as --config.mesh.AXIS of training",
        "N",
        name="mesh.AXIS",
        keys=MESH_AXES,
    )
    tokenizer: str = flag(
        "", "tokenizer.json, SentencePiece .model or 'bytes', for a work folder that has none", "FILE"
    )
    compute_dtype: Dtype | None = flag(None, "float32, bfloat16 or float16 instead of the run's own", "TYPE")
    devices: int | None = flag(None, "simulated CPU devices", "N", least=1)

    @property
    def what(self) -> str:
        """Which weights."""
        return "ema" if self.ema else "params"


@dataclasses.dataclass(frozen=True)
class SampleFlags(ModelFlags, SampleOptions):
    """The flags of `jaxscale sample`."""

    prompt: tuple[str, ...] = flag(
        (), "text to go on from; may be given several times; without one, from where a document begins", "TEXT"
    )
    prompts: str | None = flag(None, 'many: each line of a .txt, or of a .jsonl as text or as {"prompt": TEXT}', "FILE")
    num_samples: int = flag(1, "texts for each prompt", least=1)
    json: bool = flag(False, "a line of JSON for each text")
    interactive: bool = flag(False, "prompts from the terminal, one a line; Ctrl-D ends")
    serve: int | None = flag(
        None,
        f"chat: a page at http://127.0.0.1:PORT for this machine alone; default {sample_chat.PORT}, 0: any free port",
        "PORT",
        bare=str(sample_chat.PORT),
        read=port_of,
    )
    context: int | None = flag(
        None, "interactive, chat: the longest text; default what the model was trained to read", "TOKENS", least=2
    )


@command(SampleFlags, without=cluster.HostFlags)
def main(arguments: Arguments) -> int:
    """Writes what is asked for and returns the exit code."""
    flags, options = arguments.flags, arguments.options
    mesh = read_mesh(flags.mesh)
    if not flags.workdir:
        raise BadInput("--workdir must be given: the work folder of a run, or of a converted model")
    talking = check_ways(flags, options)
    texts = [] if talking else read_prompts(flags.prompt, flags.prompts)
    if flags.devices:
        jax.config.update("jax_num_cpu_devices", flags.devices)
    place = cluster.discover_process(options)
    if place is not None and talking:
        raise BadInput("--interactive and --chat are for one host; give --prompt or --prompts on several")
    facts = {name: value for name, value in options.items() if name not in cluster.FLAGS} | {"prompts": texts}
    smaller = (f"--batch={max(flags.batch // 2, 1)}", f"--num_tokens={max(flags.num_tokens // 2, 1)}")
    with cluster.joined(place, facts, options), out_of_memory_explained(lambda: ("", smaller)):
        say = print_stderr if jax.process_index() == 0 else lambda line: None
        model = open_model(
            flags.workdir,
            step=flags.step,
            what=flags.what,
            mesh=mesh,
            compute_dtype=flags.compute_dtype,
            tokenizer=flags.tokenizer,
            say=say,
        )
        tokenizer_of(model)
        talk = Talk(model, flags, say)
        if talking:
            return sample_chat.converse(talk, flags.context, prompts=flags.prompt, serve=flags.serve)
        found = write_all(talk, texts, num_samples=flags.num_samples)
        show = show_json if flags.json else show_text
        show(found, alone=len(texts) * flags.num_samples == 1, silent=jax.process_index() != 0)
    return 0


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
            put_raw(f"{head}{shown(piece.prompt)}")  # unchanged, for another program
        put_raw(shown(piece.text))
        if piece.done is not None:
            put("")
            begun = False


def show_json(pieces: Iterator[Piece], *, alone: bool, silent: bool) -> None:
    """Prints a line of JSON for each text, when it is complete."""
    shown = printable if sys.stdout.isatty() else str  # JSON leaves U+009B as it is, which begins a terminal's command
    for piece in pieces:
        if piece.done is not None and not silent:
            line = {"prompt": piece.prompt, "sample": piece.sample, **dataclasses.asdict(piece.done)}
            put_raw(f"{shown(json.dumps(line, ensure_ascii=False))}\n")


def check_ways(flags: SampleFlags, given: Collection[str]) -> bool:
    """Whether text comes from a person as it goes. Raises BadInput for ways that exclude each other."""
    serves = flags.serve is not None
    talking = flags.interactive or flags.chat or serves
    if flags.interactive and flags.chat:
        raise BadInput("--interactive goes on from text and --chat answers; give one of them")
    if flags.interactive and (flags.prompt or serves):
        raise BadInput("--interactive reads its prompts from the terminal; leave out --prompt and --serve")
    if serves and not flags.chat:
        raise BadInput("--serve is a page to chat on: give --chat too")
    for name in ("prompts", "num_samples", "batch", "json"):
        if talking and name in given:
            raise BadInput(f"--{name} is for texts that are written without anybody; leave it out")
    for name in ("system", "context"):
        if not talking and name in given:
            raise BadInput(f"--{name} is for --chat" + (" and --interactive" if name == "context" else ""))
    return talking


def read_mesh(axes: Mapping[str, str]) -> MeshConfig:
    """The mesh of --mesh.AXIS=N, or --config.mesh.AXIS=N."""
    values = dict(axes)
    if "-1" in values.values():
        values.setdefault("fsdp", "1")  # only one axis takes what is left
    return schema.from_dict(MeshConfig, values, "mesh")


def read_prompts(given: Sequence[str], file: str | None) -> list[str]:
    """Returns all prompts; one that is empty where there is none. Raises BadInput for a file that holds none."""
    if file is None:
        return list(given) or [""]
    if not paths.as_path(file).is_file():
        raise BadInput(f"--prompts={file} is not a file")
    path = os.path.expanduser(file)
    if kind_of(path) in JSON_LINES:
        found = [json_prompt(f"{file} line {number}", value) for number, value in json_records(path)]
    else:
        found = [line for _, line in text_lines(path) if line.strip()]
    if not found:
        raise BadInput(f"--prompts={file} is empty; write a prompt on each line")
    return [*given, *found]


def json_prompt(place: str, value: Any) -> str:
    """Returns the prompt of a JSON line: text, or an object with `prompt` or `text`."""
    value = value.get("prompt", value.get("text")) if isinstance(value, dict) else value
    if isinstance(value, str):
        return value
    raise BadInput(f"--prompts: {place} is neither text in JSON nor an object with a prompt")


if __name__ == "__main__":
    run_verb("sample")
