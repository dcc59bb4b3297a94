"""jaxscale: training language models with JAX, from a laptop to a TPU pod.

For use in a notebook or a Python program (docs/python_api.md):

    import jaxscale

    cfg = jaxscale.load_config("configs/quickstart.py", {"train_tokens": 1_000_000})
    jaxscale.train(cfg, "runs/first")
    print(jaxscale.sample("runs/first", "def main"))
    jaxscale.evaluate("runs/first", text={"docs": "docs/*.md"})
    jaxscale.report("runs/first")

The package also has convert, plan, preflight, prepare, open_model and trace. The first call imports jax; importing the
package does not.
"""

import importlib
import sys
from typing import Any

__version__ = "0.2.0.dev0"
CALLS = {
    "ConvertOptions": "jaxscale.api.conversion",
    "convert": "jaxscale.api.conversion",
    "evaluate": "jaxscale.api.measuring",
    "load_config": "jaxscale.settings.config_file",
    "open_model": "jaxscale.api.inference",
    "plan": "jaxscale.api.planning",
    "preflight": "jaxscale.api.planning",
    "prepare": "jaxscale.api.corpora",
    "report": "jaxscale.api.reports",
    "sample": "jaxscale.api.writing",
    "trace": "jaxscale.api.tracing",
    "train": "jaxscale.api.training",
}
__all__ = list(CALLS)


def __getattr__(name: str) -> Any:
    """Imports a function of the Python API on first use."""
    if name in __all__:
        if "jax" not in sys.modules:  # if jax is already imported, the caller has configured it
            importlib.import_module("jaxscale.system.process").keep_compiled_programs()
        return getattr(importlib.import_module(CALLS[name]), name)
    raise AttributeError(f"module 'jaxscale' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    """Returns names for tab completion."""
    return sorted([*globals(), *__all__])
