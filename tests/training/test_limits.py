"""A run with a deadline or a budget tells when it will overrun and, if asked to, decays early and ends in time."""

import dataclasses
import functools
import itertools
import json
import re

import jax
import numpy as np
import pytest
import tiny

from jaxscale.build import make_program
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.monitor.events import Events, read_events
from jaxscale.runtime.monitor.goodput import iso_time
from jaxscale.runtime.run.limiting import first_limit, hourly_dollars, overrun_advice
from jaxscale.runtime.run.opening import open_run, train_to_completion
from jaxscale.runtime.run.options import RunOptions
from jaxscale.runtime.training.config import LimitConfig
from jaxscale.runtime.training.decisions import EarlyDecay, parse_decisions
from jaxscale.runtime.training.limits import LimitMonitor, TimeLimit
from jaxscale.runtime.training.loop_services import Services
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.tools.reporting.event_text import event_message

LONG = {
    "monitor.progress": "off", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0,
    "train_tokens": "100 steps", "checkpoint.save_every_steps": 7, "checkpoint.keep_last": 9,
    "optim.decay": "constant", "optim.decay_tokens": "6 steps", "optim.name": "sgd",
}  # fmt: skip
IN_TIME = LONG | {"limit.deadline": "40s", "limit.on_overrun": "decay"}


class Clock:
    """Seconds since 1970; each step takes `pace` of them, the first `first`."""

    def __init__(self, pace=1.0, now=1e9):
        self.pace, self.now = pace, now

    def __call__(self):
        return self.now

    def limiter(self, start_step=0, **limits):
        limits = dict(ends_at=1e9 + 100, name="limit.deadline=100s", total_steps=1000, clock=self) | limits
        return LimitMonitor(TimeLimit(start_step=start_step, **limits))


def steps_of(limiter, clock, steps, pace=lambda step: 1.0):
    """{step: decision} of those steps after which there was one."""
    found = {}
    for step in steps:
        clock.now += pace(step)
        if decision := limiter.decay_after(step):
            found[step] = decision
            break
    return found


def test_a_run_that_will_overrun_says_so_once_and_again_when_it_has():
    clock, said, noted = Clock(), [], []
    note = lambda kind, step, **facts: noted.append((kind, step, facts))
    limiter = clock.limiter(say=said.append, note=note, advice="reduce train_tokens")
    assert not steps_of(limiter, clock, range(1, 200))
    assert said[0] == (
        "limit: at 1 s per step this run ends 2001-09-09T02:03 UTC, 15m00s after limit.deadline=100s; it continues: "
        "reduce train_tokens"
    )
    assert len(said) == 2 and said[1].startswith("limit: limit.deadline=100s has passed; at 1 s per step")
    assert [(kind, step, facts["passed"]) for kind, step, facts in noted] == [
        ("overrun", 11, False), ("overrun", 101, True)
    ]  # fmt: skip
    assert noted[0][2]["over_seconds"] == pytest.approx(900)


def test_a_run_that_ends_in_time_says_nothing_and_its_first_step_is_no_measure():
    clock, said = Clock(), []
    limiter = clock.limiter(total_steps=70, say=said.append)
    assert not steps_of(limiter, clock, range(1, 71), lambda step: 25.0 if step == 1 else 1.0) and not said


