"""The folder of a run with three checkpoints, made once, for the tests that look at such folders from outside."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from jaxscale.runtime.checkpoint import array_store, verify
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import seal

STEPS = (10, 20, 30)
CONFIG = {"seed": 1, "checkpoint": {"keep_last": 2, "keep_every_steps": 0}}


def make_state(step, seed=0):
    """Weights in several pieces and in one, moments, a key, and numbers of every kind that a state may have."""
    rng = np.random.default_rng([seed, step])
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    place = lambda values, *spec: jax.device_put(
        values, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    )
    wide = place(jnp.asarray(rng.normal(size=(96, 40)), jnp.float32), "data", "tensor")
    params = {
        "wide": wide,
        "half": place(jnp.asarray(rng.normal(size=(7, 3)), jnp.bfloat16)),
        "block": {"count": place(jnp.int32(5))},
    }
    moments = {"wide": place(jnp.asarray(rng.normal(size=(96, 40)), jnp.float32), "data")}
    numbers = {"epoch": step, "rate": 0.5, "done": False, "flag": place(jnp.array(True)), "order": np.arange(5) + 2**40}
    return {
        "step": place(jnp.int32(step)),
        "params": params,
        "opt_state": moments,
        "key": np.uint32([1, step]),
        **numbers,
    }


def make_run(folder, steps=STEPS, seed=0):
    """A run folder with these steps and a config.json."""
    config = CONFIG | {"seed": seed}
    checkpoints = Checkpoints(pathlib.Path(folder) / "checkpoints", CheckpointConfig(keep_last=10))
    for step in steps:
        checkpoints.save(step, make_state(step, seed), {"config": config, "data": {"fingerprint": "f"}, "step": step})
        checkpoints.wait()
    checkpoints.close()
    (pathlib.Path(folder) / "config.json").write_text(json.dumps({"config": config}))
    return checkpoints


def copy_of(run, folder):
    """The checkpoints in a copy of a run folder, to be spoilt."""
    shutil.copytree(run.directory.parent, folder)
    return Checkpoints(pathlib.Path(folder) / "checkpoints", CheckpointConfig())


def reseal(checkpoints, step, **changes):
    """Changes the record of a step as if training had written it so."""
    path = checkpoints.directory / str(step) / "run" / "metadata"
    content = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    path.write_text(json.dumps(seal(content | changes)))
    verify.write_main_list(path.parent.parent, num_processes=1)


def flip_bit(path, bit):
    """Turns one bit of a file over."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(content)


def files_of(checkpoints, step, part=""):
    """All files of a step, or of a part of it."""
    return sorted(path for path in (checkpoints.directory / str(step) / part).rglob("*") if path.is_file())


def location(checkpoints, step, leaf):
    """(file, first byte, length) of the first piece of a leaf, from the index itself."""
    base = tensorstore.KvStore.open(array_store.kvstore_spec(checkpoints.directory / str(step) / "state")).result()
    root = tensorstore.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
    for entry in tensorstore.ocdbt.dump(base, root).result()["entries"]:
        name, _, piece = entry["key"].decode().rpartition("/")
        if name == leaf and not piece.startswith(".") and "indirect_value" in entry:
            _, *file, begin, size = entry["indirect_value"].split(":")
            return "state/" + "".join(file), int(begin), int(size)
    raise AssertionError(f"{leaf} has no piece of its own in {root}")
