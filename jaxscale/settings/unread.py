"""Rejects settings that have no effect with the other settings of a config.

The condition under which a setting is read is its `read_if` (settings/conditions.py).
"""

import dataclasses
import functools
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from jaxscale import schema
from jaxscale.settings.conditions import Clause, parse
from jaxscale.system.exits import BadInput
from jaxscale.units import or_list


class Leaf(NamedTuple):
    """A setting of a config, with its value and read_if conditions."""

    name: str
    value: Any
    default: Any  # MISSING if the setting is required
    conditions: tuple[str, ...]


def leaves(config: Any, path: str = "", conditions: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Yields every setting of the config, including settings in lists and dicts of groups."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), schema.join(path, field.name)
        field_conditions = (*conditions, *schema.read_conditions(type(config), field, path))
        inner = {}
        if dataclasses.is_dataclass(value):
            inner = {name: value}
        elif isinstance(value, tuple) and value and all(map(dataclasses.is_dataclass, value)):
            inner = {f"{name}[{index}]": group for index, group in enumerate(value)}
        elif isinstance(value, Mapping) and value and all(map(dataclasses.is_dataclass, value.values())):
            inner = {schema.join(name, key): group for key, group in value.items()}
        for group_path, group in inner.items():
            yield from leaves(group, group_path, field_conditions)
        if not inner:
            make = field.default_factory
            yield Leaf(name, value, field.default if make is dataclasses.MISSING else make(), field_conditions)


def unread(config: Any) -> dict[str, tuple[Leaf, list[Clause]]]:
    """Returns {name: (setting, unsatisfied clauses)} of unread settings. Clauses on unread settings never hold."""
    known = {leaf.name: leaf for leaf in leaves(config)}

    @functools.cache
    def missing(name: str) -> tuple[Clause, ...]:
        """Returns the unsatisfied clauses. If a condition has alternatives, uses the one with the fewest."""
        unsatisfied: list[Clause] = []
        for condition in known[name].conditions:
            alternatives = [[*failing(clauses, name)] for clauses in parse(condition)]
            unsatisfied += min(alternatives, key=lambda some: (any(clause.name == name for clause in some), len(some)))
        return tuple(dict.fromkeys(unsatisfied))

    def failing(clauses: list[Clause], setting: str) -> Iterator[Clause]:
        for clause in clauses:
            if clause == Clause(setting):
                continue  # this setting switches its group on
            if not clause.holds(known[clause.name].value):
                yield clause
            elif clause.sign in ("on", "=") and clause.name != setting:
                yield from missing(clause.name)

    return {name: (leaf, list(missing(name))) for name, leaf in known.items() if missing(name)}


def as_read(config: Any) -> dict[str, Any]:
    """Returns the settings that are read, as nested plain data."""
    left_out = unread(config)

    def read_part(value: Any, name: str) -> Any:
        """Returns the part of a value that is read, or MISSING."""
        if dataclasses.is_dataclass(value):
            inner = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        elif isinstance(value, Mapping) and value and all(map(dataclasses.is_dataclass, value.values())):
            inner = value
        elif isinstance(value, tuple) and value and all(map(dataclasses.is_dataclass, value)):
            items = [read_part(item, f"{name}[{index}]") for index, item in enumerate(value)]
            return items if dataclasses.MISSING not in items else dataclasses.MISSING
        else:
            return dataclasses.MISSING if name in left_out else schema.to_dict(value)
        parts = {key: read_part(item, schema.join(name, key)) for key, item in inner.items()}
        return {key: part for key, part in parts.items() if part is not dataclasses.MISSING} or dataclasses.MISSING

    return read_part(config, "")


def refuse_unread(config: Any, given: Collection[str] = (), recorded: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Raises BadInput if settings that are not read differ from their defaults.

    `given` are the names on the command line. A setting in the file is accepted if the command line changes the
    settings in its condition. `recorded` returns the settings of the run to resume, whose values are also accepted.
    """
    typed = lambda name: any(name == other or name.startswith(f"{other}.") for other in given)
    switched = lambda clauses: all(typed(clause.name) for clause in clauses)
    refused = {
        name: (leaf, clauses)
        for name, (leaf, clauses) in unread(config).items()
        if schema.to_dict(leaf.value) != schema.to_dict(leaf.default) and (typed(name) or not switched(clauses))
    }
    before = recorded() if refused else {}
    is_recorded = lambda leaf: schema.look_up(before, leaf.name) == schema.to_dict(leaf.value)
    refused = {name: found for name, found in refused.items() if not is_recorded(found[0])}
    if not refused:
        return
    values = {leaf.name: leaf.value for leaf in leaves(config)}
    by_cause: dict[tuple[str, str], list[str]] = {}
    for name, (leaf, clauses) in refused.items():
        cause = ", ".join(f"{clause.name}={values[clause.name]!r}" for clause in clauses)
        fix = " and ".join(fix_clause(clause, values[clause.name]) for clause in clauses)
        by_cause.setdefault((cause, fix), []).append(f"{name}={leaf.value!r}")
    messages = [
        f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect with {cause}; {fix}"
        for (cause, fix), names in by_cause.items()
    ]
    raise BadInput(f"{'; '.join(messages)}, or {remove_settings([leaf for leaf, _ in refused.values()], typed)}")


def fix_clause(clause: Clause, value: Any) -> str:
    """Returns a fix that satisfies the clause, such as 'set data.name to files or hf'."""
    several = isinstance(value, (tuple, list))
    match clause.sign:
        case "on":
            if isinstance(value, bool):
                return f"set {clause.name} to true"
            return f"set {clause.name} above 0" if isinstance(value, (int, float)) else f"also give {clause.name}"
        case "off":
            return f"leave {clause.name} empty"
        case "=":
            if several:
                return f"add {or_list(clause.values)} to {clause.name}"
            return f"set {clause.name} to {or_list(clause.values)}"
    if several:
        return f"remove {' and '.join(item for item in value if item in clause.values)} from {clause.name}"
    return f"set {clause.name} to something other than {or_list(clause.values)}"


def remove_settings(settings: list[Leaf], typed: Callable[[str], bool]) -> str:
    """Returns a fix that resets settings to their defaults, such as 'remove --config.a, and add --config.b=0'."""
    extra = [leaf for leaf in settings if typed(leaf.name)]
    steps = [f"remove {', '.join(f'--config.{leaf.name}' for leaf in extra)}"] if extra else []
    listed = [leaf for leaf in settings if leaf not in extra and "[" in leaf.name]
    steps += [f"remove {', '.join(leaf.name for leaf in listed)}"] if listed else []
    if others := [leaf for leaf in settings if leaf not in [*extra, *listed]]:
        steps.append(f"add {' '.join(f'--config.{leaf.name}={as_flag(leaf.default)}' for leaf in others)}")
    return ", and ".join(steps)


def as_flag(value: Any) -> str:
    """Formats a value for a flag, quoted for a shell."""
    text = "none" if value is None else str(schema.to_dict(value))
    return shlex.quote(text) if text.isprintable() else f"${ascii(text)}"
