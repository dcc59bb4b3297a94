"""docs/reading.md with its papers linked, and with where the code rests on each."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CITED = re.compile(r"arXiv:(\d{4}\.\d{4,5})((?:, (?:arXiv:)?\d{4}\.\d{4,5})*)")
ENTRY = re.compile(r"^- \*\*.+\*\* \(.+, arXiv:(\d{4}\.\d{4,5})\)\. .+$", re.M)
OTHER = re.compile(r"^- \*\*.+\*\* \([^()]+, (?:\d{4}|<https://[^>]+>)\)\. .+$", re.M)  # not on arXiv


def with_places(text: str) -> str:
    """The page with each number a link and, behind it, the files that cite it. Raises ValueError for a cited paper that
    is not there, one that is there twice, and an entry of another form."""
    places = cited_in(ROOT / "jaxscale")
    listed = ENTRY.findall(text)
    if missing := sorted(set(places) - set(listed)):
        raise ValueError(
            f"docs/reading.md lacks arXiv:{', arXiv:'.join(missing)}, cited in {places[missing[0]][0]}; add each as "
            "'- **TITLE** (AUTHOR et al., arXiv:NUMBER). What to read it for.'"
        )
    if twice := sorted({number for number in listed if listed.count(number) > 1}):
        raise ValueError(f"docs/reading.md has arXiv:{', '.join(twice)} more than once; keep one entry")
    whole = {found[0] for form in (ENTRY, OTHER) for found in form.finditer(text)}
    if odd := [line for line in text.split("\n") if line.startswith("- ") and line not in whole]:
        raise ValueError(f"docs/reading.md: {odd[0][:60]!r} is no '- **TITLE** (AUTHOR, NUMBER or YEAR). Text.'")
    return ENTRY.sub(lambda found: linked(found[0], found[1]) + told(places.get(found[1], [])), text)


def linked(entry: str, number: str) -> str:
    """The entry with its number as a link."""
    return entry.replace(f"arXiv:{number})", f"[arXiv:{number}](https://arxiv.org/abs/{number}))", 1)


def told(files: list[str]) -> str:
    """' In the code: ...'; '' where no file cites it."""
    shown = [f"`{file}`" for file in files[:6]] + ([f"{len(files) - 6} more"] if len(files) > 6 else [])
    return f" *In the code:* {', '.join(shown)}." if files else ""


def cited_in(folder: pathlib.Path) -> dict[str, list[str]]:
    """{number: files that cite it}, from every Python file under the folder."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        numbers = {n for one in CITED.finditer(text) for n in re.findall(r"\d{4}\.\d{5}", one[0])}
        for number in sorted(numbers):
            found.setdefault(number, []).append(path.relative_to(folder.parent).as_posix())
    return found
