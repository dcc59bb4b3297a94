"""Measurements of saving and restoring a checkpoint in a folder, with the checkpoint manager of training."""

import contextlib
import math
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.core.config import MESH_AXES, MeshConfig
from jaxscale.core.mesh import make_mesh
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.hosts.agree import agreed, barrier, in_all
from jaxscale.system import paths
from jaxscale.tools.qualify.result import Machine, Probe, Reading
from jaxscale.tools.qualify.timing import seconds_of
from jaxscale.units import plural, size

FOLDER = "qualify-saves"  # temporary subfolder of the tested folder
PROCESS_BYTES, CPU_PROCESS_BYTES = 4 * 2**30, 32 * 2**20  # most bytes per process, larger than a disk's cache
LEAVES = 16
FIRST_BYTES = 2**20  # bytes per process in the first two saves; the first imports and compiles, and is not timed
TIME_SHARE = 1 / 8  # fraction of the time limit of all probes; the second save's speed then gives the size


def measure_storage(machine: Machine) -> Probe:
    """Measures bytes/s of saving and restoring, over all processes. A restore may use the host's page cache."""
    processes, most = jax.process_count(), CPU_PROCESS_BYTES if machine.on_cpu else PROCESS_BYTES
    mesh = make_mesh(MeshConfig(fsdp=-1), machine.devices)
    with empty_folder(machine.save_folder) as folder:
        save_and_restore(folder / "first", mesh, FIRST_BYTES * processes, machine)
        tried, _, *seconds = save_and_restore(folder / "second", mesh, FIRST_BYTES * processes, machine)
        whole = agreed(lambda: min(most * processes, int(tried / sum(seconds) * machine.seconds * TIME_SHARE)))
        saved_bytes, blocked, saved, restored = save_and_restore(folder / "timed", mesh, max(whole, tried), machine)
    figures = (
        Reading(name="save (written, synced, read back)", value=saved_bytes / saved, unit="bytes/s"),
        Reading(name="restore", value=saved_bytes / restored, unit="bytes/s"),
        Reading(name="time that a save blocks training", value=blocked, unit="s"),
    )
    note = f"{size(saved_bytes)} by {plural(processes, 'process')} to {machine.save_folder}"
    return Probe(name="storage", figures=figures, notes=(note,))


def save_and_restore(folder: Any, mesh: Mesh, num_bytes: int, machine: Machine) -> tuple[int, float, float, float]:
    """Returns (bytes, seconds of blocking in the save, seconds of the whole save, seconds of the restore)."""
    state = jax.block_until_ready(make_state(mesh, num_bytes))
    checkpoints = Checkpoints(folder, CheckpointConfig(keep_last=1), phase=machine.phase)
    checkpoints.prepare(state)  # so that save() does not wait for the preparation
    checkpoints.wait_prepared()
    barrier()

    def save() -> float:
        blocked = checkpoints.save(0, state, {})
        checkpoints.wait()
        return blocked

    saved, blocked = seconds_of(save)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    barrier()
    restored, _ = seconds_of(lambda: jax.block_until_ready(checkpoints.restore(0, abstract)))
    checkpoints.close()
    return sum(x.nbytes for x in state.values()), blocked, saved, restored


def make_state(mesh: Mesh, num_bytes: int) -> dict[str, jax.Array]:
    """Returns LEAVES random arrays with at least `num_bytes` in total, sharded over all devices."""
    rows = NamedSharding(mesh, P(MESH_AXES, None))
    columns = max(1, math.ceil(num_bytes / (4 * LEAVES * mesh.size)))
    make = jax.jit(lambda key: jax.random.normal(key, (mesh.size, columns), jnp.float32), out_shardings=rows)
    return {f"w{number}": make(jax.random.key(number)) for number in range(LEAVES)}


@contextlib.contextmanager
def empty_folder(parent: Any) -> Iterator[Any]:
    """Yields an empty shared folder in `parent`. Process 0 deletes the folder before and after use."""
    folder = paths.absolute(parent) / FOLDER

    def remove() -> None:
        if jax.process_index() == 0 and folder.exists():
            folder.rmtree() if paths.is_remote(folder) else shutil.rmtree(folder)

    in_all(remove)
    try:
        yield folder
    finally:
        remove()
