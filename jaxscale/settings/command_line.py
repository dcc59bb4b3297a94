"""Flags of a command (`jaxscale VERB`), declared in a dataclass, and the parser of its command line."""

import contextlib
import dataclasses
import difflib
import math
import pathlib
import re
import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from jaxscale import schema
from jaxscale.system.exits import BadInput

HIGHEST_PORT = 65_535
GROUPED = re.compile(r"\d{1,3}(,\d{3})+(\.\d*)?")  # a number with thousands separated
MAX_DIGITS = 18  # maximum digits of a whole number; Python refuses to parse more than 4,300


def flag(
    default: Any = None,
    help: str | None = "",
    value: str = "",
    *,
    least: int | None = None,
    read: Callable[[str, str], Any] | None = None,
    bare: str = "",
    name: str = "",
    keys: Collection[str] = (),
) -> Any:
    """Returns a dataclass field for a flag.

    The type determines the syntax: bool has no value, tuple[str, ...] can be repeated, and dict[str, str] is written
    --NAME.KEY=VALUE, where KEY is one of `keys`. help: '' shares the help line of the next flag; None hides the flag.
    value: text after '=' in --help, by default the default value. least: minimum of an integer. read: parser
    (name, text) -> value. bare: value if the flag is given without '='.
    """
    field = schema.setting(default, help or "")
    more = dict(value=value, least=least, read=read, bare=bare, name=name, keys=keys, listed=help is not None)
    field.metadata = types.MappingProxyType({**field.metadata, **more})
    return field


def flag_name(field: dataclasses.Field) -> str:
    """Returns the flag of a field, without '--'."""
    return field.metadata.get("name") or field.name


def flags_of(cls: type, only: Collection[str] | None = None) -> dict[str, dataclasses.Field]:
    """Returns {name: field} of the flags of a command. Flags of base classes come last."""
    names = [name for kind in cls.__mro__ for name in kind.__dict__.get("__annotations__", ())]
    fields = {field.name: field for field in dataclasses.fields(cls)}
    return {flag_name(fields[name]): fields[name] for name in names if only is None or name in only}


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A parsed command line."""

    config: str  # path of the config file, with ':argument' if there is an argument
    overrides: dict[str, str]  # {dotted name: text}
    options: dict[str, str]  # {flag: text} of the given flags, with the last value of a repeated flag
    flags: Any = None  # instance of the command's dataclass
    help: bool = False
    topic: str = ""  # word after --help
    subverb: str = ""  # first word, for commands with subcommands
    words: tuple[str, ...] = ()  # unparsed words
    behind: tuple[str, ...] = ()  # words after --, for a different program


def parse(argv: Sequence[str], cls: type, only: Collection[str] | None = None) -> Arguments:
    """Parses the flags of `cls`, written as --name=value or --name value. '-' and '_' are equivalent in names.

    `only` lists the fields of `cls` that are accepted. Raises BadInput for an invalid value or an unknown flag.
    """
    known, given, remaining = flags_of(cls, only), {}, list(argv)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word in ("-h", "--help", "--helpfull"):
            topic = remaining[0] if remaining and not remaining[0].startswith("-") else ""
            return make_arguments(given, None, help=True, topic=topic)
        name, field = known_flag(name, known) if word.startswith("--") else (name, None)
        if field is None:
            raise BadInput(f"{word} is not a flag of this command{hint_for(word, cls, only)}")
        if kind_of(cls, field) is bool:
            if value not in (("true", "false") if equals else ("",)):
                raise BadInput(f"--{name}={value} must be true or false; --{name} alone means true")
            value = value or "true"
        elif field.metadata.get("bare") and not equals:
            value = field.metadata["bare"]
        elif not equals:
            value, equals = (remaining.pop(0), "=") if remaining else ("", "")
            if value.startswith("--"):
                raise BadInput(f"--{name} needs a value, but {value} follows; write --{name}=VALUE (true for a switch)")
        if not value and not (equals and name.startswith("config.")):  # a setting may be set to an empty text
            raise BadInput(f"--{name} needs a value: --{name}={field.metadata.get('value') or 'VALUE'}")
        given.setdefault(name, []).append(value)
    return make_arguments(given, convert_flags(cls, known, given))


def make_arguments(given: dict[str, list[str]], flags: Any, **fields: Any) -> Arguments:
    """Returns Arguments, with the texts of the flags divided into config path, overrides and options."""
    last = {name: texts[-1] for name, texts in given.items()}
    overrides = {name.removeprefix("config."): text for name, text in last.items() if name.startswith("config.")}
    options = {name: text for name, text in last.items() if name != "config" and not name.startswith("config.")}
    return Arguments(last.get("config", ""), overrides, options, flags, **fields)


def known_flag(name: str, known: dict[str, dataclasses.Field]) -> tuple[str, Any]:
    """Returns (declared name, field), with None for an unknown flag. --config.mesh.AXIS selects --mesh.AXIS."""
    for declared, field in known.items():
        family, dot, _ = declared.partition(".")
        plain = name.removeprefix("config.") if dot and family != "config" else name
        keys = field.metadata.get("keys")
        if dot and plain.startswith(f"{family}.") and (not keys or plain.removeprefix(f"{family}.") in keys):
            return plain, field
        if not dot and declared.replace("-", "_") == name.replace("-", "_"):
            return declared, field
    return name, None


def hint_for(word: str, cls: type, only: Collection[str] | None) -> str:
    """Returns a suggestion for the error message about a word that is not a flag."""
    name, known = word.removeprefix("--").partition("=")[0], flags_of(cls, only)
    settings = "; settings are written --config.NAME=VALUE" if "config.NAME" in known else ""
    if not word.startswith("--"):
        return f"; write --{word}" if "=" in word and known_flag(name, known)[1] else settings
    if name == "config" or name.startswith("config."):
        return f"; {cls.no_config}" if hasattr(cls, "no_config") else ""
    if only is not None and known_flag(name, flags_of(cls))[1]:
        return "; other verbs of this command accept this flag"
    if "." in name:
        return settings
    if close := difflib.get_close_matches(name, known, n=1):
        return f"; did you mean --{close[0]}?"
    listed = sorted(known, key=lambda name: not name.startswith("config"))
    return f"; flags: {', '.join(f'--{name}' for name in listed)}" if listed else "; this command has no flags"


def kind_of(cls: type, field: dataclasses.Field) -> Any:
    """Returns the type of a flag's value, without None."""
    return next(kind for kind in schema.options(typing.get_type_hints(cls)[field.name]) if kind is not type(None))


