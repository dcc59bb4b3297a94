"""The main(argv) of a command, which parses its flags and prints its --help page."""

import ast
import dataclasses
import difflib
import inspect
import itertools
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxscale import schema
from jaxscale.settings.command_line import Arguments, flags_of, parse
from jaxscale.system.exits import BadInput, put

DEFAULT_SIZE = (120, 24)  # size without a terminal and COLUMNS
MIN_WIDTH = 40
FLAG_WIDTH = 22
UNGROUPED = "run"  # settings outside of groups
SUMMARIES = {
    UNGROUPED: "settings outside of groups", "model": "the model: its family and sizes",
    "evals": "evaluations during training", "sources": "the raw text, by name",
}  # fmt: skip
FLAG = re.compile(r"( *--.*?\S {2,})\S")  # beginning of a line, up to the description of a flag
HELP_WORDS = ("help", "-h", "--help", "--helpfull")


@dataclasses.dataclass(frozen=True)
class Command:
    """The main(argv) of a command."""

    work: Callable[[Arguments], int | None]  # returns an exit code; None means 0
    flags: type  # dataclass of flags; may have no_config, a hint for --config, and moved, {old subcommand: command}
    page: str
    settings: type | None = None  # dataclass whose groups --help lists
    subverbs: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)  # {subcommand: its fields}
    alone: str = ""  # default word for an empty command line
    instead: Mapping[str, "Command"] = dataclasses.field(default_factory=dict)  # {flag: command that it selects}
    passes_on: bool = False  # whether words after -- are for a different program

    def __call__(self, argv: Sequence[str]) -> int:
        """Runs the command and returns its exit code, or prints the help page. Raises the errors of parse()."""
        for word, other in self.instead.items():
            if {word, f"{word}=true"} & set(argv):
                return other(argv)
        words, behind = list(argv), ()
        if self.passes_on and "--" in words:
            cut = words.index("--")
            words, behind = words[:cut], tuple(words[cut + 1 :])
        words, subverb = words or [self.alone] * bool(self.alone), ""
        if self.subverbs and words[0] in HELP_WORDS:
            words = ["--help"]
        elif self.subverbs:
            default = [self.alone] if words[0].startswith("-") and self.alone in self.subverbs else []
            subverb, *words = [*default, *words]
            if subverb not in self.subverbs:
                verb = self.work.__module__.rpartition(".")[2]
                if now := getattr(self.flags, "moved", {}).get(subverb):
                    raise BadInput(f"jaxscale {verb} {subverb} has moved; run `{now}` in a checkout of jaxscale")
                raise BadInput(f"jaxscale {verb} has no verb {subverb!r}; verbs: {', '.join(self.subverbs)}")
        arguments = parse(words, self.flags, self.subverbs.get(subverb))
        if arguments.help:
            page, topic = self.page, arguments.topic
            if self.settings is not None and topic not in ("", "all"):
                page = describe_settings(self.settings, topic)
            elif self.settings is not None:
                page += f"\nSettings:\n{describe_settings(self.settings) if topic else list_groups(self.settings)}"
            put(fit_width(page))
            return 0
        code = self.work(dataclasses.replace(arguments, subverb=subverb, words=tuple(words), behind=behind))
        return 0 if code is None else code


def command(
    flags: type, more: str = "", *, without: type | None = None, **how: Any
) -> Callable[[Callable[[Arguments], int | None]], Command]:
    """Returns a decorator that creates a Command from a function Arguments -> exit code or None.

    The help page is the docstring of the function's module, with a line for each flag after the examples. `more` is
    appended to the page. The flags of the dataclass `without` are omitted. `how`: other fields of Command.
    """

    def decorate(work: Callable[[Arguments], int | None]) -> Command:
        spec = sys.modules["__main__"].__spec__
        if work.__module__ == "__main__" and spec and spec.parent == "jaxscale.cli":
            raise SystemExit(f"{spec.name} is not a program; run: python -m jaxscale.cli VERB")
        summary, *parts = (docstring(sys.modules[work.__module__]) + more).strip("\n").split("\n\n")
        number = next((n for n, part in enumerate(parts) if not part.startswith(" ")), len(parts))
        lines = flag_lines(flags, flags_of(without) if without else ())
        page = "\n\n".join([summary, *parts[:number], *([lines] if lines else []), *parts[number:]]) + "\n"
        return Command(work, flags, page, **how)

    return decorate


