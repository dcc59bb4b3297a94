"""The loop: late metrics, leaving on a signal or on too many bad steps, and what it writes."""

import dataclasses
import json
import os
import signal
import types

import jax
import numpy as np
import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.runtime.data.pipeline import open_data
from jaxscale.runtime.data.stacking import tokens_hash
from jaxscale.runtime.run.opening import open_run
from jaxscale.runtime.training import loop
from jaxscale.runtime.training.stopping import StopRequest
from jaxscale.system.exits import Exit, Stop

QUIET = {"monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0}


def program_for(cfg, budget):
    """Runs of this module share the compiled tiny step instead of compiling their own; shapes and code are the same."""
    made, shared = make_program(cfg, budget, jax.devices()[:1]), tiny.program()
    return dataclasses.replace(
        made, init=shared.init, train_step=shared.train_step, gradient_norms=shared.gradient_norms
    )


def open_tiny(folder, overrides=None, make=program_for):
    cfg = tiny.config(QUIET | (overrides or {}))
    return open_run(cfg, str(folder), log=lambda text: None, make_program=make)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class TestTrain:
    @pytest.mark.slow
    def test_metrics_of_a_step_are_fetched_only_after_the_next_is_on_its_way(self, tmp_path, monkeypatch):
        run, events, kept = open_tiny(tmp_path / "run"), [], []

        def train_step(state, batch):
            events.append(("step", len(kept)))
            state, metrics = run.train_step(state, batch)
            kept.append(metrics)
            return state, metrics

        device_get = jax.device_get

        def spy(tree):
            places = [n for n, metrics in enumerate(kept) if metrics is tree]
            events.extend(("fetch", n) for n in places)
            return device_get(tree)

        monkeypatch.setattr(jax, "device_get", spy)
        loop.train(dataclasses.replace(run, train_step=train_step, total_steps=5, save_every_steps=0))
        expected = [("step", 0)]
        for n in range(1, 5):
            expected += [("step", n), ("fetch", n - 1)]
        assert events == [*expected, ("fetch", 4)]

    def test_every_step_is_reported_once_and_in_order(self, tmp_path):
        run = open_tiny(tmp_path / "run", {"train_tokens": "7 steps", "checkpoint.save_every_steps": 3})
        state = loop.train(run)
        found = records(tmp_path / "run")
        assert [record["step"] for record in found] == list(range(1, 8)) and int(state.step) == 7
        assert [record["batch_index"] for record in found] == list(range(7))
        assert [record["tokens_seen"] for record in found] == [256 * n for n in range(1, 8)]
        wanted = {"loss", "learning_rate", "grad_norm", "tokens_per_second", "tokens_hash", "skipped", "skipped_total"}
        assert wanted <= set(found[-1])
        rows = open_data(tiny.config().data, seq_len=16, vocab_size=tiny.VOCAB, seed=1, say=lambda text: None).batches(
            16
        )
        assert [record["tokens_hash"] for record in found] == [tokens_hash(rows.batch(n)) for n in range(7)]

    @pytest.mark.slow
    def test_gated_rows_of_steps_that_are_not_logged_are_in_the_total_since_the_start(self, tmp_path):
        often = {"monitor.log_every_steps": 3, "checkpoint.save_every_steps": 8}
        for steps, expected in ((8, [(3, 3, 6), (6, 6, 21), (8, 8, 36)]), (12, [(9, 9, 9), (12, 12, 42)])):
            run = open_tiny(tmp_path / "run", often | {"train_tokens": f"{steps} steps"})

            def train_step(state, batch, run=run):
                state, metrics = run.train_step(state, batch)
                return state, metrics | {"gated_rows": np.array(state.step)}  # as many as the number of the step

            loop.train(dataclasses.replace(run, train_step=train_step))
            found = [(r["step"], r["gated_rows"], r["gated_rows_total"]) for r in records(tmp_path / "run")]
            assert found[-len(expected) :] == expected

    @pytest.mark.slow
    def test_too_many_bad_steps_in_a_row_end_the_run_with_their_own_code(self, tmp_path):
        run = open_tiny(tmp_path / "run", {"train.guard.max_skipped_in_row": 3})

        def train_step(state, batch):
            return run.train_step(state, batch._replace(weights=batch.weights * np.nan))

        with pytest.raises(
            Stop, match="5 consecutive steps were skipped, up to step 5, which had a loss or gradient"
        ) as stop:
            loop.train(dataclasses.replace(run, train_step=train_step))
        assert stop.value.code is Exit.NON_FINITE
        assert [(r["skipped"], r["skipped_total"], r["loss"]) for r in records(tmp_path / "run")] == [
            (1, 1, None), (1, 2, None), (1, 3, None), (1, 4, None), (1, 5, None)  # the last was under way already
        ]  # fmt: skip

    def test_a_validation_loss_that_is_not_finite_ends_the_run_before_it_is_saved(self, tmp_path):
        run = open_tiny(tmp_path / "run", {"eval.every_steps": 2, "checkpoint.save_every_steps": 2})
        results = iter([{"validation/loss": 4.0}, {"validation/loss": float("nan")}])
        with pytest.raises(Stop, match="the validation loss at step 2 is nan") as stop:
            loop.train(dataclasses.replace(run, evaluate=lambda params: next(results)))
        assert stop.value.code is Exit.NON_FINITE and run.checkpoints.latest_step() is None

    @pytest.mark.parametrize("moment", ["in a step", "in a validation"])
    def test_a_signal_is_obeyed_with_a_checkpoint_of_the_step_that_the_message_names(self, tmp_path, moment):
        run = open_tiny(tmp_path / "run")
        calls = []

        def train_step(state, batch):
            calls.append(1)
            if moment == "in a step" and len(calls) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return run.train_step(state, batch)

        def evaluate(params):
            if moment == "in a validation" and len(calls) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return {"validation/loss": 1.0}

        wired = dataclasses.replace(
            run, train_step=train_step, evaluate=evaluate, eval_every_steps=2, save_every_steps=0
        )
        with pytest.raises(Stop, match="SIGTERM: saved step 3; the same command continues from there") as stop:
            loop.train(wired)
        assert stop.value.code is Exit.PREEMPTED
        assert run.checkpoints.latest_step() == 3
        assert run.checkpoints.read_run(3)["data"]["batch_index"] == 3


def test_a_stop_request_notes_the_first_signal_and_gives_the_old_handlers_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("theirs", [None, "SIGTERM"])
def test_a_signal_during_a_rewind_is_known_to_all_processes(theirs):
    gather = lambda key, mine, made_of: made_of([mine, theirs])
    assert loop.first_stop_request(None, gather) == theirs and loop.first_stop_request("SIGINT", gather) == "SIGINT"


@pytest.mark.parametrize(("failure", "outcome"), [(Exit.STORAGE, 17), (Exit.CHECKPOINT_CORRUPT, 13)])
def test_a_save_that_fails_at_the_end_does_not_hide_why_a_run_stopped(failure, outcome):
    class Failing:
        def close(self, most_seconds=None):
            raise Stop(failure, "no space left")

    told = []
    with pytest.raises(Stop) as stop:
        with loop.finish_saves(Failing(), lambda kind, step=None, **facts: told.append(facts["cause"])):
            raise Stop(Exit.NON_FINITE, "5 consecutive steps")
    assert stop.value.code == (Exit.NON_FINITE if outcome == 17 else failure)
    assert told == (["no space left"] if outcome == 17 else [])
    with pytest.raises(Stop, match="no space left"), loop.finish_saves(Failing(), lambda kind, step=None, **facts: 0):
        pass


@pytest.mark.parametrize(("code", "most_seconds"), [(Exit.STORAGE, 5), (Exit.LOCK_HELD, 5), (Exit.NON_FINITE, None)])
def test_a_save_is_waited_for_unless_its_storage_was_given_up(code, most_seconds):
    waited = []
    checkpoints = types.SimpleNamespace(close=lambda most_seconds=None: waited.append(most_seconds))
    with pytest.raises(Stop), loop.finish_saves(checkpoints, lambda *_, **__: None):
        raise Stop(code, "")
    assert waited == [most_seconds]


class PaperBoard:
    """A board that several stop requests share."""

    def __init__(self):
        self.lines = {}

    def post(self, name, line):
        self.lines.setdefault(name, line)

    def read(self, name):
        return self.lines.get(name)


@pytest.mark.parametrize("ahead", [0, 1])
def test_all_processes_leave_after_the_same_step_whichever_was_signalled(ahead):
    board = PaperBoard()
    signalled, other = StopRequest(board), StopRequest(board)
    for step in range(1, 4 + ahead):
        assert other.stop_after(step) is None  # it may have begun one step more when the signal comes
    for step in range(1, 4):
        if step == 3:
            signalled.handle_signal(signal.SIGTERM, None)
        assert signalled.stop_after(step) is None
    for request, first in ((signalled, 4), (other, 4 + ahead)):
        answers = [request.stop_after(step) for step in range(first, 6)]
        assert answers == [None] * (5 - first) + ["SIGTERM"]


def test_a_second_signal_elsewhere_does_not_move_the_step():
    board = PaperBoard()
    first, second = StopRequest(board), StopRequest(board)
    first.handle_signal(signal.SIGTERM, None)
    assert first.stop_after(7) is None
    second.handle_signal(signal.SIGINT, None)
    assert [second.stop_after(8), second.stop_after(9), first.stop_after(9)] == [None, "SIGTERM", "SIGTERM"]
