"""MkDocs hooks: adds the pages that docs/mkdocs.yml does not list to the navigation, and ranks search results."""

import pathlib
from typing import Any

# folder: the section of its pages, and the heading there
PLACES = {
    "reference/verbs": ("Reference", "Verbs, one by one"),
    "reference/api": ("Reference", "Modules"),
    "howto": ("How to", "More"),
    "explanation": ("Explanation", "More"),
}
# Search ranks by the number of matches, so long pages would come before the page that explains a term.
SEARCH_BOOST = {
    "howto/": 3, "explanation/parallelism.md": 3, "reference/api/": 0.02, "reference/verbs/": 0.5, "reading.md": 0.2,
    "changelog.md": 0.2, "faults.md": 0.2,
}  # fmt: skip


def on_config(config: Any) -> Any:
    """Adds pages at the top to Topics, and those in a folder to the folder's section."""
    config.nav = completed(config.nav, pages_under(pathlib.Path(config.docs_dir)))
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Sets the search boost of a page. Returns the text unchanged."""
    if boosts := [boost for prefix, boost in SEARCH_BOOST.items() if page.file.src_uri.startswith(prefix)]:
        page.meta["search"] = {"boost": boosts[0]}
    return markdown


def pages_under(folder: pathlib.Path) -> list[str]:
    """'howto/slurm.md' of every page."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))


def completed(nav: list[Any], pages: list[str]) -> list[Any]:
    """The navigation with all pages in it. Raises ValueError for a page in a folder that no section is for."""
    sections = {name: inside for entry in nav if isinstance(entry, dict) for name, inside in entry.items()}
    more: dict[str, list[str]] = {}
    for page in sorted(set(pages) - set(named(nav))):
        more.setdefault(page.rpartition("/")[0], []).append(page)
    for folder, found in more.items():
        if folder == "":
            sections["Topics"].extend(found)
        elif folder in PLACES:
            section, heading = PLACES[folder]
            sections[section].append({heading: found})
        else:
            raise ValueError(
                f"docs/{found[0]}: no section of docs/mkdocs.yml is for the folder {folder}; name it there"
            )
    return nav


def named(nav: Any) -> list[str]:
    """Every page that the navigation names."""
    if isinstance(nav, str):
        return [nav]
    inside = nav.values() if isinstance(nav, dict) else nav
    return [page for one in inside for page in named(one)]
