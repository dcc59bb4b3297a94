"""Builds small datasets (text, questions, conversations) from the source code of Python's standard library.

  python -m jaxscale.tools.corpus.stdlib_sets --output=sets --most_bytes=2000000

No network is needed, and the same Python version gives the same files. Sources are parsed, not imported.
"""

import ast
import dataclasses
import hashlib
import json
import pathlib
import random
import warnings
from collections.abc import Iterator, Sequence

from jaxscale.runtime.text.sources.files import stdlib_files
from jaxscale.settings.command_line import Arguments, flag
from jaxscale.settings.help_text import command
from jaxscale.system.exits import BadInput, put, run_and_exit
from jaxscale.system.paths import write_text_atomic

HOLDOUT_EVERY = 10  # on average, one module in this many is held out
WRONG = 3  # wrong answers per question
SHORTEST, LONGEST = 12, 160  # limits of an answer's length, in characters


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of this command."""

    output: str = flag(
        "",
        "output folder: text.jsonl (module source, for training), held.jsonl (held-out modules), chat.jsonl (questions "
        "on functions and classes, answered by the first line of their docstring) and questions.jsonl (questions on "
        "the held-out modules, with three wrong answers each, for `jaxscale evaluate`)",
        "FOLDER",
    )
    most_bytes: int | None = flag(
        None, "maximum total size of the sources in bytes; default: all, about 12 MB", "N", least=1
    )


@command(Flags, alone="--help")
def main(arguments: Arguments) -> None:
    """Writes the datasets."""
    if not arguments.flags.output:
        raise BadInput("--output=FOLDER is required; the datasets are written to this folder")
    folder = pathlib.Path(arguments.flags.output)
    counts = write_sets(folder, arguments.flags.most_bytes)
    put(f"{folder}: " + ", ".join(f"{count} lines in {name}" for name, count in counts.items()))


def write_sets(folder: pathlib.Path, most_bytes: int | None = None) -> dict[str, int]:
    """Writes the four files and returns {name: lines}. Raises BadInput if there are too few modules."""
    sources = read_sources(most_bytes)
    train = {name: text for name, text in sources.items() if not is_validation(name)}
    validation = {name: text for name, text in sources.items() if is_validation(name)}
    parts = (train.items(), validation.items())
    answers, asked = ([entry for item in part for entry in documented_names(*item)] for part in parts)
    if not train or not validation or len({line for _, line in asked}) <= WRONG:
        raise BadInput(f"{len(sources)} modules are too few for training and held-out data; increase --most_bytes")
    files = {
        "text.jsonl": [{"id": name, "text": text} for name, text in train.items()],
        "held.jsonl": [{"id": name, "text": text} for name, text in validation.items()],
        "chat.jsonl": [
            {"messages": [{"role": "user", "content": f"What is {name} for?"},
                          {"role": "assistant", "content": line}], "id": name}
            for name, line in answers
        ],
        "questions.jsonl": questions(asked),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        write_text_atomic(folder / name, "".join(json.dumps(record) + "\n" for record in records))
    return {name: len(records) for name, records in files.items()}


def read_sources(most_bytes: int | None) -> dict[str, str]:
    """Returns {module: source} for a pseudorandom selection of modules of at most `most_bytes` in total."""
    found, size = {}, 0
    for file in sorted(stdlib_files(), key=lambda file: digest(file.name)):
        try:
            text = pathlib.Path(file.path).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # some modules test other encodings
            continue
        text_bytes = len(text.encode())
        if most_bytes is not None and size + text_bytes > most_bytes:
            continue
        found[".".join(pathlib.PurePath(file.name).with_suffix("").parts).removesuffix(".__init__")] = text
        size += text_bytes
    return dict(sorted(found.items()))


def is_validation(name: str) -> bool:
    """Returns True for a held-out module."""
    return int(digest(f"held {name}"), 16) % HOLDOUT_EVERY == 0


def digest(name: str) -> str:
    """Returns the sha256 of a name."""
    return hashlib.sha256(name.encode()).hexdigest()


def documented_names(module: str, source: str) -> Iterator[tuple[str, str]]:
    """Yields (name, first docstring line) of public functions, classes and methods with lines of suitable length."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old sources have invalid escape sequences
        try:
            tree = ast.parse(source)
        except SyntaxError:  # some files are invalid on purpose, such as test data of lib2to3
            return
    yield from names_in_body(module, tree.body)


def names_in_body(name: str, body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yields (name, first line of the docstring) for the statements of a module or class, recursively."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        line = (ast.get_docstring(node) or "").partition("\n")[0].strip()
        if SHORTEST <= len(line) <= LONGEST and line.isascii():
            yield f"{name}.{node.name}", line
        if isinstance(node, ast.ClassDef):
            yield from names_in_body(f"{name}.{node.name}", node.body)


def questions(asked: Sequence[tuple[str, str]]) -> list[dict]:
    """Returns the records of questions.jsonl. Wrong answers are sampled from the answers to other questions."""
    lines = sorted({line for _, line in asked})
    found = []
    for name, right in asked:
        draw = random.Random(digest(name))
        choices = [right, *draw.sample([line for line in lines if line != right], WRONG)]
        draw.shuffle(choices)
        context = f"Question: What is {name} for?\nAnswer:"
        found.append({"context": context, "choices": choices, "answer": choices.index(right)})
    return found


if __name__ == "__main__":
    run_and_exit(main)
