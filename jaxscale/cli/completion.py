"""Prints a shell completion script for verbs, flags, config files and setting names.

  jaxscale completion bash > ~/.local/share/bash-completion/completions/jaxscale     then open a new shell
  jaxscale completion zsh > ~/.zfunc/_jaxscale      any folder of fpath that ~/.zshrc sets before it calls compinit

The script does not start Python. Print it again after an update of jaxscale. Setting names are completed up to the next
dot. After `prepare`, the settings of recipes are completed.
"""

import dataclasses
import importlib.resources
import re
from collections.abc import Iterable, Mapping

from jaxscale import __version__, cli, schema
from jaxscale.config import RunConfig
from jaxscale.settings.command_line import Arguments, flags_of
from jaxscale.settings.help_text import Command, command
from jaxscale.system.exits import put
from jaxscale.tools.corpus.prepare.config import PrepareConfig

FILES = importlib.resources.files("jaxscale.cli")


Completions = Mapping[str, tuple[list[str], str]]  # {verb: (words, kind of config: 'run', 'recipe' or '')}


def read_verbs() -> Completions:
    """Returns the completions of all verbs: subverbs and flags. Flags that take a value end with '='."""
    return {verb: read_verb(cli.command_of(verb)) for verb in cli.VERBS}


def read_verb(main: Command) -> tuple[list[str], str]:
    """Returns the completions of a verb."""
    words, settings = [*main.subverbs, "--help"], ""
    for name, field in flags_of(main.flags).items():
        if name.startswith("config."):
            settings = "recipe" if main.settings is PrepareConfig else "run"
        elif "." in name:
            continue  # the part after the dot is arbitrary
        elif field.default is False:
            words.append(f"--{name}")
        else:
            words += [f"--{name}"] * bool(field.metadata.get("bare")) + [f"--{name}="]
    return words, settings


def setting_flags(cls: type) -> list[str]:
    """Returns '--config.NAME=' for each setting, and only '--config.evals.' for settings of user-defined groups."""
    names = (name for name, *_ in schema.describe(cls))
    whole = (f"{name.partition('.NAME')[0]}." if ".NAME" in name else f"{name}=" for name in names)
    return list(dict.fromkeys(f"--config.{name}" for name in whole))


def script(shell: str, verbs: Completions) -> str:
    """Returns the script. bash splits words at '=' and ':', so completions omit the part up to the last of these."""
    head = "#compdef jaxscale\n" if shell == "zsh" else ""
    head += f"# jaxscale {__version__}, for {shell}: made by `jaxscale completion {shell}`\n"
    files = [
        FILES.joinpath(f"completion.{kind}").read_text("utf-8") for kind in ("sh", shell)
    ]  # the file for both shells, and the file for this shell
    return head + tables(verbs) + "".join(f"\n{text}" for text in files)


def tables(verbs: Completions) -> str:
    """Returns shell functions, for both shells, that print the completions at each position."""
    behind = [f"    {verb}) echo {quoted(words)} ;;" for verb, (words, _) in verbs.items()]
    kinds = [f"    {verb}) echo {settings} ;;" for verb, (_, settings) in verbs.items() if settings]
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
    """Returns the words in single quotes, without escaping. They must consist of letters, digits and _ . = -."""
    words = list(dict.fromkeys(words))
    assert all(re.fullmatch(r"[\w.=-]+", word) for word in words), words
    return f"'{' '.join(words)}'"


@dataclasses.dataclass(frozen=True)
class CompletionFlags:
    """No flags except --help."""


@command(CompletionFlags, subverbs=dict.fromkeys(("bash", "zsh"), ()), alone="--help")
def main(arguments: Arguments) -> None:
    """Prints the script of the shell."""
    put(script(arguments.subverb, read_verbs()), end="")
