"""Eight simulated CPU devices for every test; broadcasting by accident and warnings are errors."""

import os
import re

flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
# Level 0 leaves LLVM's optimisation out, not XLA's: tiny programs compile in half the time.
os.environ["XLA_FLAGS"] = (
    f"--xla_backend_optimization_level=0 {flags} --xla_force_host_platform_device_count=8"  # flags may overrule it
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAXSCALE_HUGE_PAGES"] = "0"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory, monkeypatch):
    """Tokenised text and compiled programs of a test are its own, never the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
