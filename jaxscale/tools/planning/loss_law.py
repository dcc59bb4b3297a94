"""Fit of the loss law L = E + A/N^alpha + B/D^beta to small runs, with prediction intervals.

N is parameters, D tokens and L nats per token of held-out text. The fit is approach 3 of arXiv:2203.15556 (section 3.3
and appendix D.3), which minimises the Huber loss of log L with delta 1e-3 from a grid of starts. arXiv:2404.10102 found
two errors in the original: averaged losses made the objective so small that the optimizer stopped early, and the
exponents were rounded. Here losses are summed in units of delta, a descent ends when a step would no longer reduce the
loss, and only printed numbers are rounded.

Few runs do not determine the exponents. A weak prior pulls them towards published exponents, and each bootstrap draw
has a different prior mean, so the interval includes this uncertainty. A law of five parameters fits any few runs
closely, so the residuals underestimate the noise. The interval is therefore widened by Student's factor, and fewer than
MIN_RUNS runs need the noise as an input.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.loss_fit import PULL_AT, PULL_WIDTH, Form, Problem
from jaxscale.tools.planning.scaling import Terms
from jaxscale.units import count

INTERVAL = (0.05, 0.95)  # quantiles of the lower and upper bounds
MIN_RUNS, MIN_RUNS_WITH_NOISE, MIN_SIZES = 7, 5, 2
FREE = 1.5  # width of a nearly flat prior, ten times PULL_WIDTH
PULLS = (0.1, 1.0)  # bounds of the prior mean in a draw
SAME = 0.02  # relative difference below which two sizes count as one


class Point(NamedTuple):
    """Size and final loss of a run. Points with the same `run` are resampled together."""

    params: float
    tokens: float
    loss: float  # nats per token
    run: str = ""
    flops: float | None = None  # FLOPs of the run up to this point; None means 6 N D

    @property
    def compute(self) -> float:
        """FLOPs of the run up to this point."""
        return 6 * self.params * self.tokens if self.flops is None else self.flops


class SeedNoise(NamedTuple):
    """Noise of the loss between runs that differ only in the seed."""

    off: float  # standard deviation of log L
    freedom: float  # degrees of freedom of the measurement; infinite if set by the user


class Interval(NamedTuple):
    """A value with its 90% interval."""

    low: float
    middle: float
    high: float


@dataclasses.dataclass(frozen=True)
class LossLaw:
    """A fitted law."""

    points: tuple[Point, ...]
    form: Form
    terms: Terms
    without_pull: Terms  # the fit with a nearly flat prior on the exponents
    draws: tuple[Terms, ...]  # bootstrap draws
    noise: tuple[float, ...]  # residuals in log L, scaled to the noise of a new run
    freedom: float  # degrees of freedom of `noise`: runs minus parameters of the law, or SeedNoise.freedom
    left_out_error: float | None  # log of (measured / forecast) for the run with most FLOPs, from the other runs
    line: tuple[float, float] | None  # for form 'params': log D = line[0] + line[1] log N in the ladder

    def predict(self, params: float, tokens: float, seed: int = 0) -> Interval:
        """Returns a run's final loss with its 90% interval. Raises BadInput if the runs do not determine it."""
        self.check_reach(params, tokens)
        middle = self.terms.loss(params, tokens)
        drawn = np.log([terms.loss(params, tokens) for terms in self.draws]) - math.log(middle)
        rng = np.random.default_rng(seed)
        off = drawn + rng.choice(np.asarray(self.noise), (16, len(drawn)))
        if math.isfinite(self.freedom):  # Student's interval for an estimated noise
            off = off * np.sqrt(self.freedom / rng.chisquare(self.freedom, off.shape))
        low, high = middle * np.exp(np.quantile(off, INTERVAL))
        # The interval is at least as wide as the forecast error for the largest run of the ladder.
        missed = abs(self.left_out_error or 0.0)
        low, high = min(float(low), middle * math.exp(-missed)), max(float(high), middle * math.exp(missed))
        return Interval(low, middle, high)

    def check_reach(self, params: float, tokens: float) -> None:
        """Raises BadInput if the forecast needs a term that the law lacks."""
        first = self.points[0]
        if self.form == "tokens" and abs(math.log(params / first.params)) > SAME:
            raise BadInput(
                f"all runs of the ladder have {count(first.params)} parameters, so the loss at "
                f"{count(params)} parameters is unknown; add runs of other sizes"
            )
        if self.form == "params":
            assert self.line is not None, "set for this form"
            expected = math.exp(self.line[0] + self.line[1] * math.log(params))
            if abs(math.log(tokens / expected)) > math.log(1.25):
                raise BadInput(
                    f"each size has only one token count ({count(expected)} tokens at {count(params)} parameters), "
                    f"so the loss at {count(tokens)} tokens is unknown; add runs with other token counts"
                )

    def reach(self, params: float, tokens: float, flops: float | None = None) -> float:
        """Returns a run's FLOPs, relative to the largest run in the ladder."""
        return Point(params, tokens, 1.0, flops=flops).compute / max(point.compute for point in self.points)

    def to_dict(self) -> dict[str, Any]:
        """Returns the law as JSON data."""
        low_high = dict(zip(Terms._fields, np.quantile(np.array(self.draws), INTERVAL, axis=0).T.tolist()))
        return {
            "form": self.form,
            **self.terms._asdict(),
            "interval": list(INTERVAL),
            "intervals": low_high,
            "draws": len(self.draws),
            "without_pull": self.without_pull._asdict(),
            "left_out_error": self.left_out_error,
            "points": [point._asdict() for point in self.points],
        }