def convert_flags(cls: type, known: dict[str, dataclasses.Field], given: dict[str, list[str]]) -> Any:
    """Returns the command's dataclass with the given flags. Raises BadInput for a value of the wrong type."""
    values = {}
    for name, field in known.items():
        kind, family = kind_of(cls, field), name.partition(".")[0]
        if typing.get_origin(kind) is dict:
            values[field.name] = {
                key.partition(".")[2]: texts[-1] for key, texts in given.items() if key.startswith(f"{family}.")
            }
        elif name in given:
            texts = given[name]
            several = typing.get_origin(kind) is tuple and not field.metadata.get("read")
            values[field.name] = tuple(texts) if several else parse_value(kind, field, texts[-1])
    return cls(**values)


def parse_value(kind: Any, field: dataclasses.Field, text: str) -> Any:
    """Parses the value of a flag."""
    name, metadata = flag_name(field), field.metadata
    if metadata.get("read"):
        return metadata["read"](name, text)
    if kind is int and metadata.get("least") is not None:
        return whole_number(f"--{name}", text, metadata["least"])
    if typing.get_origin(kind) is Literal and text not in (choices := typing.get_args(kind)):
        raise BadInput(f"--{name}={text} must be {', '.join(choices[:-1])} or {choices[-1]}")
    return text if kind is str else schema.convert(text, kind, f"--{name}")


def whole_number(name: str, text: str, least: int) -> int:
    """Parses an integer. Raises BadInput with `name` if the text is not an integer or is below `least`."""
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS) or int(text) < least:
        raise BadInput(f"{name}={text} must be a whole number, {least} or more")
    return int(text)


def number(name: str, text: str, holds: Callable[[float], bool], rule: str) -> float:
    """Parses a finite number such as '1e6', '1,000,000' or '$5'. Raises BadInput if holds(number) is False."""
    plain = text.removeprefix("$")
    plain = plain.replace(",", "") if GROUPED.fullmatch(plain) else plain  # '4,20' is rejected
    with contextlib.suppress(ValueError):
        if math.isfinite(found := float(plain)) and holds(found):
            return found
    raise BadInput(f"{name}={text} must be {rule}")


def number_flag(holds: Callable[[float], bool], rule: str) -> Callable[[str, str], float]:
    """Returns a parser for flag(read=...) that accepts numbers for which holds(number) is True."""
    return lambda name, text: number(f"--{name}", text, holds, rule)


positive = number_flag(lambda found: found > 0, "a number above 0")


def file_to_write(name: str, text: str) -> pathlib.Path:
    """Returns the path of an output file. Raises BadInput if it is a folder, or if its folder does not exist."""
    file = pathlib.Path(text).expanduser()
    if file.is_dir() or not file.parent.is_dir():
        raise BadInput(f"--{name}={file} must be a file in an existing folder")
    return file


def port_of(name: str, text: str) -> int:
    """Parses a port number; 0 means any free port. Raises BadInput if the text is not a port number."""
    port = whole_number(f"--{name}", text, 0)
    if port > HIGHEST_PORT:
        raise BadInput(f"--{name}={text} must be a port from 0 (any free port) to {HIGHEST_PORT}")
    return port
