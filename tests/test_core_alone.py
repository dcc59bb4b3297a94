"""The example of docs/howto/use_core.md trains a model with core/ alone."""

import os
import pathlib
import subprocess
import sys

from xla_flags import xla_flags

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "howto" / "use_core.md"
LOADED = """
import sys
ours = {name.split(".")[1] for name in sys.modules if name.startswith("jaxscale.")}
print("loaded", *sorted(ours))
"""


def example() -> str:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("```python\n")
    return rest.partition("```")[0]


def test_the_example_trains_on_four_devices_and_loads_neither_runtime_nor_tools():
    code = example()
    assert len(code.splitlines()) <= 40
    environment = os.environ | {"XLA_FLAGS": xla_flags(4), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code + LOADED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *steps, loaded = done.stdout.splitlines()
    losses = [float(line.split()[1]) for line in steps]
    assert len(losses) == 20 and losses[0] > 4 and losses[-1] < 1.2
    assert set(loaded.split()[1:]) <= {"core", "kernels", "schema", "settings", "system", "units"}
