"""What --help prints: a verb's own page, its settings by group, and all of it no wider than the terminal."""

import dataclasses
import difflib
import re
import shutil
import textwrap
import typing
from collections.abc import Collection

from jaxscale import schema
from jaxscale.command_line import flags_of
from jaxscale.system.exits import BadInput, put

UNKNOWN = (120, 24)  # of what is no terminal, where COLUMNS does not say either
LEAST_WIDTH = 40
FLAG_WIDTH = 22
OWN = "run"  # the settings that are in no group
WHAT = {OWN: "what is in no group", "model": "the model: its family and sizes", "evals": "what is measured on the way"}
WHAT |= {"sources": "the raw text, by name"}
FLAG = re.compile(r"( *--.*?\S {2,})\S")  # of a line, up to what it says of the flag


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
        docs[field.name] = first_sentence(kind.__doc__) if dataclasses.is_dataclass(kind) else ""
    groups = by_group(cls)
    width = max(map(len, groups))
    lines = [f"  {name.ljust(width)}  {len(groups[name]):3}  {WHAT.get(name) or docs[name]}" for name in groups]
    return "\n".join([*lines, "", "--help GROUP lists the settings of one, --help all lists every setting."])


def first_sentence(text: str) -> str:
    """'AdamW with warmup and cosine unless told otherwise' of a docstring."""
    return re.match(r".*?(?=[.;:](?:\s|$)|$)", text)[0]


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
    """The text no wider than the terminal: what a flag does stays in its column, paragraphs are filled anew."""
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
    """The lines as they are where they fit, else filled anew."""
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
