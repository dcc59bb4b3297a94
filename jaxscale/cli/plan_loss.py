"""Forecasts the loss of a run from a ladder of small finished runs: E + A/N^alpha + B/D^beta, with an interval.

  jaxscale plan --loss --runs='runs/ladder/*' --config=configs/7b.py

Runs are compared by their held-out loss after the last step. Unfinished or diverged runs, and runs with different data,
tokenizer, sequence length or schedule, are excluded, with a reason. Compiles nothing and takes seconds. The output ends
with the compute-optimal size for the run's FLOPs, by loss curves, by IsoFLOP profiles and by the fitted law.
"""

import contextlib
import dataclasses
import datetime
import math
from typing import Any, NamedTuple

from jaxscale import schema, units
from jaxscale.config import RunConfig
from jaxscale.program.budget import Budget
from jaxscale.settings import config_file
from jaxscale.settings.command_line import Arguments, file_to_write, flag
from jaxscale.settings.help_text import command
from jaxscale.system import paths
from jaxscale.system.exits import BadInput, put
from jaxscale.tools.planning.best_size import Approach, three_approaches
from jaxscale.tools.planning.loss_curve import SMOOTHED, LossBand, coverage, curve_shape, fraction_inside, make_band
from jaxscale.tools.planning.loss_fit import PULL_AT
from jaxscale.tools.planning.loss_law import INTERVAL, Interval, LossLaw, SeedNoise, fit, write_forecast
from jaxscale.tools.planning.scaling_ladder import Ladder, LadderRun, find_runs, read_ladder, schedule_of, target_budget

MIN_DRAWS = 200
MAX_NOISE = 0.2  # as a fraction of the loss; larger numbers are probably percentages without %
NO_FLOOR = 0.05  # E is considered 0 below this fraction of the lowest loss
FAR = 10.0  # multiple of the largest run's FLOPs; both trials beyond it in docs/loss_law.md missed the interval
local_or_remote_file = lambda name, text: paths.as_path(text) if paths.is_remote(text) else file_to_write(name, text)


def noise_of(name: str, text: str) -> float:
    """Parses a noise level: a fraction of the loss ('0.005') or a percentage ('0.5%'). Raises BadInput for others."""
    with contextlib.suppress(ValueError):
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if 0 < number <= MAX_NOISE:
            return number
    raise BadInput(f"--{name}={text} must be a fraction of the loss, at most {MAX_NOISE:g}, such as 0.005 or 0.5%")


@dataclasses.dataclass(frozen=True)
class ForecastFlags:
    runs: str = flag(
        "",
        "work folders of finished runs, separated by commas, with * as a wildcard, in quotes; see configs/ladder.py",
        "PATTERNS",
    )
    config: str = flag("", "config of the run to forecast; set any setting with --config.NAME=VALUE", "FILE")
    settings: dict[str, str] = flag(dict, None, "VALUE", name="config.NAME")
    tokens: str | None = flag(None, "tokens of the run, instead of its train_tokens", "AMOUNT")
    to: str | None = flag(
        None,
        "writes forecast.json to this folder: the expected band of the training loss, for the report and the alerts",
        "WORKDIR",
    )
    noise: float | None = flag(
        None,
        "standard deviation of the loss over seeds, as a fraction of the loss; 5 runs then suffice instead of 7. "
        "Default: measured, if the ladder has runs that differ only in their seed",
        "0.005",
        read=noise_of,
    )
    draws: int = flag(MIN_DRAWS, "bootstrap samples", least=MIN_DRAWS)
    seed: int = flag(0, "seed of the bootstrap", least=0)
    json: Any = flag(
        None,
        "writes all numbers as JSON",
        "FILE",
        read=local_or_remote_file,
    )
    loss: bool = flag(False, None)


class Forecast(NamedTuple):
    """Forecast of a run's loss."""

    ladder: Ladder
    law: LossLaw
    params: int
    tokens: int
    flops: float
    end: Interval
    band: LossBand | None
    no_band_reason: str  # why the band is missing, or ""
    covered: dict[str, float]  # fraction of each ladder run's curve inside the band of the other runs, around its end
    largest: tuple[str, float] | None  # largest run, and the fraction of its curve that the other runs' forecast covers
    noise: SeedNoise | None  # from --noise, or measured over seeds
    ways: list[Approach]  # approaches to the compute-optimal size for the run's FLOPs


