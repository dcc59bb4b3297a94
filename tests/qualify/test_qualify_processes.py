"""Qualify as two real processes on this machine: every probe, a failure in one of them, and a slow one by name."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from processes import free_ports, run_programs
from xla_flags import xla_flags

# The verb with small products and messages. Arguments: the width of process 1's products, flags, run_programs' own.
PROGRAM = """
import sys
from jaxscale.cli import qualify
from jaxscale.tools.qualify import axis_bandwidth as links, products

width, *flags, port, count, number = sys.argv[1:]
products.CPU_WIDTH, products.CPU_MEMORY_BYTES = int(width) if number == "1" else 64, 2**20
links.LINK_REPEATS, links.default_sizes = 1, lambda device: [2**12, 2**14]
process = [f"--coordinator=localhost:{port}", f"--num_processes={count}", f"--process_id={number}"]
print("exit", int(qualify.main([*flags, *process])), flush=True)
"""


def read_result(folder):
    """(qualify.json, {probe: its part of it})."""
    result = json.loads((folder / "qualify.json").read_text())
    return result, {probe["name"]: probe for probe in result["probes"]}


@pytest.mark.soak
def test_a_process_that_fails_alone_is_named_and_the_later_probes_run_in_both(tmp_path):
    flags = [f"--out={tmp_path}", "--only=devices,links,storage", "--slow=1000"]
    shown = run_programs(PROGRAM, 2, {}, "-1", *flags)  # a width that no matrix can have
    assert all("exit 3" in text for text in shown), shown
    result, probes = read_result(tmp_path)
    assert result["devices"] == "2 x cpu" and result["num_processes"] == 2 and len(result["hosts"]) == 1
    assert probes["devices"]["state"] == "failed" and probes["devices"]["problem"].startswith("process 1: ")
    assert f"process 1: devices failed: {probes['devices']['problem'].removeprefix('process 1: ')}" in shown[1]
    assert (probes["links"]["state"], probes["storage"]["state"]) == ("measured", "measured"), shown
    assert all(figure["value"] > 0 for name in ("links", "storage") for figure in probes[name]["figures"])
    assert not (tmp_path / "qualify-saves").exists()


class Started:
    """Two processes of `jaxscale qualify`, whose output goes to files."""

    def __init__(self, folder, devices, *flags):
        port, self.folder = free_ports(), folder
        env = os.environ | {"XLA_FLAGS": xla_flags(devices), "PYTHONUNBUFFERED": "1"}
        self.running = []
        for number in range(2):
            process = [f"--coordinator=localhost:{port}", "--num_processes=2", f"--process_id={number}"]
            command = [sys.executable, "-m", "jaxscale.cli", "qualify", f"--out={folder / 'out'}", *flags, *process]
            with self.log(number).open("wb") as log:
                self.running.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for process in self.running:
            process.kill()
            process.wait()

    def log(self, number):
        return pathlib.Path(self.folder) / f"process{number}.log"

    def codes(self, seconds):
        return [process.wait(seconds) for process in self.running]


@pytest.mark.soak
def test_two_processes_of_two_devices_run_every_probe(tmp_path):
    with Started(tmp_path, 2, "--slow=1000", "--minutes=30") as two:
        assert two.codes(1800) == [0, 0], two.log(0).read_text() + two.log(1).read_text()
        assert "QUALIFIED" in two.log(0).read_text() and "QUALIFIED" not in two.log(1).read_text()
    result, probes = read_result(tmp_path / "out")
    assert result["passed"] and result["devices"] == "4 x cpu" and result["num_processes"] == 2
    assert {name: probe["state"] for name, probe in probes.items()} == {
        "products": "measured", "devices": "passed", "links": "measured", "kernels": "passed", "step": "measured",
        "storage": "measured",
    }  # fmt: skip
    assert {len(probe["figures"]) > 1 for probe in probes.values()} == {True}


@pytest.mark.soak
def test_a_process_that_is_stopped_nine_tenths_of_the_time_is_named_as_slow(tmp_path):
    with Started(tmp_path, 1, "--only=devices", "--slow=3", "--minutes=30") as two:
        deadline = time.monotonic() + 300
        while "[1/1] devices" not in two.log(0).read_text():
            assert time.monotonic() < deadline, two.log(0).read_text()
            time.sleep(0.01)
        slow, deadline = two.running[1], time.monotonic() + 600
        while slow.poll() is None and "is slow" not in two.log(0).read_text():
            assert time.monotonic() < deadline
            slow.send_signal(signal.SIGSTOP)
            time.sleep(0.09)
            slow.send_signal(signal.SIGCONT)
            time.sleep(0.01)
        assert two.codes(300) == [3, 3], two.log(0).read_text()
    result, _ = read_result(tmp_path / "out")
    (line,) = result["failures"]
    assert line.startswith("devices: CPU ") and "(process 1) is slow: " in line and "at most 3.00 times" in line
