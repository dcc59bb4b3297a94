"""What a run has compiled is found again by each of its processes, on its own machine or beside the work folder."""

import hashlib
import os
import shutil
import subprocess
import sys

import processes
import pytest
from gcs_emulator import Emulator
from xla_flags import xla_flags

from jaxscale.runtime.hosts.programs import TwoLevelCache

PROGRAM = """
import sys
from jaxscale.system.process import prepare
prepare()
import jax, jax.numpy as jnp
from jaxscale.runtime.hosts.programs import enable_shared_cache

port, number = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number), coordinator_bind_address=f"127.0.0.1:{port}")
enable_shared_cache("gs://bucket/run")
asked = []
jax.monitoring.register_event_listener(lambda event, **facts: asked.append(event.rpartition("/")[2]))
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
place = jax.NamedSharding(mesh, jax.P("data"))
values = jax.make_array_from_callback((8,), place, lambda at: jnp.arange(8.0)[at])
print(float(jax.jit(jnp.sum)(values)), float(jax.jit(jnp.cos)(2.0)))
print("programs", asked.count("compile_requests_use_cache"), "found", asked.count("cache_hits"))
"""


def start_both(gcs, homes):
    """What both processes print last: how many programs they ask for, and how many they find."""
    port, running = processes.free_ports(), []
    for number, home in enumerate(homes):
        env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")} | gcs.environment()
        env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(1), "PYTHONPATH": os.pathsep.join(sys.path)}
        env |= {"XDG_CACHE_HOME": str(home), "JAXSCALE_HUGE_PAGES": "0"}
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(port), str(number)]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        running.append(subprocess.Popen(command, env=env, **pipes))
    logs = [process.communicate(timeout=processes.SECONDS)[0] for process in running]
    assert all("programs" in log for log in logs), "\n".join(logs)
    return [[int(word) for word in log.splitlines()[-1].split()[1::2]] for log in logs]


@pytest.mark.soak
def test_the_second_start_compiles_nothing_in_any_process(tmp_path):
    homes = [tmp_path / "host0", tmp_path / "host1"]
    with Emulator() as gcs:
        for asked, found in start_both(gcs, homes):
            assert asked > 2 and not found
        kept = gcs.names("bucket")
        assert kept and all(name.startswith("run/compiled/") for name in kept)
        shutil.rmtree(homes[0])  # another machine
        for asked, found in start_both(gcs, homes):
            assert found == asked > 2
        assert gcs.names("bucket") == kept


def test_a_program_that_was_damaged_is_no_program(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    assert TwoLevelCache(near, far, is_first=True).get("step") is None
    TwoLevelCache(near, far, is_first=True).put("step", b"code")
    TwoLevelCache(near, far, is_first=False).put("other", b"code")
    assert sorted(path.name for path in far.iterdir()) == ["step-cache"]
    shutil.rmtree(near)
    assert TwoLevelCache(near, far, is_first=False).get("step") == b"code" == (near / "step-cache").read_bytes()
    shutil.rmtree(near)
    (far / "step-cache").write_bytes(hashlib.sha256(b"code").digest() + b"cods")
    assert TwoLevelCache(near, far, is_first=False).get("step") is None and not near.exists()


@pytest.mark.parametrize("far", [False, True])
def test_without_a_disk_programs_come_from_the_shared_folder_or_are_compiled(tmp_path, far):
    (tmp_path / "near").write_text("a file")
    programs = TwoLevelCache(tmp_path / "near", tmp_path / "far" if far else None, is_first=True)
    programs.put("step", b"code")
    assert programs.get("step") == (b"code" if far else None)
