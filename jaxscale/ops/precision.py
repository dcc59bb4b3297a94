"""The precision of float32 products, as a context to trace in."""

import contextlib

import jax


def matmul_precision(name: str):
    """A context in which float32 products have this precision: 'default', 'tf32' or 'highest'."""
    return (
        contextlib.nullcontext()
        if name == "default"
        else jax.default_matmul_precision({"tf32": "tensorfloat32", "highest": "highest"}[name])
    )
