"""What is answered to bad steps: pure functions of what was read, hence the same in every process."""

import pytest

from jaxscale.core.config import GuardConfig
from jaxscale.runtime.training.config import RecoveryConfig, ReplicaConfig
from jaxscale.runtime.training.decisions import Decisions, LrCut, Rewind, parse_decisions
from jaxscale.runtime.training.recovery import (
    Action,
    AlarmState,
    RecoveryState,
    StepReading,
    decide,
    oldest_clean_step,
    rewind_before_step,
    update_alarms,
)
from jaxscale.system.exits import BadInput

GUARD = GuardConfig(max_skipped_in_row=2, window_steps=20)


def answers(bad_steps, upto, **settings):
    """({step: answer}, what is remembered) of a run in which these steps are skipped."""
    cfg, trouble, found, row = RecoveryConfig(**settings), RecoveryState(), {}, 0
    for step in range(1, upto + 1):
        row = row + 1 if step in bad_steps else 0
        trouble, action = decide(cfg, GUARD, trouble, StepReading(step, 3.0, 1.0, 3.0, step in bad_steps, row))
        if action:
            found[step] = action
    return found, trouble


def test_as_many_skips_in_a_row_as_allowed_are_only_skipped():
    assert answers({5, 6, 9, 11, 12}, 40)[0] == {}


def test_the_rungs_are_climbed_in_their_order_and_each_as_often_as_it_may():
    found, trouble = answers(set(range(5, 30)), 16, steps=("cut_lr", "rewind"), max_rewinds=2)
    assert found == {
        7: Action("cut_lr", 5, 7),
        10: Action("rewind", 5, 10),
        13: Action("rewind", 5, 13),
        16: Action("halt", 5, 16),
    }
    assert (trouble.cuts, trouble.rewinds) == (1, 2)


@pytest.mark.fault("F10")
def test_without_a_rung_skipping_is_capped():
    assert answers(set(range(5, 9)), 8, steps=())[0] == {7: Action("halt", 5, 7)}


def test_skips_that_are_many_but_not_in_a_row_are_answered_too():
    every_second = set(range(2, 40, 2))
    assert answers(every_second, 12, max_skipped_in_window=4)[0] == {10: Action("rewind", 2, 10)}
    assert answers(every_second, 39, max_skipped_in_window=0)[0] == {}
    assert answers(set(range(2, 400, 10)), 400, max_skipped_in_window=4)[0] == {}  # no more than two at a time


def test_a_row_that_is_longer_than_the_window_is_remembered_from_its_first_step():
    guard = GuardConfig(max_skipped_in_row=30, window_steps=20)
    trouble, action = RecoveryState(), None
    for step in range(1, 32):
        trouble, action = decide(RecoveryConfig(), guard, trouble, StepReading(step, 3.0, 1.0, 3.0, True, step))
    assert action == Action("rewind", 1, 31)


def test_the_checkpoint_to_go_back_to_is_a_margin_older_and_never_of_the_bad_step():
    assert [rewind_before_step(11, 2), rewind_before_step(11, 0)] == [
        10,
        11,
    ]  # below that: at most step 9, at most step 10


def test_an_alarm_is_told_once_and_again_only_after_a_quiet_step():
    cfg, watching, told = RecoveryConfig(), AlarmState(), []
    for step, (loss, norm) in enumerate([(3, 1), (5, 200), (5, 200), (3, 1), (5, 1), (3, 101)], 1):
        watching, new = update_alarms(cfg, watching, StepReading(step, loss, norm, 3.0, False, 0))
        told.append(new)
    assert told == [[], ["norm", "spike"], [], [], ["spike"], ["norm"]]


def test_a_loss_that_stands_still_is_an_alarm():
    def told(losses):
        cfg, watching, found = RecoveryConfig(plateau_steps=10), AlarmState(), []
        for step, loss in enumerate(losses, 1):
            watching, new = update_alarms(cfg, watching, StepReading(step, loss, 1.0, 3.0, False, 0))
            found += [(step, name) for name in new]
        return found

    assert told([4 - 0.1 * n for n in range(20)]) == []
    assert told([4.0] * 16) == [(10, "plateau"), (15, "plateau")]


