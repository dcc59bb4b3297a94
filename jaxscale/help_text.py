"""A verb's main(argv): its flags are read, and --help shows its page and settings, no wider than the terminal."""

import ast
import dataclasses
import difflib
import inspect
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence

from jaxscale import schema
from jaxscale.command_line import Arguments, flags_of, parse
from jaxscale.system.exits import BadInput, put

UNKNOWN = (120, 24)  # of what is no terminal, where COLUMNS does not say either
LEAST_WIDTH = 40
FLAG_WIDTH = 22
OWN = "run"  # the settings that are in no group
WHAT = {OWN: "what is in no group", "model": "the model: its family and sizes", "evals": "what is measured on the way"}
WHAT |= {"sources": "the raw text, by name"}
FLAG = re.compile(r"( *--.*?\S {2,})\S")  # of a line, up to what it says of the flag
HELP_WORDS = ("help", "-h", "--help", "--helpfull")


@dataclasses.dataclass(frozen=True)
class Command:
    """main(argv) of a verb, by its flags and page; see `command`."""

    work: Callable[[Arguments], int | None]
    flags: type
    page: str
    settings: type | None
    subverbs: Mapping[str, Collection[str]]
    alone: str
    instead: Mapping[str, "Command"]
    passes_on: bool
    moved: Mapping[str, str]

    def __call__(self, argv: Sequence[str]) -> int:
        """Reads argv and returns the exit code of the work, or shows the page. Raises BadInput as `parse` does."""
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
                if subverb in self.moved:
                    now = self.moved[subverb]
                    raise BadInput(f"jaxscale {verb} {subverb} has moved; run `{now}` in a checkout of jaxscale")
                raise BadInput(f"jaxscale {verb} has no verb {subverb!r}; it has {', '.join(self.subverbs)}")
        arguments = parse(words, self.flags, self.subverbs.get(subverb))
        if arguments.help:
            show_help(self.page, self.settings, arguments.topic)
            return 0
        code = self.work(dataclasses.replace(arguments, subverb=subverb, words=tuple(words), behind=behind))
        return 0 if code is None else code


def command(
    flags: type,
    more: str = "",
    *,
    settings: type | None = None,
    without: type | None = None,
    subverbs: Mapping[str, Collection[str]] = types.MappingProxyType({}),
    alone: str = "",
    instead: Mapping[str, Command] = types.MappingProxyType({}),
    passes_on: bool = False,
    moved: Mapping[str, str] = types.MappingProxyType({}),
) -> Callable[[Callable[[Arguments], int | None]], Command]:
    """Makes the main(argv) of a verb from a function of its Arguments, which returns an exit code, or None for 0.

    The docstring of the function's module is its page. Args: more: the end of the page. settings: whose groups --help
    lists too. without: flags that the page does not list one by one. subverbs: {first word: the fields of `flags` that
    may follow it}. alone: what an empty command line means. instead: flags that lead to another command. passes_on: the
    words behind -- are another program's.
    """

    def decorate(work: Callable[[Arguments], int | None]) -> Command:
        page = page_of(docstring(sys.modules[work.__module__]) + more, flags, without)
        return Command(work, flags, page, settings, subverbs, alone, instead, passes_on, moved)

    return decorate


def docstring(owner: types.ModuleType | type) -> str:
    """The docstring of a module or a class. Python drops it under -OO; then it is read from the source file."""
    if sys.flags.optimize < 2:
        return owner.__doc__ or ""
    module = owner if isinstance(owner, types.ModuleType) else sys.modules[owner.__module__]
    try:
        tree = ast.parse(inspect.getsource(module))
    except OSError:
        return "This text is missing: Python ran with -OO, and the source files are not installed."
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner.__name__)
    return ast.get_docstring(tree if owner is module else next(classes), clean=False) or ""


def page_of(text: str, flags: type, without: type | None = None) -> str:
    """The page of a verb: its module's docstring, with a line for each flag behind the examples at its beginning.

    without: flags that the text tells of.
    """
    summary, *parts = text.strip("\n").split("\n\n")
    number = next((n for n, part in enumerate(parts) if not part.startswith(" ")), len(parts))
    lines = flag_lines(flags, flags_of(without) if without else ())
    return "\n\n".join([summary, *parts[:number], *([lines] if lines else []), *parts[number:]]) + "\n"