@command(ForecastFlags)
def main(arguments: Arguments) -> None:
    """Prints the forecast. Raises BadInput for an unsuitable ladder."""
    flags = arguments.flags
    if not flags.runs:
        raise BadInput("--runs must be given, such as --runs='runs/ladder/*' (quoted)")
    cfg = config_file.load_config(arguments.config, arguments.overrides)
    cfg, budget = target_budget(cfg, flags.tokens)
    ladder = read_ladder(find_runs(flags.runs), cfg, budget, flags.to)
    for folder, reason in ladder.left_out:
        put(f"excluded {folder}: {reason}")
    noise = ladder.noise if flags.noise is None else SeedNoise(flags.noise, math.inf)
    forecast = make_forecast(ladder, cfg, budget, dict(draws=flags.draws, seed=flags.seed, noise=noise))
    put(*forecast_lines(forecast))
    if flags.json:
        paths.write_json(flags.json, as_json(forecast))
        put(f"all numbers are written to {flags.json}")
    if flags.to:
        save(forecast, flags.to, cfg, budget)


def make_forecast(ladder: Ladder, cfg: RunConfig, budget: Budget, how: dict[str, Any]) -> Forecast:
    """Returns the forecast of a run's final loss and, if possible, of its curve. how: arguments of fit()."""
    law = fit(ladder.points, **how)
    params, tokens = cfg.model.num_params, budget.total_steps * budget.batch_tokens
    end = law.predict(params, tokens, how["seed"])
    band, reason = None, ""
    try:
        band = make_band(end, curve_shape(ladder.rungs, schedule_of(cfg, budget)), tokens)
    except BadInput as error:
        reason = str(error)
    tried = (coverage(ladder.rungs), forecast_largest(ladder, how)) if band else ({}, None)
    flops = cfg.flops_per_token * tokens
    curves = [rung.curve for rung in ladder.rungs]
    ways = three_approaches(ladder.points, curves, flops, description="those of the run to be forecast", law=law)
    return Forecast(ladder, law, params, tokens, flops, end, band, reason, *tried, how["noise"], ways)


def forecast_largest(ladder: Ladder, how: dict[str, Any]) -> tuple[str, float] | None:
    """Returns (largest run, fraction of its curve that a forecast from the other runs covers). None for too few runs.

    This validates the law, the interval and the curve shape, because all are fitted without the largest run.
    """
    *others, largest = ladder.rungs
    try:
        law = fit([point for rung in others for point in rung.points], **how)
        end = law.predict(largest.params, largest.tokens, how["seed"])
        band = make_band(end, curve_shape(others, largest.schedule), largest.tokens)
    except BadInput:
        return None
    covered = fraction_inside(band, largest)
    return None if covered is None else (largest.name, covered)


def forecast_lines(forecast: Forecast) -> list[str]:
    """Returns the forecast as text."""
    law, ladder, end = forecast.law, forecast.ladder, forecast.end
    lines = ["", "run                     parameters  tokens     FLOPs  nats/token    law"]
    lines += [rung_line(rung, law) for rung in ladder.rungs]
    lines += ["", law_line(law)]
    if law.terms.E < NO_FLOOR * min(point.loss for point in law.points):
        lines.append(
            "the fitted irreducible loss E is almost 0, so the law underestimates losses far beyond these runs"
        )
    if law.form == "tokens":
        lines.append("all runs have the same size, so the law does not include the dependence on parameters")
    if law.form == "params":
        lines.append(
            "parameters determine tokens in this ladder, so the forecast is valid only for runs with the same relation"
        )
    if law.left_out_error is None:
        lines.append("not checked: there are too few runs to forecast the largest run from the others")
    else:
        largest = max(law.points, key=lambda point: point.compute)
        name, predicted = paths.as_path(largest.run).name, largest.loss / math.exp(law.left_out_error)
        lines.append(
            f"check: fitted to the other runs, the law predicts {predicted:.4f} for the largest ({name}); measured "
            f"{largest.loss:.4f} ({largest.loss / predicted - 1:+.1%}). The interval is at least as wide as this error"
        )
    level = f"{INTERVAL[1] - INTERVAL[0]:.0%}"
    lines += ["", f"forecast for {units.count(forecast.params)} parameters, {units.count(forecast.tokens)} tokens:"]
    lines.append(f"  {end.middle:.4f} nats/token, {end.low:.4f} to {end.high:.4f} ({level} interval)")
    bits = ladder.bits_per_nat
    if bits is not None:
        lines.append(f"  {bits * end.middle:.4f} bits/byte, {bits * end.low:.4f} to {bits * end.high:.4f}")
    lines += [f"  {pull_line(forecast)}", f"  {noise_line(forecast)}"]
    times = law.reach(forecast.params, forecast.tokens, forecast.flops)
    lines.append(f"  {units.digits(times)} times the FLOPs of the ladder's largest run" + far(times))
    lines.append(band_line(forecast))
    return [*lines, "", "the compute-optimal size, by three approaches:", *(f"  {way.text}" for way in forecast.ways)]


