"""What a process sets for itself before jax is imported never keeps it from starting."""

import os
import subprocess
import sys

import pytest

from jaxscale.system import process


def test_a_cache_that_cannot_be_made_is_one_line_and_the_run_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "GLIBC_TUNABLES"))}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "file"), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    code = "import os; from jaxscale.system import process; process.prepare()\n"
    code += "print('JAX_COMPILATION_CACHE_DIR' in os.environ, process.has_huge_pages())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (
        0,
        f"False {sys.platform.startswith('linux') and not process.has_accelerator()}\n",
    )
    (line,) = done.stderr.splitlines()  # once, though the process starts itself again for huge pages
    assert "compiled programs are not cached" in line and str(tmp_path / "file") in line and "XDG_CACHE_HOME" in line


def test_what_the_user_set_is_left_alone(monkeypatch, tmp_path):
    for name, value in process.environment().items():
        monkeypatch.setenv(name, f"mine {value}")
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
    before = dict(os.environ)
    process.prepare()
    assert dict(os.environ) == before and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_verb_that_uses_no_device_here_tells_jax_so_though_it_is_imported_already():
    """Else a plan made by `python -m jaxscale.cli plan` takes the accelerator of the machine that it is made on."""
    code = "import jax; from jaxscale.system import process; process.prepare_ahead()\n"
    code += "print(jax.config.jax_platforms, jax.config.jax_enable_compilation_cache)"
    environment = os.environ | {"JAX_PLATFORMS": "tpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("cpu False\n", "")


def test_what_is_set_is_what_is_exported(tmp_path):
    names = [*process.environment()]
    code = "import os, jax; from jaxscale.system import process; process.keep_compiled_programs()\n"
    code += "ours = {name: os.environ.get(name) for name in process.environment()}; del ours['GLIBC_TUNABLES']\n"
    code += "del (wanted := process.environment())['GLIBC_TUNABLES']; assert ours == wanted, ours\n"
    code += "print(jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs)"
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == f"{tmp_path / 'jaxscale' / 'compiled'} 0\n", done.stderr


def test_programs_for_several_simulated_devices_are_scheduled_for_memory(monkeypatch):
    """Scheduled for concurrency, 8 of them stood still in two collectives on 2 cores, and XLA ended the process."""
    one = "--xla_force_host_platform_device_count=1"
    monkeypatch.setenv("XLA_FLAGS", one)
    process.order_collectives()
    assert os.environ["XLA_FLAGS"] == one
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=b --xla_force_host_platform_device_count=64")
    process.order_collectives()
    assert os.environ["XLA_FLAGS"].endswith(f"=64 {process.ORDERED}")
    users = f"{one}6 --xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_DEFAULT"
    monkeypatch.setenv("XLA_FLAGS", users)
    process.order_collectives()
    assert os.environ["XLA_FLAGS"] == users


def test_programs_for_several_simulated_devices_are_not_kept(monkeypatch, tmp_path):
    """XLA:CPU loads them without the order of their collectives: runs had wrong losses, or aborted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delenv("JAX_ENABLE_COMPILATION_CACHE", raising=False)
    told = {}
    monkeypatch.setattr(process, "set_variables", told.update)

    def told_for(devices, platforms="cpu"):
        told.clear()
        monkeypatch.setenv("XLA_FLAGS", f"--xla_a=b --xla_force_host_platform_device_count={devices}")
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        process.keep_compiled_programs()
        return dict(told)

    assert told_for(8) == {"JAX_ENABLE_COMPILATION_CACHE": "false"} and not list(tmp_path.iterdir())
    assert "JAX_COMPILATION_CACHE_DIR" in told_for(1)
    assert "JAX_COMPILATION_CACHE_DIR" in told_for(8, platforms="cuda")
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")  # whoever asks for it
    assert "JAX_COMPILATION_CACHE_DIR" in told_for(8)


@pytest.mark.parametrize("hard", [100, 4096])
def test_the_limit_of_open_files_is_raised_or_told(hard):
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))
from jaxscale.system import open_files
open_files.check_open_files(1000, "connections with other processes")
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = (
        "WARNING: open files: 1,000 connections with other processes and about 256 other files need 1,256, but the "
        "limit is 100; raise it before starting: ulimit -Hn 1256"
    )
    assert done.stdout == f"{hard}\n" and done.stderr.startswith(told if hard == 100 else "")
    assert bool(done.stderr) == (hard == 100)
