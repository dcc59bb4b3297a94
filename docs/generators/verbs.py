"""Pages with the --help of each verb."""

from generators.words import escaped, fenced, table
from jaxscale import cli
from jaxscale.settings.help_text import fit_width

WITH_SETTINGS = ("train", "plan", "preflight", "prepare")
HEAD = """# The command line

`jaxscale VERB` and `python -m` with the verb's module run the same code.
[Exit codes](exit_codes.md) are the same for all.
`jaxscale completion bash` (or `zsh`) prints a completion script for commands, flags, files and settings.

"""


def pages() -> dict[str, str]:
    """{file: Markdown}."""
    found = {"command_line.md": overview()}
    for verb, summary in cli.VERBS.items():
        found[f"verbs/{verb}.md"] = f"# jaxscale {verb}\n\n{sentence(summary)}\n\n{body(verb)}"
    return found


def overview() -> str:
    """Returns the tables of verbs by group."""
    tables = []
    for group, verbs in cli.GROUPS.items():
        rows = [[f"[`{verb}`](verbs/{verb}.md)", escaped(summary)] for verb, summary in verbs.items()]
        tables.append(f"## {group[0].upper()}{group[1:]}\n\n{table(['verb', 'what it does'], rows)}")
    return HEAD + "\n".join(tables)


def body(verb: str) -> str:
    """The verb's page; its settings have pages of their own."""
    where = "\n[All settings](../settings.md), [those of a data recipe](../recipe_settings.md).\n"
    return fenced(fit_width(cli.command_of(verb).page, 120)) + (where if verb in WITH_SETTINGS else "")


def sentence(text: str) -> str:
    """The verb's line as a sentence."""
    return escaped(text[0].upper() + text[1:] + ".")
