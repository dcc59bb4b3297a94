"""What the devices tell is asked for in a thread; a program that hangs, fails or prints rubbish costs nothing."""

import os
import sys
import time
import types

import pytest

from jaxscale.runtime.monitor import machine
from jaxscale.runtime.monitor.machine import (
    Telemetry,
    combine_devices,
    make_reader,
    parse_duty,
    parse_nvidia,
    read_nvidia,
)

# the form of nvidia-smi --query-gpu=index,uuid,utilization.gpu,power.draw,temperature.gpu --format=csv,noheader,nounits
TWO = """\
0, GPU-11111111-aaaa-bbbb-cccc-000000000000, 98, 612.35, 61
1, GPU-22222222-aaaa-bbbb-cccc-000000000000, 90, 587.65, 66
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A function that puts a program named nvidia-smi in front of the PATH, with this Python text."""

    def put(code):
        file = tmp_path / "nvidia-smi"
        file.write_text(f"#!{sys.executable} -S\n{code}\n")
        file.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return put


def test_the_programs_answer_becomes_means_and_the_hottest(program):
    program(f"import sys\nassert sys.argv[1:] == {list(machine.QUERY[1:])!r}, sys.argv\nprint({TWO!r}, end='')")
    read = make_reader("gpu")
    expected = {"device/utilisation": 0.94, "device/power_watts": 600.0, "device/temperature_c": 66.0}
    assert read() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("visible", "watts"),
    [("1", 587.65), ("GPU-1111", 612.35), ("0,1", 600.0), (None, 600.0), ("", None), ("0,-1,1", 612.35), ("7,1", None)],
)
def test_only_the_devices_of_this_process_count(visible, watts):
    assert combine_devices(parse_nvidia(TWO, visible)).get("device/power_watts") == (watts and pytest.approx(watts))


def test_what_a_device_does_not_tell_is_left_out():
    text = "0, GPU-1, [N/A], [Not Supported], 61\n1, GPU-2, 50, ERR!, nan\n"
    assert combine_devices(parse_nvidia(text)) == {"device/utilisation": 0.5, "device/temperature_c": 61.0}
    assert combine_devices([]) == {}


@pytest.mark.parametrize("text", ["No devices were found", "<html>", "0, GPU-1, 3", "a, b, c, d, e"])
def test_rubbish_is_no_table(text):
    with pytest.raises(ValueError, match="unexpected output of nvidia-smi"):
        parse_nvidia(text)


def watched(read, seconds, **settings):
    """(what was said, the metrics after so many seconds at most, or once something was said)."""
    said, end = [], time.monotonic() + seconds
    with Telemetry(read, every_seconds=0.01, say=said.append, **settings) as asked:
        while time.monotonic() < end and not said and not asked.latest:
            time.sleep(0.01)
        return said, asked.latest


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import time; time.sleep(60)", "TimeoutExpired"),
        ("print('<!doctype html>')", "ValueError: unexpected output of nvidia-smi: '<!doctype html>'"),
        ("import sys; sys.exit('driver/library version mismatch')", "exited with 1: driver/library version mismatch"),
        ("import sys; sys.stdout.buffer.write(bytes(range(256)) * 100)", "unexpected output of nvidia-smi"),
    ],
    ids=["hangs", "rubbish", "fails", "binary"],
)
def test_a_program_that_goes_wrong_is_told_once_and_asked_no_more(program, monkeypatch, code, told):
    monkeypatch.setattr(machine, "TIMEOUT_SECONDS", 0.3)
    program(code)
    (line,), metrics = watched(make_reader("gpu"), 20)
    assert told in line and "training continues without it" in line and metrics == {}


def test_numbers_come_without_waiting_for_them(program):
    program(f"print({TWO!r}, end='')")
    said, metrics = watched(read_nvidia, 20)
    assert not said and metrics["device/temperature_c"] == 66.0


def test_one_failure_is_forgotten_and_old_numbers_are_not_kept():
    answers, seen, said = [{"device/power_watts": 1.0}, OSError("busy"), {"device/power_watts": 2.0}], [], []

    def read():
        answer = answers[len(seen)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(seconds):
        seen.append(asked.latest)
        if len(seen) == len(answers):
            asked.stopped.set()

    asked = Telemetry(read, every_seconds=1, say=said.append)
    asked.stopped.wait = wait
    asked.work(asked.read)
    assert seen == [{"device/power_watts": 1.0}, {}, {"device/power_watts": 2.0}] and not said


def test_a_platform_without_such_a_program_tells_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert make_reader("gpu") is None and make_reader("cpu") is None
    with Telemetry(None, every_seconds=1, say=print) as asked:
        assert asked.latest == {}


def test_a_tpu_is_asked_through_its_own_library(monkeypatch):
    monitoring = types.SimpleNamespace(get_metric=lambda name: types.SimpleNamespace(data=lambda: DUTY[name]))
    monkeypatch.setitem(sys.modules, "libtpu", types.ModuleType("libtpu"))
    sdk = types.ModuleType("libtpu.sdk")
    sdk.tpumonitoring = monitoring
    monkeypatch.setitem(sys.modules, "libtpu.sdk", sdk)
    assert make_reader("tpu")() == {"device/utilisation": 0.75}
    del sdk.tpumonitoring
    assert make_reader("tpu") is None


DUTY = {"duty_cycle_pct": ["100.0", "50.0", ""]}


def test_a_chip_that_tells_nothing_has_no_utilisation():
    assert combine_devices(parse_duty([])) == {} == combine_devices(parse_duty(["n/a"]))
