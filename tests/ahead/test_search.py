"""The search compiles the best guess first, learns from what it compiled, and keeps to its time."""

import dataclasses
import math

import ahead_of_time
import pytest
import tiny

from jaxscale import schema
from jaxscale.config import RunConfig
from jaxscale.core.config import MESH_AXES, PipelineConfig
from jaxscale.main import TrainFlags
from jaxscale.settings.command_line import parse
from jaxscale.settings.unread import unread
from jaxscale.tools.planning.speed import StepEstimate, estimate_step, recomputed_flops
from jaxscale.tools.preflight import search
from jaxscale.tools.preflight.layouts import all_layouts, microbatch_choices
from jaxscale.tools.preflight.preflight import ahead_program
from jaxscale.tools.preflight.roofline import Roofline
from jaxscale.tools.preflight.search import (
    Candidate,
    explore,
    fitting,
    is_promising,
    needs_as_much,
    override_lines,
    ranked,
    winner,
)
from jaxscale.tools.preflight.step_report import PreflightReport

GB = 10**9
LIMIT = 10 * GB


def bounds(seconds):
    """A roofline of which only the time matters."""
    return Roofline(seconds, 0.0, {}, {}, {}, seconds, seconds, seconds, 0.5, (), ())


@pytest.fixture(scope="module")
def topology():
    return ahead_of_time.topology()