@pytest.mark.parametrize("pace", [lambda step: 1.0, lambda step: 0.5 if step < 60 else 1.0], ids=["steady", "slower"])
def test_the_decay_begins_at_the_last_moment_and_ends_in_time(pace):
    clock = Clock()
    limiter = clock.limiter(decay_steps=lambda total: total // 5, say=str)
    (begin, decay) = steps_of(limiter, clock, range(1, 1000), pace).popitem()
    assert decay.step == begin
    opening = pace(1)
    ends = clock.now + opening + (decay.until - begin) * pace(begin)
    assert 1e9 + 100 - 12 <= ends <= 1e9 + 100
    assert decay.until - begin == pytest.approx(decay.until / 5, abs=1)


def test_no_decay_begins_where_one_has_begun_or_the_warmup_has_not_ended():
    for limits in (dict(decay_start=20), dict(warmup_steps=500)):
        clock, said = Clock(), []
        limiter = clock.limiter(decay_steps=lambda total: 5, say=said.append, start_step=30, **limits)
        assert not steps_of(limiter, clock, range(31, 300)) and said


def test_where_there_is_no_time_for_a_whole_decay_it_is_shorter_and_says_so():
    clock, said = Clock(), []
    limiter = clock.limiter(decay_steps=lambda total: 20, say=said.append)
    pace = lambda step: 80.0 if step == 30 else 1.0  # a long pause, that nothing announced
    assert steps_of(limiter, clock, range(1, 100), pace) == {30: EarlyDecay(30, 32)}
    line = limiter.limit.line(EarlyDecay(30, 32))
    assert (
        "over 2 steps to step 32; there is not enough time for the full decay of 20 steps; step 30, "
        "at the peak learning rate, is saved" in line
    )
    assert "not enough time" not in limiter.limit.line(EarlyDecay(30, 50))


class Board:
    """What processes share, as each sees it at its last look."""

    def __init__(self):
        self.lines = {}

    def post(self, name, line):
        self.lines.setdefault(self.told(name), line)

    def read(self, name):
        return self.lines.get(self.told(name))

    def told(self, name):
        """The name without the number that each opening in this one process counts up."""
        return re.sub(r"\d+", "", name)


def test_all_processes_decay_after_the_same_step_which_the_first_one_tells():
    board, clock = Board(), Clock()
    first = clock.limiter(decay_steps=lambda total: 20, board=board, say=str)
    other = Clock(now=5.0).limiter(decay_steps=lambda total: 20, board=board, primary=False)
    found, posted_at = {}, []
    for step in range(1, 200):
        clock.now += 1
        a = first.decay_after(step)
        posted_at = [*posted_at, step] if board.lines else []
        found |= {step: (a, other.decay_after(step))} if a else {}
        assert step in found or other.decay_after(step) is None
        if found:
            break
    ((step, (a, b)),) = found.items()
    assert a == b == EarlyDecay(step, a.until) and step < a.until <= 100
    assert posted_at == [step - 2, step - 1, step], "as far ahead as it takes until all have looked"
    board.lines[board.told("jaxscale/decay/1")] = f"{step - 1} 99"
    with pytest.raises(Stop, match="all processes must begin the decay after step") as stop:
        other.decay_after(step)
    assert stop.value.code is Exit.PEER_LOST


programs = functools.lru_cache(4)(lambda budget: make_program(tiny.config(LONG), budget, jax.devices()[:1]))


def train(folder, overrides=IN_TIME, *, clock=None, stop_after=None, replay=None):
    """Trains in the folder, each look at the clock a second later."""
    ticks = itertools.count(1_700_000_000)
    services = Services(
        Events(folder, primary=True, clock=lambda: 1.7e9).note, clock=clock or (lambda: float(next(ticks)))
    )
    options = RunOptions(stop_after=stop_after, replay=replay)
    made = lambda cfg, budget: programs(budget)
    run = open_run(tiny.config(overrides), str(folder), str, services=services, options=options, make_program=made)
    train_to_completion(run)
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    return tiny.host(checkpoints.restore(checkpoints.latest_step(), tiny.program({"optim.name": "sgd"}).abstract_state))


def rates(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["learning_rate"] for row in rows if "learning_rate" in row}


def decays(folder):
    return [(event["step"], event["until"]) for event in read_events(folder) if event["event"] == "early_decay"]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """(folder, last state) of a run that ended in time."""
    folder = tmp_path_factory.mktemp("limits") / "run"
    return folder, train(folder)


@pytest.mark.slow
def test_a_run_decays_early_and_ends_at_the_smallest_rate_on_record(ended):
    folder, last = ended
    ((begin, until),) = decays(folder)
    assert last.step == until < 40 and until - begin == 6
    found = rates(folder)
    np.testing.assert_array_equal([found[step] for step in range(2, begin + 2)], np.float32(1e-2))
    np.testing.assert_allclose([found[n] for n in range(begin + 1, until + 1)], np.linspace(1e-2, 1e-3, 6), rtol=1e-6)
    assert found[until] == np.float32(1e-3)
    kinds = {event["event"]: event_message(event) for event in read_events(folder)}
    assert kinds["overrun"].startswith("limit.deadline=40s will be exceeded; ")
    assert kinds["early_decay"] == f"the decay starts early, and the run ends at step {until}: limit.deadline=40s"
    written = json.loads((folder / "config.json").read_text())
    assert (written["budget"]["total_steps"], written["budget"]["decay_start"]) == (until, begin)
    assert written["changed"] == []


@pytest.mark.slow
def test_killed_in_its_early_decay_it_goes_on_bit_for_bit_and_decides_no_more(ended, tmp_path):
    folder, last = ended
    ((begin, until),) = decays(folder)
    train(tmp_path / "run", stop_after=begin + 2)
    assert decays(tmp_path / "run") == [(begin, until)]
    tiny.assert_same_bits(train(tmp_path / "run"), last)
    assert decays(tmp_path / "run") == [(begin, until)] and rates(tmp_path / "run") == rates(folder)


@pytest.mark.soak
def test_replayed_it_decays_at_the_same_step_whatever_the_clock_says(ended, tmp_path):
    folder, last = ended
    replayed = train(tmp_path / "new", replay=str(folder), clock=lambda: 1.7e9)
    tiny.assert_same_bits(replayed, last)
    assert decays(tmp_path / "new") == decays(folder) and rates(tmp_path / "new") == rates(folder)


def test_a_decay_that_was_decided_and_not_saved_is_forgotten():
    event = lambda kind, step, **facts: {"event": kind, "step": step} | facts
    events = [event("started", 0), event("early_decay", 21, until=27)]
    assert parse_decisions(events).decay == EarlyDecay(21, 27)
    assert parse_decisions([*events, event("resumed", 21)]).decay == EarlyDecay(21, 27)
    assert parse_decisions([*events, event("resumed", 14)]).decay is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"limit.deadline": "soon"}, "limit: deadline='soon' must be a time such as 2026-12-24T18:00, or a duration"),
        ({"limit.dollars": -1.0}, r"limit: dollars=-1.0 must be finite and at least 0"),
        (
            {"limit.deadline": "1h", "limit.on_overrun": "decay", "optim.decay": "cosine"},
            "optim.decay='cosine' has no constant phase before a decay; set optim.decay to wsd or constant, or",
        ),
    ],
)
def test_limits_that_cannot_be_are_refused(overrides, message):
    with pytest.raises(BadInput, match=message):
        tiny.config(LONG | overrides)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({}, "stop it and restart it with --config.limit.on_overrun=decay, or reduce train_tokens"),
        ({"limit.on_overrun": "decay"}, "the decay has started, and is not shortened"),
        (
            {"optim.decay": "cosine"},
            "reduce train_tokens; a run with optim.decay=wsd or constant could decay early",
        ),
    ],
)
def test_the_way_out_is_what_this_run_could_do(overrides, told):
    assert overrun_advice(tiny.config(LONG | {"limit.deadline": "40s"} | overrides)) == told


