"""Optional packages are found by their distributions."""

import pathlib
import re
import subprocess
import sys

import pytest

from jaxscale.runtime.text.sources.part import importing
from jaxscale.system import packages

PACKAGE = pathlib.Path(packages.__file__).parents[1]
HIDDEN = """
import sys
from jaxscale.runtime.monitor import sinks
sys.path[:] = [path for path in sys.path if "site-packages" not in path]  # wandb is not installed now
import wandb  # the folder
print(wandb.__path__, sinks.missing_packages(["wandb"]))
"""


def test_a_folder_of_the_name_does_not_stand_for_a_package(tmp_path):
    (tmp_path / "wandb").mkdir()
    command = [sys.executable, "-c", HIDDEN]
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": "/usr/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
    assert "monitor.writers='wandb' needs a missing package; run pip install" in done.stdout, done.stderr


def test_a_folder_of_the_name_does_not_satisfy_an_import(tmp_path, monkeypatch):
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    import no_such_package  # noqa: F401  as Python sees it, the package is there

    with pytest.raises(ValueError, match="needs the package no_such_package, which is not installed"):
        with importing("reading this", "no_such_package"):
            import no_such_package  # noqa: F401, F811


@pytest.mark.parametrize("name", ["numpy", "tensorboardX", "tokenizers", "sentencepiece", "pytest"])
def test_an_installed_package_is_found_by_the_name_of_its_import(name):
    assert packages.is_installed(name)


def test_no_optional_package_is_looked_for_by_an_import():
    looks = re.compile(r"find_spec\(|except \(?(ImportError|ModuleNotFoundError)")
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if looks.search(path.read_text("utf-8"))}
    assert found == {"runtime/text/sources/part.py"}  # which asks for the distribution first
