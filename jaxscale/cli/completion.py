"""Prints a shell completion script for verbs, flags, config files and names of settings.

  jaxscale completion bash > ~/.local/share/bash-completion/completions/jaxscale     then open a new shell
  jaxscale completion zsh > ~/.zfunc/_jaxscale      any folder of fpath that ~/.zshrc sets before it calls compinit

The script does not start Python. Print it again after an update of jaxscale. Names of settings are completed up to the
next dot; `prepare` completes those of recipes.
"""

import dataclasses
import importlib.resources
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxscale import __version__, cli, schema
from jaxscale.cli import run_verb
from jaxscale.config import RunConfig
from jaxscale.settings.command_line import Arguments, flags_of
from jaxscale.settings.help_text import Command, command
from jaxscale.system.exits import put
from jaxscale.tools.corpus.prepare.config import PrepareConfig

FILES = importlib.resources.files("jaxscale.cli")


class Verb(NamedTuple):
    """Completions of one verb."""

    subverbs: tuple[str, ...]
    flags: tuple[str, ...]  # with '=' if they take a value
    settings: str  # the config of --config.NAME: 'run', 'recipe' or ''


def read_verbs() -> dict[str, Verb]:
    """Returns the completions of all verbs."""
    return {verb: read_verb(cli.command_of(verb)) for verb in cli.VERBS}


def read_verb(main: Command) -> Verb:
    """Returns the subverbs and flags of a verb."""
    flags, settings = ["--help"], ""
    for name, field in flags_of(main.flags).items():
        if name.startswith("config."):
            settings = "recipe" if main.settings is PrepareConfig else "run"
        elif "." in name:
            continue  # any name may follow
        elif field.default is False:
            flags.append(f"--{name}")
        else:
            flags += [f"--{name}"] * bool(field.metadata.get("bare")) + [f"--{name}="]
    return Verb(tuple(main.subverbs), tuple(flags), settings)


def setting_flags(cls: type) -> list[str]:
    """Returns '--config.NAME=' of each setting, and '--config.evals.' for user-named groups as in evals.NAME.files."""
    names = (name for name, *_ in schema.describe(cls))
    whole = (f"{name.partition('.NAME')[0]}." if ".NAME" in name else f"{name}=" for name in names)
    return list(dict.fromkeys(f"--config.{name}" for name in whole))


def bash(verbs: Mapping[str, Verb]) -> str:
    """Returns the script for bash, which splits words at '=' and ':' and expects the part after the last one."""
    return (
        f"# jaxscale {__version__}, for bash: made by `jaxscale completion bash`\n"
        + tables(verbs)
        + functions_of("bash")
    )


def zsh(verbs: Mapping[str, Verb]) -> str:
    """Returns the script for zsh."""
    head = f"#compdef jaxscale\n# jaxscale {__version__}, for zsh: made by `jaxscale completion zsh`\n"
    return head + tables(verbs) + functions_of("zsh")


def functions_of(shell: str) -> str:
    """Returns the completion functions: those that both shells share, and the shell's own."""
    return "".join(f"\n{FILES.joinpath(f'completion.{kind}').read_text('utf-8')}" for kind in ("sh", shell))


def tables(verbs: Mapping[str, Verb]) -> str:
    """Returns shell functions that print the completions of each position, for both shells."""
    behind = [f"    {verb}) echo {quoted([*one.subverbs, *one.flags])} ;;" for verb, one in verbs.items()]
    kinds = [f"    {verb}) echo {one.settings} ;;" for verb, one in verbs.items() if one.settings]
    settings = [
        f"    {kind}) echo {quoted(setting_flags(cls))} ;;"
        for kind, cls in (("run", RunConfig), ("recipe", PrepareConfig))
    ]
    functions = {"behind": behind, "kind": kinds, "settings": settings}
    return f"_jaxscale_verbs() {{ echo {quoted([*verbs, '--help'])}; }}\n" + "".join(
        f'_jaxscale_{name}() {{\n  case "$1" in\n{chr(10).join(lines)}\n  esac\n}}\n'
        for name, lines in functions.items()
    )


def quoted(words: Iterable[str]) -> str:
    """Returns the words in single quotes. They need no escaping."""
    words = list(dict.fromkeys(words))
    assert all(re.fullmatch(r"[\w.=-]+", word) for word in words), words
    return f"'{' '.join(words)}'"


SHELLS = {"bash": bash, "zsh": zsh}


@dataclasses.dataclass(frozen=True)
class CompletionFlags:
    """No flags but --help."""


@command(CompletionFlags, subverbs=dict.fromkeys(SHELLS, ()), alone="--help")
def main(arguments: Arguments) -> None:
    """Prints the script of the shell."""
    put(SHELLS[arguments.subverb](read_verbs()), end="")


if __name__ == "__main__":
    run_verb("completion")
