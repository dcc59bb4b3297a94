"""Builds a checked RunConfig from a config file, which is executed, and a command line."""

import contextlib
import difflib
import importlib.util
import json
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jaxscale
from jaxscale import schema
from jaxscale.config import RunConfig
from jaxscale.settings.command_line import MAX_DIGITS, Arguments
from jaxscale.settings.renamed import current_name, with_current_names
from jaxscale.settings.unread import as_read, refuse_unread
from jaxscale.system.exits import BadInput
from jaxscale.system.redact import is_secret, redacted

MAX_NAME = 128  # maximum characters of a run's name
FLAG_SETTINGS = (
    ("skip-data", "data.skip_batches"), ("init_from", "init.from_path"), ("budget_dollars", "limit.dollars"),
    ("deadline", "limit.deadline"),
)  # fmt: skip
SHIPPED = pathlib.Path(jaxscale.__file__).with_name("configs")  # in a checkout, a symbolic link to configs/
SKIPPED = re.compile(rf"([0-9]{{1,{MAX_DIGITS}}}):([0-9]{{1,{MAX_DIGITS}}})")


def load_config(
    path: str, overrides: Mapping[str, Any] | None = None, recorded: Callable[[], Mapping[str, Any]] = dict
) -> RunConfig:
    """Returns the RunConfig that get_config() in a config file defines, with overrides.

    path: a local file, which is executed, or the name of a config in the package, such as 'quickstart'. 'auto:depth=8'
    calls get_config('depth=8'). recorded: returns the settings of the run to resume. Settings without an effect are
    rejected, unless this run has recorded them.
    """
    overrides = current_overrides(overrides or {})
    values = with_current_names(config_values(path), RunConfig.renamed)
    cfg = schema.from_dict(RunConfig, schema.merge(values, overrides))
    check_no_secrets(schema.flatten(schema.to_dict(cfg)))
    refuse_unread(cfg, overrides, lambda: with_current_names(recorded(), RunConfig.renamed))
    return cfg


