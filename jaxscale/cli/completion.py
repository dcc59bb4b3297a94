"""Prints what completes this command in a shell: verbs, flags, config files and the names of settings.

  jaxscale completion bash > ~/.local/share/bash-completion/completions/jaxscale     and open a new shell
  jaxscale completion zsh > ~/.zfunc/_jaxscale      any folder of fpath, which ~/.zshrc names before it calls compinit

What is printed is a script that asks nobody: completing is instant. After an update of jaxscale, print it again. The
names of settings are completed up to the next dot, those of `prepare` from its recipes.
"""

import dataclasses
import importlib.resources
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxscale import __version__, cli, schema
from jaxscale.cli import run_verb
from jaxscale.command_line import Arguments, flags_of
from jaxscale.config import RunConfig
from jaxscale.corpus.prepare.config import PrepareConfig
from jaxscale.help_text import Command, command
from jaxscale.system.exits import put

FILES = importlib.resources.files("jaxscale.cli")


class Verb(NamedTuple):
    """What may stand behind a verb."""

    subverbs: tuple[str, ...]
    flags: tuple[str, ...]  # with '=' where a value follows
    settings: str  # whose --config.NAME it takes: 'run', 'recipe' or ''


def read_verbs() -> dict[str, Verb]:
    """All verbs, by the flags that they declare."""
    return {verb: read_verb(cli.command_of(verb)) for verb in cli.VERBS}


def read_verb(main: Command) -> Verb:
    """The verbs and flags of a verb."""
    flags, settings = ["--help"], ""
    for name, field in flags_of(main.flags).items():
        if name.startswith("config."):
            settings = "recipe" if main.settings is PrepareConfig else "run"
        elif "." in name:
            continue  # a family of names
        elif field.default is False:
            flags.append(f"--{name}")
        else:
            flags += [f"--{name}"] * bool(field.metadata.get("bare")) + [f"--{name}="]
    return Verb(tuple(main.subverbs), tuple(flags), settings)


def setting_flags(cls: type) -> list[str]:
    """'--config.NAME=' of each setting; of those that a person names, as in evals.NAME.files, '--config.evals.'."""
    names = (name for name, *_ in schema.describe(cls))
    whole = (f"{name.partition('.NAME')[0]}." if ".NAME" in name else f"{name}=" for name in names)
    return list(dict.fromkeys(f"--config.{name}" for name in whole))


def bash(verbs: Mapping[str, Verb]) -> str:
    """The script for bash, which splits words at '=' and ':' and wants what is behind the last of them."""
    return (
        f"# jaxscale {__version__}, for bash: made by `jaxscale completion bash`\n" + tables(verbs) + behaviour("bash")
    )


def zsh(verbs: Mapping[str, Verb]) -> str:
    """The script for zsh."""
    head = f"#compdef jaxscale\n# jaxscale {__version__}, for zsh: made by `jaxscale completion zsh`\n"
    return head + tables(verbs) + behaviour("zsh")


def behaviour(shell: str) -> str:
    """What the shell does with the words: a function of both shells, and its own."""
    return "".join(f"\n{FILES.joinpath(f'completion.{kind}').read_text('utf-8')}" for kind in ("sh", shell))


def tables(verbs: Mapping[str, Verb]) -> str:
    """The words of each place as functions that print them, which both shells read."""
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
    """Words for a shell: names of ours, which hold nothing that it would change."""
    words = list(dict.fromkeys(words))
    assert all(re.fullmatch(r"[\w.=-]+", word) for word in words), words
    return f"'{' '.join(words)}'"


SHELLS = {"bash": bash, "zsh": zsh}


@dataclasses.dataclass(frozen=True)
class CompletionFlags:
    """None but --help."""


@command(CompletionFlags, subverbs=dict.fromkeys(SHELLS, ()), alone="--help")
def main(arguments: Arguments) -> None:
    """Prints the script of a shell."""
    put(SHELLS[arguments.subverb](read_verbs()), end="")


if __name__ == "__main__":
    run_verb("completion")
