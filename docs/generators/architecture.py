"""The rooms of the package and what each imports, drawn from the imports themselves."""

import ast
import html
import pathlib
from collections.abc import Mapping

from generators.words import escaped, table

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jaxscale"
HEAD = """# Architecture

A room is a folder or a top module of `jaxscale/`. It may import the rooms in rows below its own, never one beside or
above it; `tests/test_layers.py` holds that. `python docs/build.py` draws this page from the imports.

![The rooms, those that import most at the top](architecture.svg)
"""
READ = """
## The road of a run

`main.py` reads flags and a config; `run/` decides whether a run begins or goes on, and opens it; `build.py` puts model
and optimizer on a mesh and compiles the step; `training/` feeds it, guards it and reports.

| road | leads through |
|---|---|
| a setting | `ROOM/config.py`, `config.py`, `build.py`, and the room that reads it |
| a token | `text/`, `data/` (shards, order, rows, batches), `training/feed.py`, the step |
| a save | `training/loop.py`, `checkpoint/`, storage |
| a model | `models/`, `ops/`, placed by `sharding/`'s rules |

## The rooms

"""
BOX, GAP, ROW = 112, 10, 46  # of the drawing, in pixels


def rooms() -> dict[str, list[pathlib.Path]]:
    """{room: its files}, modules at the top being rooms of one file."""
    found: dict[str, list[pathlib.Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if not name.startswith("__"):
            found.setdefault(name, []).append(path)
    return found


def imported(paths: list[pathlib.Path], known: Mapping[str, object]) -> set[str]:
    """The rooms that these files import."""
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("jaxscale"):
                found |= {f"{node.module}.{alias.name}".split(".")[1] for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("jaxscale.")}
    return found & set(known)


def levels(imports: Mapping[str, set[str]]) -> dict[str, int]:
    """{room: its row}, 0 for one that imports none. Raises ValueError for rooms that import each other in a circle."""
    rows: dict[str, int] = {}
    while len(rows) < len(imports):
        ready = {room for room, below in imports.items() if room not in rows and below <= set(rows)}
        if not ready:
            raise ValueError(f"rooms import each other in a circle: {', '.join(sorted(set(imports) - set(rows)))}")
        rows |= {room: 1 + max((rows[one] for one in imports[room]), default=-1) for room in ready}
    return rows


def drawing(rows: Mapping[str, int], imports: Mapping[str, set[str]]) -> str:
    """An SVG with a box for each room, those that import most at the top."""
    by_row = [[room for room in sorted(rows) if rows[room] == row] for row in range(max(rows.values()) + 1)]
    width = max(len(row) for row in by_row) * (BOX + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {len(by_row) * ROW}" role="img" '
        'font-family="system-ui,sans-serif" font-size="13" fill="#808080"><title>Rooms by what they import</title>'
    ]
    for y, row in enumerate(reversed(by_row)):
        left = (width - len(row) * (BOX + GAP)) / 2
        for x, room in enumerate(row):
            told = html.escape(f"{room} imports {', '.join(sorted(imports[room])) or 'no other room'}")
            place = left + x * (BOX + GAP)
            parts.append(
                f'<g><title>{told}</title><rect x="{place:g}" y="{y * ROW + 6}" width="{BOX}" height="{ROW - 14}" '
                f'rx="5" fill="none" stroke="#808080" stroke-opacity=".6"/><text x="{place + BOX / 2:g}" '
                f'y="{y * ROW + 27}" text-anchor="middle">{html.escape(room)}</text></g>\n'
            )
    return "".join([*parts, "</svg>\n"])


def about(path: pathlib.Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def pages() -> dict[str, str]:
    """{file in docs/: its text}."""
    files = rooms()
    imports = {room: imported(paths, files) - {room} for room, paths in files.items()}
    row_of = levels(imports)
    lines = []
    for room in sorted(files, key=lambda one: (-row_of[one], one)):
        first = next((path for path in files[room] if path.name == "__init__.py"), files[room][0])
        name = f"`{room}/`" if first.name == "__init__.py" else f"`{room}.py`"
        lines.append([name, escaped(about(first)), ", ".join(sorted(imports[room])) or "none"])
    text = HEAD + READ + table(["room", "what it holds", "imports"], lines)
    return {"architecture.md": text, "architecture.svg": drawing(row_of, imports)}


def write() -> None:
    """Renews the page and its drawing in docs/."""
    for name, text in pages().items():
        (ROOT / "docs" / name).write_text(text, encoding="utf-8")
