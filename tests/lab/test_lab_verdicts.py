"""The verdict of every experiment on results with a known answer, and its page in a browser."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from headless import BROWSER, Browser
from made_results import BASE, made, noisy

from jaxscale.system.exits import BadInput
from jaxscale.tools.lab import batch, clipping, isoflop, ladder, optimizers, precision, rate, resume, shape, vary, width
from jaxscale.tools.lab.experiment import Options
from jaxscale.tools.lab.experiment_page import lab_page
from jaxscale.tools.lab.experiments import EXPERIMENTS
from jaxscale.tools.lab.sizes import inner_flops, wider
from jaxscale.tools.lab.trial import Base, seconds_of
from jaxscale.tools.planning.best_size import loss_law_text
from jaxscale.tools.planning.loss_law import Point, fit

USUAL = BASE.cfg.optim.peak_lr


def power_in(sentence):
    """The exponent that a sentence tells."""
    return float(sentence.partition("to the power ")[2].split()[0])


@functools.cache
def rate_results(exponent, seeds=2):
    found = []
    for trial in rate.rate_trials(BASE, Options(names=("adamw",), seeds=seeds)):
        tokens = trial.at["batch_tokens"] / BASE.cfg.tokens_per_step
        off = math.log(trial.at["optim.peak_lr"] / (USUAL * tokens**exponent))
        found.append(made(trial, 2.0 + 0.05 * off**2 + noisy(trial)))
    return found


@pytest.mark.parametrize("exponent, fits, misses", [(0.5, "square root", "linear"), (0.8, "", "")])
def test_the_rule_of_the_rate_is_told(exponent, fits, misses):
    first = rate.conclude(rate_results(exponent)).verdict[0]
    assert power_in(first) == pytest.approx(exponent, abs=0.05)
    assert (f"{fits} fits within the interval, {misses} does not" if fits else "neither rule") in first


def test_a_best_rate_at_the_end_of_those_tried_is_no_point_of_the_rule():
    edge = [made(r.trial, 3.0 - r.trial.at["optim.peak_lr"]) for r in rate_results(0.5)]
    assert "The best learning rate is at the edge of the sweep" in rate.conclude(edge).verdict[0]


def test_rates_are_added_until_the_best_lies_inside_those_tried():
    best, tried = {"adamw": 5 * USUAL, "lion": USUAL / 100, "sgd": 1e9}, []
    lost = lambda t: t.at["optim.peak_lr"] > 1e3 * USUAL  # of SGD, whose search ends there

    def run(trials):
        tried.extend(trials)
        off = lambda t: math.log(t.at["optim.peak_lr"] / best[t.at["optim.name"]])
        return [made(t, 2.0 + 0.05 * off(t) ** 2, diverged=lost(t)) for t in trials]

    options, of_name = Options(names=tuple(best)), lambda r: r.at("optim.name")
    results = rate.inside(run(optimizers.optimizer_trials(BASE, options)), options, run, of_name)
    rates = {name: sorted({t.at["optim.peak_lr"] for t in tried if t.at["optim.name"] == name}) for name in best}
    assert rates["adamw"][-1] == 8 * USUAL and len(rates["adamw"]) == 6 and len(rates["lion"]) == 8
    assert rates["sgd"][-1] == 1600 * USUAL and any(map(lost, tried))
    assert all(t.cfg.optim.min_lr / t.cfg.optim.peak_lr == pytest.approx(0.05) for t in tried)
    assert len(results) == len(tried) == len({t.name for t in tried})
    of_muon = Base.load("configs/lab.py", {"optim.name": "muon"}).cfg.optim  # whose rate is no AdamW's
    assert rate.middle_rate(of_muon, "muon") == USUAL == 4 * rate.middle_rate(of_muon, "adamw")
    mine = options._replace(rates=(1e-3, 2e-3, 4e-3))
    assert len(rate.inside(run(optimizers.optimizer_trials(BASE, mine)), mine, run, of_name)) == 3 * 3 * 2


def batch_results(critical, least=20_000):
    """Runs whose loss falls as a power of tokens / (1 + batch / critical)."""
    found = []
    for trial in batch.batch_trials(BASE, Options(rates=(USUAL,))):
        size = trial.at["batch_tokens"]
        tokens = np.arange(size, 200_000 + 1, size)
        curve = 2.0 * (tokens / (least * (1 + size / critical))) ** -0.2
        found.append(made(trial, float(curve[-1]), curve=curve))
    return found


def still_results(scale, noise=0.02):
    """Gradients of a known noise scale, in tokens."""
    random = np.random.default_rng(0)
    square = lambda t: (1 + scale / t.at["batch_tokens"]) * (1 + noise * random.normal(size=40))
    trials = batch.noise_trials(BASE, rate_results(0.5, 1)[0])
    return [made(t, 2.0, metrics={"grad_norm": np.sqrt(square(t))}) for t in trials]


def test_the_critical_batch_is_found_by_curves_and_by_noise():
    found = batch.conclude(batch_results(6_000), still_results(9_000))
    curves = next(line for line in found.verdict if "from these curves is" in line)
    assert 5.0 < float(curves.split(" is ")[1].partition("K")[0]) < 7.0
    noise = next(line for line in found.verdict if "noise scale" in line)
    assert 8.0 < float(noise.split(" is ")[1].partition("K")[0]) < 10.0


@pytest.mark.slow
def test_of_each_batch_the_best_rate_counts_and_none_at_which_a_run_was_lost():
    trials = batch.batch_trials(BASE, Options(rates=(1e-3, 2e-3, 4e-3), batches=(1024,)))
    losses = {1e-3: 2.2, 2e-3: 2.1, 4e-3: 1.9}
    lost = lambda t: t.at["optim.peak_lr"] == 4e-3 and t.seed == 1
    results = [made(t, losses[t.at["optim.peak_lr"]], diverged=lost(t)) for t in trials]
    assert {r.at("optim.peak_lr") for r in batch.best_rates(results, batch.tokens_per_step)} == {2e-3}
    found = batch.conclude(results, still_results(9_000))
    assert found.verdict[-1] == (
        "The best learning rate is at the edge of the sweep (a bound) for: 1.02K tokens, at least 0.002828."
    )
    assert batch.answer(BASE, Options(), lambda trials: [made(t, 9.0, diverged=True) for t in trials]).rows == []


def optimizer_results(speed, noise=0.0005):
    found = []
    for trial in optimizers.optimizer_trials(BASE, Options(names=tuple(speed))):
        name = trial.at["optim.name"]
        off = math.log(trial.at["optim.peak_lr"] / rate.middle_rate(BASE.cfg.optim, name))
        tokens = np.arange(1, 197) * 1024
        curve = 2.0 * (tokens * speed[name] / 200_000) ** -0.2 + 0.05 * off**2 + noisy(trial, noise)
        found.append(made(trial, float(curve[-1]), curve=curve))
    return found


@pytest.mark.slow
def test_an_optimizer_that_needs_half_the_tokens_is_told_so():
    found = optimizers.conclude(optimizer_results({"adamw": 1.0, "lion": 2.0, "adafactor": 1.0, "lamb": 0.5}))
    assert found.verdict[0].startswith("Held-out loss, best first: lion")
    lion, adafactor, lamb = found.verdict[1:4]
    assert 0.45 < float(lion.split(" needs ")[1].split()[0]) < 0.56 and "significantly lower" in lion
    every_tenth = [
        {"step": 1, "step_seconds": None},
        {"step": 10, "step_seconds": 0.5},
        {"step": 12, "step_seconds": 1.0},
    ]
    assert seconds_of([{"step": 0}, *every_tenth]) == 9 * 0.5 + 2 * 1.0
    assert "not significant" in adafactor and "significantly higher; not every seed of lamb reached adamw's" in lamb
    _, lion, *_ = optimizers.conclude(optimizer_results({"adamw": 1.0, "lion": 2.0}, noise=0.05)).verdict
    assert "not every seed of adamw reached its mean" in lion and "every seed of lion" not in lion


def test_precision_is_measured_against_the_same_seed():
    worse = {"float32": 0.0, "bfloat16": 0.0, "fp8 products": 0.01}
    names = ("bfloat16", "fp8 products", "float16 no scale", precision.DYNAMIC)
    results = [
        made(t, 2.0 + 0.3 * t.seed + worse.get(t.at["precision"], 0) * 2 + noisy(t, 1e-4),
             diverged="no scale" in t.at["precision"], metrics={"train/loss_scale": [2.0**28] * 3 + [2.0**24] * 37})
        for t in precision.precision_trials(BASE, Options(names=names))
    ]  # fmt: skip
    found = precision.conclude(results)
    told = {line.removeprefix("With ").partition(":")[0]: line for line in found.verdict}
    assert "not significantly different" in told["bfloat16"]
    assert "worse" in told["fp8 products"] and "+0.8" in told["fp8 products"]
    assert told["float16 no scale"].endswith(": 3 of 3 runs diverged.")
    assert told[precision.DYNAMIC].endswith("; the loss scale fell from 2.68e+08 to 1.68e+07.")
    fp8, band = (
        next(one for one in drawn if one.label == "fp8 products")
        for drawn in (found.drawings[0].plot.lines, found.drawings[0].plot.bands)
    )
    assert all(0.5 < percent < 1.5 for percent in fp8.values)  # of its training loss, beside the same seed's
    assert all(low < value < high for low, value, high in zip(band.low, fp8.values, band.high, strict=True))
    assert band.color == fp8.color


def test_every_gradient_of_the_noise_scale_is_logged():
    seldom = Base.load("configs/lab.py", {"monitor.log_every_steps": "10"})
    trials = batch.noise_trials(seldom, rate_results(0.5, 1)[0])
    assert {t.cfg.monitor.log_every_steps for t in trials} == {1}
    nothing = [made(t, 2.0, curve=[]) for t in trials]
    assert "no gradient norm was logged" in batch.noise_text(nothing)


def test_two_sizes_of_one_number_of_heads_are_one_width():
    tried = []
    run = lambda trials: tried.extend(trials) or [made(t, 2.0) for t in trials]
    width.answer(BASE, Options(sizes=(1, 1.1, 2), rates=(USUAL,), seeds=1), run)
    assert len(tried) == len({t.name for t in tried}) == 2 * 2 * 2  # forms, widths, a rate and the check


def test_a_law_that_puts_the_best_size_below_one_parameter_determines_none():
    ends = {  # of real runs: {parameters: {tokens: nats}}
        5_544: {4_096: 5.121, 8_192: 4.404, 16_384: 3.459, 32_512: 3.137},
        13_600: {1_536: 5.387, 3_072: 5.173, 6_144: 4.667, 12_288: 3.846},
        37_500: {1_024: 5.496, 2_048: 5.403, 4_096: 5.178},
    }
    points = [Point(params, tokens, loss) for params, of in ends.items() for tokens, loss in of.items()]
    assert loss_law_text(points, 7.6e9, fit(points, draws=2)).endswith("these runs determine no best size.")


def test_clipping_that_allows_twice_the_rate_is_told_so():
    limits = {1.0: 16 * USUAL, 0.0: 4 * USUAL}
    lost = lambda t: t.at["optim.peak_lr"] > limits[t.at["optim.clip_norm"]]
    trials = clipping.clipping_trials(BASE, Options())
    results = [made(t, 2.0, diverged=lost(t), metrics={"grad_norm": [1.5] * 40}) for t in trials]
    clipped, bare, ends = clipping.conclude(results).verdict
    assert ends == "The lowest held-out loss is 2 (2 to 2) nats with clipping and 2 (2 to 2) nats without."
    assert f"up to a learning rate of {16 * USUAL:.3g} (a run diverged at the next rate)" in clipped
    assert f"up to a learning rate of {4 * USUAL:.3g}" in bare


@pytest.mark.slow
def test_the_best_size_is_found_three_ways_from_a_known_law():
    law = lambda params, tokens: 1.0 + 1000 / params**0.5 + 400 / tokens**0.5  # so the best size grows as C ** 0.5
    results = []
    for trial in isoflop.isoflop_trials(BASE, Options()):
        batch, total = trial.cfg.tokens_per_step, trial.cfg.train_tokens
        curve = law(trial.cfg.model.num_params, np.arange(batch, total + 1, batch))
        results.append(made(trial, float(curve[-1]), curve=curve))
    lowest, curves, parabolas, law_text, _ = isoflop.conclude(results).verdict
    power_of = lambda cfg: cfg.train_tokens**-0.09 * cfg.model.num_params**-0.01
    kaplan = isoflop.conclude([r._replace(loss=power_of(r.trial.cfg)) for r in results]).verdict[-1]
    assert "losses scale as C ** -0.08992" in kaplan and "parameters as D ** -0.09 (" in kaplan
    assert kaplan.endswith("has C ** -0.050 and D ** -0.095.")
    assert lowest.count(" parameters at ") == 4 and "the smallest" not in lowest and "the largest" not in lowest
    few = min(results, key=lambda r: r.trial.cfg.model.num_params)
    long = few._replace(
        history=dataclasses.replace(few.history, rows=[{"step": 1, "tokens_seen": 5_234_000, "loss": 2}])
    )
    [*_, ratio, _] = isoflop.conclude([long]).rows[0]
    assert ratio.html == f"{5_234_000 / few.trial.cfg.model.num_params:.1f}" == "119.8"
    small = [r for r in results if r.trial.cfg.model.num_params < 200_000]
    bound = isoflop.conclude(small).verdict[0]
    assert "141K parameters at 3.4e+11 FLOPs" in bound and "the largest." in bound and "All are at the edge" in bound
    assert "All are at the edge" not in lowest
    for text in (curves, parabolas):
        assert 0.4 < float(text.split("C ** ")[1].split()[0]) < 0.6 and "10 times the largest budget tried" in text, (
            text
        )
    assert "so the best size grows as C ** 0.5" in law_text


@pytest.mark.slow
def test_a_rate_that_moves_with_the_width_without_mup_is_told():
    results = []
    for trial in width.width_trials(BASE, Options()):
        power = -1.0 if trial.at["parametrisation"] == "standard" else 0.0
        best = USUAL * 1.3 * (trial.at["width"] / 64) ** power
        loss = 2.0 + 0.05 * math.log(trial.at["optim.peak_lr"] / best) ** 2 + noisy(trial, 0.0005)
        results.append(made(trial, loss))
    grown = lambda t: float(t.at["width"]) ** (0.8 if t.at["parametrisation"] == "standard" else 0.0)
    looked_at = [
        made(t, 5.0, curve=[5.0] * 4, metrics={f"stats/{kind}_rms/0{layer}": [1.0, 1.1, 1.2, grown(t)]
                                               for kind in width.KINDS for layer in range(2)})
        for t in width.coordinate_trials(BASE, Options())
    ]  # fmt: skip
    standard, mup, ends, *coordinates = width.conclude(results, looked_at).verdict
    powers = [[float(part.split()[0]) for part in text.split("to the power ")[1:]] for text in coordinates]
    assert powers == [pytest.approx([0.8] * 3), pytest.approx([0.0] * 3, abs=1e-9)]
    lost = lambda r, **stats: r._replace(
        history=dataclasses.replace(r.history, rows=({"step": 4, "loss": 5.0, **stats},))
    )
    broken = [lost(looked_at[0], **{"stats/mlp_rms/00": None}), lost(looked_at[1]), *looked_at[2:]]
    left_out = width.conclude(results, broken).verdict[-2]
    assert (
        left_out.endswith(" 2 of 6 runs have no finite activation statistics and were excluded.")
        and "nan" not in left_out
    )
    nothing = width.conclude(results, list(map(lost, looked_at))).verdict[-1]
    assert "fewer than two widths have finite statistics. 6 of 6 runs" in nothing
    assert {t.cfg.train_tokens for t in width.coordinate_trials(BASE, Options())} == {"4 steps"}
    assert ends.startswith("At width 256, the loss at the best learning rate is ") and ends.count("nats with") == 2
    assert power_in(standard) == pytest.approx(-1, abs=0.05) and "so it does not transfer" in standard
    assert power_in(mup) == pytest.approx(0, abs=0.05) and "consistent with no change" in mup


def shape_results(bend, seeds=3):
    """Runs whose loss rises with the square of log(width / layers) from that of 2 layers."""
    found = []
    for trial in shape.shape_trials(BASE, Options(seeds=seeds)):
        off = math.log(trial.at["width"] / trial.at["layers"] / 32)
        rate_off = math.log(trial.at["optim.peak_lr"] * trial.at["width"] / 64 / USUAL)
        found.append(made(trial, 2.0 + bend * off**2 + 0.05 * rate_off**2 + 0.3 * trial.seed + noisy(trial)))
    return found


@pytest.mark.slow
def test_shapes_have_equal_flops_and_those_that_differ_beyond_noise_are_told():
    results = shape_results(0.01)
    flops = {inner_flops(r.trial.cfg.model, r.trial.cfg.seq_len) for r in results}
    under_mup = Base.load("configs/lab.py", {"model.mup.base_dim": "64"}).cfg
    assert wider(under_mup, 2)["optim.peak_lr"] == USUAL == 2 * wider(BASE.cfg, 2)["optim.peak_lr"]
    of_muon = Base.load("configs/lab.py", {"optim.name": "muon"}).cfg
    assert wider(of_muon, 4)["optim.peak_lr"] == USUAL / 2
    assert len({r.at("layers") for r in results}) == 5 and max(flops) < 1.005 * min(flops)
    lowest, far, spread = shape.conclude(results).verdict
    assert (
        lowest.startswith("2 layers of width 64 (width / layers 32) has the lowest")
        and "all others are significantly higher" in lowest
    )
    assert "16 layers of width 16 (by 5.2" in far and "Over a factor of 96" in spread  # 0.01 * log(32)**2 of 2.3 nats
    ends = shape.conclude([r for r in results if r.at("optim.peak_lr") * r.at("width") <= 64 * USUAL]).verdict[-1]
    assert (
        ends.startswith("The best learning rate is at the edge of the sweep (a bound) for: 1 layer of ")
        and "at least" in ends
    )
    flat, spread = shape.conclude(shape_results(0.0)).verdict
    assert flat.count(" layer") >= 5 and "not significantly different" in flat
    assert "one seed cannot show" in shape.conclude(shape_results(0.01, 1)).verdict[0]
    with pytest.raises(BadInput, match="no width gives 32 layers as many FLOPs"):
        shape.shape_trials(BASE, Options(sizes=(16,)))


@pytest.mark.slow
def test_a_ladder_predicts_a_size_ten_times_as_large_and_reports_a_miss():
    law = lambda cfg: 1.2 + 30 * cfg.model.num_params**-0.35
    options = Options(target=10, sizes=(0.5, 1, 1.5, 2, 2.5))
    trials = ladder.ladder_trials(BASE, options)
    ratios = [t.cfg.train_tokens / t.cfg.model.num_params for t in trials]
    assert max(ratios) < 1.02 * min(ratios) and len(trials) == 10
    results = [made(t, law(t.cfg) + noisy(t), curve=[2.0] * (t.cfg.train_tokens // 1024)) for t in trials]
    target = ladder.target_trial(BASE, options, results[-1].at("parameters"))
    assert 10 <= target.cfg.model.num_params / results[-1].at("parameters") < 13
    end = lambda times: [made(target, times * law(target.cfg), curve=[2.0] * (target.cfg.train_tokens // 1024))]
    last, not_made, of_all, kaplan = ladder.conclude(results).verdict
    pure = [r._replace(loss=r.at("parameters") ** -0.1) for r in results]
    assert "the loss scales as N ** -0.1 (-0.1 to -0.1) and C ** -0.0489 (" in ladder.conclude(pure).verdict[-1]
    assert kaplan.endswith("has N ** -0.102 from its L(N, D) and C ** -0.050 from its L(C).")
    assert "inside the interval" in last and "It was not trained; --target=10 trains it." in not_made
    assert "0.3" in of_all.partition(" / N ** ")[2] and "at this ratio of tokens to parameters" in of_all
    found = ladder.law_of(results)
    of_target = lambda times: ladder.in_words("the target", ladder.compare(found, end(times)))
    assert "inside the interval" in of_target(1.0) and "outside the interval" in of_target(1.3)
    assert "No prediction for the largest size" in ladder.conclude(results[:4], end(1.0)).verdict[0]


def test_one_value_that_differs_after_a_kill_is_found():
    whole, *killed = resume.resume_trials(BASE, Options())
    curve = np.linspace(5, 2, 40)
    resumed = [{"event": "started"}, {"event": "resumed", "step": 28}]
    same = [made(whole, 2.0, curve=curve), *(made(t, 2.0, curve=curve, events=resumed) for t in killed)]
    assert all("are bit-identical" in line and "step 28" in line for line in resume.conclude(same).verdict)
    curve[30] = np.nextafter(curve[30], 9)
    other = [same[0], made(killed[0], 2.0, curve=curve, events=resumed), same[2]]
    assert "1 of 41 values differ, the first at step 31" in resume.conclude(other).verdict[0]
    unhurt = [same[0], made(killed[0], 2.0, curve=curve, events=resumed[:1]), same[2]]
    assert "ended before it could be killed" in resume.conclude(unhurt).verdict[0]


def test_a_sweep_names_the_lowest_and_the_values_within_noise():
    ends = {"1e-3": 2.2, "2e-3": 2.0, "4e-3": 2.001, "8e-3": 2.5}
    trials = vary.vary_trials(BASE, Options(vary=(("optim.peak_lr", tuple(ends)),)))
    first, parabola = vary.conclude([made(t, ends[t.at["optim.peak_lr"]] + noisy(t)) for t in trials]).verdict
    assert first.startswith("optim.peak_lr=2e-3 has the lowest loss")
    assert "its interval overlaps optim.peak_lr=4e-3" in first
    assert parabola.startswith("Best optim.peak_lr, from a parabola through the lowest points: 0.00")
    lost = [made(t, 2.0, curve=[5.0, 6.0, 1e4, 5.0], diverged=True) for t in trials[-3:]]
    held = [made(t, ends[t.at["optim.peak_lr"]]) for t in trials[:-3]]
    *_, bound = vary.conclude([*held[:6], *lost]).verdict
    assert bound == "Best optim.peak_lr, at the edge of the values tried: at least 0.002."
    plot = vary.conclude([*held, *lost]).drawings[-1].plot
    assert [len(one.steps) for one in plot.lines] == [40, 40, 40, 2] and len(plot.bands) == 3


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium here to open the page in")
def test_a_page_in_a_browser_is_not_too_wide_and_shows_its_plots(tmp_path):
    results = rate_results(0.5)
    page = tmp_path / "rate.html"
    page.write_text(lab_page("rate", EXPERIMENTS["rate"], BASE, results, rate.conclude(results)))
    browser = Browser(tmp_path / "profile")
    try:
        for width, dark in ((400, False), (1280, True)):
            browser.open(page.as_uri(), width, 900, dark=dark)
            assert browser.ask("document.documentElement.scrollWidth <= innerWidth + 1")
        assert browser.ask("document.querySelectorAll('figure.plot').length") == 2 and not browser.complaints()
    finally:
        browser.close()
