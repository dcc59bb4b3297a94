"""A capture begins and ends between steps, appears where it is told, and leaves the run's numbers as they are."""

import contextlib
import gzip
import io
import json
import pathlib
import shutil
import threading
import time

import pytest
import tiny

from jaxscale import main
from jaxscale.runtime.hosts.config import HangConfig
from jaxscale.runtime.hosts.watchdog import Watchdog
from jaxscale.runtime.monitor.config import MonitorConfig, parse_steps
from jaxscale.runtime.monitor.events import read_events
from jaxscale.runtime.monitor.goodput import Throughput
from jaxscale.runtime.monitor.profile import TRIGGER_FILE, Profiler
from jaxscale.system import fence
from jaxscale.system.exits import Exit, Stop


class Steps:
    """A loop of steps around a profiler, as the real one is: the numbers of a step are read during the next."""

    def __init__(self, folder, steps=None, *, start=None, stop=None, process=0):
        self.done, self.captured, self.notes, self.said, self.left_out = 0, [], [], [], []
        self.on = False
        self.profiler = Profiler(
            folder, steps=parse_steps(steps), process=process, say=self.said.append,
            note=lambda kind, step=None, **facts: self.notes.append((kind, step, facts)),
            start=start or self.start, stop=stop or self.stop,
        )  # fmt: skip
        self.phase = Watchdog(None, HangConfig(), observers=(self.profiler,)).phase

    def start(self, folder):
        assert pathlib.Path(folder).is_dir() and not self.on
        self.on = True

    def stop(self):
        assert self.on
        self.on = False

    def run(self, first, last, touch=()):
        """Steps [first, last], the first of which compiles; the file is made while the steps `touch` run."""
        for step in range(first, last + 1):
            with self.phase("data", step):
                pass
            with self.phase("compile" if step == first else "step", step):
                if self.on:
                    self.captured.append(step)
                if step in touch:
                    (self.profiler.workdir / TRIGGER_FILE).touch()
            if step > first:
                with self.phase("compile" if step - 1 == first else "step", step - 1):
                    if self.profiler.busy():
                        self.left_out.append(step - 1)


def kinds(steps):
    return [(step, facts["what"]) for kind, step, facts in steps.notes if kind == "profile"]


def test_a_range_of_steps_is_captured_and_left_out_of_the_throughput(tmp_path):
    steps = Steps(tmp_path, "4:6")
    with steps.profiler:
        steps.run(1, 12)
    assert steps.captured == [4, 5, 6]  # the devices are done with 5 only while 6 is under way
    assert steps.left_out == [3, 4, 5, 6] and kinds(steps) == [(4, "begun"), (4, "written")]
    assert (tmp_path / "profiles" / "4").is_dir() and not steps.on


@pytest.mark.parametrize(("first", "captured"), [(1, [2, 3]), (3, []), (2, [])])
def test_the_step_that_compiles_is_never_captured(tmp_path, first, captured):
    steps = Steps(tmp_path, "1:3")
    with steps.profiler:
        steps.run(first, 6)
    assert steps.captured == captured


def test_a_touched_file_is_answered_by_the_next_step_and_taken_away(tmp_path):
    steps = Steps(tmp_path)
    with steps.profiler:
        steps.run(1, 20, touch=(3, 12))
        assert not (tmp_path / TRIGGER_FILE).exists()
    assert steps.captured == [*range(4, 10), *range(13, 19)]
    assert kinds(steps) == [(4, "begun"), (4, "written"), (13, "begun"), (13, "written")]


def test_only_the_first_process_looks_for_the_file(tmp_path):
    steps = Steps(tmp_path, process=1)
    with steps.profiler:
        steps.run(1, 9, touch=(3,))
    assert not steps.captured and (tmp_path / TRIGGER_FILE).exists()


def test_a_capture_ends_with_the_run_and_with_a_way_back(tmp_path):
    steps = Steps(tmp_path, "3:100")
    with steps.profiler:
        steps.run(1, 6)
        steps.run(2, 4)  # from a checkpoint of step 1; 3 is in the range again
        assert steps.on
    assert not steps.on and kinds(steps) == [(3, "begun"), (3, "written")] * 2


@pytest.mark.parametrize("where", ["start", "stop"])
def test_a_profiler_that_fails_is_told_once_and_ends_nothing(tmp_path, where):
    def fail(*arguments):
        raise RuntimeError("Only one profile may be run at a time.\nmore")

    steps = Steps(tmp_path, "3:9", **{where: fail})
    with steps.profiler:
        steps.run(1, 20, touch=(12,))
    (line,) = [line for line in steps.said if "training continues without it" in line]
    assert "RuntimeError: Only one profile may be run at a time." in line and "\n" not in line
    assert [kind for kind, *_ in steps.notes].count("alarm") == 1 and not steps.profiler.busy()


@pytest.mark.parametrize(
    "error", [None, OSError("the disk fails"), Stop(Exit.LOCK_HELD, "taken over")], ids=["ours", "a disk", "another's"]
)
def test_a_lock_that_cannot_be_asked_ends_nothing_and_one_that_is_lost_ends_the_steps(tmp_path, error):
    steps = Steps(tmp_path, "3:5")

    def may_write():
        if error and steps.done:
            raise error

    with fence.fenced(tmp_path, may_write):
        with pytest.raises(Stop) if isinstance(error, Stop) else contextlib.nullcontext(), steps.profiler:
            steps.run(1, 4)
            steps.done = 4
            steps.run(5, 9)
    told = [line for line in steps.said if "OSError: the disk fails; training continues without it" in line]
    assert len(told) == isinstance(error, OSError) and steps.on is (error is not None)


