"""Whether a run is silent, how long it has to go, and what that costs."""

import dataclasses
import os

import pytest

from jaxscale.runtime.monitor.history import History
from jaxscale.tools.reporting.serve import Pages
from jaxscale.tools.reporting.status import QUIET_SECONDS, STARTING_SECONDS, cost_fact, patience_seconds, status_of

BEGAN = 1_790_000_000.0


def records(*steps, seconds):
    return [{"step": step, "loss": 1.0, "step_seconds": seconds} for step in steps]


@pytest.mark.parametrize(
    ("rows", "began_at", "patience"),
    [
        ([], 0, STARTING_SECONDS),
        ([{"step": 5, "validation/loss": 2.0}], 0, STARTING_SECONDS),
        (records(10, 20, 30, seconds=0.5), 0, QUIET_SECONDS),
        (records(10, 20, 30, seconds=60.0), 0, 10 * 10 * 60.0),
        (records(10, seconds=60.0), 0, 10 * 10 * 60.0),  # its distance from the beginning
        (records(10, 20, 30, seconds=60.0), 30, STARTING_SECONDS),  # it goes on from there, and compiles
        (records(10, seconds=None), 0, QUIET_SECONDS),
    ],
)
def test_patience_is_that_of_ten_records_and_an_hour_before_the_first(rows, began_at, patience):
    assert patience_seconds(rows, began_at) == patience


def test_a_run_that_compiles_is_not_called_silent_and_one_that_is_killed_meanwhile_is_in_the_end():
    started = {"event": "started", "step": 0, "time": "2026-09-21T00:00:00+00:00"}
    begun = History(workdir="run", events=(started,), written_at=BEGAN)
    assert status_of(begun, BEGAN + 1800).state.name == "starting"
    assert status_of(begun, BEGAN + 3700).state.name == "silent"
    steps = dataclasses.replace(begun, rows=tuple(records(10, 20, seconds=1.0)))
    assert (
        status_of(steps, BEGAN + 170).state.name == "running" and status_of(steps, BEGAN + 190).state.name == "silent"
    )


def test_the_time_to_go_has_validations_share_and_a_run_without_an_end_no_cost_there():
    rows = (*records(10, seconds=1.0), {"step": 10, "validation/loss": 2.0, "validation_seconds": 10.0})
    devices = {"kind": "TPU v5", "number": 1}
    run = History(workdir="run", rows=rows, config={"devices": devices, "budget": {"total_steps": 30}})
    assert status_of(run, BEGAN).left_seconds == pytest.approx(20 * 1.0 * 2)  # half of the time so far was validation
    assert cost_fact(status_of(run, BEGAN, 3600.0)) == ("cost so far", "$20.00", "$60.00 at the end")
    endless = dataclasses.replace(run, config={"devices": devices})
    assert cost_fact(status_of(endless, BEGAN, 3600.0)) == ("cost so far", "$20.00", "")


def test_the_time_to_go_has_the_saves_of_this_start_alone():
    """Its clock begins anew: a step of a second is 1.5 with the saves, whatever the start before took."""
    rows = [{"step": n, "loss": 1.0, "step_seconds": 1.0, "goodput/wall_seconds": 9.0 * n} for n in (10, 20)]
    rows += [row | {"step": 20 + n, "goodput/wall_seconds": 1.5 * n} for row, n in zip(rows, (10, 20))]
    run = History(workdir="run", rows=tuple(rows), config={"budget": {"total_steps": 60}})
    assert status_of(run, BEGAN).left_seconds == pytest.approx(20 * 1.5)


def test_tokens_and_the_time_to_go_follow_batches_that_grow():
    rows = [{"step": n, "loss": 1.0, "step_seconds": 1.0, "tokens_seen": 100.0 * n} for n in (8, 9)]
    budget = {"total_steps": 20, "batch_tokens": 400, "ramp": [[0, 100], [10, 400]]}
    saved = {"event": "saved", "step": 11}
    run = History(workdir="run", rows=tuple(rows), config={"budget": budget})
    assert status_of(run, BEGAN).left_seconds == pytest.approx(1 + 10 * 4)
    assert status_of(dataclasses.replace(run, events=(saved,)), BEGAN).tokens == 10 * 100 + 400


def test_the_served_page_is_made_anew_while_a_run_says_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    os.utime(tmp_path / "metrics.jsonl", (BEGAN, BEGAN))
    now = [BEGAN]
    pages = Pages(lambda version: version, [tmp_path], lambda: now[0])
    versions = []
    for quiet in (0, 170, 190, 350, 370, 700, 730):
        now[0] = BEGAN + quiet
        versions.append(pages.page())
    assert [a != b for a, b in zip(versions, versions[1:])] == [False, True, False, True, False, True]


def test_the_step_is_the_last_one_that_was_saved_where_none_was_reported_since():
    config = {"budget": {"total_steps": 489, "batch_tokens": 100}}
    rows = ({"step": 480, "loss": 1.0, "tokens_seen": 48_000},)
    saved = {"event": "saved", "step": 489}
    run = History(workdir="run", rows=rows, config=config, events=({"event": "started", "step": 0}, saved))
    assert (status_of(run, BEGAN).step, status_of(run, BEGAN).tokens) == (489, 48_900)
    done = dataclasses.replace(run, events=(*run.events, {"event": "stopped", "step": None, "code": 0}))
    assert status_of(done, BEGAN).state.name == "finished"
    back = dataclasses.replace(run, events=(*run.events, {"event": "rewind", "step": 489, "to": 400}))
    assert status_of(dataclasses.replace(back, rows=({"step": 400, "loss": 1.0},)), BEGAN).step == 400