def pull_line(forecast: Forecast) -> str:
    """Returns a line that reports how much the prior on the published exponents changes the forecast."""
    law, end = forecast.law, forecast.end
    free = law.without_pull.loss(forecast.params, forecast.tokens)
    names = [name for name in ("alpha", "beta") if getattr(law.terms, name)]
    moved = ", ".join(
        f"{name} {getattr(law.without_pull, name):.3g} instead of {getattr(law.terms, name):.3g}" for name in names
    )
    share = end.middle / free - 1
    text = (
        f"the prior on the exponents ({PULL_AT:g}) changes the forecast by {share:+.1%}: without it {free:.4f}, {moved}"
    )
    if end.low <= free <= end.high:
        return text
    return f"{text}; this is outside the interval, so the prior dominates the data; add runs with sizes further apart"


def noise_line(forecast: Forecast) -> str:
    """Returns a line that reports the noise level of one run and its source."""
    freedom, noise = forecast.law.freedom, forecast.noise
    left = f"Student's t interval with {freedom:.0f} degrees of freedom"
    if noise is None or noise.freedom != freedom:
        more = "" if noise is None else f", which exceed the noise of {noise.off:.2%}"
        return f"noise of one run: from the residuals of the fit{more}; {left}"
    if math.isinf(freedom):
        return f"noise of one run: {noise.off:.2%}, as given"
    return f"noise of one run: {noise.off:.2%}, measured over seeds; {left}"


def far(times: float) -> str:
    """Returns a warning if the run has more than FAR times the FLOPs of the ladder's largest run, or ''."""
    if times <= FAR:
        return ""
    return f", more than {FAR:g} times. The interval covers errors of the fit, but not of the form of the law"


def band_line(forecast: Forecast) -> str:
    """Returns a line that reports how well the band covers held-out runs."""
    if forecast.band is None:
        return f"no band for the loss curve: {forecast.no_band_reason}"
    covered = forecast.covered
    if not covered:
        return "the band for the loss curve could not be validated on held-out runs, because there are too few runs"
    part = sum(covered.values()) / len(covered)
    worst = min(covered, key=covered.__getitem__)
    text = (
        f"leave-one-out check: centered on a run's final loss, the band of the other runs covers {part:.0%} of its "
        f"curve on average (worst: {worst}, {covered[worst]:.0%})"
    )
    if forecast.largest:
        text += (
            f"; a forecast of {forecast.largest[0]} from the other runs covers {forecast.largest[1]:.0%} of its curve"
        )
    return text


def rung_line(rung: LadderRun, law: LossLaw) -> str:
    """Returns the table row of a ladder run."""
    predicted = law.terms.loss(rung.params, rung.tokens)
    return (
        f"{rung.name[:22]:22}  {units.count(rung.params):>10}  {units.count(rung.tokens):>6}  {rung.flops:8.2e}  "
        f"{rung.loss:10.4f}  {rung.loss / predicted - 1:+.2%}"
    )


