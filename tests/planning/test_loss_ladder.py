"""A ladder takes finished runs that can be compared, and says of every other why not."""

import dataclasses

import made_ladder
import numpy as np
import pytest

from jaxscale.program.budget import resolve_budget
from jaxscale.tools.planning.loss_curve import PARTS, coverage, curve_shape, fraction_inside, make_band
from jaxscale.tools.planning.loss_law import Interval, fit
from jaxscale.tools.planning.scaling_ladder import check_healthy, find_runs, read_ladder, schedule_of, target_budget

TARGET = made_ladder.config(128, 1600)
BUDGET = resolve_budget(TARGET, None)


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    folder = made_ladder.write_ladder(tmp_path_factory.mktemp("ladder"))
    return read_ladder(find_runs(f"{folder}/*"), TARGET, BUDGET)


def why_left_out(folder, target=TARGET, **more):
    found = read_ladder([str(folder)], target, resolve_budget(target, None), **more)
    assert not found.rungs
    ((_, why),) = found.left_out
    return why


@pytest.mark.soak
def test_finished_runs_are_read_as_they_ended(ladder):
    assert not ladder.left_out and len(ladder.rungs) == 9
    assert [rung.flops for rung in ladder.rungs] == sorted(rung.flops for rung in ladder.rungs)
    smallest = ladder.rungs[0]
    cfg = made_ladder.config(16, 200)
    assert smallest.name == "16-200" and smallest.params == cfg.model.num_params
    assert smallest.tokens == 200 * cfg.tokens_per_step
    assert smallest.flops == pytest.approx(cfg.flops_per_token * smallest.tokens)
    assert smallest.loss == pytest.approx(made_ladder.end_of(cfg), rel=0.02)
    assert len(ladder.points) == 9 and ladder.bits_per_nat == pytest.approx(made_ladder.BITS_PER_NAT)


def test_the_noise_is_measured_from_runs_that_differ_in_seed_alone(ladder, tmp_path):
    assert ladder.noise is None
    for seed, (width, steps) in enumerate([(16, 200), (16, 200), (16, 200), (16, 400), (32, 400), (32, 400)]):
        cfg = made_ladder.config(width, steps, seed=seed)
        made_ladder.write(tmp_path / f"{width}-{steps}-{seed}", cfg, noise=0.02, seed=seed)
    found = read_ladder(find_runs(f"{tmp_path}/*"), TARGET, BUDGET)
    ends = {rung.name: np.log(rung.loss) for rung in found.rungs}
    three, two = ([end for name, end in ends.items() if name.startswith(of)] for of in ("16-200", "32-400"))
    assert found.noise.freedom == 3 and len(three) == 3 and len(two) == 2
    assert found.noise.off**2 * 3 == pytest.approx(2 * np.var(three, ddof=1) + np.var(two, ddof=1))
    pair = read_ladder(find_runs(f"{tmp_path}/32-*"), TARGET, BUDGET)
    assert pair.noise is None  # of one degree of freedom


@pytest.mark.slow
def test_its_law_forecasts_a_larger_run(ladder):
    law, tokens = fit(ladder.points, draws=100), BUDGET.total_steps * BUDGET.batch_tokens
    low, middle, high = law.predict(TARGET.model.num_params, tokens)
    assert middle == pytest.approx(made_ladder.end_of(TARGET), rel=0.03)
    assert low <= made_ladder.end_of(TARGET) <= high


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"seq_len": 32}, "seq_len is 32, but 16 in the run to forecast"),
        ({"model__vocab_size": 72}, "model.vocab_size is 72, but 64 in the run to forecast"),
        ({"data__val_fraction": 0.1}, "data.val_fraction is 0.1, but 0.05 in the run to forecast"),
        ({"data__name": "files", "data__files": "a.txt"}, "data.name is 'files', but 'synthetic' in the run"),
        ({"optim__decay": "linear"}, "the schedule is linear to 0.1 of the peak, warmup 5.0%, but cosine"),
        ({"optim__min_lr": 0.0}, "the schedule is cosine to 0 of the peak"),
        ({"optim__decay": "wsd"}, "the schedule is wsd over the last 20%"),
        (
            {"optim__decay": "piecewise"},
            "the schedule is piecewise (0.316 from 80%, 0.1 from 90%) to 0.1 of the peak",
        ),
    ],
    ids=str,
)
def test_a_run_of_another_kind_is_left_out(tmp_path, overrides, told):
    assert told in why_left_out(made_ladder.write(tmp_path / "run", made_ladder.config(**overrides)))


