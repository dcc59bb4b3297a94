"""Renamed settings, whose old names are accepted in configs, command lines and records of older runs."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.system.exits import print_stderr


def current_name(name: str, table: Mapping[str, str]) -> str:
    """Returns the current dotted name of a setting or group. `table` maps old names to new names."""
    for old, new in table.items():
        if name == old or name.startswith(f"{old}."):
            log_renamed(f"{old} is now {new}")
            return new + name.removeprefix(old)
    return name


def with_current_names(values: Mapping[str, Any], table: Mapping[str, str]) -> Mapping[str, Any]:
    """Returns nested settings with current names. If both names are present, the current name takes precedence."""
    renamed = []
    for old, new in table.items():
        names, found = old.split("."), values
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is not None:
            values = put_default(remove(values, names), new.split("."), found)
            renamed.append(f"{old} is now {new}")
    if renamed:
        log_renamed(", ".join(renamed))
    return values


@functools.cache
def log_renamed(text: str) -> None:
    """Prints a notice to stderr, once per process."""
    print_stderr(f"renamed settings: {text}")


def remove(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns nested settings without the setting under these names."""
    head, *tail = names
    others = {name: value for name, value in values.items() if name != head}
    return others | ({head: remove(values[head], tail)} if tail else {})


def put_default(values: Mapping[str, Any], names: Sequence[str], value: Any) -> dict[str, Any]:
    """Returns nested settings with a setting or group added. Existing settings take precedence."""
    head, *tail = names
    before = values.get(head)
    if before is not None and not isinstance(before, Mapping):
        return dict(values)
    if tail:
        value = put_default(before or {}, tail, value)
    elif isinstance(before, Mapping) and isinstance(value, Mapping):
        value = {**value, **before}
    return {**values, head: value}
