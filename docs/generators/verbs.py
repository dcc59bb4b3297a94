"""What each verb's --help says, word for word."""

import contextlib
import importlib
import io

from generators.words import escaped, fenced, table
from jaxscale import cli

SETTINGS = "\nSettings:\n"
HEAD = """# The command line

`jaxscale VERB` and `python -m` with the verb's module are the same door.
[Exit codes](exit_codes.md) are the same for all.
`jaxscale completion bash` prints what completes verbs, flags, files and names of settings in a shell; zsh likewise.

"""


def pages() -> dict[str, str]:
    """{file: Markdown}."""
    found = {"command_line.md": overview()}
    for verb, (_, text) in cli.VERBS.items():
        found[f"verbs/{verb}.md"] = f"# jaxscale {verb}\n\n{sentence(text)}\n\n{body(help_of(verb))}"
    return found


def overview() -> str:
    """The tables of verbs, by when they are wanted."""
    tables = []
    for group, verbs in cli.GROUPS.items():
        rows = [[f"[`{verb}`](verbs/{verb}.md)", escaped(cli.VERBS[verb][1])] for verb in verbs]
        tables.append(f"## {group[0].upper()}{group[1:]}\n\n{table(['verb', 'what it does'], rows)}")
    return HEAD + "\n".join(tables)


def help_of(verb: str) -> str:
    """What `jaxscale VERB --help` prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            importlib.import_module(cli.VERBS[verb][0]).main(["--help"])
        except SystemExit as end:  # argparse leaves so
            assert not end.code, f"jaxscale {verb} --help ended with {end.code}"
    assert said.getvalue().strip(), f"jaxscale {verb} --help says nothing"
    return said.getvalue()


def body(text: str) -> str:
    """The help, with the list of settings, which has a page of its own, replaced by where it is."""
    own, mark, _ = text.partition(SETTINGS)
    where = "\n[All settings](../settings.md), [those of a data recipe](../recipe_settings.md).\n" if mark else ""
    return fenced(own) + where


def sentence(text: str) -> str:
    """The verb's line as a sentence."""
    return escaped(text[0].upper() + text[1:] + ".")
