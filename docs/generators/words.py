"""Plain text as Markdown: what is no markup there must not become any here."""

import re
from collections.abc import Iterable, Sequence

SPECIAL = re.compile(r"([\\*_\[\]<>|#~{}])")
CODE = re.compile(r"(`[^`\n]+`)")


def escaped(text: str) -> str:
    """The text with Markdown's own characters taken literally, but for `code`, which stays code."""
    parts = CODE.split(text)
    return "".join(part if place % 2 else SPECIAL.sub(r"\\\1", part) for place, part in enumerate(parts))


def code(text: str) -> str:
    """Inline code, also within a table."""
    return html_code(text) if "|" in text or "`" in text else f"`{text}`"


def html_code(text: str) -> str:
    """Inline code as HTML, where Markdown would split a table's cell at '|'."""
    for plain, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;")):
        text = text.replace(plain, entity)
    return f"<code>{text}</code>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells that are Markdown already."""
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(" ".join(cell.split()) for cell in row) + " |" for row in cells) + "\n"


def fenced(text: str, language: str = "text") -> str:
    """A block of code."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text.strip(chr(10))}\n{fence}\n"


def docstring(text: str) -> str:
    """A docstring as Markdown: paragraphs, and what is indented deeper as a block."""
    blocks = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = paragraph.split("\n")
        if all(line.startswith(("  ", "\t")) for line in lines) or is_list(lines):
            blocks.append(fenced(paragraph))
        else:
            blocks.append(escaped("\n".join(line.strip() for line in lines)) + "\n")
    return "\n".join(blocks)


def is_list(lines: Sequence[str]) -> bool:
    """True for lines whose columns mean something: flags with what they do, letters with what they stand for."""
    return any(re.search(r"\S {2,}\S", line) for line in lines) or any(line.startswith("--") for line in lines)
