"""A command line taken apart, and the config file that it names; nothing here knows what the settings are."""

import contextlib
import dataclasses
import difflib
import importlib.util
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from jaxscale.system.exits import BadInput

LONGEST_NAME = 128  # characters of a run's name
MOST_DIGITS = 18  # of a whole number; Python itself refuses to read more than 4,300


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A command line taken apart."""

    config: str  # path, with ':argument' where the file takes one
    overrides: dict[str, str]  # dotted name to text
    options: dict[str, str]  # the command's own flags
    help: bool = False
    topic: str = ""  # what is asked of it: the word behind --help


def parse_arguments(argv: Sequence[str], options: Sequence[str]) -> Arguments:
    """--config=FILE, --config.NAME=VALUE, and `options` of the command's own; each as --name=value or --name value.

    Raises BadInput for anything else, with the nearest flag there is.
    """
    config, overrides, found, rest = "", {}, {}, list(argv)
    while rest:
        flag = rest.pop(0)
        if flag in ("-h", "--help", "--helpfull"):
            topic = rest[0] if rest and not rest[0].startswith("-") else ""
            return Arguments(config, overrides, found, help=True, topic=topic)
        name, equals, value = flag.removeprefix("--").partition("=")
        known = name == "config" or name.startswith("config.") or name in options
        if not flag.startswith("--") or not known:
            close = difflib.get_close_matches(name, ["config", *options], n=1)
            hint = (
                f"; did you mean --{close[0]}?"
                if close
                else f"; flags are --config, --config.NAME, {flag_list(options)}"
            )
            if not flag.startswith("--") or "." in name:
                hint = "; settings are written --config.NAME=VALUE"
            raise BadInput(f"{flag} is not a flag of this command{hint}")
        if not equals:
            if not rest:
                raise BadInput(f"--{name} needs a value: --{name}=VALUE")
            value = rest.pop(0)
            if value.startswith("--"):
                raise BadInput(f"--{name} needs a value: --{name}=VALUE (=true for a switch), not {value}")
        if not value and (name == "config" or name in options):
            raise BadInput(f"--{name} needs a value: --{name}=VALUE")
        if name == "config":
            config = value
        elif name in options:
            found[name] = value
        else:
            overrides[name.removeprefix("config.")] = value
    return Arguments(config, overrides, found)


def take_switches(argv: Sequence[str], options: Sequence[str], switches: Sequence[str]) -> tuple[list[str], set[str]]:
    """(the other arguments, the switches that are on). Names may be written with '-' for '_'."""
    rest, found = [], set()
    for flag in argv:
        name, equals, value = flag.removeprefix("--").partition("=")
        own = name.replace("-", "_")
        if not flag.startswith("--") or own not in (*options, *switches):
            rest.append(flag)
        elif own in options:
            rest.append(f"--{own}{equals}{value}")
        elif value not in (("true", "false") if equals else ("",)):
            raise BadInput(f"--{own}={value} must be true or false; --{own} alone is true")
        elif value != "false":
            found.add(own)
    return rest, found


def whole_number(name: str, text: str, least: int) -> int:
    """The value of --name as a number. Raises BadInput if it is none, or too small."""
    if not (text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS) or int(text) < least:
        raise BadInput(f"--{name}={text} must be a whole number, {least} or more")
    return int(text)


def flag_list(options: Sequence[str]) -> str:
    """'--workdir, --steps'."""
    return ", ".join(f"--{name}" for name in options) or "none other"


def config_values(path: str) -> dict[str, Any]:
    """What the file's get_config returns, as nested plain dicts."""
    if "://" in path:
        raise BadInput(f"--config={path} must be a local file: a config is code, and code is not run from a bucket")
    name, argument = split_argument(path)
    file = pathlib.Path(name)
    if not name:
        raise BadInput("--config must be given, such as --config=configs/quickstart.py")
    if not file.is_file():
        near = sorted(str(p) for p in file.parent.glob("*.py")) if file.parent.is_dir() else []
        close = difflib.get_close_matches(str(file), near, n=1)
        raise BadInput(f"--config={name} is no file{f'; did you mean {close[0]}?' if close else ''}")
    spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    try:
        with neighbours_first(file.parent):
            spec.loader.exec_module(module)
            if not hasattr(module, "get_config"):
                raise BadInput("it has no get_config()")
            values = module.get_config(argument) if argument else module.get_config()
        values = values.to_dict() if hasattr(values, "to_dict") else values
        if not isinstance(values, dict):
            raise BadInput(f"get_config() must return a ConfigDict or a dict, and returned {values!r}")
    except Exception as error:  # a config is anybody's code: whatever it raises is told in one line
        kind = "" if type(error) in (ValueError, BadInput) else f"{type(error).__name__}: "
        told = " ".join(str(error).split())
        raise BadInput(f"--config={path} cannot be read: {kind}{told}{line_of(error, str(file))}") from None
    return values


def split_argument(path: str) -> tuple[str, str]:
    """'configs/auto.py:depth=8' as (file, argument). A colon elsewhere belongs to the file's name."""
    name, mark, argument = path.partition(".py:")
    return (f"{name}.py", argument) if mark else (path, "")


@contextlib.contextmanager
def neighbours_first(folder: pathlib.Path) -> Iterator[None]:
    """Lets a config import those beside it, as a script could, wherever the command runs. Leaves nothing behind."""
    place, known = str(folder.resolve()), set(sys.modules)
    sys.path.insert(0, place)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # taken out by the config itself
            sys.path.remove(place)
        for name in set(sys.modules) - known:  # another folder's config may have a neighbour of the same name
            file = getattr(sys.modules[name], "__file__", None)
            if file and os.path.dirname(file) == place:  # not what lies deeper: that may be an environment
                del sys.modules[name]


def line_of(error: BaseException, file: str) -> str:
    """' (line 7)': the last line of `file` that the error went through; '' if it went through none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1]})" if lines else ""


def config_name(path: str) -> str:
    """A short name for the work folder: 'configs/auto.py:depth=8' -> 'auto-depth8'."""
    name, argument = split_argument(path)
    stem = pathlib.Path(name).stem
    name = f"{stem}-{argument.replace('=', '')}" if argument else stem
    plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)  # a folder's name, and never a way into another
    return plain[:LONGEST_NAME].lstrip(".") or "run"
