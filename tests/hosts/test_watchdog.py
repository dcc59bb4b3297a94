"""A phase that outlasts its budget ends the process with the stacks of all threads, whatever holds it up."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

import pytest
from twins import twins

from jaxscale.runtime.hosts import watchdog as module
from jaxscale.runtime.hosts.config import HangConfig
from jaxscale.runtime.hosts.watchdog import UNWATCHED, Watchdog

ROOT = pathlib.Path(module.__file__).parents[3]
NEVER = HangConfig(**{field.name: 0 for field in dataclasses.fields(HangConfig)})


class Bitten:
    """A watchdog that ends no process; saves exit codes, events and reports to the others."""

    process = 1

    def __init__(self, workdir, **budgets):
        self.codes, self.events, self.told, self.over = [], [], [], threading.Event()
        cfg = dataclasses.replace(NEVER, **budgets)
        self.watchdog = Watchdog(workdir, cfg, note=self.note, others=self, end=self.end)

    def note(self, kind, step=None, **facts):
        self.events.append((kind, step, facts))

    def report_hang(self, line):
        self.told.append(line)

    def on_hang(self, heard):
        self.heard = heard

    def end(self, code):
        self.codes.append(code)
        if self.watchdog.backstop:
            self.watchdog.backstop.disarm()
        self.watchdog.stopped.set()  # what the end of the process would bring
        self.over.set()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "TICK_SECONDS", 0.02)


def stacks(workdir):
    (file,) = (workdir / "stacks").iterdir()
    return file


@pytest.mark.fault("F8")
def test_an_overdue_phase_leaves_stacks_a_line_and_an_event_and_tells_the_others(tmp_path, quick, capfd):
    workdir, never = tmp_path / "run", threading.Event()
    bitten = Bitten(workdir, data_seconds=1)
    with bitten.watchdog:
        helper = threading.Thread(target=never.wait, name="a-helper", daemon=True)
        helper.start()
        with bitten.watchdog.phase("data", 7):
            began = time.monotonic()
            assert bitten.over.wait(10) and time.monotonic() - began < 3
        text, mode = stacks(workdir).read_text(), stacks(workdir).stat().st_mode
    line = "process 1: data of step 7 has made no progress for 1 s (hang.data_seconds)"
    assert bitten.codes == [15] and bitten.told == [line]
    ((kind, step, facts),) = bitten.events
    assert (kind, step, facts["phase"], facts["cause"]) == ("hang", 7, "data", line)
    assert f"stopped (hang, exit 15): {line}; stacks of all threads: {workdir}" in capfd.readouterr().err
    assert text.startswith(line) and mode & 0o777 == 0o600 and (workdir / "stacks").stat().st_mode & 0o777 == 0o700
    assert text.index("MainThread, in phase data") < text.index("Thread a-helper") and "bitten.over.wait" in text
    never.set()


@pytest.mark.slow
def test_phases_that_end_in_time_leave_nothing(tmp_path, quick):
    bitten = Bitten(tmp_path, step_seconds=1, compile_seconds=60)
    with bitten.watchdog as watchdog:
        with watchdog.phase("compile"):  # has a budget of its own
            time.sleep(1.2)
        with watchdog.phase("data"):  # may take for ever
            time.sleep(0.1)
        with watchdog.phase("step"):
            time.sleep(0.3)
            with watchdog.phase("compile"):  # the outer one's time stands still
                time.sleep(0.8)
            time.sleep(0.1)
    assert bitten.codes == [] and not (tmp_path / "stacks").exists()


@pytest.mark.fault("F8")
def test_each_thread_has_its_own_phase(tmp_path, quick):
    bitten = Bitten(tmp_path, save_seconds=1, step_seconds=60)

    def save():
        with bitten.watchdog.phase("save", 5):
            bitten.over.wait(10)

    with bitten.watchdog:
        thread = threading.Thread(target=save, name="saver")
        thread.start()
        with bitten.watchdog.phase("step", 6):
            assert bitten.over.wait(10)
        thread.join()
    assert bitten.told == ["process 1: save of step 5 has made no progress for 1 s (hang.save_seconds)"]


@pytest.mark.fault("F8")
def test_the_hang_of_another_ends_this_one_with_its_stacks_too(tmp_path, quick, capfd):
    bitten = Bitten(tmp_path, step_seconds=60)
    with bitten.watchdog:
        with bitten.watchdog.phase("step", 3):
            bitten.heard("process 0: data of step 3 has made no progress")
        assert "in phase step" in stacks(tmp_path).read_text()
    assert bitten.codes == [15] and bitten.told == []  # the other one tells
    assert "stopped (hang, exit 15): process 0: data of step 3 has made no progress; stacks" in capfd.readouterr().err


def test_an_empty_file_of_a_killed_start_is_removed(tmp_path):
    (tmp_path / "stacks").mkdir()
    for name, text in (("1-a.txt", ""), ("1-b.txt", "stacks"), ("2-a.txt", "")):
        (tmp_path / "stacks" / name).write_text(text)
    with Bitten(tmp_path, step_seconds=60).watchdog as watchdog, watchdog.phase("step"):
        assert len(list((tmp_path / "stacks").iterdir())) == 3
    assert sorted(path.name for path in (tmp_path / "stacks").iterdir()) == ["1-b.txt", "2-a.txt"]


def test_a_work_folder_that_cannot_be_written_does_not_silence_it(tmp_path, quick, capfd):
    (tmp_path / "file").write_text("")
    bitten = Bitten(tmp_path / "file", step_seconds=1)
    with bitten.watchdog, bitten.watchdog.phase("step"):
        assert bitten.over.wait(10)
    (where,) = re.findall("stacks of all threads: (.*)", capfd.readouterr().err)
    assert "in phase step" in pathlib.Path(where).read_text()
    os.unlink(where)


def test_without_a_watchdog_phases_are_only_names():
    with UNWATCHED.phase("step", 1):
        pass
    assert UNWATCHED.phases == {}


@pytest.mark.parametrize("seconds", [-1, 0.5, float("nan"), float("inf")])
def test_budgets_are_checked(seconds):
    with pytest.raises(ValueError, match="step_seconds=.* must be 0"):
        HangConfig(step_seconds=seconds)


# Each stands still in another way: the last two hold Python's lock, so that no thread of Python can see it.
STANDSTILLS = {
    "asleep": "time.sleep(600)",
    "in C": "ctypes.CDLL(None).sleep(600)",
    "busy": "sum(iter(lambda: 1, 2))",
    "in C, with the lock of Python": "lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, (ctypes.c_long * 16)()\n"
    "    lock(mutex)\n    lock(mutex)",
}


@pytest.mark.slow
@pytest.mark.fault("F8")
@pytest.mark.parametrize("how", twins([*STANDSTILLS], "asleep", "in C, with the lock of Python"))
def test_a_real_process_ends_with_code_15_wherever_it_stands_still(tmp_path, how):
    program = (
        "import ctypes, dataclasses, sys, time\n"
        "from jaxscale.runtime.hosts.watchdog import HangConfig, Watchdog\n"
        "def standstill():\n"
        f"    {STANDSTILLS[how]}\n"
        "with Watchdog(sys.argv[1], HangConfig(step_seconds=1)) as watchdog, watchdog.phase('step', 4):\n"
        "    print('begun', flush=True)\n"
        "    standstill()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as child:
        line, began = child.stdout.readline(), time.monotonic()
        killer = threading.Timer(60, child.kill)  # if what is tested fails
        killer.start()
        error = child.communicate()[1]
        killer.cancel()
    assert line == "begun\n" and child.returncode == 15 and time.monotonic() - began < 1 + 5, error
    assert "stopped (hang, exit 15): process 0: step 4 has made no progress for 1 s (hang.step_seconds)" in error
    assert "standstill" in stacks(tmp_path).read_text()
    assert ("Python is blocked" in error) == ("with the lock" in how)