def test_a_budget_needs_a_price():
    mesh = tiny.program().mesh
    assert hourly_dollars(LimitConfig(dollars=9.0, chip_hour_dollars=2.5), mesh) == 2.5
    with pytest.raises(
        BadInput, match="limit.dollars=9 needs a price, but the list price of 'cpu' is unknown; set the price"
    ):
        hourly_dollars(LimitConfig(dollars=9.0), mesh)


def test_a_budget_counts_what_earlier_starts_have_cost_and_no_time_between_them(tmp_path):
    at = lambda seconds: iso_time(1e9 + seconds)
    events = [
        {"time": at(5), "event": "started", "step": 0, "process_began": at(0)},
        {"time": at(100), "event": "stopped", "step": None, "code": 10, "goodput": {"step_seconds": 100.0}},
        {"time": at(505), "event": "resumed", "step": 7, "process_began": at(500)},
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    limit = LimitConfig(dollars=10.0, chip_hour_dollars=36.0)  # for 1000 seconds
    assert first_limit(tmp_path, limit, tiny.program().mesh, 1e9 + 505) == (1e9 + 505 + 1000 - 105, "limit.dollars=10")
    both = dataclasses.replace(limit, deadline="20m")
    assert first_limit(tmp_path, both, tiny.program().mesh, 1e9 + 505) == (1e9 + 1200, "limit.deadline=20m")


def test_a_deadline_is_a_time_or_counts_from_the_first_start():
    ends = lambda text: LimitConfig(deadline=text).ends_at(1000.0)
    assert ends("1h30m") == 6400.0 and ends("2d") == 1000 + 2 * 86_400
    assert ends("1970-01-02T00:00") == 86_400 == ends("1970-01-02T01:00+01:00")
