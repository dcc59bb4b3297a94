"""Attention of a stack whose layers do not all see equally far: a window in some, every key in the others.

Which of the two a layer is may be known only as the program runs, where one compiled layer serves them all.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxscale.ops.config import Mix


def either(near: Callable[..., Any], far: Callable[..., Any], mix: Mix) -> Callable[..., Any]:
    """f(*arrays, local=) with the values of near(*arrays) where `local` is true, else of far(*arrays)."""
    # The program's text says how often each runs, for who counts its work (ahead.hlo_trips).
    scope = f"taken_{mix.near}_of_{mix.layers}"

    def run(*arrays: jax.Array, local: bool | np.bool_ | jax.Array) -> Any:
        if isinstance(local, (bool, np.bool_)):
            return near(*arrays) if local else far(*arrays)
        with jax.named_scope(scope):
            return lax.cond(local, near, far, *arrays)

    return run
