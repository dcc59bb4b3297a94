"""A state that several processes restore: each byte is read from storage once, and each process has all of its bits."""

import json
import re

import processes
import pytest
from gcs_emulator import Emulator

pytest.importorskip("gcsfs", reason="gcsfs is not installed")

# Saves a state on one mesh and restores it on others, between looks at objects that mark the places in the log.
PROGRAM = """
import json, sys
import jax, numpy as np
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.hosts.agree import barrier
from jaxscale.system import paths

jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, count, number = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number), coordinator_bind_address=f"127.0.0.1:{port}")
rng = np.random.default_rng(0)
bits = {"w": rng.bytes(64 * 1024 * 4), "half": rng.bytes(16 * 512 * 2), "flags": bytes([0, 1, 1, 0]), "step": bytes(4)}
values = {  # random bits: NaNs, zeros of both signs and denormals among them
    "w": np.frombuffer(bits["w"], np.float32).reshape(64, 1024),
    "half": np.frombuffer(bits["half"], jax.numpy.bfloat16).reshape(16, 512),
    "flags": np.frombuffer(bits["flags"], bool),
    "step": np.frombuffer(bits["step"], np.int32)[0],
}
SPECS = {"w": ("fsdp",), "half": (None, "fsdp"), "flags": (), "step": ()}

def shardings(**sizes):
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
    return {name: jax.NamedSharding(mesh, jax.P(*spec)) for name, spec in SPECS.items()}

def mark(text):
    barrier()
    if jax.process_index() == 0:
        (paths.as_path("gs://bucket") / f"mark-{text}").exists()
    barrier()

checkpoints = Checkpoints("gs://bucket/run", CheckpointConfig())
first = shardings(data=1, fsdp=jax.device_count())
state = {
    name: jax.make_array_from_callback(value.shape, first[name], lambda index, value=value: value[index])
    for name, value in values.items()
}
checkpoints.save(1, state, {}, wait=True)
number = jax.device_count()
for data in [number, 1, *([2] if number > 2 else [])]:
    sizes = {"data": data, "fsdp": number // data}
    places = shardings(**sizes)
    wanted = {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=places[n]) for n, v in values.items()}
    mark(json.dumps(sizes))
    found = checkpoints.restore(1, wanted)
    mark("end")
    for name, value in values.items():
        assert found[name].sharding == places[name] and found[name].dtype == value.dtype
        for part in found[name].addressable_shards:
            assert np.asarray(part.data).tobytes() == np.ascontiguousarray(value[part.index]).tobytes(), name
print("the same bits")
"""
STATE_BYTES = 64 * 1024 * 4 + 16 * 512 * 2


def bytes_of(gcs, name, ranged):
    """What a request asked for."""
    first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", ranged).groups() if ranged else (0, "")
    size = len(gcs.get("bucket", name))
    return min(int(last) + 1 if last else size, size) - int(first)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_each_byte_is_read_once_however_many_hold_copies(count):
    with Emulator() as gcs:
        logs = processes.run_programs(PROGRAM, count, gcs.environment())
        assert all(log.endswith("the same bits\n") for log in logs), "\n".join(logs)
        counted, sizes = {}, None
        for method, name, ranged in gcs.log:
            if name.startswith("mark-"):
                sizes = None if name == "mark-end" else json.loads(name.removeprefix("mark-"))
            elif sizes and method == "GET" and "/d/" in name:
                key = json.dumps(sizes)
                counted[key] = counted.get(key, 0) + bytes_of(gcs, name.removeprefix("media "), ranged)
    assert len(counted) == (3 if count > 2 else 2)
    for sizes, read in counted.items():  # and the index, by each process
        assert STATE_BYTES <= read < 1.1 * STATE_BYTES, (sizes, read / STATE_BYTES)
