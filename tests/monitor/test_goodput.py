"""Every second of a run is charged to one kind, and all kinds together are its wall time."""

import datetime
import json
import random
import threading

import pytest
import tiny

from jaxscale import main
from jaxscale.runtime.hosts.config import HangConfig
from jaxscale.runtime.hosts.watchdog import Watchdog
from jaxscale.runtime.monitor.events import read_events
from jaxscale.runtime.monitor.goodput import KINDS, TimeLedger, iso_time, measure_goodput, process_age_seconds
from jaxscale.runtime.monitor.history import read_history
from jaxscale.runtime.monitor.records import abandon
from jaxscale.runtime.monitor.writers import open_records


class Clock:
    """A clock that a test moves."""

    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


def make(age_seconds=0.0):
    clock = Clock()
    ledger = TimeLedger(age_seconds=age_seconds, clock=clock, wall_clock=lambda: clock.now + 1_700_000_000)
    return clock, ledger, Watchdog(None, HangConfig(), observers=(ledger,)).phase


def run_steps(clock, phase, first, last, *, data=0.1, read=1.0, compiles=()):
    """What the loop does: wait for data, dispatch, and read the numbers of the step before."""
    for step in range(first, last + 1):
        with phase("data", step):
            clock.now += data
        with phase("compile" if step in compiles else "step", step):
            clock.now += 5.0 if step in compiles else 0.01
        if step > first:
            with phase("compile" if step - 1 in compiles else "step", step - 1):
                clock.now += read


def test_every_second_is_charged_to_one_kind():
    clock, ledger, phase = make(age_seconds=3.0)
    clock.now += 2.0
    with phase("restore"):
        clock.now += 4.0
    run_steps(clock, phase, 1, 3, compiles=(1,))
    with phase("eval", 3):
        clock.now += 0.5
    with phase("save", 3):
        clock.now += 0.25
        with phase("eval", 3):  # one within another stops its time
            clock.now += 0.125
    found = ledger.totals()
    assert found["other"] == 5.0 and found["restore"] == 4.0 and found["save"] == 0.25 and found["eval"] == 0.625
    assert found["compile"] == pytest.approx(5.0 + 1.0)  # and its numbers, which come one step late
    assert sum(found.values()) == pytest.approx(clock.now - 97.0) and found["idle"] == 0.0


def test_a_wait_for_data_of_no_step_is_charged_to_data():
    clock, ledger, phase = make()
    with phase("data"):
        clock.now += 1.0
    with phase("step", 1):
        clock.now += 2.0
    found = ledger.totals()
    assert (found["data"], found["step"]) == (1.0, 2.0)


def test_phases_of_other_threads_block_no_step():
    clock, ledger, phase = make()

    def save():
        with phase("save", 1):
            clock.now += 7.0

    thread = threading.Thread(target=save)
    with phase("step", 1):
        thread.start()
        thread.join()
    assert ledger.totals() | {"step": 0.0} == dict.fromkeys(KINDS, 0.0) and ledger.totals()["step"] == 7.0


@pytest.mark.parametrize(("data", "read", "lost"), [(0.3, 0.7, 0.3), (0.9, 0.01, 3.6)], ids=["hidden", "starved"])
def test_a_wait_for_data_counts_where_the_devices_wait_too(data, read, lost):
    clock, ledger, phase = make()
    run_steps(clock, phase, 1, 4, data=data, read=read)
    assert ledger.totals()["data"] == pytest.approx(lost)  # the first wait has no step to hide behind


def test_a_wait_that_is_being_read_off_is_told_as_it_will_be():
    clock, ledger, phase = make()
    run_steps(clock, phase, 1, 2, data=0.3, read=0.7)
    with phase("data", 3):
        clock.now += 0.3
    assert ledger.totals()["data"] == pytest.approx(0.6)
    with phase("step", 2):
        clock.now += 0.7
        assert ledger.totals()["data"] == pytest.approx(0.3)
    assert ledger.totals()["data"] == pytest.approx(0.3)


def test_a_look_at_the_statistics_is_no_step_and_hides_no_wait():
    clock, ledger, phase = make()
    with phase("data", 1):
        clock.now += 0.5
    with phase("statistics", 1):  # with its compilation
        clock.now += 9.0
    with phase("compile", 1):
        clock.now += 5.0
    assert ledger.totals() | {"statistics": 0.0, "data": 0.0, "compile": 0.0} == dict.fromkeys(KINDS, 0.0)
    assert (ledger.totals()["statistics"], ledger.totals()["data"]) == (9.0, 0.5)