def event(kind, step, **facts):
    return {"time": "", "event": kind, "step": step} | facts


REWIND = event("rewind", 14, to=8, batch=8, why="skipped", skip_batches=[[8, 13]], clean=None)


def test_decisions_behind_the_step_that_a_run_goes_on_from_are_forgotten():
    log = [
        event("started", 0), event("skipped", 4), event("lr_cut", 6, factor=0.1, until=105), event("skipped", 9),
        event("resumed", 5), event("skipped", 9), event("skipped", 11), REWIND,
        event("resumed", 8), event("skipped", 10),
    ]  # fmt: skip
    found = parse_decisions(log)
    assert found.skipped == (4, 10) and found.cuts == (LrCut(6, 0.1, 105),) and found.pending is None
    assert found.rewinds == (Rewind(1, 8, 8, ((8, 13),), None, "skipped"),) and found.skip_batches == [(8, 13)]
    assert found.recovery_state(window_steps=20, step=12) == RecoveryState(1, 1, (4, 10), 5)


def test_a_rewind_stays_pending_until_a_start_has_carried_it_out():
    assert parse_decisions([event("started", 0), REWIND]).pending.to == 8
    assert parse_decisions([event("started", 0), REWIND, event("resumed", 8)]).pending is None


def test_a_detour_ends_where_a_later_rewind_cuts_it_off():
    def detours(*rewinds):
        facts = dict(why="skipped", skip_batches=[])
        return parse_decisions(
            [event("rewind", 99, to=n, batch=n, clean=clean, **facts) for n, clean in rewinds]
        ).detours

    assert detours((8, [12, 4, "wiki"])) == [(12, 4, "wiki")]
    assert detours((8, [12, 4, "wiki"]), (14, [20, 4, "wiki"])) == [(12, 2, "wiki"), (20, 4, "wiki")]
    assert detours((8, [12, 4, "wiki"]), (12, None)) == []


def test_the_same_steps_run_again_for_a_wrong_copy_keep_their_detours():
    facts = dict(skip_batches=[])
    first = event("rewind", 99, to=8, batch=8, clean=[12, 4, "wiki"], why="skipped", **facts)
    again = event("rewind", 13, to=10, batch=10, clean=None, why="replicas", **facts)
    assert parse_decisions([first, event("resumed", 8), again]).detours == [(12, 4, "wiki")]


def test_detours_that_a_checkpoint_tells_of_are_those_of_the_events_or_of_a_run_that_it_was_copied_from():
    def detours(recorded, *rewinds):
        facts = dict(why="skipped", skip_batches=[])
        decided = parse_decisions([event("rewind", 99, to=n, batch=n, clean=clean, **facts) for n, clean in rewinds])
        return decided.with_recorded_detours({"detours": recorded}).detours

    assert detours([[12, 4, "wiki"]]) == [(12, 4, "wiki")]
    assert detours([[12, 4, "wiki"]], (14, [20, 4, "wiki"])) == [(12, 2, "wiki"), (20, 4, "wiki")]
    assert detours([[12, 4, "wiki"]], (8, [12, 4, "wiki"])) == [(12, 4, "wiki")]
    assert detours([[12, 4, "wiki"]], (8, [12, 4, "wiki"]), (12, None)) == []  # cut off since it was saved
    assert parse_decisions([]).with_recorded_detours(None).detours == []


def test_a_clean_checkpoint_that_is_very_old_is_not_waited_for():
    assert [oldest_clean_step(5000, 2000), oldest_clean_step(5000, 0)] == [3000, 0]


def test_nothing_was_decided_in_a_new_run():
    assert parse_decisions([]) == Decisions()


@pytest.mark.parametrize(
    "config, name, value",
    [(GuardConfig, "max_grad_norm", 0.0), (GuardConfig, "max_skipped_in_row", -1), (RecoveryConfig, "cut_factor", 1.0),
     (RecoveryConfig, "cut_steps", 0), (ReplicaConfig, "every_steps", -1), (ReplicaConfig, "max_passing", -1)],
)  # fmt: skip
def test_a_setting_out_of_its_bounds_is_named_with_its_value_alone(config, name, value):
    with pytest.raises(BadInput, match=f"^{name}={value} must be (above|at least) -?[01]$"):
        config(**{name: value})