@pytest.fixture
def report():
    """One that fits, whose figures the tests replace by their own."""
    return PreflightReport(
        config="tiny", topology="simulated:8", platform="cpu", chip="simulated CPU", num_devices=8, num_hosts=1,
        num_slices=1, layout="fsdp=8", settings={}, memory=(), host_bytes=0, peak_bytes=0, code_bytes=0,
        chip_bytes=LIMIT,
        usable_bytes=LIMIT, usable_why="", shortage=None, compiled_flops=1.0, model_flops=1.0, traffic=(),
        collectives=(),
        roofline=bounds(1.0), notes=(), lower_seconds=0.0, compile_seconds=0.0,
        versions={}, date="2026-11-21", kept=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def candidates(topology):
    return search.search_candidates(tiny.config(), topology)


def candidate(seconds, gigabytes, **changes):
    """A candidate with a guess: its step takes so long, and its activations so much."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    guess = StepEstimate(state_bytes=0, activation_bytes=int(gigabytes * GB), compute_s=seconds, link_s=0.0)
    return Candidate(changes, search.with_changes(tiny.config(), changes), guess)


class Machine:
    """Compiles a candidate in ten seconds of its own clock: its memory is `factor` times the guess."""

    def __init__(self, report, factor=1.0, seconds=None):
        self.report, self.factor, self.seconds = report, factor, seconds or {}
        self.time, self.compiled, self.said = 0.0, [], []

    def compile(self, one):
        self.time += 10.0
        self.compiled.append(one.label)
        return self.result(one)

    def result(self, one):
        took = self.seconds.get(one.label, one.estimate.compute_s)
        line = bounds(took)
        needs = int(self.factor * one.estimate.activation_bytes)
        report = dataclasses.replace(self.report, peak_bytes=needs, usable_bytes=LIMIT, roofline=line)
        return report if report.fits else dataclasses.replace(report, roofline=None)

    def explore(self, candidates, known=(), seconds=1000.0, enough=None):
        known = [(one, self.result(one)) for one in known]
        return explore(candidates, known, self.compile, seconds=seconds, clock=lambda: self.time,
                       say=self.said.append, enough=enough)  # fmt: skip


def test_the_last_of_its_own_remat_tells_how_large_a_candidate_is_else_the_last_of_any(report):
    compiled = lambda peak: dataclasses.replace(report, peak_bytes=peak * GB)
    tried = [(candidate(1, 1, model__remat=name), compiled(peak)) for name, peak in (("full", 3), ("dots", 2))]
    expected = lambda name: search.activation_scale(candidate(1, 1, model__remat=name), tried) / search.MARGIN
    assert [round(expected(name), 9) for name in ("full", "dots", "none")] == [3, 2, 2]
    assert search.activation_scale(candidate(1, 1), []) == search.PRIOR_SCALE


def test_the_best_guess_is_compiled_first_and_what_cannot_fit_never(report):
    machine = Machine(report)
    slow, fast = candidate(2.0, 5, mesh__tensor=2), candidate(1.0, 5, mesh__data=2)
    large = candidate(0.5, 12, model__remat="full")
    tried = machine.explore([slow, large, fast], known=[candidate(9.0, 12)], enough=3)
    assert machine.compiled == ["mesh.data=2", "mesh.tensor=2"]
    assert winner(tried)[0] is fast


def test_the_winner_is_the_best_as_compiled_not_as_guessed(report):
    one, other = candidate(1.0, 5, mesh__tensor=2), candidate(1.1, 5, mesh__data=2)
    tried = Machine(report, seconds={"mesh.tensor=2": 3.0, "mesh.data=2": 2.0}).explore([one, other])
    assert [pair[0] for pair in ranked(tried)] == [other, one]
    assert winner(tried)[0] is other


def test_what_cannot_be_faster_than_the_best_so_far_is_not_compiled(report):
    machine = Machine(report)
    machine.explore([candidate(1.0, 5, mesh__tensor=2), candidate(2.0, 5, mesh__data=2)])
    assert machine.compiled == ["mesh.tensor=2"]


@pytest.mark.parametrize(("wait", "tried"), [(1.0, True), (3.0, False)])
def test_nor_what_waits_for_links_three_times_as_long_as_would_matter(report, wait, tried):
    machine = Machine(report, seconds={"mesh.tensor=2": 2.0})
    other = candidate(1.5, 5, mesh__data=2)
    waits = dataclasses.replace(other.estimate, exposed_s=wait, link_s=wait)
    machine.explore([candidate(1.0, 5, mesh__tensor=2), dataclasses.replace(other, estimate=waits)])
    assert machine.compiled == ["mesh.tensor=2"] + ["mesh.data=2"] * tried


def test_a_failure_corrects_the_guesses_of_the_same_policy(report):
    machine = Machine(report, factor=3.0)
    first = candidate(1.0, 5, model__remat="full", mesh__tensor=2)  # needs 15 of 10
    second = candidate(1.1, 4, model__remat="full", mesh__data=2)  # 12: after the first it is known better
    small = candidate(1.2, 2, model__remat="full", mesh__data=4)
    tried = machine.explore([first, second, small])
    assert machine.compiled == [first.label, small.label]
    assert [one for one, _ in fitting(tried)] == [small]


def test_fewer_microbatches_than_failed_are_not_tried(report):
    failed, fewer = (candidate(1.0, 5, train__num_microbatches=parts) for parts in (4, 2))
    more, elsewhere = candidate(1.0, 5, train__num_microbatches=8), candidate(1.0, 5, mesh__tensor=2)
    assert needs_as_much(fewer, failed) and not needs_as_much(more, failed)
    assert not needs_as_much(elsewhere, failed)
    report = dataclasses.replace(report, peak_bytes=11 * GB, usable_bytes=LIMIT, roofline=None)
    assert not is_promising(dataclasses.replace(fewer, estimate=candidate(1.0, 0.1).estimate), [(failed, report)], 2)


def test_two_repairs_are_enough_and_none_is_a_part_of_another(report):
    machine = Machine(report)
    broken = candidate(1.0, 12)
    full = candidate(1.2, 4, model__remat="full")
    full_and_more = candidate(1.2, 3, model__remat="full", mesh__data=2)
    split = candidate(1.3, 5, mesh__tensor=2)
    late = candidate(1.4, 5, mesh__tensor=4)
    tried = machine.explore([late, split, full_and_more, full], known=[broken], enough=2)
    assert machine.compiled == ["model.remat=full", "mesh.tensor=2"]
    assert [one for one, _ in fitting(tried)] == [full, split]


def test_where_no_guess_fits_the_two_smallest_are_compiled_and_no_more(report):
    machine = Machine(report)
    sizes = {2: 40, 4: 30, 8: 35}
    tried = machine.explore([candidate(1.0, sizes[n], mesh__data=n) for n in sizes], known=[candidate(1, 50)], enough=2)
    assert machine.compiled == ["mesh.data=4", "mesh.data=8"] and not fitting(tried)


@pytest.mark.parametrize(("seconds", "count"), [(9, 0), (10, 1), (25, 2), (1000, 3)])
def test_no_compilation_is_begun_that_would_end_too_late(report, seconds, count):
    known = dataclasses.replace(report, lower_seconds=0.0, compile_seconds=10.0)
    machine = Machine(known)
    choices = [candidate(1.0, 5, mesh__data=n) for n in (2, 4, 8)]
    machine.explore(choices, known=[candidate(1.0, 5)], seconds=seconds)
    assert len(machine.compiled) == count
    assert any(f"time limit reached ({seconds} s): {3 - count} not compiled" in line for line in machine.said) == (
        count < 3
    )


@pytest.mark.slow
def test_the_candidates_are_all_that_training_would_take_and_the_config_itself(candidates, topology):
    assert len({one.label for one in candidates}) == len(candidates) > 50
    assert [one.label for one in candidates if one.cfg == tiny.config()] == ["unchanged"]
    assert not any("mesh.fsdp" in one.changes for one in candidates)  # it is -1, and takes what is left
    for one in candidates[::17]:
        ahead_program(one.cfg, topology)
    shapes = {(one.cfg.mesh.data, one.cfg.mesh.tensor) for one in candidates}
    assert shapes == {(data, tensor) for data in (1, 2, 4, 8) for tensor in (1, 2) if data * tensor <= 8}  # 2 kv heads


@pytest.mark.slow
def test_the_guess_of_a_candidate_is_that_of_its_own_program(candidates, topology):
    for one in candidates[5::40]:
        assert one.estimate == estimate_step(ahead_program(one.cfg, topology), topology)


def test_layouts_have_all_axes_within_reason():
    cfg = tiny.config({"model.num_layers": 6, "seq_len": 8192, "batch_tokens": "32 rows"})
    found = list(all_layouts(cfg, 16))
    assert all(math.prod(one[axis] for axis in MESH_AXES) == 16 for one in found)
    key = [tuple(one.values()) for one in found]
    assert len(set(key)) == len(key)
    sizes = lambda name: {one[name] for one in found}
    assert sizes("pipeline") == {1, 2}  # 4 stages of 2 layers would have room for 8
    assert sizes("context") == {1, 2, 4, 8}  # of 1,024 positions each, or more
    assert {(one["pipeline"], one["chunks"]) for one in found} == {(1, 1), (2, 1)}  # chunks of 2 layers: room for 8
    assert {one["data"] for one in found if one["pipeline"] > 1 or one["context"] > 1} == {1}
    assert {one["data"] for one in all_layouts(cfg, 16, num_slices=2) if one["pipeline"] > 1} == {1, 2}
    assert {
        one["context"] for one in all_layouts(dataclasses.replace(cfg, seq_len=6144, batch_tokens="32 rows"), 16)
    } == {1, 2, 4}


def test_stages_get_as_many_microbatches_as_they_need():
    cfg = tiny.config({"model.num_layers": 8, "batch_tokens": "16 rows"})
    layout = dict.fromkeys(MESH_AXES, 1) | {"pipeline": 4, "fsdp": 2, "chunks": 1}
    assert microbatch_choices(cfg, layout) == [4, 8]
    assert microbatch_choices(cfg, layout | {"pipeline": 8, "chunks": 2, "fsdp": 1}) == [8, 16]
    assert microbatch_choices(cfg, layout | {"pipeline": 1}) == [1, 2, 4, 8]


@pytest.mark.soak
def test_the_search_tries_stages_and_shared_positions_and_what_it_names_is_read(topology):
    said = []
    cfg = tiny.config({"model.num_layers": 4, "seq_len": 2048, "batch_tokens": "4 rows", "model.remat": "dots"})
    found = search.search_candidates(cfg, topology, said.append)
    layouts = {(one.cfg.mesh.pipeline, one.cfg.mesh.context, one.cfg.pipeline.chunks) for one in found}
    assert layouts == {(p, c, v) for p, v in ((1, 1), (2, 1), (2, 2), (4, 1)) for c in (1, 2)}
    for one in found:
        if one.cfg.mesh.pipeline > 1:
            assert one.cfg.model.remat == "full" and one.estimate.idle_s > 0
    for one in found[::31]:
        assert not unread(one.cfg).keys() & one.changes.keys()
    assert said[0].startswith(f"{len(found)} candidates estimated on ") and "context 1, 2;" in said[0]
    plain = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, pipeline=2), pipeline=PipelineConfig(chunks=2))
    without = dict.fromkeys(MESH_AXES, 1) | {"fsdp": 4, "tensor": 2, "chunks": 1}
    (back, *_) = search.make_candidates(plain, topology, [without], ["zero3"], [False])
    assert back.changes["pipeline.chunks"] == 1  # or training would refuse it: nothing reads it


@pytest.mark.soak
def test_the_search_shares_experts_and_tries_schedules_and_says_so(topology):
    sparse = {"model.experts": dict(number=4, chosen=2, mlp_dim=8), "model.remat": "full"}
    cfg = tiny.config(sparse | {"expert.exchange": "send", "mesh.expert": 2})
    layouts = list(all_layouts(cfg, 8))
    assert {one["expert"] for one in layouts} == {1, 2, 4}
    assert {one["expert"] for one in all_layouts(tiny.config(), 8)} == {1}
    assert microbatch_choices(cfg, dict.fromkeys(MESH_AXES, 1) | {"expert": 4, "fsdp": 2, "chunks": 1}) == [1, 2]
    chosen = [one for one in layouts if one["tensor"] == one["context"] == one["data"] == 1]
    found = list(search.make_candidates(cfg, topology, chosen, ["zero3"], [False]))
    assert search.choices_text(found) == "; schedules 1f1b, zero_bubble; experts: tokens sent"
    alone = [one for one in found if one.cfg.mesh.expert == 1]
    assert alone and all(one.changes["expert.exchange"] == "auto" for one in alone)  # or nobody would read it
    staged = [one for one in found if one.cfg.pipeline.schedule == "zero_bubble"]
    assert staged and all(one.cfg.mesh.pipeline > 1 for one in staged)
    for one in (staged[0], alone[0]):
        ahead_program(one.cfg, topology)
    other = dataclasses.replace(staged[0].cfg, pipeline=dataclasses.replace(staged[0].cfg.pipeline, schedule="1f1b"))
    assert [one for one in found if one.cfg == other][0].estimate.idle_s > staged[0].estimate.idle_s


def test_why_the_winner_wins_is_told_by_part(report):
    line = dataclasses.replace(bounds(2.0), exposed_s={"ici:fsdp": 0.5}, bubble_s=0.25, at_least_s=2.75)
    best = (candidate(1.0, 5, mesh__pipeline=2), dataclasses.replace(report, peak_bytes=5, roofline=line))
    own = (candidate(1.0, 5), dataclasses.replace(report, peak_bytes=5, roofline=bounds(3.0)))
    large = (candidate(1.0, 5), dataclasses.replace(report, peak_bytes=2 * LIMIT, roofline=None))
    wins = (
        "best: mesh.pipeline=2: at least 2750 ms per step: matmuls 2000 ms, bubble 250 ms, exposed communication 500 ms"
    )
    assert search.winner_lines([own, best]) == [
        wins,
        "the unchanged config: at least 3000 ms per step: matmuls 3000 ms",
    ]
    assert search.winner_lines([large, best]) == [wins, "the unchanged config: does not fit"]


def test_repairs_add_zero3_and_offload_and_change_something(topology):
    found = search.repair_candidates(tiny.config({"rules": "zero1"}), topology)
    assert all(one.changes for one in found)
    assert {one.cfg.rules for one in found} == {"zero1", "zero3"}
    assert {one.cfg.optim.offload_moments for one in found} == {False, True}


def test_flags_are_read_back_as_the_same_config(candidates):
    for one in [*candidates[::13], candidate(1, 1, model__remat="save", model__remat_save=("query", "mlp_up"))]:
        lines = override_lines(one.changes)
        assert not any(" " in line for line in lines)
        overrides = parse(lines, TrainFlags).overrides
        assert schema.from_dict(RunConfig, schema.merge(tiny.VALUES, overrides)) == one.cfg


def test_policies_that_keep_more_compute_less_again():
    cost = lambda remat: recomputed_flops(tiny.config({"model.remat": remat}).model, 16)
    assert cost("none") == 0 < cost("minimal") + 1 < cost("qkv") < cost("attention") < cost("full")
    model = tiny.config().model
    block = 2 * 16 * (32 + 16 + 16) + 2 * 32 * 16 + 2 * 16 * 32 * 2 + 2 * 16 * 32  # wq wk wv, wo, gate and up, scores
    assert cost("full") == model.num_layers * block


def test_more_microbatches_need_less_memory_and_more_traffic(topology):
    guesses = [
        estimate_step(ahead_program(tiny.config({"train.num_microbatches": n}), topology), topology) for n in (1, 2)
    ]
    assert guesses[1].memory() < guesses[0].memory()
    assert guesses[1].link_s > guesses[0].link_s and guesses[1].compute_s == guesses[0].compute_s


def test_the_fastest_by_arithmetic_is_told_and_that_which_fits():
    large, small, slow = candidate(1.0, 12, mesh__data=2), candidate(1.5, 5, mesh__tensor=2), candidate(2.0, 1)
    told = ("mesh.data=2, 11.2 GiB, 1000 ms: matmuls 1000 ms", "mesh.tensor=2, 4.7 GiB, 1500 ms: matmuls 1500 ms")
    whether = f"fastest estimate, fitting or not: {told[0]}"
    assert search.fastest_lines([slow, large, small], LIMIT) == [whether, f"fastest estimate that fits: {told[1]}"]
    assert search.fastest_lines([slow, small], LIMIT) == [f"fastest estimate, which fits: {told[1]}"]
    assert search.fastest_lines([large], LIMIT) == [whether, "none fits in 9.3 GiB"]
