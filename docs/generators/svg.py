"""Drawings that stand in a page, in its own colours of text, so that they can be read on light and on dark.

Each has a title and a description for who hears the page, and each mark its own words for who points at it.
"""

import html
from collections.abc import Iterable
from typing import NamedTuple

FONT = "system-ui,sans-serif"


class Ink(NamedTuple):
    """The colour of a mark and that of what is written on it."""

    fill: str
    text: str


def figure(title: str, told: str, caption: str, size: tuple[float, float], marks: Iterable[str]) -> str:
    """A figure for a Markdown page, on one line. told: the drawing in words."""
    name = "".join(letter if letter.isalnum() else "-" for letter in title.lower())
    width, height = size
    return (
        f'<figure class="drawing" data-search-exclude=""><div><svg xmlns="http://www.w3.org/2000/svg" role="img" '
        f'viewBox="0 0 {width:g} {height:g}" aria-labelledby="{name}-title {name}-told" font-family="{FONT}">'
        f'<title id="{name}-title">{html.escape(title)}</title><desc id="{name}-told">{html.escape(told)}</desc>'
        f"{''.join(marks)}</svg></div><figcaption>{caption}</figcaption></figure>\n"
    )


def sentence(words: str) -> str:
    """Words as they stand in a caption."""
    return html.escape(words)


def rectangle(place: tuple[float, float, float, float], ink: Ink | None, word: str, kind: str, told: str) -> str:
    """A rectangle (x, y, width, height) with a word on it; without ink it is an empty place."""
    x, y, width, height = place
    look = f'fill="{ink.fill}"' if ink else 'fill="currentColor" fill-opacity=".1"'
    box = f'<rect x="{x + 0.5:g}" y="{y:g}" width="{width - 1:g}" height="{height:g}" rx="2" {look}/>'
    size = min(11, 0.6 + width)  # a digit is a little wider than half its height
    inside = written(x + width / 2, y + height / 2, word, "middle", size, ink.text) if ink and word else ""
    return marked(kind, told, box + inside)


def polygon(corners: Iterable[tuple[float, float]], ink: Ink, kind: str, told: str) -> str:
    """A filled shape."""
    points = " ".join(f"{x:g},{y:g}" for x, y in corners)
    return marked(kind, told, f'<polygon points="{points}" fill="{ink.fill}"/>')


def text(x: float, y: float, words: str, *, anchor: str, size: float) -> str:
    """Words in the page's colour of text, centred on y."""
    return written(x, y, words, anchor, size, "currentColor")


def written(x: float, y: float, words: str, anchor: str, size: float, fill: str) -> str:
    """Words of any colour."""
    return (
        f'<text x="{x:g}" y="{y:g}" dy=".36em" text-anchor="{anchor}" font-size="{size:g}" fill="{fill}">'
        f"{html.escape(words)}</text>"
    )


def marked(kind: str, told: str, inside: str) -> str:
    """Shapes that are one mark."""
    title = f"<title>{html.escape(told)}</title>" if told else ""
    return f'<g class="{kind}">{title}{inside}</g>'
