"""Escapes the names of special tokens in messages, so that text can never become a control token.

Before a template sees a message, each such name in it is broken by a noncharacter that stands nowhere else. What comes
out of the template is cut at the names that are whole, which only the template can have written; then it is taken out.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxscale.system.exits import BadInput

OPEN, CLOSE = "\ufdee", "\ufdef"  # noncharacters around what a template marks as generated
GUARDS = tuple(map(chr, range(0xFDD0, 0xFDEE)))  # noncharacters: no text should have them (Unicode 17.0, section 23.7)
FEWEST = 2  # characters of a name: one alone cannot be broken, and is never taken for a token


class Guard:
    """Finds and breaks the names of a tokenizer's special tokens."""

    def __init__(self, names: Iterable[str]):
        self.names = sorted((name for name in names if len(name) >= FEWEST), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")
        self._beginnings = tuple({name[:n] for name in self.names for n in range(1, len(name))})
        self._ends = tuple({name[n:] for name in self.names for n in range(1, len(name))})

    def choose(self, value: Any) -> str:
        """A noncharacter that stands nowhere in the value. Raises BadInput if all do, or one that has a meaning."""
        whole = "".join(texts_in(value))
        free = [guard for guard in GUARDS if guard not in whole]
        if not free or OPEN in whole or CLOSE in whole:
            raise BadInput("holds noncharacters (U+FDD0 to U+FDEF), which no text should")
        return free[0]

    def broken(self, value: Any, guard: str) -> Any:
        """The value with every name in its texts broken, also one that a text could begin or end."""
        if isinstance(value, Mapping):
            key_of = lambda key: self.broken_text(key, guard) if self.pattern.search(key) else key
            return {key_of(str(key)): self.broken(inner, guard) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.broken(inner, guard) for inner in value]
        return self.broken_text(value, guard) if isinstance(value, str) else value

    def broken_text(self, text: str, guard: str) -> str:
        """One text."""
        while found := self.pattern.search(text):  # again, for names may overlap
            text = text[: found.start() + 1] + guard + text[found.start() + 1 :]
        if text.endswith(self._beginnings):
            text += guard
        return guard + text if text.startswith(self._ends) else text


def texts_in(value: Any) -> Iterable[str]:
    """Every text inside a JSON value, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from texts_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from texts_in(inner)
