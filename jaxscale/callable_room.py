"""A room whose name is also a call of the Python interface: `jaxscale.train` holds modules, `jaxscale.train()` trains.

Python sets `jaxscale.train` to the package of that name as soon as anything in it is imported, so a function of the
same name beside it would be there on some days and not on others. The package itself can be called instead.
"""

import importlib
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any


class CallableRoom(types.ModuleType):
    """A package that is called as the function of its name in jaxscale.api, which is imported by the first call."""

    @property
    def _function(self) -> Callable[..., Any]:
        """The function."""
        return getattr(importlib.import_module("jaxscale.api"), self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> inspect.Signature:
        """Its arguments, for help() and for notebooks that complete them."""
        return inspect.signature(self._function)

    @property
    def __doc__(self) -> str:
        """The function's call and docstring, which help() shows of a package, and then what the package's file says."""
        function, own = self._function, vars(self).get("__doc__") or ""
        called = f"{function.__name__}{inspect.signature(function)}"
        return f"{called}\n\n{inspect.getdoc(function)}\n\nThis package: {own}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self._function(*args, **kwargs)


def make_callable(name: str) -> None:
    """Lets the package of this name, which is being imported, be called."""
    sys.modules[name].__class__ = CallableRoom
