"""Tables of text for a terminal."""

import dataclasses
from collections.abc import Sequence

INDENT = "  "


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind on one device."""

    kind: str
    num_bytes: int
    source: str  # how it is known


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = INDENT) -> list[str]:
    """Rows as indented lines of aligned columns; the columns in `right` are aligned at their end."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines
