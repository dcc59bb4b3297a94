"""Small states on many meshes, and how to damage what is saved of them: for the tests of checkpoints."""

import builtins
import functools
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore

from jaxscale.system.exits import Stop


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any
    epoch: int


def shardings(mesh_shape, tree):
    devices = jax.devices()[: int(np.prod(mesh_shape))]
    mesh = jax.make_mesh(mesh_shape, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=devices)
    spec = lambda leaf: jax.sharding.PartitionSpec("data", "tensor") if leaf.ndim == 2 else jax.sharding.PartitionSpec()
    return jax.tree.map(lambda leaf: jax.sharding.NamedSharding(mesh, spec(leaf)), tree)


def init(seed=0, width=16):
    key = jax.random.key(seed)
    params = {
        "block": {"w": jax.random.normal(key, (32, width)), "b": jnp.full((4,), 0.1, jnp.bfloat16)},
        "flags": jnp.array([True, False, True]),
    }
    frozen = {"block": {"w": True, "b": False}, "flags": False}  # masked: MaskedNode and EmptyState among the leaves
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.adam(1e-3), frozen))
    return jnp.int32(3), params, optimizer.init(params)


@functools.cache
def make_state(mesh_shape=(4, 2), **settings):
    shape = jax.eval_shape(lambda: init(**settings))
    return State(*jax.jit(lambda: init(**settings), out_shardings=shardings(mesh_shape, shape))(), epoch=7)


def abstract(mesh_shape=(4, 2), **settings):
    shape = jax.eval_shape(lambda: init(**settings))
    return State(
        *jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            shape,
            shardings(mesh_shape, shape),
        ),
        epoch=0,
    )


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def stop_of(action, *arguments, **settings):
    with pytest.raises(Stop) as caught:
        action(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return caught.value


def data_files(directory, step):
    """The files that hold array data, largest first."""
    folder = directory / str(step) / "state"
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name == "d"]
    return sorted(files, key=lambda path: -path.stat().st_size)


def flip_bit(path, bit):
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(raw)


def restore_newest(checkpoints, attempt, say=print):
    """attempt(step) of the newest step that can be read, as runtime/run/opening.py goes on from it; of None without
    any."""
    step = checkpoints.newest_readable(say)
    while True:
        try:
            found = attempt(step)
        except Stop as error:
            step = checkpoints.fall_back(step, error, say)
            continue
        if step is not None:
            checkpoints.log_changed_files(step, say)
        return found


def refuse_to_open(patch, refused, error):
    """From now on opening raises the error for each path of which refused(path) is true, as a sick disk would."""

    def refusing(real):
        def opened(path, *rest, **more):
            if isinstance(path, str | os.PathLike) and refused(pathlib.Path(path)):
                raise error
            return real(path, *rest, **more)

        return opened

    patch.setattr(builtins, "open", refusing(open))
    patch.setattr(os, "open", refusing(os.open))
    store_open = tensorstore.open  # reads in C++, out of reach of the two above

    def opened_store(spec, **how):
        base = spec["kvstore"].get("base", {}) if isinstance(spec, dict) else None
        if isinstance(base, dict) and refused(pathlib.Path(base.get("path", "")) / "manifest.ocdbt"):
            raise error
        return store_open(spec, **how)

    patch.setattr(tensorstore, "open", opened_store)
