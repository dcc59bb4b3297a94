"""Exit codes, from jaxscale/system/exits.py."""

from generators.words import escaped, table
from jaxscale.system.exits import STARTED_AGAIN, Exit

HEAD = """# Exit codes

All commands use these exit codes. `jaxscale --help` prints the same list.
[Fault tolerance](../survive.md) describes recovery in detail.

"""
TAIL = """
`jaxscale supervise` also restarts a process that a signal killed, but not after Ctrl-C (130) or a closed pipe (141).
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
    head = ["code", "name", "what happened", "what to do", "restarted by `jaxscale supervise`"]
    return {"exit_codes.md": HEAD + table(head, rows) + TAIL}
