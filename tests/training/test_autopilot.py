"""A run that meets bad batches: it skips, cuts, goes back, and can be repeated bit for bit without them."""

import dataclasses
import json
import os
import signal

import jax
import numpy as np
import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.core import guard
from jaxscale.core.config import GuardConfig
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.monitor.events import read_events
from jaxscale.runtime.run.opening import open_run, rewind
from jaxscale.runtime.run.options import RunOptions
from jaxscale.runtime.training import loop
from jaxscale.runtime.training.autopilot import Autopilot, AutopilotSpec, Rewound
from jaxscale.runtime.training.config import RecoveryConfig
from jaxscale.system.exits import Exit, Stop

VALUES = {
    "monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0,
    "mesh.data": 2, "mesh.fsdp": 1, "checkpoint.save_every_steps": 4, "train.guard.window_steps": 10,
    "optim.name": "sgd",  # with momentum: a state worth going back to, and smaller to compile and save than AdamW's
}  # fmt: skip
soak = lambda case: pytest.param(case, marks=pytest.mark.soak)
FRAGILE = {"train.guard.max_skipped_in_row": 2, "train.recovery.rewind_margin_steps": 2}
COMPILED = {name: VALUES[name] for name in ("mesh.data", "mesh.fsdp", "train.guard.window_steps", "optim.name")}


def shared_program(cfg, budget):
    """All runs here share one compiled program: they differ in what the host does alone."""
    shared = tiny.program(COMPILED, 2)
    parts = {name: getattr(shared, name) for name in ("init", "train_step", "gradient_norms")}
    return dataclasses.replace(make_program(cfg, budget, jax.devices()[:2]), **parts)


@pytest.fixture
def spoil(monkeypatch):
    return lambda text: monkeypatch.setenv("JAXSCALE_SPOIL_BATCHES", text)


def opened(folder, overrides=None, make=shared_program, **options):
    cfg = tiny.config(VALUES | (overrides or {}))
    return open_run(cfg, str(folder), log=lambda text: None, options=RunOptions(**options), make_program=make)


def trained(folder, overrides=None, **options):
    """The state at the end, as main comes to it."""
    run = opened(folder, overrides, **options)
    while isinstance(outcome := loop.train(run), Rewound):
        run = rewind(run)
    return tiny.host(outcome)


def learned(state):
    return state.params, state.opt_state


def told(folder, kind):
    return [event for event in read_events(folder) if event["event"] == kind]


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def assert_same_saved(one, other):
    """Fails unless both runs hold the same steps, every leaf of each with the same bits."""
    leaves = []
    for folder in (one, other):
        checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
        leaves.append({step: checkpoints.read_record(step)["leaves"] for step in checkpoints.all_steps()})
    assert leaves[0] == leaves[1] and leaves[0]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """What a run learns that never trains on batches [8, 13)."""
    state = trained(tmp_path_factory.mktemp("straight") / "run", {"data.skip_batches": ((8, 13),)})
    return learned(state)


def health(folder):
    checkpoints = Checkpoints(folder / "checkpoints", tiny.config().checkpoint)
    return {step: checkpoints.read_record(step)["health"] for step in checkpoints.all_steps()}