def test_steps_behind_a_rewind_are_lost_once():
    clock, ledger, phase = make()
    run_steps(clock, phase, 1, 6, data=0.0, compiles=(1,))
    before = ledger.totals()
    with phase("restore"):
        clock.now += 2.0
    run_steps(clock, phase, 3, 8, data=0.0, compiles=(3,))  # the loop calls its first step so; nothing compiles again
    after = ledger.totals()
    assert after["compile"] == before["compile"] and before["lost"] == 0.0
    assert after["lost"] == pytest.approx(5.0 + 3 * 0.01 + 4 * 1.0)  # steps 3 to 6: all four were dispatched and read
    assert after["step"] - before["step"] == pytest.approx(2 * 0.01 + 1.0)  # 7 and 8; 8 was not read


def test_steps_that_a_killed_start_had_logged_are_lost(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "goodput/wall_seconds": 9.5, "goodput/step_seconds": 8}\n{"st')
    clock, ledger, phase = make()
    facts = ledger.start_facts(tmp_path)
    assert facts["left"] == {"wall_seconds": 9.5, "step_seconds": 8.0, "step": 4}
    assert facts["process_began"] == iso_time(1_700_000_100) and "left" not in ledger.start_facts(tmp_path)
    run_steps(clock, phase, 3, 6, data=0.0, compiles=(3,))
    found = ledger.totals()
    assert found["compile"] == pytest.approx(6.0) and found["lost"] == pytest.approx(
        1.01
    )  # 3 compiles; 4 is done again
    assert found["step"] == pytest.approx(0.02 + 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_any_nesting_of_phases_sums_to_the_wall_time(seed):
    rng, (clock, ledger, phase) = random.Random(seed), make()

    def some(depth):
        for _ in range(rng.randrange(4)):
            clock.now += rng.random()
            with phase(rng.choice(["data", "step", "save", "eval", "compile", "restore"]), rng.randrange(9)):
                clock.now += rng.random()
                some(depth + 1) if depth < 3 else None
                assert sum(ledger.totals().values()) == pytest.approx(clock.now - 100.0)

    for _ in range(20):
        some(0)
    assert min(ledger.totals().values()) >= -1e-9
    assert sum(ledger.metrics()[f"goodput/{kind}_seconds"] for kind in KINDS if kind != "idle") == pytest.approx(
        ledger.metrics()["goodput/wall_seconds"], abs=0.01
    )


def records_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def event(kind, at, step=None, **facts):
    return {"time": iso_time(at), "event": kind, "step": step, **facts}


def ledger_at(wall, **kinds):
    """A ledger's numbers, the rest of the wall time as steps."""
    return {"wall_seconds": wall, "step_seconds": wall - sum(kinds.values())} | {
        f"{k}_seconds": v for k, v in kinds.items()
    }


def record(step, **ledger):
    return {"step": step, "loss": 1.0} | {f"goodput/{name}": value for name, value in ledger.items()}


def test_starts_are_added_up_and_what_lies_between_is_idle():
    events = [
        event("started", 1010, 0, process_began=iso_time(1000)),
        event("rewind", 1100, 40, to=20),
        event("resumed", 1110, 20, process_began=iso_time(1000)),  # the same process
        event("stopped", 1200, code=10, goodput=ledger_at(200.0, compile=20.0, lost=30.0, other=10.0)),
        event("resumed", 1310, 60, process_began=iso_time(1300)),  # killed after 150 s: nothing said so
        event("resumed", 1510, 80, process_began=iso_time(1500), left=ledger_at(150.0, restore=50.0) | {"step": 95}),
    ]
    records = [record(60, **ledger_at(190.0)), record(80, **ledger_at(100.0)), record(90, **ledger_at(60.0, lost=40.0))]
    found = measure_goodput(records, events)
    assert (found.starts, found.rewinds) == (3, 1)
    expected = {"step": 140 + 100 + 20, "compile": 20, "lost": 30 + 40, "other": 10, "restore": 50, "idle": 100 + 50}
    assert {kind: seconds for kind, seconds in found.seconds.items() if seconds} == pytest.approx(expected)
    assert found.wall_seconds == pytest.approx(1560 - 1000) and found.fraction == pytest.approx(260 / 560)
    assert measure_goodput(records, events, now=1660).seconds["idle"] == pytest.approx(250)


def test_a_start_without_a_record_of_its_own_does_not_inherit_the_last_one():
    events = [
        event("started", 1000, 0, process_began=iso_time(1000)),
        event("resumed", 2000, 50, process_began=iso_time(2000), left=ledger_at(500.0) | {"step": 50}),
    ]
    assert measure_goodput([record(50, **ledger_at(490.0))], events).wall_seconds == pytest.approx(1000.0)


def test_a_rewind_and_a_kill_leave_no_second_out(tmp_path):
    """Three starts in one folder, as processes leave it: one goes back and is killed, one is killed at once."""
    clock = Clock(1_700_000_000.0)
    metrics = tmp_path / "metrics.jsonl"

    def begin(step):
        ledger = TimeLedger(age_seconds=2.0, clock=clock, wall_clock=clock)
        facts = ledger.start_facts(tmp_path)
        if step:
            open_records(metrics, step)  # as the writer does, before it is noted
        events.append(event("resumed" if step else "started", clock.now, step, **facts))
        return ledger, Watchdog(None, HangConfig(), observers=(ledger,)).phase

    def train(ledger, phase, first, last, compiles=()):
        for step in range(first, last + 1):
            run_steps(clock, phase, step, step, compiles=compiles)
            with phase("step", step):
                clock.now += 1.0
            with metrics.open("a") as file:
                file.write(json.dumps({"step": step, "loss": 1.0} | ledger.metrics()) + "\n")

    events, began = [], clock.now - 2.0
    ledger, phase = begin(0)
    train(ledger, phase, 1, 6, compiles=(1,))
    events.append(event("rewind", clock.now, 6, to=3))
    abandon(tmp_path, 3, 1)
    with phase("restore"):
        clock.now += 2.0
    assert measure_goodput(records_of(metrics), events).wall_seconds == pytest.approx(clock.now - 2.0 - began, rel=0.01)
    events.append(event("resumed", clock.now, 3, **ledger.start_facts(tmp_path)))
    train(ledger, phase, 4, 8)
    clock.now += 40.0  # killed here, and nobody looked
    begin(5)
    clock.now += 3.0
    events.append(event("restored", clock.now, 5))
    clock.now += 30.0  # killed before its first record
    ledger, phase = begin(5)
    train(ledger, phase, 6, 9, compiles=(6,))
    events.append(event("stopped", clock.now, code=0, goodput=ledger.facts()))
    found = measure_goodput(records_of(metrics), events)
    assert (found.starts, found.rewinds) == (3, 1)
    assert found.wall_seconds == pytest.approx(clock.now - began, rel=0.01)
    assert found.seconds["idle"] == pytest.approx(66.0, rel=1e-3) and found.seconds["restore"] == 2.0
    assert found.seconds["lost"] == pytest.approx(3 * 1.11, rel=0.01)  # 4 to 6


def test_what_an_older_version_wrote_is_other_and_rubbish_is_left_out():
    events = [
        event("started", 100, 0),
        event("rewind", 110, 9),
        event("resumed", 120, 5),
        event("stopped", 160, code=0),
    ]
    found = measure_goodput([{"step": 3}], [*events, {"event": "stopped", "time": "yesterday"}, {}])
    assert found.starts == 1 and found.seconds["other"] == 60.0 == found.wall_seconds
    assert measure_goodput([], []).fraction is None


def test_a_program_that_is_not_ours_is_not_charged_for_its_past():
    assert process_age_seconds() == 0.0  # pytest


@pytest.mark.soak
def test_a_real_run_that_is_stopped_and_gone_on_with_adds_up(tmp_path):
    values = tiny.VALUES | dict(
        train_tokens="12 steps",
        checkpoint=dict(save_every_steps=5),
        eval=dict(every_steps=6, num_rows=8),
        monitor=dict(log_every_steps=1, tensorboard=False, progress="off"),
    )
    (tmp_path / "tiny.py").write_text(f"def get_config():\n    return {values!r}\n")
    command = [f"--config={tmp_path / 'tiny.py'}", f"--workdir={tmp_path / 'run'}"]
    assert main.main([*command, "--stop_after=8"]) == 0
    assert main.main(command) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shown = read_history(tmp_path / "run")  # a row of training and one of validation at steps 6 and 12
    assert shown.problems == shown.abandoned == () and shown.series("loss")[0] == [*range(1, 13)]
    assert [record["step"] for record in records if "validation/loss" in record] == shown.series("validation/loss")[0]
    for record in records:
        kinds = [record[f"goodput/{kind}_seconds"] for kind in KINDS if kind != "idle"]
        assert sum(kinds) == pytest.approx(record["goodput/wall_seconds"], rel=0.01) and min(kinds) >= 0
    events = read_events(tmp_path / "run")
    found = measure_goodput(records, events)
    began, ended = events[0]["process_began"], events[-1]["time"]
    wall = (datetime.datetime.fromisoformat(ended) - datetime.datetime.fromisoformat(began)).total_seconds()
    assert found.starts == 2 and found.wall_seconds == pytest.approx(wall, rel=0.01)
    assert all(
        found.seconds[kind] > 0 for kind in ("step", "compile", "restore", "data", "save", "eval", "idle", "other")
    )
    assert found.seconds["lost"] == 0.0