def test_a_run_that_is_not_finished_is_left_out(tmp_path):
    folder = made_ladder.write(tmp_path / "run", made_ladder.config(), until=120)
    assert why_left_out(folder) == "the run is not finished: step 120 of 200"


def test_a_run_without_held_out_text_is_left_out(tmp_path):
    folder = made_ladder.write(tmp_path / "run", made_ladder.config())
    made_ladder.write_rows(folder, made_ladder.rows_of(folder)[:-1])
    assert "no held-out loss" in why_left_out(folder)


def test_a_run_that_diverged_is_left_out(tmp_path):
    folder = made_ladder.write(tmp_path / "run", made_ladder.config())
    *rows, last = made_ladder.rows_of(folder)
    made_ladder.write_rows(folder, [*rows, last | {"validation/loss": None, "nonfinite": ["validation/loss"]}])
    assert why_left_out(folder) == "the run diverged: the held-out loss at step 200 is not finite"
    risen = [row | {"loss": row["loss"] + (row["step"] > 150)} for row in rows]
    made_ladder.write_rows(folder, [*risen, last])
    assert why_left_out(folder).startswith("the run diverged: the training loss rose from")


def test_a_loss_that_wavers_has_not_diverged():
    steps = np.arange(1.0, 401)
    check_healthy(steps, 3 - 0.001 * steps + 0.1 * np.sin(steps / 20), 400)


@pytest.mark.parametrize("change", [("horizon", 1.0), ("cut", 0.1)], ids=lambda change: change[0])
def test_a_run_whose_rate_left_its_schedule_is_left_out(tmp_path, change):
    """A run that was prolonged, or whose rate was cut, did not end as a run of its length does."""
    folder = made_ladder.write(tmp_path / "run", made_ladder.config())
    peak = max(row.get("learning_rate", 0) for row in made_ladder.rows_of(folder))
    rows = [
        row | {"learning_rate": peak if change[0] == "horizon" else change[1] * row["learning_rate"]}
        if 100 < row["step"] <= 120 and "loss" in row
        else row
        for row in made_ladder.rows_of(folder)
    ]
    made_ladder.write_rows(folder, rows)
    assert "the learning rate at step 102 was" in why_left_out(folder)


def test_a_run_that_began_with_anothers_parameters_is_left_out(tmp_path):
    folder = made_ladder.write(tmp_path / "run", made_ladder.config())
    text = (folder / "config.json").read_text().replace('"ancestry": []', '"ancestry": [{"path": "a"}]')
    (folder / "config.json").write_text(text)
    assert "parameters of another run" in why_left_out(folder)


