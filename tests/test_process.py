"""What a process sets for itself before jax is imported never keeps it from starting."""

import os
import subprocess
import sys

from jaxscale.system import process


def test_a_cache_that_cannot_be_made_is_one_line_and_the_run_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "GLIBC_TUNABLES"))}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "file"), "JAX_PLATFORMS": "cpu"}
    code = (
        "import os; from jaxscale import process; process.prepare(); print('JAX_COMPILATION_CACHE_DIR' in os.environ)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n")
    (line,) = done.stderr.splitlines()  # once, though the process starts itself again for huge pages
    assert "compiled programs are not kept" in line and str(tmp_path / "file") in line and "XDG_CACHE_HOME" in line


def test_what_the_user_set_is_left_alone(monkeypatch, tmp_path):
    for name, value in process.environment().items():
        monkeypatch.setenv(name, f"mine {value}")
    before = dict(os.environ)
    process.prepare()
    assert dict(os.environ) == before and not list(tmp_path.iterdir())


def test_what_is_set_is_what_is_exported(monkeypatch):
    for name in process.environment():
        monkeypatch.delenv(name, raising=False)
    process.keep_compiled_programs()
    ours = {name: value for name, value in process.environment().items() if name != "GLIBC_TUNABLES"}
    assert {name: os.environ.get(name) for name in ours} == ours and len(ours) == 3
    for name in ours:
        monkeypatch.delenv(name)
