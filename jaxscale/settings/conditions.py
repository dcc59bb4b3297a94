"""Conditions on other settings under which a setting has an effect (`read_if`).

In `data.name=files|hf and data.mixture or not data.val_files`, 'or' separates alternatives and 'and' separates clauses.
A clause is NAME=A|B (the value, or one of several values, is A or B), NAME!=A|B (no value is A or B), NAME (the value
is not 0, false, none or empty) or `not NAME`. A name that begins with a dot is a setting in the same group.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxscale.units import or_list

CLAUSE = re.compile(r"(?P<off>not )?(?P<name>[.\w\[\]-]+)(?:(?P<sign>!?=)(?P<values>[\w|]+))?")


class Clause(NamedTuple):
    """One clause of a condition."""

    name: str
    sign: str = "on"  # "on", "off", "=" or "!="
    values: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        """Returns True if the value satisfies the clause."""
        if self.sign in ("on", "off"):
            return bool(value) == (self.sign == "on")
        items = value if isinstance(value, (tuple, list)) else (value,)
        return any(as_text(item) in self.values for item in items) == (self.sign == "=")

    def __str__(self) -> str:
        named = {"on": self.name, "off": f"no {self.name}"}
        return named.get(self.sign) or f"{self.name}{self.sign}{or_list(self.values)}"


def as_text(value: Any) -> str:
    """Formats a value as in a condition: 'true', 'none', or str(value)."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def parse(condition: str) -> list[list[Clause]]:
    """Returns the alternatives of a condition, each as a list of clauses. Asserts that the syntax is valid."""

    def clause(text: str) -> Clause:
        found = CLAUSE.fullmatch(text)
        assert found and not (found["off"] and found["sign"]), f"{text!r} is not a clause of a condition"
        sign = "off" if found["off"] else found["sign"] or "on"
        return Clause(found["name"], sign, tuple((found["values"] or "").split("|")) if found["sign"] else ())

    return [[clause(text) for text in part.split(" and ")] for part in condition.split(" or ")]


def whole_condition(condition: str, path: str) -> str:
    """Returns the condition with full names in place of names that are relative to the group at `path`."""
    return re.sub(r"(?<![\w\]])\.(?=\w)", f"{path}." if path else "", condition)


def in_words(conditions: Sequence[str]) -> str:
    """Returns the conditions as text, such as 'read if data.name=files or hf'; '' if there are none."""
    texts = [" or ".join(" and ".join(map(str, clauses)) for clauses in parse(text)) for text in conditions]
    return f"read if {' and '.join(dict.fromkeys(texts))}" if texts else ""
