"""Small real sets made of this Python's standard library, where there is no network: text, questions, conversations.

  python -m jaxscale.data.stdlib_sets --output=sets --most_bytes=2000000

The same Python gives the same files. Nothing is imported: the sources are parsed.
"""

import ast
import dataclasses
import hashlib
import json
import pathlib
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxscale.command_line import Arguments, flag
from jaxscale.help_text import command
from jaxscale.system.exits import BadInput, put, run_and_exit
from jaxscale.system.paths import write_text_atomic
from jaxscale.text.sources.files import stdlib_files

HELD_OUT = 10  # one module of this many is held out
WRONG = 3  # wrong answers beside the right one
SHORTEST, LONGEST = 12, 160  # characters of an answer: less says nothing, more is no line


class Entry(NamedTuple):
    """A function or class and what it says of itself."""

    name: str  # json.dumps
    line: str


@dataclasses.dataclass(frozen=True)
class Flags:
    """What is written."""

    output: str = flag(
        "",
        "text.jsonl (source of modules, to train on), held.jsonl (of other modules), chat.jsonl (what each function "
        "and class is for, by the first line of its own documentation), questions.jsonl (the same of the other "
        "modules, each with three wrong answers: for `jaxscale evaluate`)",
        "FOLDER",
    )
    most_bytes: int | None = flag(
        None, "of source, so that a small run has a small set; all unless given, about 12 MB", "N", least=1
    )


@command(Flags, alone="--help")
def main(arguments: Arguments) -> None:
    """Writes the sets."""
    if not arguments.flags.output:
        raise BadInput("--output must be given: the folder for the sets")
    folder = pathlib.Path(arguments.flags.output)
    counts = write_sets(folder, arguments.flags.most_bytes)
    put(f"{folder}: " + ", ".join(f"{count} lines in {name}" for name, count in counts.items()))


def write_sets(folder: pathlib.Path, most_bytes: int | None = None) -> dict[str, int]:
    """Writes the four files and says how many lines each has. Raises BadInput where there is too little source."""
    sources = read_sources(most_bytes)
    kept = {name: text for name, text in sources.items() if not is_held_out(name)}
    held = {name: text for name, text in sources.items() if is_held_out(name)}
    answers, asked = ([entry for name, text in part.items() for entry in entries(name, text)] for part in (kept, held))
    if not kept or not held or len({entry.line for entry in asked}) <= WRONG:
        raise BadInput(f"{len(sources)} modules are too few for a set to train on and one to hold out; take more bytes")
    files = {
        "text.jsonl": [{"id": name, "text": text} for name, text in kept.items()],
        "held.jsonl": [{"id": name, "text": text} for name, text in held.items()],
        "chat.jsonl": [conversation(entry) for entry in answers],
        "questions.jsonl": questions(asked),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        write_text_atomic(folder / name, "".join(json.dumps(record) + "\n" for record in records))
    return {name: len(records) for name, records in files.items()}


def read_sources(most_bytes: int | None) -> dict[str, str]:
    """{module: source} in a pseudorandom order, at most `most_bytes` of them."""
    found, size = {}, 0
    for file in sorted(stdlib_files(), key=lambda file: digest(file.name)):
        try:
            text = pathlib.Path(file.path).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # some modules show other encodings
            continue
        text_bytes = len(text.encode())
        if most_bytes is not None and size + text_bytes > most_bytes:
            continue
        found[module_name(file.name)] = text
        size += text_bytes
    return dict(sorted(found.items()))


def module_name(path: str) -> str:
    """'json.decoder' of 'json/decoder.py', 'json' of 'json/__init__.py'."""
    return ".".join(pathlib.PurePath(path).with_suffix("").parts).removesuffix(".__init__")


def is_held_out(name: str) -> bool:
    """Whether a module is kept from training."""
    return int(digest(f"held {name}"), 16) % HELD_OUT == 0


def digest(name: str) -> str:
    """A number of a name, the same everywhere."""
    return hashlib.sha256(name.encode()).hexdigest()


def entries(module: str, source: str) -> Iterator[Entry]:
    """Yields the public functions, classes and methods of a module whose documentation begins with a line of use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old sources, about escapes in their strings
        try:
            tree = ast.parse(source)
        except SyntaxError:  # made to be wrong, such as lib2to3's own data
            return
    yield from entries_of(module, tree.body)


def entries_of(name: str, body: Sequence[ast.stmt]) -> Iterator[Entry]:
    """Yields those of a module's statements, or of a class's."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        line = (ast.get_docstring(node) or "").partition("\n")[0].strip()
        if SHORTEST <= len(line) <= LONGEST and line.isascii():
            yield Entry(f"{name}.{node.name}", line)
        if isinstance(node, ast.ClassDef):
            yield from entries_of(f"{name}.{node.name}", node.body)


def question(entry: Entry) -> str:
    """What is asked about an entry."""
    return f"What is {entry.name} for?"


def conversation(entry: Entry) -> dict:
    """A line of chat.jsonl."""
    return {
        "messages": [{"role": "user", "content": question(entry)}, {"role": "assistant", "content": entry.line}],
        "id": entry.name,
    }


def questions(asked: Sequence[Entry]) -> list[dict]:
    """The lines of questions.jsonl: wrong answers are those of other entries, in an order drawn for each."""
    lines = sorted({entry.line for entry in asked})
    found = []
    for entry in asked:
        draw = random.Random(digest(entry.name))
        choices = [entry.line, *draw.sample([line for line in lines if line != entry.line], WRONG)]
        draw.shuffle(choices)
        found.append(
            {
                "context": f"Question: {question(entry)}\nAnswer:",
                "choices": choices,
                "answer": choices.index(entry.line),
            }
        )
    return found


if __name__ == "__main__":
    run_and_exit(main)
