"""What must hold of other settings for a setting to be read: text beside the setting, taken apart here.

`data.name=files|hf and data.mixture or not data.val_files`: of the alternatives between 'or' one must hold, and of each
all clauses between 'and'. A clause is NAME=A|B (its value, or one of its values, is A or B), NAME!=A|B (none is), NAME
(it is on: not 0, false, none or empty) or `not NAME`. A name that begins with a dot is of a setting in the same group.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from jaxscale.units import or_list

CLAUSE = re.compile(r"(?P<off>not )?(?P<name>[.\w\[\]-]+)(?:(?P<sign>!?=)(?P<values>[\w|]+))?")


@dataclasses.dataclass(frozen=True)
class Clause:
    """One clause of a condition."""

    name: str
    sign: str = "on"  # on, off, = or !=
    values: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        """Whether the setting's value is as the clause wants it."""
        if self.sign in ("on", "off"):
            return bool(value) == (self.sign == "on")
        found = value if isinstance(value, (tuple, list)) else (value,)
        return any(as_text(one) in self.values for one in found) == (self.sign == "=")

    def __str__(self) -> str:
        named = {"on": self.name, "off": f"no {self.name}"}
        return named.get(self.sign) or f"{self.name}{self.sign}{or_list(self.values)}"


def as_text(value: Any) -> str:
    """The value as a condition has it: 'true', 'none', and all else as it is."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def parse(condition: str) -> list[list[Clause]]:
    """The alternatives, of each its clauses. Asserts that it is written as it must be."""
    return [[parse_clause(text) for text in part.split(" and ")] for part in condition.split(" or ")]


def parse_clause(text: str) -> Clause:
    """One clause."""
    found = CLAUSE.fullmatch(text)
    assert found and not (found["off"] and found["sign"]), f"{text!r} is no clause of a condition"
    sign = "off" if found["off"] else found["sign"] or "on"
    return Clause(found["name"], sign, tuple((found["values"] or "").split("|")) if found["sign"] else ())


def whole_condition(condition: str, path: str) -> str:
    """The condition with whole names for those of the group at `path`."""
    return re.sub(r"(?<![\w\]])\.(?=\w)", f"{path}." if path else "", condition)


def in_words(conditions: Sequence[str]) -> str:
    """'read if data.name=files or hf'; '' for a setting that is always read."""
    told = [" or ".join(" and ".join(map(str, clauses)) for clauses in parse(one)) for one in conditions]
    return f"read if {' and '.join(dict.fromkeys(told))}" if told else ""
