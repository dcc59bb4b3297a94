"""The precision of float32 products."""

import functools
from collections.abc import Callable

import jax

NAMES = {"tf32": "tensorfloat32", "highest": "highest"}  # of settings, as jax has them


def with_precision(name: str, f: Callable) -> Callable:
    """f, traced so that float32 products have this precision, 'default', 'tf32' or 'highest': backward passes too."""
    if name == "default":
        return f

    @functools.wraps(f)
    def precise(*args, **kwargs):
        with jax.default_matmul_precision(NAMES[name]):
            return f(*args, **kwargs)

    return precise