def docstring(owner: types.ModuleType | type) -> str:
    """Returns the docstring of a module or class. With -OO, which removes docstrings, reads the source file."""
    if sys.flags.optimize < 2:
        return owner.__doc__ or ""
    module = owner if isinstance(owner, types.ModuleType) else sys.modules[owner.__module__]
    try:
        tree = ast.parse(inspect.getsource(module))
    except OSError:
        return "Help is not available, because Python ran with -OO and the source files are not installed."
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner.__name__)
    return ast.get_docstring(tree if owner is module else next(classes), clean=False) or ""


def flag_lines(flags: type, without: Collection[str] = ()) -> str:
    """Returns a line for each listed flag, with its value or default and its help."""
    lines, labels = [], []
    for name, field in flags_of(flags).items():
        metadata = field.metadata
        if name in without or not metadata.get("listed", True):
            continue
        value = metadata.get("value") or str(field.default)
        suffix = "" if field.default is False else f"[={value}]" if metadata.get("bare") else f"={value}"
        labels.append(f"--{name}{suffix}")
        if metadata["help"]:
            lines.append(f"  {' '.join(labels):<{FLAG_WIDTH}}  {metadata['help']}")
            labels = []
    return "\n".join(lines)


def list_groups(cls: type) -> str:
    """Returns a line for each group of settings, and a line that explains --help GROUP."""
    hints, docs = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        is_group = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        first_sentence = re.split(r"[.;:](?:\s|$)|\n", docstring(kind), maxsplit=1)[0] if is_group else ""
        docs[field.name] = first_sentence
    groups = by_group(cls)
    width = max(map(len, groups))
    lines = [f"  {name.ljust(width)}  {len(groups[name]):3}  {SUMMARIES.get(name) or docs[name]}" for name in groups]
    return "\n".join([*lines, "", "--help GROUP lists the settings of a group, --help all lists all settings."])


def describe_settings(cls: type, group: str = "") -> str:
    """Returns help on all settings or on the settings in a group. Raises BadInput for an unknown group."""
    groups = by_group(cls)
    if group and group not in groups:
        close = difflib.get_close_matches(group, groups, n=1)
        hint = f"did you mean {close[0]}?" if close else f"groups: {', '.join(groups)}, all"
        raise BadInput(f"--help {group}: unknown group of settings; {hint}")
    return "\n".join(line for name in ([group] if group else groups) for line in groups[name])


def by_group(cls: type) -> dict[str, list[str]]:
    """Returns {group: lines of its settings} in the order of fields."""
    groups: dict[str, list[str]] = {UNGROUPED: []}
    for kind, name, type_, default, text in schema.describe_groups(cls):
        owner = f" ({kind})" if kind else ""
        line = f"  --config.{name}={default}{owner}\n      {type_}{': ' + text if text else ''}"
        groups.setdefault(name.partition(".")[0] if "." in name else UNGROUPED, []).append(line)
    return groups


def fit_width(text: str, width: int = 0) -> str:
    """Wraps text to a width, by default the terminal's. The help of a flag stays in its column."""
    width = width or max(shutil.get_terminal_size(DEFAULT_SIZE).columns, MIN_WIDTH)
    fitted = []
    for is_text, lines in itertools.groupby(text.split("\n"), lambda line: bool(line) and line[0] not in " -"):
        for paragraph in [[*lines]] if is_text else ([line] for line in lines):
            fitted += wrap(paragraph, width)
    return "\n".join(fitted)


def wrap(lines: list[str], width: int) -> list[str]:
    """Returns the lines unchanged if they fit, else rewrapped."""
    if max(map(len, lines)) <= width:
        return lines
    flag = FLAG.match(lines[0])
    indent = len(lines[0]) - len(lines[0].lstrip())
    hang = " " * (flag.end() - 1 if flag and flag.end() < width // 2 else indent + 4 * (0 < indent < 6))
    first = flag[1] if flag else " " * indent
    words = " ".join([lines[0][len(first) :], *(line.strip() for line in lines[1:])])
    if flag and len(first) >= width // 2:
        first, words = " " * indent, f"{flag[1].strip()}  {words}"
    return textwrap.wrap(
        words, width, initial_indent=first, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False
    )
