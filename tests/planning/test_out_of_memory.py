"""Too little memory on a device is one line: what was asked for, what the estimate said, and what helps most."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import tiny
from test_topology import needs_libtpu

from jaxscale.program.out_of_memory import out_of_memory_explained
from jaxscale.system.exits import Exit, Stop
from jaxscale.tools.planning.topology import open_topology

FAR_TOO_MANY = 1 << 43  # float32 numbers: 32 TiB
HELP = lambda: ("; the estimate was 3 GiB", ("train.num_microbatches=2", "model.remat=full"))


def test_an_allocation_that_the_device_refuses_is_one_line_with_the_estimate_and_two_settings():
    with pytest.raises(Stop) as error, out_of_memory_explained(HELP):
        jnp.zeros(FAR_TOO_MANY).block_until_ready()
    assert error.value.code == Exit.NO_GO
    assert str(error.value) == (
        f"out of device memory: allocating {4 * FAR_TOO_MANY} bytes failed; the estimate was 3 GiB; try "
        "train.num_microbatches=2 or model.remat=full"
    )


def test_a_program_that_needs_too_much_while_it_runs_is_the_same_line():
    spread = jax.jit(lambda x: jnp.outer(jnp.exp(jnp.broadcast_to(x, 1 << 22)), jnp.arange(1 << 21) + x).sort().sum())
    with pytest.raises(Stop, match="^out of device memory: allocating .*; try train.num_microbatches=2 or"):
        with out_of_memory_explained(HELP):
            spread(jnp.float32(1)).block_until_ready()


def test_another_error_of_the_device_keeps_its_traceback():
    def fail(x):
        raise KeyError("not memory")

    call = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x))
    with pytest.raises(jax.errors.JaxRuntimeError), out_of_memory_explained(HELP):
        call(jnp.float32(1)).block_until_ready()


@pytest.mark.aot
@needs_libtpu
def test_a_program_that_the_compiler_refuses_is_the_same_line():
    sharding = jax.sharding.SingleDeviceSharding(open_topology("v5e:1x1").devices[0])
    x = jax.ShapeDtypeStruct((1 << 17, 1 << 17), jnp.bfloat16, sharding=sharding)  # 32 GiB, on a chip of 16 GiB
    with pytest.raises(Stop, match="^out of device memory: .*HBM.*; the estimate was 3 GiB; try") as error:
        with out_of_memory_explained(HELP):
            jax.jit(lambda x: x @ x).lower(x).compile()
    assert "\n" not in str(error.value)


LIMITED = """
import resource, sys
import jax, tiny
from jaxscale import main
from jaxscale.api import training
from jaxscale.system.exits import run_and_exit

jax.devices()
size = int(open("/proc/self/statm", encoding="utf-8").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1400 << 20), resource.RLIM_INFINITY))
run_and_exit(main.main)
"""


@pytest.mark.soak
def test_training_under_a_limit_ends_with_the_estimate_of_its_program(tmp_path):
    (tmp_path / "text.txt").write_text("def return import " * 400)
    values = tiny.VALUES | dict(
        model=tiny.LLAMA | dict(vocab_size=1 << 18, embed_dim=256, num_layers=1),
        data=dict(files=str(tmp_path / "text.txt"), cache_dir=str(tmp_path / "cache")),
        mesh=dict(data=1, fsdp=1),
    )
    (tmp_path / "config.py").write_text(f"def get_config():\n    return {values!r}\n")
    words = [f"--config={tmp_path / 'config.py'}", f"--workdir={tmp_path / 'run'}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LIMITED, *words]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == Exit.NO_GO, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("stopped (no_go, exit 3): out of device memory: allocating ")
    assert "; estimated need per device: " in line and "mesh.fsdp" in line and "Traceback" not in done.stderr