@pytest.mark.fault("F11")
def test_a_run_goes_back_before_the_bad_steps_and_leaves_their_batches_out(tmp_path, spoil, straight):
    spoil("10:13:nan")  # steps 11 to 13; recovery acts when step 13 is read, while 14 is under way
    tiny.assert_same_bits(learned(trained(tmp_path / "run", FRAGILE)), straight)
    (rewind,) = told(tmp_path / "run", "rewind")
    assert [rewind[name] for name in ("step", "to", "first_bad", "last_bad", "skip_batches")] == [
        14,
        8,
        11,
        13,
        [[8, 13]],
    ]
    assert [event["step"] for event in told(tmp_path / "run", "skipped")] == [11, 12, 13]
    assert {event["why"] for event in told(tmp_path / "run", "skipped")} == {"not finite"}
    # those saved after step 8 are of the new line, and the one of the old line was moved away
    assert health(tmp_path / "run") == {12: "clean", 16: "clean", 20: "clean"}
    assert [path.name[:11] for path in (tmp_path / "run" / "checkpoints").glob("rewound-*")] == ["rewound-12-"]
    assert [line["batch_index"] for line in lines(tmp_path / "run")] == [*range(8), *range(13, 25)]
    abandoned = lines(tmp_path / "run", "abandoned.jsonl")
    assert [(line["rewind"], line["step"], line["skipped"]) for line in abandoned] == [
        (1, 9, 0), (1, 10, 0), (1, 11, 1), (1, 12, 1), (1, 13, 1), (1, 14, 0)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.fault("F11")
@pytest.mark.parametrize("moment", [soak("signalled meanwhile"), soak("half carried out"), "after the next steps"])
def test_a_rewind_binds_a_run_that_was_killed_after_it(tmp_path, spoil, straight, moment, monkeypatch):
    spoil("10:13:nan")
    run = opened(tmp_path / "run", FRAGILE)

    def train_step(state, batch):
        if int(state.step) == 13:  # step 14, in which recovery acts
            os.kill(os.getpid(), signal.SIGTERM)
        return run.train_step(state, batch)

    if moment == "signalled meanwhile":
        with pytest.raises(Stop, match="SIGTERM: rewinding to an older step") as stop:
            loop.train(dataclasses.replace(run, train_step=train_step))
        assert stop.value.code is Exit.PREEMPTED
    else:
        assert isinstance(loop.train(run), Rewound)
    if moment == "half carried out":
        Checkpoints(tmp_path / "run" / "checkpoints", run.checkpoints.cfg).set_aside_after(8, "rewound")
    if moment == "after the next steps":
        loop.train(opened(tmp_path / "run", FRAGILE, stop_after=9))
    tiny.assert_same_bits(learned(trained(tmp_path / "run", FRAGILE)), straight)
    assert len(lines(tmp_path / "run", "abandoned.jsonl")) == 6


@pytest.mark.fault("F11")
@pytest.mark.soak
def test_replayed_without_the_fault_a_rewound_run_is_the_same_bit_for_bit(tmp_path, spoil, straight, monkeypatch):
    spoil("10:13:nan")
    trained(tmp_path / "old", FRAGILE)
    monkeypatch.delenv("JAXSCALE_SPOIL_BATCHES")
    new = trained(tmp_path / "new", FRAGILE, replay=str(tmp_path / "old"))
    tiny.assert_same_bits(learned(new), straight)
    assert_same_saved(tmp_path / "new", tmp_path / "old")
    same = lambda folder: [(line["step"], line["batch_index"], line["loss"]) for line in lines(folder)]
    assert same(tmp_path / "new") == same(tmp_path / "old")


@pytest.mark.soak
def test_skips_and_cuts_are_replayed_bit_for_bit(tmp_path, spoil, monkeypatch):
    """The old run skipped by its own judgement, the new one because it is told to: its batches are good."""
    ladder = {"train.recovery.steps": ("cut_lr",), "train.recovery.cut_steps": 4, "train.guard.max_skipped_in_row": 1}
    spoil("5:7:nan")
    old = trained(tmp_path / "old", ladder)
    (cut,) = told(tmp_path / "old", "lr_cut")
    assert (cut["step"], cut["factor"], cut["until"]) == (9, 0.1, 12)  # step 7 is read while step 8 is under way
    rates = [line["learning_rate"] for line in lines(tmp_path / "old")]
    assert all(rates[step - 1] < 0.2 * rates[7] for step in range(9, 13)) and rates[12] > 5 * rates[11]
    monkeypatch.delenv("JAXSCALE_SPOIL_BATCHES")
    tiny.assert_same_bits(trained(tmp_path / "new", ladder, replay=str(tmp_path / "old")), old)
    assert_same_saved(tmp_path / "new", tmp_path / "old")
    for kind in ("skipped", "lr_cut"):
        decided = [
            [(event["step"], event.get("factor")) for event in told(tmp_path / name, kind)] for name in ("old", "new")
        ]
        assert decided[0] == decided[1]
    assert [event["why"] for event in told(tmp_path / "new", "skipped")] == ["ordered"] * 2
    # another order of the same decisions is another run
    other = learned(trained(tmp_path / "other", ladder))
    with pytest.raises(AssertionError):
        tiny.assert_same_bits(other, learned(old))


@pytest.mark.slow
def test_what_a_replay_has_saved_goes_on_by_its_own_judgement(tmp_path, spoil):
    loop.train(opened(tmp_path / "old", stop_after=7))
    loop.train(opened(tmp_path / "new", replay=str(tmp_path / "old"), stop_after=4))
    state = loop.train(opened(tmp_path / "new", stop_after=6))
    assert int(state.guard.order) == 0


def test_a_replay_of_another_config_is_refused(tmp_path):
    opened(tmp_path / "old").writer.close()
    with pytest.raises(Stop, match="optim.peak_lr") as stop:
        opened(tmp_path / "new", {"optim.peak_lr": 2e-2}, replay=str(tmp_path / "old"))
    assert stop.value.code is Exit.CONFIG_MISMATCH
    with pytest.raises(ValueError, match="--replay=.* has no config.json"):
        opened(tmp_path / "new", replay=str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_checkpoints_after_a_skip_are_suspect_for_a_window_also_where_the_run_was_stopped_meanwhile(tmp_path, spoil):
    keep = {"checkpoint.keep_last": 9}
    spoil("5:6:nan")
    loop.train(opened(tmp_path / "run", keep, stop_after=8))
    trained(tmp_path / "run", keep)
    assert health(tmp_path / "run") == {4: "clean", 8: "suspect", 12: "suspect", 16: "clean", 20: "clean"}
    assert [event["step"] for event in told(tmp_path / "run", "skipped")] == [6]


@pytest.mark.slow
@pytest.mark.fault("F11")
@pytest.mark.parametrize("fault", ["comes again", soak("is gone")])
def test_a_replay_ends_as_the_run_did(tmp_path, spoil, fault, monkeypatch):
    spoil("10:99:nan")
    unhealed = FRAGILE | {"train.recovery.steps": ()}
    with pytest.raises(Stop):
        trained(tmp_path / "old", unhealed)
    if fault == "is gone":
        monkeypatch.delenv("JAXSCALE_SPOIL_BATCHES")
    with pytest.raises(Stop, match="which had been skipped in the run that is replayed|not finite") as stop:
        trained(tmp_path / "new", FRAGILE | {"train.recovery.max_rewinds": 1}, replay=str(tmp_path / "old"))
    assert stop.value.code is Exit.NON_FINITE and not told(tmp_path / "new", "rewind")


@pytest.mark.soak
def test_behind_the_end_of_the_old_run_a_replay_judges_for_itself(tmp_path, spoil):
    loop.train(opened(tmp_path / "old", stop_after=6))
    spoil("10:11:nan")
    state = trained(tmp_path / "new", replay=str(tmp_path / "old"))
    assert int(state.guard.order) == 0
    assert [event["why"] for event in told(tmp_path / "new", "skipped")] == ["not finite"]


def test_a_replay_that_could_not_be_the_same_is_refused(tmp_path):
    loop.train(opened(tmp_path / "old", stop_after=2))
    with pytest.raises(ValueError, match="--replay=.* is the work folder of this run"):
        opened(tmp_path / "old", replay=f"{tmp_path}/./old/")
    with pytest.raises(Stop, match="that run has 20 steps and this run 30") as stop:
        opened(tmp_path / "new", {"train_tokens": "30 steps"}, replay=str(tmp_path / "old"))
    assert stop.value.code is Exit.CONFIG_MISMATCH
    changed = {"optim.peak_lr": 2e-2}
    opened(tmp_path / "old", changed, allow_change=("optim.peak_lr",)).writer.close()
    with pytest.raises(Stop, match="changed settings that affect its results .optim.peak_lr") as stop:
        opened(tmp_path / "new", changed, replay=str(tmp_path / "old"))
    assert stop.value.code is Exit.CONFIG_MISMATCH


@pytest.mark.fault("F31")
def test_a_replay_does_not_guess_what_was_skipped_where_no_checkpoint_tells(tmp_path):
    old = opened(tmp_path / "old", stop_after=2)
    old.checkpoints.save(2, {"step": 2}, {"data": {"skipped": [[0, 1]]}}, wait=True)
    old.checkpoints.close()
    old.writer.close()
    (tmp_path / "old/checkpoints/2/run/metadata").write_text("{")
    with pytest.raises(Stop, match="step 2 cannot be read") as stop:
        opened(tmp_path / "new", replay=str(tmp_path / "old"))
    assert stop.value.code is Exit.CHECKPOINT_CORRUPT


@pytest.mark.slow
def test_a_replay_minds_what_alters_numbers_and_not_what_only_reports_them(tmp_path):
    loop.train(opened(tmp_path / "old", stop_after=5))
    reports = {"monitor.log_every_steps": 3, "checkpoint.keep_last": 2}
    opened(tmp_path / "old", reports).writer.close()
    opened(tmp_path / "new", replay=str(tmp_path / "old")).writer.close()
    longer = {"train_tokens": "30 steps"}
    opened(tmp_path / "old", longer).writer.close()  # by whose cosine steps 3 to 5 had other rates
    with pytest.raises(Stop, match="changed settings that affect its results .train_tokens.") as stop:
        opened(tmp_path / "newer", longer, replay=str(tmp_path / "old"))
    assert stop.value.code is Exit.CONFIG_MISMATCH


def test_a_longer_flat_part_alters_no_number_of_the_steps_before_it(tmp_path):
    flat = {"optim.decay": "wsd", "optim.warmup_tokens": "2 steps"}
    loop.train(opened(tmp_path / "old", flat, stop_after=4))
    longer = flat | {"train_tokens": "30 steps"}
    opened(tmp_path / "old", longer).writer.close()
    (change,) = json.loads((tmp_path / "old" / "config.json").read_text())["changed"]
    assert change == {"step": 4, "name": "train_tokens", "old": "20 steps", "new": "30 steps", "allowed": False,
                      "alters": False}  # fmt: skip
    opened(tmp_path / "new", longer, replay=str(tmp_path / "old")).writer.close()


@pytest.mark.fault("F11")
def test_a_start_that_is_refused_moves_nothing(tmp_path, spoil):
    spoil("10:13:nan")
    run = opened(tmp_path / "run", FRAGILE)
    assert isinstance(loop.train(run), Rewound)
    before = health(tmp_path / "run"), (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(Stop, match="optim.peak_lr") as stop:
        opened(tmp_path / "run", FRAGILE | {"optim.peak_lr": 2e-2})
    assert stop.value.code is Exit.CONFIG_MISMATCH
    assert (health(tmp_path / "run"), (tmp_path / "run" / "metrics.jsonl").read_text()) == before
    again = rewind(run)
    again.writer.close()
    assert again.parts.corpus is run.parts.corpus and again.parts.program.train_step is run.parts.program.train_step
    assert health(tmp_path / "run") == {4: "clean", 8: "clean"}


@pytest.mark.fault("F11")
def test_a_save_that_fails_meanwhile_does_not_keep_a_run_from_going_back(tmp_path, spoil):
    spoil("10:13:nan")
    run = opened(tmp_path / "run", FRAGILE)

    def train_step(state, batch):
        if int(state.step) == 13:  # step 14, in which recovery acts
            run.checkpoints.join()
            run.checkpoints.saver.failure = (12, "no space left")
        return run.train_step(state, batch)

    assert isinstance(loop.train(dataclasses.replace(run, train_step=train_step)), Rewound)
    assert [event["cause"] for event in told(tmp_path / "run", "save_failed")] == ["no space left"]


@pytest.mark.cases(1)
@pytest.mark.fault("F11")
@pytest.mark.parametrize(("most", "to"), [(0, 4), (9, 12)])
def test_a_clean_checkpoint_that_is_too_old_is_passed_over(tmp_path, most, to):
    keep = {"checkpoint.keep_last": 9, "train.recovery.max_rewind_steps": most}
    run = opened(tmp_path / "run", FRAGILE | keep)

    def train_step(state, batch):
        bad = int(state.step) in (5, 13, 14, 15)
        return run.train_step(state, batch._replace(weights=batch.weights * np.nan) if bad else batch)

    assert isinstance(loop.train(dataclasses.replace(run, train_step=train_step)), Rewound)
    (rewind,) = told(tmp_path / "run", "rewind")
    assert (rewind["first_bad"], rewind["to"]) == (14, to)


def pilot_that_has_read(*readings, **settings):
    """(an autopilot after these verdicts of steps, each with how many are skipped in a row; its events)"""
    events = []
    note = lambda kind, step, **facts: events.append((kind, step, facts.get("why") or facts.get("what")))
    pilot = Autopilot(AutopilotSpec(RecoveryConfig(steps=()), GuardConfig(**settings), note), None)
    for step, (verdict, in_row) in enumerate(readings, 1):
        values = {"objective": 3.0, "grad_norm": 1.0, "loss_median": 3.0, "skipped_in_row": in_row}
        pilot.observe(
            step, values | {"verdict": verdict, "skipped": verdict not in (guard.GOOD, guard.NEW_LEVEL)}, None
        )
    return pilot, events


def test_a_new_level_is_told_and_an_excused_overflow_is_not_a_bad_step():
    pilot, events = pilot_that_has_read((guard.LOSS_RATIO, 1), (guard.LOSS_SCALE, 1), (guard.NEW_LEVEL, 0))
    assert events == [("skipped", 1, "loss by median"), ("alarm", 3, "new level")]
    assert pilot.state.bad == (1,)


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        (guard.NOT_FINITE, r"1 consecutive step was skipped, .* not finite .*inspect the data of these steps$"),
        (guard.LOSS_RATIO, r"had a loss too far above .* or raise train\.guard\.spike_ratio if"),
        (guard.NORM_RATIO, r"had a gradient norm too far above .* or raise train\.guard\.grad_ratio if"),
    ],
)
def test_the_last_line_names_what_was_refused_and_by_which_setting(verdict, line):
    pilot, _ = pilot_that_has_read((verdict, 1), max_skipped_in_row=0)
    with pytest.raises(Stop, match=line):
        pilot.act(1, None)


def test_many_that_stand_alone_are_told_as_many():
    pilot, _ = pilot_that_has_read(*[(guard.LOSS_RATIO, 1)] * 51)
    with pytest.raises(Stop, match="^51 of the last 100 steps were skipped, up to step 51, which had"):
        pilot.act(51, None)


@pytest.mark.slow
@pytest.mark.fault("F11")
def test_a_run_that_cannot_be_healed_stops_after_so_many_rewinds(tmp_path, spoil):
    spoil("10:99:nan")
    with pytest.raises(
        Stop, match=r"consecutive steps were skipped.*, after 0 cuts of the learning rate and 1 rewinds"
    ) as stop:
        trained(tmp_path / "run", FRAGILE | {"train.recovery.max_rewinds": 1})
    assert stop.value.code is Exit.NON_FINITE
    (rewind,) = told(tmp_path / "run", "rewind")
    assert rewind["last_bad"] == 14  # the step that was under way when 13 was read was bad too


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(tmp_path, spoil):
    spoil("1:9:nan")
    with pytest.raises(Stop, match="no checkpoint before step 2 exists"):
        trained(tmp_path / "run", FRAGILE)


@pytest.mark.soak
def test_a_run_leaves_after_a_step_with_its_horizon_unchanged(tmp_path):
    whole = trained(tmp_path / "whole")
    assert int(loop.train(opened(tmp_path / "run", stop_after=7)).step) == 7
    assert opened(tmp_path / "run", stop_after=7) is None
    tiny.assert_same_bits(trained(tmp_path / "run"), whole)
    assert not (tmp_path / "run" / "abandoned.jsonl").exists()


@pytest.mark.slow
@pytest.mark.fault("F10")
def test_a_gradient_that_is_not_finite_is_skipped_once_or_ends_the_run_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_SPOIL_GRADIENT", "5:blocks/mlp/up")
    made = []

    def make(cfg, budget):
        made.append(made[0] if made else make_program(cfg, budget, jax.devices()[:2]))
        return made[0]

    state = loop.train(opened(tmp_path / "skips", stop_after=7, make=make))
    assert (int(state.step), int(state.guard.skipped)) == (7, 1)
    assert np.isfinite(np.asarray(state.guard.losses)).all() and int(state.guard.seen) == 6
    assert [line["skipped"] for line in lines(tmp_path / "skips")] == [0, 0, 0, 0, 1, 0, 0]
    strict = {"train.guard.max_skipped_in_row": 0, "train.recovery.steps": ()}
    with pytest.raises(Stop, match="up to step 5,.*first not finite in blocks/mlp/up") as stop:
        trained(tmp_path / "stops", strict, make=make)
    assert stop.value.code is Exit.NON_FINITE
