"""Settings that nothing reads, by the choices that a config makes, and the line that refuses them.

Which setting is read when stands beside it (`read_if`, conditions.py).
"""

import dataclasses
import functools
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from jaxscale import schema
from jaxscale.conditions import Clause, parse
from jaxscale.system.exits import BadInput
from jaxscale.units import or_list


class Leaf(NamedTuple):
    """A setting of a config that has been built."""

    name: str
    value: Any
    default: Any  # MISSING where it must be given
    conditions: tuple[str, ...]

    @property
    def is_default(self) -> bool:
        """Whether nobody asks for anything by it."""
        return schema.to_dict(self.value) == schema.to_dict(self.default)


def leaves(config: Any, path: str = "", conditions: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Every setting of the groups that the config has, those of lists and dicts of groups too."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), schema.join(path, field.name)
        own = (*conditions, *schema.read_conditions(type(config), field, path))
        inner = {}
        if dataclasses.is_dataclass(value):
            inner = {name: value}
        elif isinstance(value, tuple) and value and all(map(dataclasses.is_dataclass, value)):
            inner = {f"{name}[{index}]": one for index, one in enumerate(value)}
        elif isinstance(value, Mapping) and value and all(map(dataclasses.is_dataclass, value.values())):
            inner = {schema.join(name, key): one for key, one in value.items()}
        for place, group in inner.items():
            yield from leaves(group, place, own)
        if not inner:
            make = field.default_factory
            yield Leaf(name, value, field.default if make is dataclasses.MISSING else make(), own)


def unread(config: Any) -> dict[str, tuple[Leaf, list[Clause]]]:
    """{name: (the setting, what would have to hold)} of each that nothing reads, whatever its value is.

    A switch that is itself not read switches nothing on.
    """
    known = {leaf.name: leaf for leaf in leaves(config)}

    @functools.cache
    def missing(name: str) -> tuple[Clause, ...]:
        """What keeps the setting from being read: of each condition the alternative that lacks least."""
        lacking: list[Clause] = []
        for condition in known[name].conditions:
            ways = [[*lacks(clauses, name)] for clauses in parse(condition)]
            lacking += min(ways, key=lambda way: (any(clause.name == name for clause in way), len(way)))
        return tuple(dict.fromkeys(lacking))

    def lacks(clauses: list[Clause], of: str) -> Iterator[Clause]:
        for clause in clauses:
            if clause == Clause(of):
                continue  # the switch of its own group
            if not clause.holds(known[clause.name].value):
                yield clause
            elif clause.sign in ("on", "=") and clause.name != of:
                yield from missing(clause.name)

    return {name: (leaf, list(missing(name))) for name, leaf in known.items() if missing(name)}


def as_read(config: Any) -> dict[str, Any]:
    """The settings as nested plain data, without those that nothing reads: with these nobody asks for anything."""
    left_out = unread(config)

    def kept(value: Any, name: str) -> Any:
        """The value; MISSING where nothing reads any of it."""
        if dataclasses.is_dataclass(value):
            inner = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        elif isinstance(value, Mapping) and value and all(map(dataclasses.is_dataclass, value.values())):
            inner = value
        elif isinstance(value, tuple) and value and all(map(dataclasses.is_dataclass, value)):
            found = [kept(one, f"{name}[{index}]") for index, one in enumerate(value)]
            return found if dataclasses.MISSING not in found else dataclasses.MISSING
        else:
            return dataclasses.MISSING if name in left_out else schema.to_dict(value)
        found = {key: kept(one, schema.join(name, key)) for key, one in inner.items()}
        return {key: one for key, one in found.items() if one is not dataclasses.MISSING} or dataclasses.MISSING

    return kept(config, "")


def refuse_unread(config: Any, given: Collection[str] = (), recorded: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Raises BadInput, one line, for settings that differ from their defaults and are not read.

    given: names of the command line, which can be left out there; what a file sets for a choice that the command line
    changes is let through. recorded: asked only where there are such settings; the settings of the run that goes on,
    whose own are let through.
    """
    typed = lambda name: any(name == one or name.startswith(f"{one}.") for one in given)
    switched = lambda lacking: all(typed(clause.name) for clause in lacking)
    found = {
        name: (leaf, lacking)
        for name, (leaf, lacking) in unread(config).items()
        if not leaf.is_default and (typed(name) or not switched(lacking))
    }
    kept = recorded() if found else {}
    found = {name: why for name, why in found.items() if schema.look_up(kept, name) != schema.to_dict(why[0].value)}
    if not found:
        return
    values = {leaf.name: leaf.value for leaf in leaves(config)}
    by_cause: dict[str, list[str]] = {}
    ways: dict[str, str] = {}
    for name, (leaf, lacking) in found.items():
        cause = ", ".join(f"{clause.name}={values[clause.name]!r}" for clause in lacking)
        by_cause.setdefault(cause, []).append(f"{name}={leaf.value!r}")
        ways[cause] = " and ".join(way_to(clause, values[clause.name]) for clause in lacking)
    told = [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not read with {cause}; {ways[cause]}"
        for cause, names in by_cause.items()
    ]
    raise BadInput(f"{'; '.join(told)}, or {way_back([leaf for leaf, _ in found.values()], typed)}")


def way_to(clause: Clause, value: Any) -> str:
    """'set data.name to files or hf': what makes the clause hold, where the value does not."""
    several = isinstance(value, (tuple, list))
    match clause.sign:
        case "on":
            if isinstance(value, bool):
                return f"set {clause.name} to true"
            return f"set {clause.name} above 0" if isinstance(value, (int, float)) else f"give {clause.name} too"
        case "off":
            return f"leave {clause.name} empty"
        case "=":
            if several:
                return f"add {or_list(clause.values)} to {clause.name}"
            return f"set {clause.name} to {or_list(clause.values)}"
    if several:
        return f"take {' and '.join(one for one in value if one in clause.values)} out of {clause.name}"
    return f"set {clause.name} to something other than {or_list(clause.values)}"


def way_back(settings: list[Leaf], typed: Callable[[str], bool]) -> str:
    """'leave out --config.a, and add --config.b=0': how none of them asks for anything."""
    extra = [leaf for leaf in settings if typed(leaf.name)]
    ways = [f"leave out {', '.join(f'--config.{leaf.name}' for leaf in extra)}"] if extra else []
    listed = [leaf for leaf in settings if leaf not in extra and "[" in leaf.name]
    ways += [f"take {', '.join(leaf.name for leaf in listed)} out"] if listed else []
    if rest := [leaf for leaf in settings if leaf not in [*extra, *listed]]:
        ways.append(f"add {' '.join(f'--config.{leaf.name}={as_flag(leaf.default)}' for leaf in rest)}")
    return ", and ".join(ways)


def as_flag(value: Any) -> str:
    """The value as a shell hands it to a flag."""
    text = "none" if value is None else str(schema.to_dict(value))
    return shlex.quote(text) if text.isprintable() else f"${ascii(text)}"