def law_line(law: LossLaw) -> str:
    """Returns the fitted law and the intervals of its parameters."""
    terms, intervals = law.terms, law.to_dict()["intervals"]
    text = f"loss = {terms.E:.4g}"
    names = ["E"]
    if law.form != "tokens":
        text, names = f"{text} + {terms.A:.4g} / parameters^{terms.alpha:.4g}", [*names, "alpha"]
    if law.form != "params":
        text, names = f"{text} + {terms.B:.4g} / tokens^{terms.beta:.4g}", [*names, "beta"]
    ranges = ", ".join(f"{name} {intervals[name][0]:.3g} to {intervals[name][1]:.3g}" for name in names)
    return f"{text}    ({ranges})"


def save(forecast: Forecast, workdir: str, cfg: RunConfig, budget: Budget) -> None:
    """Writes forecast.json. Raises BadInput if the forecast has no band, or if the folder has a different run."""
    if forecast.band is None:
        raise BadInput(f"--to={workdir} requires a loss band, which is missing: {forecast.no_band_reason}")
    folder = paths.make_run_dir(workdir)
    if (folder / "config.json").exists():
        check_same_end(paths.read_json(folder / "config.json"), workdir, cfg, budget)
    numbers = as_json(forecast)
    write_forecast(
        folder,
        forecast.law,
        numbers["band"],
        made_from=[rung.name for rung in forecast.ladder.rungs],
        left_out=[paths.as_path(name).name for name, _ in forecast.ladder.left_out],
        made_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        of="loss",  # the training loss, averaged over the fraction `smoothed_over` of the run
        smoothed_over=SMOOTHED,
        end=numbers["nats_per_token"],
        end_bits_per_byte=numbers["bits_per_byte"],
        params=forecast.params,
        train_tokens=forecast.tokens,
        **{name: numbers[name] for name in ("reach", "coverage", "largest_inside")},
    )
    put(
        f"the band is written to {folder / 'forecast.json'}; the report plots it, and a loss outside it raises an alert"
    )


def check_same_end(recorded: Any, workdir: str, cfg: RunConfig, budget: Budget) -> None:
    """Raises BadInput if the folder's run differs from the forecast run in its model or number of steps."""
    model, steps = recorded.get("config", {}).get("model"), recorded.get("budget", {}).get("total_steps")
    settings = schema.to_dict(cfg.model)
    differ = sorted(name for name, value in settings.items() if not model or model.get(name, value) != value)
    if differ or steps != budget.total_steps:
        what = f"model.{differ[0]}" if differ else f"its length, {steps} steps instead of {budget.total_steps}"
        raise BadInput(
            f"--to={workdir} contains a run that differs from the config in {what}; use the config and --tokens "
            "of that run, or a different folder"
        )


def as_json(forecast: Forecast) -> dict[str, Any]:
    """Returns all numbers, for --json."""
    bits = forecast.ladder.bits_per_nat
    return {
        "params": forecast.params,
        "tokens": forecast.tokens,
        "flops": forecast.flops,
        "nats_per_token": forecast.end._asdict(),
        "bits_per_byte": {n: bits * v for n, v in forecast.end._asdict().items()} if bits is not None else None,
        "reach": forecast.law.reach(forecast.params, forecast.tokens, forecast.flops),
        "law": forecast.law.to_dict(),
        "noise": forecast.noise and {"off": forecast.noise.off, "measured": math.isfinite(forecast.noise.freedom)},
        "left_out": [{"run": folder, "why": reason} for folder, reason in forecast.ladder.left_out],
        "band": forecast.band._asdict() if forecast.band else None,
        "why_no_band": forecast.no_band_reason,
        "coverage": forecast.covered,
        "best_size": {way.name: size_json(way, forecast.flops) for way in forecast.ways},
        "largest_inside": dict([forecast.largest]) if forecast.largest else None,
    }


def size_json(way: Approach, flops: float) -> dict[str, Any]:
    """Returns the result of an approach to the compute-optimal size, for --json."""
    if way.law is None:
        return {"told": way.text}
    found = {"params": way.law.params(flops), "tokens": way.law.tokens(flops)}
    found |= {"params_exponent": way.law.params_exponent, "tokens_exponent": way.law.tokens_exponent}
    return {"told": way.text} | {name: value._asdict() for name, value in found.items()}
