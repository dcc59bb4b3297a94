"""The shipped configs and data recipes: the header that stands in each file."""

import ast
import pathlib

from generators.words import escaped, fenced

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def pages() -> dict[str, str]:
    """{file: Markdown}."""
    parts = ["# Configs\n\nThe headers of the configs and data recipes in `configs/`.\n"]
    for path in sorted((ROOT / "configs").rglob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if text is None:
            raise ValueError(f"{path.relative_to(ROOT)} has no docstring; say what the config is for")
        first, _, rest = text.partition("\n")
        name = path.relative_to(ROOT).as_posix()
        parts.append(f"## {name}\n\n{escaped(first)}\n" + (f"\n{fenced(rest)}" if rest.strip() else ""))
    return {"configs.md": "\n".join(parts)}
