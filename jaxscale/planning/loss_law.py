"""The loss at the end of a run as a law of its size: E + A/N^alpha + B/D^beta, fitted to small runs, with an interval.

N parameters, D tokens, L nats per token of held-out text. The fit is approach 3 of arXiv:2203.15556 (section 3.3 and
appendix D.3): least Huber loss of log L, delta 1e-3, from a grid of starts. arXiv:2404.10102 found what went wrong
there: the losses were averaged, which made the objective so small that the optimizer's tolerance stopped it early, and
exponents were rounded. So losses are summed here, in units of delta, a descent ends where a step would gain nothing,
and nothing is rounded but in print.

Few runs leave the exponents open: a weak pull holds them near what larger ladders found, and every draw of the
bootstrap has another pull, so that the interval shows what the ladder does not decide. Few runs also lie near any law
of five numbers, whatever their noise: how far they are off tells too little of it, so the interval is widened as
Student's is for what they leave over, and fewer than LEAST_RUNS need the noise told.
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
LEAST_RUNS, LEAST_TOLD, LEAST_SIZES = 7, 5, 2  # LEAST_TOLD: runs that are enough where the noise is told
FREE = 1.5  # width of a pull that hardly pulls: ten times that of the fit, as wide as all that exponents may be
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


class Noise(NamedTuple):
    """What one run differs from the next by that has another seed and nothing else."""

    off: float  # standard deviation of log L
    freedom: float  # degrees of freedom that it was measured with; infinite where it was given


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
    without_pull: Terms  # the same, the exponents not held
    draws: tuple[Terms, ...]  # of the bootstrap
    noise: tuple[float, ...]  # what a run of the ladder lies off the law, in log L, made as large as a new run's
    freedom: (
        float  # degrees of freedom behind this noise: runs left over by the numbers of the law, or those of a Noise
    )
    left_out_error: float | None  # log of (measured / forecast) of the run with most FLOPs, from the others
    line: tuple[float, float] | None  # form params: log D = line[0] + line[1] log N in the ladder

    def predict(self, params: float, tokens: float, seed: int = 0) -> Prediction:
        """(low, middle, high) of a run's end. Raises BadInput where the ladder says nothing about such a run."""
        self.check_reach(params, tokens)
        middle = self.terms.loss(params, tokens)
        drawn = np.log([terms.loss(params, tokens) for terms in self.draws]) - math.log(middle)
        rng = np.random.default_rng(seed)
        off = drawn + rng.choice(np.asarray(self.noise), (16, len(drawn)))
        if math.isfinite(self.freedom):  # the noise itself is known so well and no better: Student's interval
            off = off * np.sqrt(self.freedom / rng.chisquare(self.freedom, off.shape))
        low, high = middle * np.exp(np.quantile(off, INTERVAL))
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
            assert self.line is not None, "a law of this form has it"
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
            "without_pull": self.without_pull._asdict(),
            "left_out_error": self.left_out_error,
            "points": [point._asdict() for point in self.points],
        }


def fit(points: Sequence[Point], *, draws: int = 400, seed: int = 0, noise: Noise | None = None) -> LossLaw:
    """The law of the points, the same for the same points and seed; 400 draws of 9 runs take about 1 s.

    noise: of a run, where it is known; at least that much is in the interval. Raises BadInput, in one line that says
    what is missing, for a ladder that fixes no law.
    """
    points = tuple(points)
    check_enough(points, noise)
    form, line = choose_form(points)
    problem = Problem.of(points, form)
    theta = problem.best()
    # Weights of the Bayesian bootstrap (Rubin 1981): unlike drawing whole runs, no draw lacks a size altogether.
    rng, names = np.random.default_rng(seed), list(dict.fromkeys(run_of(points)))
    places = [names.index(name) for name in run_of(points)]
    weights, moved = rng.exponential(size=(draws, len(names))), np.zeros((draws, len(names)))
    weights /= weights.mean(axis=1, keepdims=True)
    pulls = np.clip(rng.normal(PULL_AT, PULL_WIDTH, (draws, problem.powers)), *PULLS)
    off = problem.off(theta) * math.sqrt(len(points) / max(1, len(points) - len(theta)))
    freedom = float(max(1, len(names) - len(theta)))
    if noise is not None and (len(names) <= len(theta) or noise.off > math.sqrt(np.mean(off**2))):
        weights, moved = np.ones_like(weights), rng.normal(0, noise.off, moved.shape)
        off, freedom = rng.normal(0, noise.off, 1000), noise.freedom
    thetas = problem.best_each(theta, weights[:, places], pulls, moved[:, places])
    free = problem._replace(width=FREE).best_each(
        theta, np.ones((1, len(points))), np.full((1, problem.powers), PULL_AT)
    )
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


def run_of(points: Sequence[Point]) -> list[str]:
    """The run of each point; a point without one is a run of its own."""
    return [point.run or f"point {place}" for place, point in enumerate(points)]


def check_enough(points: Sequence[Point], noise: Noise | None) -> None:
    """Raises BadInput where the runs are too few for an interval that holds what it says, or a loss is none."""
    if bad := [point for point in points if not (point.loss > 0 and math.isfinite(point.loss))]:
        raise BadInput(f"the loss of {bad[0].run or 'a run'} is {bad[0].loss}; leave it out")
    runs = len(set(run_of(points)))
    if runs < (LEAST_RUNS if noise is None else LEAST_TOLD):
        raise BadInput(
            f"a law needs {LEAST_RUNS} finished runs or more, and the ladder has {runs}: so few lie near any law, and "
            "their interval would hold far less than it says; three sizes with three amounts of tokens each are a good "
            f"start. {LEAST_TOLD} are enough where it is known by how much runs differ that differ in seed alone: give "
            "--noise=0.005 (half a percent), or repeat some with other seeds"
        )


def choose_form(points: Sequence[Point]) -> tuple[Form, tuple[float, float] | None]:
    """(which terms the points can tell, how tokens follow from parameters where they do). Raises as fit() does."""
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
    try:  # one run fewer than a law needs will do for a trial, if it has the same form
        if len(rest) < LEAST_TOLD - 1 or choose_form(rest)[0] != form:
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
