"""Builds the documentation as static pages that search without a server or a network.

  python docs/build.py      and open build/site/index.html
  --gather                  only gathers the pages, in build/docs

Written pages come from docs/. The reference, and each number that stands as {{ name }} in a page, are computed from the
code while it is built, so that neither can be stale. Needs the extra `docs` (Material for MkDocs).
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported: a build must not take a chip

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # the package of this checkout, whichever is installed

from generators import api, architecture, chips, codes, figures, reading, recipes, scaling, settings, verbs  # noqa: E402

REFERENCE = (verbs, settings, codes, recipes, chips, api)
NOT_PAGES = ("mkdocs.yml", "*.py", "generators", "__pycache__")
NUMBER = re.compile(r"\{\{ *(\w+) *\}\}")


def gather(folder: pathlib.Path) -> None:
    """Puts written and made pages into `folder`, which is emptied first. Raises ValueError as fill() does."""
    shutil.rmtree(folder, ignore_errors=True)
    architecture.write()
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns(*NOT_PAGES))
    page = folder / "reading.md"
    page.write_text(reading.with_places(page.read_text(encoding="utf-8")), encoding="utf-8")
    fill_all(folder)
    for name in ("CHANGELOG", "CONTRIBUTING"):
        shutil.copy(ROOT / f"{name}.md", folder / f"{name.lower()}.md")
    for module in REFERENCE:
        for name, text in module.pages().items():
            path = folder / "reference" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    (folder / "assets" / "scaling_data.js").write_text(scaling.script(), encoding="utf-8")


def fill_all(folder: pathlib.Path) -> None:
    """Replaces the names of numbers in all pages by the numbers. Raises ValueError for one that no page uses, too."""
    used: set[str] = set()
    for path in sorted(folder.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if names := set(NUMBER.findall(text)):
            path.write_text(fill(text, figures.FIGURES, path.relative_to(folder).as_posix()), encoding="utf-8")
            used |= names
    if idle := sorted(set(figures.FIGURES) - used):
        raise ValueError(f"docs/generators/figures.py computes {', '.join(idle)}, and no page has it; delete it there")


def fill(text: str, values: Mapping[str, Callable[[], str]], page: str) -> str:
    """The text with each {{ name }} replaced. Raises ValueError that names the page for a name without a number."""
    if unknown := sorted(set(NUMBER.findall(text)) - set(values)):
        raise ValueError(f"docs/{page}: no number is called {', '.join(unknown)}; see docs/generators/figures.py")
    return NUMBER.sub(lambda found: values[found[1]](), text)


def main(argv: list[str]) -> int:
    """Gathers the pages and builds the site; the exit code of MkDocs."""
    if unknown := [flag for flag in argv if flag not in ("--gather", "--help", "-h")]:
        raise SystemExit(f"error: {unknown[0]} is not a flag of docs/build.py; it has --gather")
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    if "--gather" not in argv and importlib.util.find_spec("material") is None:
        raise SystemExit("error: Material for MkDocs is not installed; pip install -e '.[docs]'")
    try:
        gather(ROOT / "build" / "docs")
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if "--gather" in argv:
        return 0
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / "docs" / "mkdocs.yml")]
    code = subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode
    if code == 0:
        print(f"built {os.path.relpath(ROOT / 'build' / 'site' / 'index.html')}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
