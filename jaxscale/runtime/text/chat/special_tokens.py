"""Escapes the names of special tokens in messages, so that text can never become a control token.

Before rendering, a noncharacter that does not occur in the conversation is inserted into each such name in messages.
The rendered text is split at intact names, which only the template can have written; then the marker is removed.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxscale.system.exits import BadInput

OPEN, CLOSE = "\ufdee", "\ufdef"  # noncharacters around text in {% generation %} tags
GUARDS = tuple(map(chr, range(0xFDD0, 0xFDEE)))  # noncharacters: no text should have them (Unicode 17.0, section 23.7)
MIN_NAME_CHARACTERS = 2  # a name of one character cannot be split, and is never treated as a token


class Guard:
    """Finds and escapes the names of a tokenizer's special tokens."""

    def __init__(self, names: Iterable[str]):
        self.names = sorted((name for name in names if len(name) >= MIN_NAME_CHARACTERS), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")
        self._beginnings = tuple({name[:n] for name in self.names for n in range(1, len(name))})
        self._ends = tuple({name[n:] for name in self.names for n in range(1, len(name))})

    def choose_marker(self, value: Any) -> str:
        """Returns a noncharacter that does not occur in the value. Raises BadInput if all or a reserved one do."""
        whole = "".join(strings_in(value))
        free = [guard for guard in GUARDS if guard not in whole]
        if not free or OPEN in whole or CLOSE in whole:
            raise BadInput("holds noncharacters (U+FDD0 to U+FDEF), which no text should")
        return free[0]

    def escape(self, value: Any, guard: str) -> Any:
        """Escapes names in all strings of the value, including names that a string may begin or end with."""
        if isinstance(value, Mapping):
            key_of = lambda key: self.escape_text(key, guard) if self.pattern.search(key) else key
            return {key_of(str(key)): self.escape(inner, guard) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape(inner, guard) for inner in value]
        return self.escape_text(value, guard) if isinstance(value, str) else value

    def escape_text(self, text: str, guard: str) -> str:
        """Escapes names in one string."""
        while found := self.pattern.search(text):  # repeated, since names may overlap
            text = text[: found.start() + 1] + guard + text[found.start() + 1 :]
        if text.endswith(self._beginnings):
            text += guard
        return guard + text if text.startswith(self._ends) else text


def strings_in(value: Any) -> Iterable[str]:
    """Yields all strings in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from strings_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from strings_in(inner)
