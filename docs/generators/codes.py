"""Exit codes, from jaxscale/system/exits.py."""

from generators.words import escaped, table
from jaxscale.system.exits import STARTED_AGAIN, Exit

HEAD = """# Exit codes

Every verb ends with one of these; `jaxscale --help` has the same list.
[A run that survives](../survive.md) has longer answers.

"""
TAIL = """
Death by a signal is started again too; Ctrl-C (130) and a closed pipe (141) are a person's wish and are not.
"""


def pages() -> dict[str, str]:
    """{file: Markdown}."""
    rows = [
        [
            str(int(one)),
            f"`{one.name}`",
            escaped(one.event),
            escaped(one.advice),
            "yes" if one in STARTED_AGAIN else "no",
        ]
        for one in Exit
    ]
    head = ["code", "name", "what happened", "what a person does", "started again"]
    return {"exit_codes.md": HEAD + table(head, rows) + TAIL}