def test_folders_that_hold_no_run_or_a_damaged_one_are_left_out(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "is not a work folder" in why_left_out(tmp_path / "empty")
    folder = made_ladder.write(tmp_path / "run", made_ladder.config())
    assert why_left_out(folder, target_folder=str(folder)) == "this is the run to forecast"
    for text in ("{", '{"config": {}}', '{"budget": {}}', "[]"):
        (folder / "config.json").write_text(text)
        assert "config.json" in why_left_out(folder)


def test_a_torn_last_line_changes_nothing(tmp_path):
    folder = made_ladder.write(tmp_path / "run", made_ladder.config())
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20')
    assert len(read_ladder([str(folder)], TARGET, BUDGET).rungs) == 1


def test_a_constant_rate_gives_points_on_the_way(tmp_path):
    target = made_ladder.config(128, 1600, optim__decay="constant")
    folder = made_ladder.write(tmp_path / "run", made_ladder.config(optim__decay="constant"))
    rows = made_ladder.rows_of(folder)
    extra = [{"step": step, "validation/loss": 6.0 - step / 100} for step in (0, 10, 50, 100)]
    made_ladder.write_rows(folder, sorted([*rows, *extra], key=lambda row: row["step"]))
    (rung,) = read_ladder([str(folder)], target, resolve_budget(target, None)).rungs
    # the warmup is 10 steps, and points begin at twice that
    assert [point.tokens / 256 for point in rung.points] == [50, 100, 200]
    assert {point.run for point in rung.points} == {str(folder)}


def test_patterns_find_folders_and_say_where_they_find_none(tmp_path, monkeypatch):
    for name in ("a-1", "a-2", "b-1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs" / "a-3").write_text("a file")
    monkeypatch.chdir(tmp_path)
    assert find_runs("runs/a-*,runs/b-1") == ["runs/a-1", "runs/a-2", "runs/b-1"]
    assert find_runs("r*/b-1, runs/b*") == ["runs/b-1"]
    assert find_runs(f"{tmp_path}/runs/b-*") == [f"{tmp_path}/runs/b-1"]
    with pytest.raises(ValueError, match=r"--runs=runs/c-\* matches no folder"):
        find_runs("runs/c-*")


def test_another_amount_of_tokens_can_be_asked_for():
    cfg, budget = target_budget(TARGET, "512000")
    assert budget.total_steps == 2000 and cfg.model == TARGET.model
    with pytest.raises(ValueError, match="--tokens='much' is not an amount"):
        target_budget(TARGET, "much")


@pytest.mark.slow
def test_the_band_holds_the_curve_of_a_run_that_was_not_in_the_ladder(ladder, tmp_path):
    own = schedule_of(TARGET, BUDGET)
    made_ladder.write(tmp_path / "run", TARGET, noise=0.003, seed=99)
    (run,) = read_ladder([str(tmp_path / "run")], TARGET, BUDGET).rungs
    end = fit(ladder.points, draws=100).predict(run.params, run.tokens)
    band = make_band(end, curve_shape(ladder.rungs, own), run.tokens)
    assert band.tokens[-1] == run.tokens and len(band.low) == len(PARTS)
    assert all(low < middle < high for low, middle, high in zip(band.low, band.middle, band.high))
    assert fraction_inside(band, run) >= 0.9
    shares = coverage(ladder.rungs)
    assert set(shares) == {rung.name for rung in ladder.rungs} and np.mean(list(shares.values())) >= 0.8


def test_a_curve_that_goes_wrong_leaves_the_band(ladder, tmp_path):
    folder = made_ladder.write(tmp_path / "run", TARGET, noise=0.003)
    rows = [row | ({"loss": 1.05 * row["loss"]} if "loss" in row else {}) for row in made_ladder.rows_of(folder)]
    made_ladder.write_rows(folder, rows)
    (run,) = read_ladder([str(folder)], TARGET, BUDGET).rungs
    end = Interval(0.999 * run.loss, run.loss, 1.001 * run.loss)
    assert (
        fraction_inside(make_band(end, curve_shape(ladder.rungs, schedule_of(TARGET, BUDGET)), run.tokens), run) < 0.2
    )


def test_no_band_is_made_of_other_schedules_gaps_or_too_few(ladder):
    own = schedule_of(TARGET, BUDGET)
    with pytest.raises(ValueError, match="is cosine to 0.1 of the peak, warmup 5.0%, but the schedule of the run"):
        curve_shape(ladder.rungs, own._replace(warmup=0.2))
    with pytest.raises(ValueError, match="0 runs log a training loss"):
        curve_shape([], own)
    with pytest.raises(ValueError, match="2 runs log a training loss"):
        curve_shape(ladder.rungs[:2], own)
    late = [rung.__class__(**{**vars(rung), "schedule": own._replace(warmup=0.15)}) for rung in ladder.rungs]
    with pytest.raises(ValueError, match="the warmup takes 15% of the run"):
        curve_shape(late, own._replace(warmup=0.15))


def test_runs_whose_batches_grow_are_no_rungs(tmp_path):
    grown = dataclasses.replace(BUDGET, ramp=((0, 8), (10, BUDGET.batch_tokens)))
    with pytest.raises(ValueError, match="the run to forecast cannot have a batch_ramp, because steps"):
        read_ladder([], TARGET, grown)


def test_a_constant_rate_that_decayed_early_is_one_of_wsd():
    cfg = made_ladder.config(optim__decay="constant")
    budget = dataclasses.replace(resolve_budget(cfg, None), total_steps=100, decay_start=80)
    other = made_ladder.config(optim__decay="wsd", optim__decay_fraction=0.2)
    assert schedule_of(cfg, budget).ends_as(schedule_of(other, dataclasses.replace(budget, decay_start=None)))
    assert not schedule_of(cfg, budget).ends_as(schedule_of(cfg, dataclasses.replace(budget, decay_start=None)))
