"""The packages and what each imports, drawn from the imports themselves."""

import ast
import html
import pathlib
import re
from collections.abc import Mapping

from generators.words import escaped, table

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jaxscale"
GROUPS = ("runtime", "tools", "settings", "program")  # whose parts import each other one way
LOW = (  # parts of core/ and kernels/ that are below the rest of both
    "core/axes", "core/config.py", "core/shardings.py", "kernels/compiler_options.py", "kernels/config.py",
    "kernels/hardware.py", "kernels/host_memory.py", "kernels/collectives.py",
)  # fmt: skip
HEAD = """# Architecture

![Packages by import level, with those that import most at the top](architecture.svg)

A package imports only packages from lower levels. `tests/test_layers.py` enforces this order. After you change imports
or docstrings, regenerate this page with `python docs/build.py --gather`.
"""
READ = """
## Call path of a training run

1. `main.py` parses the flags and the config, and calls `train_in` (`api/training.py`).
2. `open_run` (`runtime/run/opening.py`) opens the work folder and restores the newest checkpoint. `build.py` creates
   the mesh, the sharded model, the optimizer and the compiled step from the config.
3. `train_to_completion` (in the same file) calls `train` (`runtime/training/loop.py`).
4. `train` calls `step_through` (in the same file), which runs the compiled step once per batch.
5. `train_step` (`core/step.py`) calls `Gradients` (`core/gradients.py`), which computes the loss
   (`core/models/model.py`) with `run_stack` (`core/models/layers.py`) and the model's blocks.

[Train with core only](howto/use_core.md) shows a step without `build.py`.

| to follow | read |
|---|---|
| a setting | the `config.py` of its package, `config.py`, `build.py`, and the package that uses the setting |
| a token | `runtime/text/`, `runtime/data/`, `runtime/training/feed.py`, `core/step.py` |
| a checkpoint | `runtime/training/loop.py`, `runtime/checkpoint/` |
| a model | `core/models/`, `kernels/`, `core/shardings.py` |

## Packages

The table is sorted by level, with the highest level first. Its last column omits indirect imports.

"""


def room_of(path: pathlib.Path) -> str:
    """'runtime/data' of a file in it, 'core' of most files of core; '' for a file that holds no more than a
    docstring."""
    parts = path.relative_to(PACKAGE).parts
    if parts[0] in GROUPS or "/".join(parts[:2]) in LOW:
        room = "/".join(parts[:2])
    else:
        room = parts[0]
    return "" if "__" in room else room.removesuffix(".py")


def rooms() -> dict[str, list[pathlib.Path]]:
    """{package: its files}; a module that stands alone is a package of one file."""
    found: dict[str, list[pathlib.Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if room := room_of(path):
            found.setdefault(room, []).append(path)
    return found


def imported(paths: list[pathlib.Path], known: Mapping[str, object]) -> set[str]:
    """The packages that these files import."""
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("jaxscale"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("jaxscale.")]
            for name in names:
                parts = name.split(".")[1:]
                ends = ["/".join(parts[:end]) for end in (2, 1)]
                found |= set([end for end in ends if end in known][:1])
    return found


def direct(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The imports of each package, without those that one of its other imports implies (transitive reduction)."""

    def reachable(room: str) -> set[str]:
        return imports[room].union(*map(reachable, imports[room]))

    return {room: below - set().union(*map(reachable, below)) for room, below in imports.items()}


def levels(imports: Mapping[str, set[str]]) -> dict[str, int]:
    """{package: its row}, 0 for one that imports none. Raises ValueError for packages that import each other."""
    rows: dict[str, int] = {}
    while len(rows) < len(imports):
        ready = {room for room, below in imports.items() if room not in rows and below <= set(rows)}
        if not ready:
            raise ValueError(f"packages import each other in a circle: {', '.join(sorted(set(imports) - set(rows)))}")
        rows |= {room: 1 + max((rows[one] for one in imports[room]), default=-1) for room in ready}
    return rows


BOX, GAP, ROW = 160, 10, 46  # of the drawing, in pixels


def drawing(rows: Mapping[str, int], imports: Mapping[str, set[str]]) -> str:
    """An SVG with a box for each package, those that import most at the top."""
    by_row = [[room for room in sorted(rows) if rows[room] == row] for row in range(max(rows.values()) + 1)]
    width = max(len(row) for row in by_row) * (BOX + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {len(by_row) * ROW}" role="img" '
        'font-family="system-ui,sans-serif" font-size="13" fill="#808080"><title>Packages by what they import</title>'
    ]
    for y, row in enumerate(reversed(by_row)):
        left = (width - len(row) * (BOX + GAP)) / 2
        for x, room in enumerate(row):
            title = html.escape(f"{room} imports {', '.join(sorted(imports[room])) or 'no other package'}")
            place = left + x * (BOX + GAP)
            parts.append(
                f'<g><title>{title}</title><rect x="{place:g}" y="{y * ROW + 6}" width="{BOX}" height="{ROW - 14}" '
                f'rx="5" fill="none" stroke="#808080" stroke-opacity=".6"/><text x="{place + BOX / 2:g}" '
                f'y="{y * ROW + 27}" text-anchor="middle">{html.escape(room)}</text></g>\n'
            )
    return "".join([*parts, "</svg>\n"])


def about(path: pathlib.Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(text.partition("\n\n")[0].split()))[0]


def pages() -> dict[str, str]:
    """{file in docs/: its text}."""
    files = rooms()
    imports = {room: imported(paths, files) - {room} for room, paths in files.items()}
    row_of, listed = levels(imports), direct(imports)
    lines = []
    for room in sorted(files, key=lambda one: (-row_of[one], one)):
        path = PACKAGE / room / "__init__.py"
        name = f"`{room}/`" if path.exists() else f"`{room}.py`"
        first = path if path.exists() else files[room][0]
        lines.append([name, escaped(about(first)), ", ".join(sorted(listed[room])) or "none"])
    core = [
        [f"`{path.relative_to(PACKAGE).as_posix()}`", escaped(about(path))]
        for path in sorted((PACKAGE / "core").rglob("*.py"))
        if path.name != "__init__.py" and room_of(path) in ("core", "core/axes")
    ]
    text = HEAD + READ + table(["package", "contents", "imports"], lines)
    text += "\n## Files in core\n\n" + table(["file", "contents"], core)
    return {"architecture.md": text, "architecture.svg": drawing(row_of, imports)}


def write() -> None:
    """Renews the page and its drawing in docs/."""
    for name, text in pages().items():
        (ROOT / "docs" / name).write_text(text, encoding="utf-8")