def current_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns overrides of a RunConfig with current names of settings."""
    return {current_name(name, RunConfig.renamed): value for name, value in overrides.items()}


def file_text(cfg: RunConfig) -> str:
    """Returns the text of a config file that defines `cfg`, without settings that are not read."""
    return f"import json\n\n\ndef get_config():\n    return json.loads({json.dumps(as_read(cfg))!r})\n"


def check_no_secrets(settings: dict[str, Any]) -> None:
    """Raises BadInput if a setting contains a secret, because checkpoints and the command line would show it."""
    cleaned = redacted([[value, name] for name, value in settings.items()])  # reads the environment once
    for (name, value), clean in zip(settings.items(), cleaned):
        fix = "pass secrets in environment variables"
        # eos_token etc. are words of a vocabulary. An access token is recognized by its format.
        if isinstance(value, str) and not name.endswith("_token") and is_secret(name.rpartition(".")[2], value):
            raise BadInput(f"{name} contains a secret, according to its name; {fix}")
        if clean != [value, name]:
            kinds = "a secret, or the value of an environment variable with the name of a secret"
            raise BadInput(f"{name}={value!r} contains {kinds}; {fix}")


def with_flags(arguments: Arguments) -> dict[str, Any]:
    """Returns the overrides and the settings of flags such as --skip-data. Raises BadInput for a conflict."""
    overrides: dict[str, Any] = dict(arguments.overrides)
    for flag, name in FLAG_SETTINGS:
        if text := arguments.options.get(flag):
            if name in overrides:
                raise BadInput(f"--{flag}={text} and --config.{name} set the same setting; use only one of them")
            overrides[name] = skipped_batches(text) if flag == "skip-data" else text
    return overrides


def skipped_batches(text: str) -> tuple[tuple[int, int], ...]:
    """Parses the ranges in --skip-data."""
    found = []
    for part in text.split(","):
        if (ends := SKIPPED.fullmatch(part.strip())) is None:
            raise BadInput(f"--skip-data={text} must be ranges FROM:TO of batches (TO is excluded), such as 1200:1204")
        found.append((int(ends[1]), int(ends[2])))
    return tuple(found)


def config_values(path: str) -> dict[str, Any]:
    """Returns the values of the file's get_config() as nested dicts."""
    if "://" in path:
        raise BadInput(f"--config={path} must be a local file, because it is executed; copy it to this machine")
    name, argument = split_argument(path)
    file = find_config(name)
    spec = importlib.util.spec_from_file_location(f"config_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise BadInput(f"--config={name} must be a Python file with the suffix .py")
    module = importlib.util.module_from_spec(spec)
    try:
        with neighbours_first(file.parent):
            spec.loader.exec_module(module)
            if not hasattr(module, "get_config"):
                raise BadInput("the file has no function get_config()")
            values = module.get_config(argument) if argument else module.get_config()
        values = values.to_dict() if hasattr(values, "to_dict") else values
        if not isinstance(values, dict):
            raise BadInput(f"get_config() must return a ConfigDict or a dict, but returned {values!r}")
    except (Exception, SystemExit) as error:  # report any error of user code in one line
        kind = "" if type(error) in (ValueError, BadInput) else f"{type(error).__name__}: "
        message = " ".join(str(error).split())
        raise BadInput(f"--config={path} cannot be read: {kind}{message}{line_of(error, str(file))}") from None
    return values


def find_config(name: str) -> pathlib.Path:
    """Returns the path of a config file, given its path or its name in the package. Raises BadInput if none exists."""
    if not name:
        raise BadInput("--config must be given, such as --config=quickstart")
    file, names = pathlib.Path(name), shipped_names()
    if file.is_file():
        return file
    if name in names:
        return SHIPPED / f"{name}.py"
    close = difflib.get_close_matches(name, [*map(str, file.parent.glob("*.py")), *names], n=1)
    close = close or difflib.get_close_matches(file.stem, names, n=1)
    raise BadInput(f"--config={name} is not a file or a config name{f'; did you mean {close[0]}?' if close else ''}")


def shipped_names() -> list[str]:
    """Returns the names of the configs in the package, such as '7b' and 'data/web'."""
    return sorted(str(file.relative_to(SHIPPED).with_suffix("")) for file in SHIPPED.glob("**/*.py"))


def split_argument(path: str) -> tuple[str, str]:
    """Splits 'auto:depth=8' or 'configs/auto.py:depth=8' into (name or file, argument)."""
    name, mark, argument = path.partition(".py:")
    if mark:
        return f"{name}.py", argument
    name, _, argument = path.partition(":")
    return (name, argument) if name in shipped_names() else (path, "")  # other colons are part of the file name


@contextlib.contextmanager
def neighbours_first(folder: pathlib.Path) -> Iterator[None]:
    """Lets a config import modules from its folder, as a script can. Restores sys.path and sys.modules."""
    path, known = str(folder.resolve()), set(sys.modules)
    sys.path.insert(0, path)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # removed by the config itself
            sys.path.remove(path)
        for name in set(sys.modules) - known:  # a config in a different folder may import the same name
            file = getattr(sys.modules[name], "__file__", None)
            if file and os.path.dirname(file) == path:  # excludes subfolders, which may contain an environment
                del sys.modules[name]


def line_of(error: BaseException, file: str) -> str:
    """Returns ' (line 7)', the last line of `file` in the traceback, or '' if the traceback does not contain it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1]})" if lines else ""


def config_name(path: str) -> str:
    """Returns a short name for the work folder: 'configs/auto.py:depth=8' -> 'auto-depth8'."""
    name, argument = split_argument(path)
    stem = pathlib.Path(name).stem
    name = f"{stem}-{argument.replace('=', '')}" if argument else stem
    plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)  # without path separators
    return plain[:MAX_NAME].lstrip(".") or "run"
