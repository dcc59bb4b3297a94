"""Eight simulated CPU devices for every test; broadcasting by accident and warnings are errors."""

import collections
import contextlib
import gc
import json
import os
import pathlib
import re
import signal
import tempfile

from xla_flags import QUICK

flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
os.environ["XLA_FLAGS"] = f"{QUICK} {flags} --xla_force_host_platform_device_count=8"  # flags may overrule it
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # one for all processes of these tests, gone with the first of them
    compiled = tempfile.TemporaryDirectory(prefix="jaxscale-tests-")
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": compiled.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAXSCALE_HUGE_PAGES"] = "0"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # source locations of operations are a tenth of lowering
os.environ.pop("COLUMNS", None)  # the terminal of whoever runs the tests is no part of them

import jax  # noqa: E402
import pytest  # noqa: E402

from jaxscale.system.redact import is_secret  # noqa: E402
from jaxscale.tools.preflight.compiled import without_compilation_cache  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# A loaded program for several CPU devices can compute wrong numbers (system.process.keep_compiled_programs).
jax.config.update("jax_enable_compilation_cache", False)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # of a suite in the background; the programs it starts would too
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Programs that stay compiled are millions of objects, and each full collection goes through all of them.
gc.set_threshold(100_000, 20, 50)


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory):
    """What the tests tokenize and fetch is their own, never the user's."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture(autouse=True)
def programs_for_chips_that_are_not_here_are_not_kept(request):
    """They can be written into the compilation cache and not read back."""
    with without_compilation_cache() if request.node.get_closest_marker("aot") else contextlib.nullcontext():
        yield


def pytest_addoption(parser):
    parser.addoption("--fault_results", help="a file for what each test marked with `fault` came to, as JSON lines")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items):
    """Marks cases after the first N of `cases(N)` as slow, and adds the faults that a test covers to its report."""
    seen = collections.Counter()
    for item in items:
        if limit := item.get_closest_marker("cases"):
            function = item.nodeid.partition("[")[0]
            if seen[function] >= limit.args[0]:
                item.add_marker("slow")
            seen[function] += not any(item.get_closest_marker(name) for name in ("aot", "soak", "peer", "slow"))
        faults = [fault for mark in item.iter_markers("fault") for fault in mark.args]
        if faults:
            item.user_properties.append(("faults", faults))


@pytest.fixture(scope="session", autouse=True)
def nothing_of_ours_in_the_environment():
    """A secret of whoever runs the tests is no part of them: its value would be taken out of what is compared."""
    for name in [name for name, value in os.environ.items() if is_secret(name, value)]:
        del os.environ[name]


class FaultResults:
    """Writes the outcomes; lives in the process that collects the reports of all others."""

    def __init__(self, path):
        self.path, self.lines = path, []

    def pytest_runtest_logreport(self, report):
        faults = dict(report.user_properties).get("faults")
        if faults and (report.when == "call" or report.outcome != "passed"):
            test = report.nodeid.partition("[")[0].removeprefix("tests/")
            self.lines.append(json.dumps({"test": test, "faults": faults, "outcome": report.outcome}) + "\n")

    def pytest_sessionfinish(self):
        pathlib.Path(self.path).write_text("".join(self.lines))


def pytest_configure(config):
    path = config.getoption("--fault_results")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FaultResults(path))
