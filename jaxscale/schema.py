"""Converts a dict of settings, from a config file and a command line, to frozen dataclasses.

A setting is a dataclass field made by `setting(default, help)`. Supported annotations are bool, int, float, str,
Literal, tuple[X, ...], dict[str, X], X | None, unions of these types, nested dataclasses, and unions of dataclasses
that are distinguished by `name: Literal[...]`, or by `kind: Literal[...]` if they have no name.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import json
import operator
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from jaxscale.system.exits import BadInput


class SettingsGroup(Protocol):
    """A dataclass of settings."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


T = TypeVar("T", bound=SettingsGroup)
MAX_INTEGER = 2**63 - 1  # largest int64
MAX_SHOWN = 80  # maximum characters of a value in an error
hints_of = functools.cache(typing.get_type_hints)


def setting(default: Any = dataclasses.MISSING, help: str = "", *, may_change: bool = False, read_if: str = "") -> Any:
    """Returns a dataclass field with help.

    may_change: whether the value may change when a run resumes. read_if: the condition on other settings under which
    the setting or group is read (settings/conditions.py); empty: always.
    """
    metadata = {"help": help, "may_change": may_change, "read_if": read_if}
    if isinstance(default, (dict, list)) or callable(default):
        factory = default if callable(default) else lambda: type(default)(default)
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


adjustable = functools.partial(setting, may_change=True)


