"""Runs of these tests compile few programs, many times over: once is enough."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_kept(tmp_path_factory):
    """jax's own cache, in a folder of the test session."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    old = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.getbasetemp() / "compiled"))
    jax.config.update(names[1], 0.0)
    compilation_cache.reset_cache()
    yield
    for name, value in old.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