def fit(points: Sequence[Point], *, draws: int = 400, seed: int = 0, noise: SeedNoise | None = None) -> LossLaw:
    """Fits the loss law to the points. Deterministic for the same seed; 400 draws of 9 runs take about 1 s.

    noise: noise between seeds, if known. If the points determine no law, raises BadInput and names the missing runs.
    """
    points = tuple(points)
    check_enough(points, noise)
    form, line = choose_form(points)
    problem = Problem.of(points, form)
    theta = problem.best()
    # In the Bayesian bootstrap (Rubin 1981), unlike in resampling, every draw includes all sizes.
    rng, names = np.random.default_rng(seed), list(dict.fromkeys(run_names(points)))
    places = [names.index(name) for name in run_names(points)]
    weights, moved = rng.exponential(size=(draws, len(names))), np.zeros((draws, len(names)))
    weights /= weights.mean(axis=1, keepdims=True)
    pulls = np.clip(rng.normal(PULL_AT, PULL_WIDTH, (draws, problem.powers)), *PULLS)
    off = problem.residuals(theta) * math.sqrt(len(points) / max(1, len(points) - len(theta)))
    freedom = float(max(1, len(names) - len(theta)))
    if noise is not None and (len(names) <= len(theta) or noise.off > math.sqrt(np.mean(off**2))):
        weights, moved = np.ones_like(weights), rng.normal(0, noise.off, moved.shape)
        off, freedom = rng.normal(0, noise.off, 1000), noise.freedom
    thetas = problem.best_each(theta, weights[:, places], pulls, moved[:, places])
    flat_prior, equal = problem._replace(width=FREE), np.ones((1, len(points)))
    free = flat_prior.best_each(theta, equal, np.full((1, problem.powers), PULL_AT))
    return LossLaw(
        points=points,
        form=form,
        terms=Terms(*problem.terms(theta)),
        without_pull=Terms(*problem.terms(free[0])),
        draws=tuple(Terms(*problem.terms(drawn)) for drawn in thetas),
        noise=tuple(float(value) for value in np.concatenate([off, -off])),
        freedom=freedom,
        left_out_error=left_out_error(points, form),
        line=line,
    )


def run_names(points: Sequence[Point]) -> list[str]:
    """Returns the run name of each point, or a unique name if the point has none."""
    return [point.run or f"point {place}" for place, point in enumerate(points)]


def check_enough(points: Sequence[Point], noise: SeedNoise | None) -> None:
    """Raises BadInput if there are too few runs for a valid interval, or if a loss is invalid."""
    if bad := [point for point in points if not (point.loss > 0 and math.isfinite(point.loss))]:
        raise BadInput(f"the loss of {bad[0].run or 'a run'} is {bad[0].loss}, not a positive number; exclude the run")
    runs = len(set(run_names(points)))
    if runs < (MIN_RUNS if noise is None else MIN_RUNS_WITH_NOISE):
        raise BadInput(
            f"a loss law needs at least {MIN_RUNS} finished runs, but the ladder has {runs}. Use, for example, three "
            f"sizes with three token counts each. If the noise between seeds is known, {MIN_RUNS_WITH_NOISE} runs are "
            "enough: pass --noise=0.005 (0.5%), or repeat some runs with other seeds"
        )


def choose_form(points: Sequence[Point]) -> tuple[Form, tuple[float, float] | None]:
    """Returns (form of the law, LossLaw.line). Raises BadInput if the points determine no law."""
    sizes, amounts = distinct([p.params for p in points]), distinct([p.tokens for p in points])
    if sizes < MIN_SIZES and amounts < 3:
        raise BadInput(
            f"the ladder has {sizes} size and {amounts} token count{'s' * (amounts > 1)}; use at least 2 sizes, "
            "or for a law in tokens alone, at least 3 token counts"
        )
    if sizes < MIN_SIZES:
        return "tokens", None
    log_params, log_tokens = np.log([p.params for p in points]), np.log([p.tokens for p in points])
    slope, start = np.polyfit(log_params, log_tokens, 1)
    if np.abs(log_tokens - start - slope * log_params).max() < 0.1:  # tokens are a function of parameters
        if sizes < 3:
            raise BadInput(
                f"the ladder has {sizes} sizes with one token count each; use at least 3 sizes, or more token counts"
            )
        return "params", (float(start), float(slope))
    return "both", None


def distinct(values: Sequence[float]) -> int:
    """Returns the number of values whose relative difference exceeds SAME."""
    logs = np.sort(np.log(values))
    return 1 + int((np.diff(logs) > SAME).sum())


def left_out_error(points: Sequence[Point], form: Form) -> float | None:
    """Returns log(measured / forecast by other runs) for the run with the most FLOPs, or None for too few runs."""
    largest = max(points, key=lambda point: point.compute)
    name = largest.run or None
    others = [point for point in points if point is not largest and (name is None or point.run != name)]
    try:  # here one run fewer than in fit() is enough, if the form is the same
        if len(others) < MIN_RUNS_WITH_NOISE - 1 or choose_form(others)[0] != form:
            return None
    except BadInput:
        return None
    problem = Problem.of(others, form)
    law = Terms(*problem.terms(problem.best()))
    return math.log(largest.loss / law.loss(largest.params, largest.tokens))


def write_forecast(path: Any, law: LossLaw, band: Mapping[str, Sequence[float]], **facts: Any) -> None:
    """Writes forecast.json. Raises ValueError for NaN.

    band: tokens, and the low, middle and high smoothed training loss at these tokens. facts: other values to write.
    """
    assert set(band) == {"tokens", "low", "middle", "high"} and len(set(map(len, band.values()))) == 1, sorted(band)
    paths.write_json(paths.as_path(path) / "forecast.json", {**band, **facts, "law": law.to_dict()})