def merge(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested dict `values` with overrides such as {"optim.peak_lr": "1e-3"}. They can add keys."""
    merged = {key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    for dotted, value in overrides.items():
        head, _, tail = dotted.partition(".")
        if tail:
            inner = merged.get(head, {})
            inner = literal(inner) if isinstance(inner, str) else inner
            if not isinstance(inner, Mapping):
                raise BadInput(f"{dotted}={value!r} cannot be set: {head} is {inner!r}, not a group of settings")
            merged[head] = merge(inner, {tail: value})
        else:
            merged[head] = value
    return merged


def from_dict(cls: type[T], values: object, path: str = "") -> T:
    """Returns an instance of the dataclass `cls` with these values. Raises BadInput for an invalid value."""
    if not isinstance(values, Mapping):
        fix = dict_syntax(path) if path and isinstance(values, str) else ""
        raise BadInput(f"{path or cls.__name__} must be a group of settings of {cls.__name__}, not {values!r}{fix}")
    if table := getattr(cls, "renamed", None):
        from jaxscale.settings.renamed import with_current_names

        values = with_current_names(values, table)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = hints_of(cls)
    for key in values:
        if key not in fields:
            raise BadInput(f"{join(path, key)} is not a setting of {cls.__name__}{suggestion(str(key), cls, path)}")
    built = {}
    for name, field in fields.items():
        if name in values:
            built[name] = convert(with_default_name(values[name], field, hints[name]), hints[name], join(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise BadInput(f"{join(path, name)} must be given: {field.metadata.get('help') or hints[name]}")
    try:
        return cls(**built)
    except BadInput as error:  # from __post_init__, which does not know the path
        raise BadInput(f"{path}: {error}" if path else str(error)) from None


def to_dict(config: Any) -> Any:
    """Returns the dataclass as nested JSON data. Inverse of from_dict()."""
    if dataclasses.is_dataclass(config):
        return {field.name: to_dict(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, (tuple, list)):
        return [to_dict(value) for value in config]
    return config


def flatten(values: Any, path: str = "") -> dict[str, Any]:
    """Flattens nested data to {dotted name: value}. Empty groups remain empty dicts."""
    if isinstance(values, Mapping) and values:
        return {key: leaf for name, value in values.items() for key, leaf in flatten(value, join(path, name)).items()}
    return {path: values}


def keys_of(name: str) -> list[str | int]:
    """Returns the keys of a dotted name: 'optim.groups[0].frozen' -> ['optim', 'groups', 0, 'frozen']."""
    return [int(index) if index else key for index, key in re.findall(r"\[(\d+)\]|([^.\[\]]+)", name)]


def look_up(values: Any, name: str) -> Any:
    """Returns the value with a dotted name in nested data, or MISSING."""
    try:
        return functools.reduce(operator.getitem, keys_of(name), values)
    except (LookupError, TypeError):  # TypeError: None instead of a group
        return dataclasses.MISSING


def put(values: Any, name: str, value: Any) -> None:
    """Replaces the value under a dotted name in nested plain data."""
    *parents, last = keys_of(name)
    functools.reduce(operator.getitem, parents, values)[last] = value


def describe(cls: type, path: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yields (dotted name, type, default, help) for every setting in `cls` and in its groups."""
    for _, name, type_, default, text in describe_groups(cls, path):
        yield name, type_, default, text


def read_conditions(cls: type, field: dataclasses.Field, path: str) -> list[str]:
    """Returns the read_if conditions of a field, with the full names of settings. `path` is the field's group."""
    from jaxscale.settings.conditions import whole_condition

    declared = [field.metadata.get("read_if", ""), getattr(cls, "inherited_read_if", {}).get(field.name, "")]
    return [whole_condition(text, path) for text in declared if text]


def describe_groups(
    cls: type, path: str = "", chosen: str = "", only_if: tuple[str, ...] = ()
) -> Iterator[tuple[str, str, str, str, str]]:
    """Yields (group name or '', dotted name, type, default, help). `only_if`: conditions of the group."""
    from jaxscale.settings.conditions import in_words

    hints = hints_of(cls)
    for field in dataclasses.fields(cls):
        conditions = (*only_if, *read_conditions(cls, field, path))
        groups, named = group_types(hints[field.name]), group_types(named_hint(hints[field.name]))
        if groups or named:
            group_path = join(path, field.name)
            for group in groups or named:
                name = group_name(group) if len(groups or named) > 1 else chosen
                yield from describe_groups(group, group_path if groups else f"{group_path}.NAME", name, conditions)
            continue
        if field.default is not dataclasses.MISSING:
            default = repr(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = repr(field.default_factory())
        else:
            default = "required"
        needs = [text for text in conditions if text != join(path, field.name)]  # except on the field itself
        text = "; ".join(filter(None, [field.metadata.get("help", ""), in_words(needs)]))
        yield chosen, join(path, field.name), type_name(hints[field.name]), default, text


def named_hint(hint: Any) -> Any:
    """Returns X of a hint dict[str, X], else None."""
    return next((typing.get_args(option)[1] for option in options(hint) if typing.get_origin(option) is dict), None)


def changeable(cls: type, path: str = "") -> set[str]:
    """Returns the dotted names of the settings and groups that may change when a run resumes."""
    names, hints = set(), hints_of(cls)
    for field in dataclasses.fields(cls):
        if field.metadata.get("may_change"):
            names.add(join(path, field.name))
        for group in group_types(hints[field.name]):
            names |= changeable(group, join(path, field.name))
    return names


def difference(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Returns {dotted name: (old, new)} for values that differ between two nested dicts. Missing values are None."""
    old, new = flatten(old), flatten(new)
    return {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def convert(value: Any, hint: Any, path: str) -> Any:
    """Converts `value`, which can be command-line text, to the type `hint`. Raises BadInput if it does not match."""
    candidates = options(hint)
    groups = group_types(hint)
    if isinstance(value, str):
        parsed = parse_text(value, candidates)
        if str not in candidates or any(match(parsed, option, path)[0] for option in candidates if option is not str):
            value = parsed  # text of a list, number or none remains text only if no other type fits
    if groups:
        if value is None and type(None) in candidates:
            return None
        if dataclasses.is_dataclass(value):
            return value
        return from_dict(choose_group(groups, value, path), value, path)
    for option in candidates:
        matched, converted = match(value, option, path)
        if matched:
            return converted
    is_large = int in candidates and isinstance(value, (int, float)) and abs(value) > MAX_INTEGER
    large = " of at most 64 bits" if is_large else ""
    raise BadInput(f"{path}={clipped(value)} is not {type_name(hint)}{large}{value_hint(value, candidates, path)}")


def clipped(value: Any) -> str:
    """Formats a value for an error, truncated to MAX_SHOWN characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def match(value: Any, option: Any, path: str) -> tuple[bool, Any]:
    """Returns (True, converted) if the value has this type, else (False, None)."""
    origin = typing.get_origin(option)
    if option is type(None):
        return value is None, None
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in typing.get_args(option)), value
    if option is bool:
        return isinstance(value, bool), value
    if option is int:
        whole = isinstance(value, float) and value.is_integer()  # accepts 1e9
        fits = (isinstance(value, int) or whole) and not isinstance(value, bool) and abs(value) <= MAX_INTEGER
        return fits, int(value) if fits else None
    if option is float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        return fits, float(value) if fits else None  # rejects inf and nan
    if option is str:
        return isinstance(value, str), value
    if origin is tuple:
        args = typing.get_args(option)
        if not isinstance(value, (tuple, list)):
            return False, None
        if len(args) == 2 and args[1] is Ellipsis:
            return True, tuple(convert(item, args[0], f"{path}[{i}]") for i, item in enumerate(value))
        if len(value) != len(args):
            return False, None
        return True, tuple(convert(item, arg, f"{path}[{i}]") for i, (item, arg) in enumerate(zip(value, args)))
    if origin is dict:
        if not isinstance(value, Mapping):
            return False, None
        _, inner = typing.get_args(option)
        return True, {str(key): convert(item, inner, join(path, key)) for key, item in value.items()}
    raise AssertionError(f"{path}: schema does not know the type {option!r}")


def parse_text(text: str, candidates: list[Any]) -> Any:
    """Parses command-line text to a Python value. Text that is not a literal is returned unchanged."""
    lowered = text.strip().lower()
    if lowered in ("true", "false") and bool in candidates:
        return lowered == "true"
    if lowered in ("none", "null") and type(None) in candidates:
        return None
    if any(typing.get_origin(option) is Literal and text in typing.get_args(option) for option in candidates):
        return text
    value = literal(text)
    if value is not text:
        return value
    names = [name.strip() for name in text.split(",")]  # 'a,b' of Literal names
    inner = [typing.get_args(option)[0] for option in candidates if typing.get_origin(option) is tuple]
    return names if any(typing.get_origin(hint) is Literal for item in inner for hint in options(item)) else text


def literal(text: str) -> Any:
    """Parses a Python literal, or a JSON object or list such as '{"x": true}'. Returns other text unchanged."""
    with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # see ast.literal_eval
        return ast.literal_eval(text)
    if text.lstrip().startswith(("{", "[")):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    return text


def choose_group(groups: list[type], value: Any, path: str) -> type:
    """Returns the dataclass that `name` or `kind` in `value` selects. If there is only one, it needs neither."""
    if len(groups) == 1:
        return groups[0]
    named = {group_name(group): group for group in groups}
    tag = group_tag(groups[0])
    if not isinstance(value, Mapping):
        raise BadInput(f"{path}={value!r} must be a group of settings whose {tag} is one of {sorted(named)}")
    if tag not in value:
        raise BadInput(f"{path}.{tag} must be given; set it to one of {sorted(named)}")
    name = value[tag]
    if not isinstance(name, str) or name not in named:
        close = difflib.get_close_matches(str(name), named, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise BadInput(f"{path}.{tag}={clipped(name)} must be one of {sorted(named)}{hint}")
    return named[name]


def group_name(group: type) -> str:
    """Returns the value of `name: Literal[...]`, or of `kind`, of a group."""
    return typing.get_args(hints_of(group)[group_tag(group)])[0]


def group_tag(group: type) -> str:
    """Returns the setting that identifies a group, 'name' or 'kind'."""
    return "name" if "name" in hints_of(group) else "kind"


def with_default_name(value: Any, field: dataclasses.Field, hint: Any) -> Any:
    """Adds the name of the default to a group without a name, if the field allows several dataclasses."""
    several = len(group_types(hint)) > 1
    value = literal(value) if several and isinstance(value, str) else value
    if several and isinstance(value, Mapping) and "name" not in value:
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(default):
            return {"name": group_name(type(default)), **value}
    return value


def options(hint: Any) -> list[Any]:
    """Returns the members of a union, or [hint] if it is not a union. str is last, so that other types match first."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return sorted(members, key=lambda member: {bool: 0, int: 1, float: 2, str: 9}.get(member, 3))


def group_types(hint: Any) -> list[type[Any]]:
    """Returns the dataclasses in a union, or [hint] if the hint is a dataclass."""
    return [option for option in options(hint) if isinstance(option, type) and dataclasses.is_dataclass(option)]


def suggestion(key: str, cls: type, path: str) -> str:
    """Returns '; did you mean ...?' with a similar name in this group or in its groups, or the names of this group."""
    names = [field.name for field in dataclasses.fields(cls)]
    full_names = [name for name, *_ in describe(cls, path)]
    leaf = {name.rsplit(".", 1)[-1]: name for name in reversed(full_names)}
    close = difflib.get_close_matches(key, names, n=1) or [
        leaf[name] for name in difflib.get_close_matches(key, leaf, n=1, cutoff=0.75)
    ]
    return f"; did you mean {close[0]!r}?" if close else f"; settings: {', '.join(names)}"


def value_hint(value: Any, candidates: list[Any], path: str) -> str:
    """Returns '; did you mean ...?' for a misspelt choice. If a dict is expected, returns the syntax of a dict."""
    if isinstance(value, str) and any(typing.get_origin(option) is dict for option in candidates):
        return dict_syntax(path)
    choices = [arg for option in candidates if typing.get_origin(option) is Literal for arg in typing.get_args(option)]
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def dict_syntax(path: str) -> str:
    """Returns the command-line syntax of a dict or a group of settings."""
    return f"""; write {path}='{{"NAME": VALUE}}', or {path}.NAME=VALUE for one key"""


def type_name(hint: Any) -> str:
    """Formats a type: 'an integer', 'one of ...', 'a list of ...'."""
    plain = {bool: "true or false", int: "an integer", float: "a number", str: "text", type(None): "none"}
    parts = []
    for option in options(hint):
        origin, args = typing.get_origin(option), typing.get_args(option)
        if option in plain:
            parts.append(plain[option])
        elif origin is Literal:
            parts.append("one of " + ", ".join(map(str, args)))
        elif origin is tuple:
            inner = type_name(args[0]) if args[-1] is Ellipsis else ", ".join(type_name(arg) for arg in args)
            parts.append(f"a list of ({inner})")
        elif origin is dict:
            parts.append(f"a dict of name to ({type_name(args[1])})")
        else:
            parts.append(getattr(option, "__name__", str(option)))
    return " or ".join(parts)


def join(path: str, name: Any) -> str:
    """Joins a path and a name with a dot."""
    return f"{path}.{name}" if path else str(name)
