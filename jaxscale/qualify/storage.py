"""What a save and a restore take, through the checkpoints of training, to the folder that is given."""

import contextlib
import math
import shutil
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.checkpoint.config import CheckpointConfig
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.hosts.agree import agreed, all_here
from jaxscale.hosts.reports import SharedReports
from jaxscale.qualify.result import Figure, Machine, Probe
from jaxscale.qualify.timing import seconds_of
from jaxscale.sharding.config import MESH_AXES, MeshConfig
from jaxscale.sharding.mesh import make_mesh
from jaxscale.system import paths
from jaxscale.units import plural, size

FOLDER = "qualify-saves"  # inside the folder that is given, and gone afterwards
HOST_BYTES, CPU_HOST_BYTES = 4 * 2**30, 32 * 2**20  # that each host saves: beyond what a disk's own cache takes
LEAVES = 16
FIRST_BYTES = 2**20  # of each host in the first two saves: what the first imports and compiles is no part of a rate
TIME_SHARE = 1 / 8  # of the time for all probes, by the second save: slow storage is tried with less


def measure_storage(machine: Machine) -> Probe:
    """bytes/s of all hosts together of a save (written, synced and read back) and of a restore, bit for bit.

    What was just written may still be in a host's memory when it is restored, so that a cold restore can be slower.
    """
    hosts, most = jax.process_count(), CPU_HOST_BYTES if machine.on_cpu else HOST_BYTES
    mesh = make_mesh(MeshConfig(fsdp=-1), machine.devices)
    with emptied(machine.save_folder) as folder:
        save_and_restore(folder / "first", mesh, FIRST_BYTES * hosts, machine)
        tried, _, *seconds = save_and_restore(folder / "second", mesh, FIRST_BYTES * hosts, machine)
        whole = agreed(lambda: min(most * hosts, int(tried / sum(seconds) * machine.seconds * TIME_SHARE)))
        saved_bytes, blocked, saved, restored = save_and_restore(folder / "timed", mesh, max(whole, tried), machine)
    figures = (
        Figure(name="save, written, synced and read back", value=saved_bytes / saved, unit="bytes/s"),
        Figure(name="restore", value=saved_bytes / restored, unit="bytes/s"),
        Figure(name="a save blocks the step's thread for", value=blocked, unit="s"),
    )
    told = f"{size(saved_bytes)} by {plural(hosts, 'host')} to {machine.save_folder}"
    return Probe(name="storage", figures=figures, notes=(told,))


def save_and_restore(folder: Any, mesh: Mesh, num_bytes: int, machine: Machine) -> tuple[int, float, float, float]:
    """(bytes, seconds for which the save blocked, seconds until it was safe, seconds of the restore)."""
    state = jax.block_until_ready(make_state(mesh, num_bytes))
    reports = SharedReports() if jax.process_count() > 1 else None
    checkpoints = Checkpoints(folder, CheckpointConfig(keep_last=1), reports=reports, phase=machine.phase)
    checkpoints.prepare(state)
    checkpoints.preparing.join()
    all_here()

    def save() -> float:
        blocked = checkpoints.save(0, state, {})
        checkpoints.wait()
        return blocked

    saved, blocked = seconds_of(save)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    all_here()
    restored, _ = seconds_of(lambda: jax.block_until_ready(checkpoints.restore(0, abstract)), time.perf_counter)
    checkpoints.close()
    return sum(x.nbytes for x in state.values()), blocked, saved, restored


def make_state(mesh: Mesh, num_bytes: int) -> dict[str, jax.Array]:
    """LEAVES arrays of different random numbers, shared by all devices, so many bytes in all."""
    rows = NamedSharding(mesh, P(MESH_AXES, None))
    columns = max(1, math.ceil(num_bytes / (4 * LEAVES * mesh.size)))
    make = jax.jit(lambda key: jax.random.normal(key, (mesh.size, columns), jnp.float32), out_shardings=rows)
    return {f"w{number}": make(jax.random.key(number)) for number in range(LEAVES)}


@contextlib.contextmanager
def emptied(place: Any) -> Iterator[Any]:
    """A folder inside `place` for all processes, which the first one removes again."""
    folder = paths.absolute(place) / FOLDER
    try:
        yield folder
    finally:
        if jax.process_index() == 0 and folder.exists():
            folder.rmtree() if paths.is_remote(folder) else shutil.rmtree(folder)
