"""Requests to storage for a save and a restore of a 70B model's state, by the number of processes."""

import os

import processes
import pytest
from gcs_emulator import Emulator

pytest.importorskip("gcsfs", reason="gcsfs is not installed")

# Saves twice and restores once the arrays of configs/70b.py, each a few numbers that all processes share.
PROGRAM = """
import sys
import jax, numpy as np
from jaxscale.settings import config_file
from jaxscale.build import make_program
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.hosts.agree import barrier
from jaxscale.system import paths

config, port, count, number = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
if int(count) > 1:
    where = f"127.0.0.1:{port}"
    jax.distributed.initialize(where, int(count), int(number), coordinator_bind_address=where)
cfg = config_file.load_config(config, {"mesh.fsdp": "1", "mesh.tensor": "1", "mesh.data": "1"})
shapes = make_program(cfg, resolve_budget(cfg, None), jax.local_devices()[:1]).abstract_state
mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))

def tiny(leaf):
    shape = tuple(8 if axis == 0 else 1 for axis in range(leaf.ndim))
    place = jax.NamedSharding(mesh, jax.P(*("fsdp",) * bool(shape)))
    return jax.make_array_from_callback(shape, place, lambda index: np.zeros(shape, leaf.dtype)[index])

def mark(text):
    barrier()
    if jax.process_index() == 0:
        (paths.as_path("gs://bucket") / f"mark-{text}").exists()
    barrier()

state = jax.tree.map(tiny, shapes)
mark("open")
checkpoints = Checkpoints("gs://bucket/run", CheckpointConfig())
for step in (1, 2):
    mark(f"save-{step}")
    checkpoints.save(step, state, {}, wait=True)
mark("restore")
checkpoints.restore(2, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state))
mark("end")
print(len(jax.tree.leaves(state)), "arrays")
"""
CONFIG = os.path.join(os.path.dirname(__file__), "..", "..", "configs", "70b.py")


def requests(count):
    """{part: requests of all processes}."""
    counted, part = {}, None
    with Emulator() as gcs:
        logs = processes.run_programs(PROGRAM, count, gcs.environment(), CONFIG)
        assert all(log.endswith(" arrays\n") for log in logs), "\n".join(logs)
        for _, name, _ in gcs.log:
            if "mark-" in name:
                part = name.partition("mark-")[2].rstrip("/")
            elif part:
                counted[part] = counted.get(part, 0) + 1
    return counted


@pytest.mark.soak
def test_requests_grow_no_faster_than_the_processes():
    counted = {count: requests(count) for count in (1, 2, 4, 8)}
    print(counted)
    for part in ("save-2", "restore"):
        first, last = (counted[count][part] for count in (4, 8))
        assert last < 2.2 * first, (part, counted)  # twice the processes, each with files of its own
