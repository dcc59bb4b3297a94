"""Every setting of a run and of a data recipe, from the dataclasses that read them."""

import dataclasses

from generators.words import code, escaped, table
from jaxscale import schema
from jaxscale.config import RunConfig
from jaxscale.tools.corpus.prepare.config import PrepareConfig

HEAD = """# {title}

{what} `{verb} --help all` prints the same list. {more}

"""


def pages() -> dict[str, str]:
    """{file: Markdown}."""
    return {
        "settings.md": HEAD.format(
            title="Settings of a run",
            what="Set these in a config file or as `--config.NAME=VALUE`.",
            verb="jaxscale train",
            more="**c**: can change when a run resumes.",
        )
        + page(RunConfig),
        "recipe_settings.md": HEAD.format(
            title="Settings of a data recipe",
            what="Set these in a recipe or as `--config.NAME=VALUE`.",
            verb="jaxscale prepare",
            more="[Prepare data](../prepare.md) describes the stages.",
        )
        + page(PrepareConfig, can_change=False),
    }


def page(cls: type, can_change: bool = True) -> str:
    """A table for each group of settings."""
    free = schema.changeable(cls) if can_change else set()
    top = {field.name for field in dataclasses.fields(cls)}
    groups: dict[str, list[list[str]]] = {}
    for chosen, name, kind, default, text in schema.describe_groups(cls):
        head = name.partition(".")[0]
        section = head if head in top and "." in name else ""
        section = f"{section} ({chosen})" if chosen and section == "model" else section
        which = f"({chosen}) " if chosen and not section.startswith("model") else ""
        mark = " **c**" if any(name == one or name.startswith(one + ".") for one in free) else ""
        groups.setdefault(section, []).append([code(name) + mark, escaped(which + kind), code(default), escaped(text)])
    parts = []
    for section, rows in groups.items():
        parts += [f"## {section or 'Top level'}\n", table(["setting", "type", "default", "meaning"], rows)]
    return '<div class="stacked" markdown="1">\n\n' + "\n".join(parts) + "\n</div>\n"