@pytest.mark.parametrize("text", ["100", "5:5", "7:3", "0:4", "a:b", "1:2:3", "-1:3"])
def test_what_is_no_range_of_steps_is_refused(text):
    with pytest.raises(ValueError, match="profile_steps=.* must be FIRST:STOP"):
        MonitorConfig(profile_steps=text)


def test_steps_that_are_left_out_change_no_throughput():
    now, busy = [0.0], [False]
    throughput = Throughput(1.0, None, clock=lambda: now[0], is_excluded=lambda: busy[0])
    throughput.add(10)  # compiled
    for seconds, captured, excluded in ((1, False, 0), (1, False, 0), (9, True, 3), (1, False, 0.5), (2, True, 0)):
        now[0] += seconds + excluded
        throughput.exclude(excluded)
        busy[0] = captured
        throughput.add(10)
    report = throughput.report()
    assert report["tokens_per_second"] == pytest.approx(10.0) and report["step_seconds"] == pytest.approx(1.0)


@pytest.mark.soak
def test_a_real_capture_appears_and_the_numbers_are_those_of_a_run_without(tmp_path):
    values = tiny.VALUES | dict(
        train_tokens="16 steps", monitor=dict(log_every_steps=1, tensorboard=False, progress="off")
    )
    (tmp_path / "tiny.py").write_text(f"def get_config():\n    return {values!r}\n")
    found = {}
    for name, flags in (("plain", []), ("captured", ["--config.monitor.profile_steps=6:8"])):
        assert main.main([f"--config={tmp_path / 'tiny.py'}", f"--workdir={tmp_path / name}", *flags]) == 0
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found[name] = [
            (line["step"], line["loss"], line["grad_norm"], line["tokens_hash"]) for line in lines if "loss" in line
        ]
    assert found["captured"] == found["plain"] and len(found["plain"]) == 16
    (trace,) = (tmp_path / "captured" / "profiles" / "6").rglob("*.trace.json.gz")
    events = json.load(io.TextIOWrapper(gzip.open(trace)))["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("PjitFunction(") and "_step" in name for name in names) >= 2  # both steps
    begun, written = [event for event in read_events(tmp_path / "captured") if event["event"] == "profile"]
    assert (begun["what"], begun["last"], written["what"]) == ("begun", 7, "written")
    assert written["place"].endswith("profiles/6") and not (tmp_path / "plain" / "profiles").exists()


class Bucket(Profiler):
    """A profiler whose work folder is looked at as a bucket is: by its thread, and written to at the end."""

    def __init__(self, folder, **settings):
        super().__init__(folder, **settings)
        self.remote = True


def steps_in_a_bucket(folder, *captures, **settings):
    """Steps whose captures are one file each; a bucket needs no folders for them."""
    steps = Steps(folder)
    for step in captures:
        (folder / "profiles" / str(step)).mkdir(parents=True)

    def start(folder):
        steps.start(folder)
        pathlib.Path(folder, "trace").write_text("abc")

    steps.profiler = Bucket(
        folder, steps=None, note=steps.profiler.note, say=steps.said.append, start=start, stop=steps.stop, **settings
    )
    steps.phase = Watchdog(None, HangConfig(), observers=(steps.profiler,)).phase
    return steps


def test_an_upload_that_fails_ends_no_other_capture(tmp_path):
    steps, goes_on = steps_in_a_bucket(tmp_path, 2, 12), threading.Event()

    def may_write():
        if threading.current_thread() in steps.profiler.uploads[:1]:
            goes_on.wait(20)
            raise OSError("no route")

    with fence.fenced(tmp_path, may_write):
        with steps.profiler:
            steps.profiler.compiled = True
            steps.profiler.requested.set()
            steps.run(2, 9)  # captures 2 to 6, which are on their way
            steps.profiler.requested.set()
            steps.run(12, 13)
            goes_on.set()
            steps.profiler.uploads[0].join(20)
            assert steps.on
            steps.run(14, 15)
        assert not steps.on
    (line,) = [line for line in steps.said if "training continues without it" in line]
    told, _, left = line.partition(" and is still in ")
    assert told == "the profile that begins at step 2 could not be uploaded to the bucket"
    shutil.rmtree(left.partition(":")[0])
    assert kinds(steps) == [(2, "begun"), (12, "begun"), (12, "written")]


def test_in_a_bucket_a_thread_looks_for_the_file_and_brings_the_capture(tmp_path):
    steps = steps_in_a_bucket(tmp_path, 4, poll_seconds=0.01)
    with steps.profiler:
        steps.run(1, 3)
        (tmp_path / TRIGGER_FILE).touch()
        end = time.monotonic() + 20
        while not steps.profiler.requested.is_set() and time.monotonic() < end:
            time.sleep(0.01)
        assert not (tmp_path / TRIGGER_FILE).exists()
        for step in range(4, 12):
            with steps.phase("data", step):
                pass
    assert (tmp_path / "profiles" / "4" / "trace").read_text() == "abc"
    assert kinds(steps) == [(4, "begun"), (4, "written")]
