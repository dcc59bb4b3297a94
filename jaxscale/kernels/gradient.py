"""jax.custom_vjp with type annotations: the decorated function has the type of the original function."""

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import jax

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class CustomVjp(Protocol[P, R]):
    """A function with a custom gradient."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Sets the forward and the backward pass, like jax.custom_vjp.defvjp."""
        ...


def custom_vjp(f: Callable[P, R], nondiff_argnums: tuple[int, ...] = ()) -> CustomVjp[P, R]:
    """Returns jax.custom_vjp(f) with the type of f. JAX's annotation omits the parameters and the result."""
    return cast(CustomVjp[P, R], jax.custom_vjp(f, nondiff_argnums=nondiff_argnums))
