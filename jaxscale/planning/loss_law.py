"""The loss at the end of a run as a law of its size: E + A/N^alpha + B/D^beta, fitted to small runs, with an interval.

N parameters, D tokens, L nats per token of held-out text. The fit is approach 3 of arXiv:2203.15556 (section 3.3 and
appendix D.3): least Huber loss of log L, delta 1e-3, from a grid of starts. arXiv:2404.10102 found what went wrong
there: the losses were averaged, which made the objective so small that the optimizer's tolerance stopped it early, and
exponents were rounded. So losses are summed here, in units of delta, a descent ends where a step would gain nothing,
and nothing is rounded but in print.

Few runs leave the exponents open: a weak pull holds them near what larger ladders found, and every draw of the
bootstrap has another pull, so that the interval shows what the ladder does not decide.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxscale.planning.loss_fit import PULL_AT, PULL_WIDTH, Form, Problem
from jaxscale.system import paths
from jaxscale.system.exits import BadInput
from jaxscale.units import count

INTERVAL = (0.05, 0.95)  # quantiles of low and high
LEAST_POINTS, LEAST_SIZES, LEAST_RUNS = 5, 2, 3
PULLS = (0.1, 1.0)  # the range that a draw's pull lies in
SAME = 0.02  # two numbers of parameters or tokens closer than this, relatively, are one


class Point(NamedTuple):
    """The end of a run. Several points of one run (where its schedule was constant) are drawn together."""

    params: float
    tokens: float
    loss: float  # nats per token
    run: str = ""
    flops: float | None = None  # of the run up to here; 6 N D where it is not told

    @property
    def compute(self) -> float:
        """Floating-point operations up to this point."""
        return 6 * self.params * self.tokens if self.flops is None else self.flops


class Terms(NamedTuple):
    """E, A, B, alpha, beta; 0 for those that a form does not have."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, params: float, tokens: float) -> float:
        """Nats per token."""
        in_params = self.A * params**-self.alpha if self.A else 0.0
        in_tokens = self.B * tokens**-self.beta if self.B else 0.0
        return self.E + in_params + in_tokens


class Prediction(NamedTuple):
    """Nats per token."""

    low: float
    middle: float
    high: float


@dataclasses.dataclass(frozen=True)
class LossLaw:
    """A fitted law."""

    points: tuple[Point, ...]
    form: Form
    terms: Terms
    draws: tuple[Terms, ...]  # of the bootstrap
    noise: tuple[float, ...]  # what a run of the ladder lies off the law, in log L, made as large as a new run's
    left_out_error: float | None  # log of (measured / forecast) of the run with most FLOPs, from the others
    line: tuple[float, float] | None  # form params: log D = line[0] + line[1] log N in the ladder

    def predict(self, params: float, tokens: float, seed: int = 0) -> Prediction:
        """(low, middle, high) of a run's end. Raises BadInput where the ladder says nothing about such a run."""
        self.check_reach(params, tokens)
        middle = self.terms.loss(params, tokens)
        drawn = np.log([terms.loss(params, tokens) for terms in self.draws])
        noise = np.random.default_rng(seed).choice(np.asarray(self.noise), (16, len(drawn)))
        low, high = np.exp(np.quantile(drawn + noise, INTERVAL))
        # A law that missed the ladder's own largest run by so much is not known better further out.
        missed = abs(self.left_out_error or 0.0)
        return Prediction(
            min(float(low), middle * math.exp(-missed)), middle, max(float(high), middle * math.exp(missed))
        )

    def check_reach(self, params: float, tokens: float) -> None:
        """Raises BadInput if the law has no term for what this run has another of than the ladder."""
        first = self.points[0]
        if self.form == "tokens" and abs(math.log(params / first.params)) > SAME:
            raise BadInput(
                f"the ladder has one size, {count(first.params)} parameters, and cannot tell the loss of "
                f"{count(params)}; add runs of another size"
            )
        if self.form == "params":
            usual = math.exp(self.line[0] + self.line[1] * math.log(params))
            if abs(math.log(tokens / usual)) > math.log(1.25):
                raise BadInput(
                    f"in the ladder the tokens follow from the size, and at {count(params)} parameters are "
                    f"{count(usual)}; it cannot tell the loss at {count(tokens)}: add runs of one size and other tokens"
                )

    def reach(self, params: float, tokens: float, flops: float | None = None) -> float:
        """How many times the FLOPs of the ladder's largest run this one has."""
        return Point(params, tokens, 1.0, flops=flops).compute / max(point.compute for point in self.points)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        low_high = {
            name: [float(value) for value in np.quantile([getattr(draw, name) for draw in self.draws], INTERVAL)]
            for name in Terms._fields
        }
        return {
            "form": self.form,
            **self.terms._asdict(),
            "interval": list(INTERVAL),
            "intervals": low_high,
            "draws": len(self.draws),
            "left_out_error": self.left_out_error,
            "points": [point._asdict() for point in self.points],
        }