def flag_lines(flags: type, without: Collection[str] = ()) -> str:
    """A line for each flag that is listed: what stands behind it, or its default, and what it says."""
    lines, labels = [], []
    for name, field in flags_of(flags).items():
        how = field.metadata
        if name in without or not how.get("listed", True):
            continue
        value = how.get("value") or str(field.default)
        behind = "" if field.default is False else f"[={value}]" if how.get("bare") else f"={value}"
        labels.append(f"--{name}{behind}")
        if how["help"]:
            label, labels = " ".join(labels), []
            first = f"  {label:<{FLAG_WIDTH}}  "
            lines += textwrap.wrap(
                how["help"], UNKNOWN[0], initial_indent=first, subsequent_indent=" " * len(first),
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    return "\n".join(lines)


def show_help(page: str, settings: type | None = None, topic: str = "") -> None:
    """Prints a verb's page, and of its settings the groups; with a topic one group alone, or 'all'."""
    if settings is None:
        put(fitted(page))
    elif topic == "all":
        put(fitted(f"{page}\nSettings:\n{describe_settings(settings)}"))
    elif topic:
        put(fitted(describe_settings(settings, topic)))
    else:
        put(fitted(f"{page}\nSettings:\n{list_groups(settings)}"))


def list_groups(cls: type) -> str:
    """A line for each group of settings, and how to see what is in one."""
    hints, docs = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        is_group = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        docs[field.name] = first_sentence(docstring(kind)) if is_group else ""
    groups = by_group(cls)
    width = max(map(len, groups))
    lines = [f"  {name.ljust(width)}  {len(groups[name]):3}  {WHAT.get(name) or docs[name]}" for name in groups]
    return "\n".join([*lines, "", "--help GROUP lists the settings of one, --help all lists every setting."])


def first_sentence(text: str) -> str:
    """Returns the first sentence of a docstring, at most its first line."""
    return re.split(r"[.;:](?:\s|$)|\n", text, maxsplit=1)[0]


def describe_settings(cls: type, group: str = "") -> str:
    """Every setting of `cls`, or of one group, with its type, default and meaning, and the model or kind that has it.

    Raises BadInput for a group that is not there.
    """
    groups = by_group(cls)
    if group and group not in groups:
        close = difflib.get_close_matches(group, groups, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(groups)} and all"
        raise BadInput(f"--help {group}: no group of settings has this name; {hint}")
    return "\n".join(line for name in ([group] if group else groups) for line in groups[name])


def by_group(cls: type) -> dict[str, list[str]]:
    """{group: the lines of its settings}, in the order of the fields."""
    found: dict[str, list[str]] = {OWN: []}
    for kind, name, type_, default, text in schema.describe_groups(cls):
        of = f" ({kind})" if kind else ""
        line = f"  --config.{name}={default}{of}\n      {type_}{': ' + text if text else ''}"
        found.setdefault(name.partition(".")[0] if "." in name else OWN, []).append(line)
    return found


def fitted(text: str) -> str:
    """The text no wider than the terminal: flag descriptions stay in their column, paragraphs are refilled."""
    width = max(shutil.get_terminal_size(UNKNOWN).columns, LEAST_WIDTH)
    return "\n".join(line for lines in paragraphs(text) for line in filled(lines, width))


def paragraphs(text: str) -> list[list[str]]:
    """The lines of each flag, and of each paragraph."""
    found: list[list[str]] = []
    for line in text.split("\n"):
        deep = len(line) - len(line.lstrip())
        above = found[-1][-1] if found else ""
        goes_on = above.strip() and line.strip() and not line.lstrip().startswith("--")
        of_flag = FLAG.match(found[-1][0]) if found else None
        if goes_on and (deep == of_flag.end() - 1 if of_flag else not deep and not above.startswith((" ", "--"))):
            found[-1].append(line)
        else:
            found.append([line])
    return found


def filled(lines: list[str], width: int) -> list[str]:
    """The lines unchanged where they fit, else refilled."""
    if max(map(len, lines)) <= width:
        return lines
    flag = FLAG.match(lines[0])
    deep = len(lines[0]) - len(lines[0].lstrip())
    hang = " " * (flag.end() - 1 if flag and flag.end() < width // 2 else deep + 4 * (0 < deep < 6))
    first = flag[1] if flag else " " * deep
    words = " ".join([lines[0][len(first) :], *(line.strip() for line in lines[1:])])
    if flag and len(first) >= width // 2:
        first, words = " " * deep, f"{flag[1].strip()}  {words}"
    return textwrap.wrap(
        words, width, initial_indent=first, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False
    )
