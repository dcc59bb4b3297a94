"""Which settings are read while something runs: every class of settings notes who asks for its fields."""

import contextlib
import dataclasses
import sys
import typing

from jaxscale import schema
from jaxscale.config import RunConfig

# Whoever looks at all settings, whatever they mean.
GENERAL = ("schema.py", "settings/unread.py", "dataclasses.py", "<string>")


def groups(cls=RunConfig):
    """Every class of settings that a run can have."""
    found = {cls}
    for hint in typing.get_type_hints(cls).values():
        inner = [*schema.options(hint), *schema.options(schema.named_hint(hint))]
        inner += [arg for option in inner for arg in typing.get_args(option)]
        for option in inner:
            if dataclasses.is_dataclass(option) and option not in found:
                found |= groups(option)
    return found


@contextlib.contextmanager
def noted():
    """A set that fills, while the block runs, with (class, field) of each setting that is read to do something.

    Checks of values, copies, comparisons and records look at all settings, and do not count.
    """
    read, fields = set(), {cls: {field.name for field in dataclasses.fields(cls)} for cls in groups()}

    def getter(of, plain):
        def get(self, name):
            if name in of:
                caller = sys._getframe(1)
                while caller.f_code.co_name in ("<genexpr>", "<listcomp>", "<lambda>"):
                    caller = caller.f_back
                file, function = caller.f_code.co_filename, caller.f_code.co_name
                if not file.endswith(GENERAL) and function != "__post_init__" and not function.startswith("check_"):
                    read.add((type(self), name))
            return plain(self, name)

        return get

    for cls, of in fields.items():
        cls.__getattribute__ = getter(of, object.__getattribute__)
    try:
        yield read
    finally:
        for cls in fields:
            del cls.__getattribute__


def placed(config, path=""):
    """{dotted name: (class, field)} of every setting of a config, as unread.leaves names them."""
    found = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), schema.join(path, field.name)
        inner = {name: value} if dataclasses.is_dataclass(value) else {}
        if isinstance(value, tuple):
            inner = {f"{name}[{i}]": one for i, one in enumerate(value) if dataclasses.is_dataclass(one)}
        if isinstance(value, dict):
            inner = {schema.join(name, key): one for key, one in value.items() if dataclasses.is_dataclass(one)}
        for place, group in inner.items():
            found |= placed(group, place)
        if not inner:
            found[name] = (type(config), field.name)
    return found