def fit(points: Sequence[Point], *, draws: int = 400, seed: int = 0) -> LossLaw:
    """The law of the points, the same for the same points and seed; 400 draws of 9 runs take about 1 s.

    Raises BadInput, in one line that says what is missing, for a ladder that fixes no law.
    """
    points = tuple(points)
    form, line = choose_form(points)
    problem = Problem.of(points, form)
    theta = problem.best()
    # Weights of the Bayesian bootstrap (Rubin 1981): unlike drawing whole runs, no draw lacks a size altogether.
    rng, names = np.random.default_rng(seed), list(dict.fromkeys(run_of(points)))
    weights = rng.exponential(size=(draws, len(names)))
    weights /= weights.mean(axis=1, keepdims=True)
    pulls = np.clip(rng.normal(PULL_AT, PULL_WIDTH, (draws, problem.powers)), *PULLS)
    thetas = problem.best_each(theta, weights[:, [names.index(name) for name in run_of(points)]], pulls)
    off = problem.off(theta) * math.sqrt(len(points) / max(1, len(points) - len(theta)))
    return LossLaw(
        points=points,
        form=form,
        terms=Terms(*problem.terms(theta)),
        draws=tuple(Terms(*problem.terms(drawn)) for drawn in thetas),
        noise=tuple(float(value) for value in np.concatenate([off, -off])),
        left_out_error=left_out_error(points, form),
        line=line,
    )


def run_of(points: Sequence[Point]) -> list[str]:
    """The run of each point; a point without one is a run of its own."""
    return [point.run or f"point {place}" for place, point in enumerate(points)]


def choose_form(points: Sequence[Point]) -> tuple[Form, tuple[float, float] | None]:
    """(which terms the points can tell, how tokens follow from parameters where they do). Raises as fit() does."""
    if bad := [point for point in points if not (point.loss > 0 and math.isfinite(point.loss))]:
        raise BadInput(f"the loss of {bad[0].run or 'a run'} is {bad[0].loss}; leave it out")
    if len(points) < LEAST_POINTS:
        raise BadInput(
            f"a law needs {LEAST_POINTS} finished runs or more, and the ladder has {len(points)}; "
            "three sizes with three amounts of tokens each are a good start"
        )
    if (runs := len(set(run_of(points)))) < LEAST_RUNS:
        raise BadInput(f"the points are of {runs} runs, and an interval needs {LEAST_RUNS}: points of one run agree")
    sizes, amounts = distinct([p.params for p in points]), distinct([p.tokens for p in points])
    if sizes < LEAST_SIZES and amounts < 3:
        raise BadInput(
            f"the ladder has {sizes} size and {amounts} amount{'s' * (amounts > 1)} of tokens; a law in both needs 2 "
            "sizes or more, one in tokens alone 3 amounts"
        )
    if sizes < LEAST_SIZES:
        return "tokens", None
    log_params, log_tokens = np.log([p.params for p in points]), np.log([p.tokens for p in points])
    slope, start = np.polyfit(log_params, log_tokens, 1)
    if np.abs(log_tokens - start - slope * log_params).max() < 0.1:  # one variable in two dresses
        if sizes < 3:
            raise BadInput(
                f"the ladder has {sizes} sizes, each with one amount of tokens; a law needs 3 sizes, or a second amount"
            )
        return "params", (float(start), float(slope))
    return "both", None


def distinct(values: Sequence[float]) -> int:
    """How many differ by more than SAME."""
    logs = np.sort(np.log(values))
    return 1 + int((np.diff(logs) > SAME).sum())


def left_out_error(points: Sequence[Point], form: Form) -> float | None:
    """log(measured / forecast) of the run with the most FLOPs, from all others; None if too few remain."""
    largest = max(points, key=lambda point: point.compute)
    name = largest.run or None
    rest = [point for point in points if point is not largest and (name is None or point.run != name)]
    try:  # twice the rest: one run fewer than a law needs will do for a trial, if it has the same form
        if len(rest) < LEAST_POINTS - 1 or choose_form([*rest, *rest])[0] != form:
            return None
    except BadInput:
        return None
    problem = Problem.of(rest, form)
    law = Terms(*problem.terms(problem.best()))
    return math.log(largest.loss / law.loss(largest.params, largest.tokens))


def write_forecast(path: Any, law: LossLaw, band: Mapping[str, Sequence[float]], **facts: Any) -> None:
    """Writes forecast.json of a work folder, whole or not at all.

    Args: path: the folder. band: tokens, low, middle, high, of equal length, for the smoothed training loss. facts:
    what else a reader may want, such as made_from, as JSON has it.
    Numbers that are not finite are the caller's defect (ValueError), and nothing is written.
    """
    assert set(band) == {"tokens", "low", "middle", "high"} and len(set(map(len, band.values()))) == 1, sorted(band)
    paths.write_json(paths.as_path(path) / "forecast.json", {**band, **facts, "law": law.to_dict()})
