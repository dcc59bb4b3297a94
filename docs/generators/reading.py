"""Where the code rests on each paper of docs/reading.md."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CITED = re.compile(r"arXiv:(\d{4}\.\d{4,5})((?:, (?:arXiv:)?\d{4}\.\d{4,5})*)")
ENTRY = re.compile(r"^- \*\*.+\*\* \(arXiv:(\d{4}\.\d{5})\)\. .+$", re.M)


def with_places(text: str) -> str:
    """The page with, behind each entry, the files that cite it. Raises ValueError for a paper without one."""
    places = cited_in(ROOT / "jaxscale")
    listed = ENTRY.findall(text)
    if missing := sorted(set(places) - set(listed)):
        raise ValueError(
            f"docs/reading.md lacks arXiv:{', arXiv:'.join(missing)}, cited in {places[missing[0]][0]}; add each as "
            "'- **TITLE** (arXiv:NUMBER). What to read it for.'"
        )
    if twice := sorted({number for number in listed if listed.count(number) > 1}):
        raise ValueError(f"docs/reading.md has arXiv:{', '.join(twice)} more than once; keep one entry")
    return ENTRY.sub(lambda found: found[0] + told(places.get(found[1], [])), text)


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
