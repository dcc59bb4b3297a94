"""jax.custom_vjp for functions whose results are used as arrays: the decorated function keeps its type."""

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import jax

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class CustomVjp(Protocol[P, R]):
    """A function with a custom gradient."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Sets the forward and the backward pass, as jax.custom_vjp.defvjp."""
        ...


def custom_vjp(f: Callable[P, R], nondiff_argnums: tuple[int, ...] = ()) -> CustomVjp[P, R]:
    """Returns jax.custom_vjp(f), typed as `f`: jax's own type loses the parameters and the result."""
    return cast(CustomVjp[P, R], jax.custom_vjp(f, nondiff_argnums=nondiff_argnums))
