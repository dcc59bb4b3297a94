"""Health rules: base class, shared state, inputs and results, and robust statistics (median, MAD) of short windows."""

import abc
import collections
import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxscale import units
from jaxscale.core.config import SIGMA_PER_MAD, robust_sigma
from jaxscale.runtime.monitor.config import HealthConfig
from jaxscale.system.exits import BadInput

if TYPE_CHECKING:
    from jaxscale.runtime.monitor.health.evidence import EvidenceFn

NOISE_EVERY = 8  # values between two estimates of the noise of the whole window, which are expensive
HARMLESS = ("busy_machine",)  # rules about causes outside the run
SMOOTH = 10  # records in a smoothed loss
REJECT_SIGMAS = 5.0  # values further above the baseline are not added to it
REJECT_RATIO = 1.03
NEW_LEVEL = 12  # consecutive rejected records become the new baseline
SHORT_WAIT = 1.0  # seconds that a save waited for the previous save


def absolute_deviation(values: Sequence[float], centre: float) -> float:
    """Returns the median absolute deviation from the centre."""
    return median([abs(value - centre) for value in values])


class BaselineComparison(NamedTuple):
    """A value compared with the values before it."""

    centre: float
    ratio: float  # value / centre
    sigmas: float  # standard deviations above the centre


def loss_limit(ratio: float, centre: float) -> float:
    """Returns `ratio` times a loss. Adds (ratio - 1) nats to a loss below 1 nat, which may double by chance."""
    return centre + (ratio - 1) * max(centre, 1.0)


def format_ratio(ratio: float, decimals: int) -> str:
    """Returns '2.67', or 'many' for an infinite ratio."""
    return f"{ratio:.{decimals}f}" if math.isfinite(ratio) else "many"


class Baseline:
    """Recent values of a metric, for comparison with the next value. Callers do not add outliers such as spikes."""

    near, enough = 15, 10  # number of values for the centre; minimum for a comparison

    def __init__(self) -> None:
        self.values: collections.deque[float] = collections.deque(maxlen=50)  # window for the noise
        self.cached: tuple[float, float] | None = None  # centre and sigma, until a value is added
        self.noise, self.added = 0.0, 0  # noise from neighbour differences; values since the last reset

    def add(self, value: float) -> None:
        """Adds a value."""
        self.values.append(value)
        self.cached, self.added = None, self.added + 1

    def reset(self, values: Sequence[float]) -> None:
        """Replaces all values."""
        self.values.clear()
        self.values.extend(values)
        self.cached, self.added = None, 0

    def center_and_noise(self) -> tuple[float, float] | None:
        """Returns (centre, standard deviation of the noise), or None if there are too few values.

        The noise is the larger of two estimates: from deviations from the centre, and from differences between
        neighbours. A trend increases only the first estimate.
        """
        if len(self.values) < self.enough:
            return None
        if self.cached is None:
            values = list(self.values)
            near = values[-self.near :]
            centre = median(near)
            if self.added % NOISE_EVERY == 0 or len(values) < 2 * NOISE_EVERY:
                steps = [abs(after - before) for before, after in zip(values, values[1:])]
                self.noise = SIGMA_PER_MAD * median(steps) / math.sqrt(2)
            self.cached = centre, max(robust_sigma(centre, absolute_deviation(near, centre)), self.noise)
        return self.cached

    def compare(self, value: float) -> BaselineComparison | None:
        """Compares a value with the baseline. Returns None if the baseline has too few values."""
        if (usual := self.center_and_noise()) is None:
            return None
        centre, sigma = usual
        ratio = value / centre if centre > 0 else math.inf
        return BaselineComparison(centre, ratio, (value - centre) / sigma if sigma else math.inf)


class Slope(NamedTuple):
    """A least-squares line."""

    per_x: float
    error: float  # standard error of the slope, increased for correlated neighbours
    level: float  # the mean of y


def slope(xs: Sequence[float], ys: Sequence[float]) -> Slope:
    """Fits a least-squares line. For AR(1) residuals of correlation r, n points count as n (1 - r) / (1 + r)."""
    n = len(xs)
    mean_x, mean_y = sum(xs) / n, sum(ys) / n
    sum_xx = sum((x - mean_x) ** 2 for x in xs)
    per_x = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / sum_xx
    residuals = [y - mean_y - per_x * (x - mean_x) for x, y in zip(xs, ys)]
    variance = sum(r * r for r in residuals)
    correlation = sum(a * b for a, b in zip(residuals, residuals[1:])) / variance if variance else 0.0
    inflation = (1 + max(correlation, 0.0)) / (1 - min(max(correlation, 0.0), 0.9))
    return Slope(per_x, math.sqrt(variance / (n - 2) / sum_xx * inflation), mean_y)


class BlockMeans:
    """Means of a metric over equal blocks of records. Merges neighbouring blocks if there are more than `most`."""

    def __init__(self, most: int = 128):
        self.most, self.records = most, 1  # records per block
        self.done: list[tuple[float, float]] = []  # mean step, mean value
        self.open: list[tuple[float, float]] = []

    def add(self, step: float, value: float) -> bool:
        """Adds a value; returns True if it completed a block."""
        self.open.append((step, value))
        if len(self.open) < self.records:
            return False
        self.done.append(mean_of(self.open))
        self.open = []
        if len(self.done) > self.most:
            pairs = zip(self.done[0::2], self.done[1::2])
            left = self.done[-1:] if len(self.done) % 2 else []
            self.done = [mean_of(pair) for pair in pairs]
            self.records *= 2
            self.open = left * (self.records // 2)  # an odd block becomes half of the next
        return True


def mean_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns (mean x, mean y)."""
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def is_harmless(event: Mapping[str, Any]) -> bool:
    """Returns True if an alarm or alert has ended, was a short wait, or has a cause outside the run."""
    waited = event.get("waited")
    short = event.get("event") == "alarm" and isinstance(waited, float) and waited < SHORT_WAIT
    return bool(event.get("over")) or short or event.get("event") == "alert" and event.get("what") in HARMLESS


class Cause(NamedTuple):
    """A possible cause of a finding."""

    what: str
    evidence: str  # for or against the cause


class Finding(NamedTuple):
    """A problem, reported when it begins and when it ends."""

    kind: str  # the rule's name
    step: int
    seen: str  # observation, with numbers
    numbers: dict[str, Any]  # the numbers of `seen` as JSON values
    causes: tuple[Cause, ...]  # most likely first; empty at the end of the problem
    advice: tuple[str, ...]
    sources: tuple[str, ...]  # sources of the thresholds
    over: bool = False
    documents: tuple[str, ...] = ()  # documents with the most tokens in batch numbers["batch"]


class RuleResult(NamedTuple):
    """Result of one rule for one record."""

    bad: bool
    seen: str = ""
    numbers: dict[str, Any] = {}  # never mutated
    sure: bool = False  # this record alone begins (bad) or ends (good) a finding
    patience: float | None = None  # steps that bad records must span before they count


HEALTHY = RuleResult(False)


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Facts about a run that do not come from its metrics. Any of them may be unknown."""

    workdir: str = "RUN"  # shown in commands
    total_steps: int | None = None
    warmup_steps: int = 0
    decay: str | None = None
    clip_norm: float = 0.0
    compute_dtype: str | None = None
    vocab_size: int | None = None
    branched: bool = False  # initialized with another run's weights
    stage_batches: tuple[int, ...] = ()  # first batch of each mixture stage after the first
    grows_at: tuple[int, ...] = ()  # batches at which the batch size or sequence length increases
    forecast: tuple[tuple[float, float, float], ...] = ()  # (tokens, low, high), by tokens
    on_cpu: bool = False  # steps run on processors shared with other programs
    experts: int = 0  # per mixture layer
    chosen: int = 0  # experts per token
    balanced_by: tuple[str, ...] = ()  # "bias" and balance losses
    bias_rate: float = 0.0  # 0 without a router bias


def facts_from_config(
    config: Mapping[str, Any], workdir: str = "RUN", forecast: Mapping[str, Any] | None = None
) -> RunFacts:
    """Returns the facts in a run's config.json and forecast.json. Raises BadInput for a malformed forecast."""
    settings, budget = config.get("config", {}), config.get("budget", {})
    optim, model = settings.get("optim", {}), settings.get("model", {})
    experts = model.get("experts") or {}
    bias_rate = (experts.get("bias") and not settings.get("lora", {}).get("rank") and experts.get("bias_rate")) or 0.0
    losses = [name for name in settings.get("train", {}).get("aux_losses") or {} if name.endswith("balance_loss")]
    return RunFacts(
        workdir=workdir,
        total_steps=budget.get("total_steps"),
        warmup_steps=budget.get("warmup_steps") or 0,
        decay=optim.get("decay"),
        clip_norm=optim.get("clip_norm") or 0.0,
        compute_dtype=model.get("compute_dtype"),
        vocab_size=model.get("vocab_size"),
        on_cpu=config.get("devices", {}).get("kind") == "cpu",
        experts=experts.get("number") or 0,
        chosen=experts.get("chosen") or 0,
        balanced_by=(*(("bias",) if bias_rate else ()), *losses) if experts else (),
        bias_rate=bias_rate,
        branched=bool(settings.get("init", {}).get("from_path")),
        stage_batches=stage_batches(settings, budget),
        grows_at=tuple(int(first) for name in ("ramp", "seq_len_ramp") for first, _ in (budget.get(name) or ())[1:]),
        forecast=parse_forecast(forecast) if forecast else (),
    )


def stage_batches(settings: Mapping[str, Any], budget: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the first batch of each later stage of data.mixture, without stages that start at an epoch."""
    mixture, batch_tokens = settings.get("data", {}).get("mixture") or {}, budget.get("batch_tokens")
    if not batch_tokens or not all(isinstance(weights, Mapping) for weights in mixture.values()):
        return ()
    starts, batches = set(), units.recorded_sizes(budget)
    known = dict(seq_len=settings.get("seq_len", 1), batch_tokens=batch_tokens)
    for start in mixture:
        with contextlib.suppress(BadInput):  # a stage that starts at an epoch
            whole = batches.begin(budget.get("total_steps", 0))
            starts.add(batches.holding(units.resolve("start", start, **known, train_tokens=whole)))
    return tuple(sorted(batch for batch in starts if batch > 0))


def parse_forecast(forecast: Mapping[str, Any]) -> tuple[tuple[float, float, float], ...]:
    """Returns sorted (tokens, low, high) tuples from {"tokens": [...], "low": [...], "high": [...]}."""
    try:
        columns = [[float(number) for number in forecast[name]] for name in ("tokens", "low", "high")]
        return tuple(sorted(zip(*columns, strict=True)))
    except (KeyError, TypeError, ValueError):
        raise BadInput("forecast.json must have three equally long lists of numbers: tokens, low and high") from None


class View(NamedTuple):
    """A record, and the shared state of the records before it."""

    record: Mapping[str, Any]
    step: int
    cfg: HealthConfig
    facts: RunFacts
    losses: "Losses"
    active: frozenset[str]  # rules with an open finding

    def number(self, name: str) -> float | None:
        """Returns the number with this name in the record, or None if the record does not have it."""
        value = self.record.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def not_finite(self, name: str) -> bool:
        """Returns True if the record lists this name as non-finite."""
        return name in self.record.get("nonfinite", ())


class Losses:
    """Training losses so far: a baseline without spikes, and a smoothed loss."""

    def __init__(self) -> None:
        self.baseline = Baseline()
        self.compared: BaselineComparison | None = None  # the last loss, compared with the baseline before it
        self.rejected: list[float] = []  # consecutive rejected losses
        self.new_level = False  # the last record reset the baseline
        self.recent: collections.deque[float] = collections.deque(maxlen=SMOOTH)
        self.smoothed: float | None = None
        self.records = 0  # records with a loss

    def add(self, loss: float) -> None:
        """Adds the loss of a record."""
        self.records += 1
        self.recent.append(loss)
        self.smoothed = median(self.recent) if len(self.recent) == SMOOTH else None
        self.compared, self.new_level = self.baseline.compare(loss), False
        if self.compared and self.compared.sigmas > REJECT_SIGMAS and self.compared.ratio > REJECT_RATIO:
            self.rejected.append(loss)
            if len(self.rejected) >= NEW_LEVEL:
                self.baseline.reset(self.rejected)
                self.rejected, self.new_level = [], True
            return
        self.rejected = []
        self.baseline.add(loss)


class Rule(abc.ABC):
    """A check of each record. `begin` consecutive bad records open a finding, and `end` good records close it.

    Records for which `check` returns None are ignored. After each finding, the next one needs twice as many good
    records to close, up to 16 times `end`, so that recurring problems are reported less often.
    """

    kind: str
    begin, end = 2, 5
    causes: tuple[tuple[str, "EvidenceFn"], ...]  # possible causes, by prior likelihood (docs/health.md)
    advice: tuple[str, ...]
    sources: tuple[str, ...]  # sources of the thresholds

    active = False
    in_row = 0  # consecutive bad records while inactive, or good records while active
    since = 0  # the step of the first bad record that counted
    first_bad: int | None = None  # the step of the first bad record since a good one
    findings = 0

    @abc.abstractmethod
    def check(self, view: View) -> RuleResult | None:
        """Returns the result for a record, or None if the rule cannot decide."""

    def update(self, view: View) -> tuple[RuleResult, bool] | None:
        """Checks a record. Returns (result, True if a finding ended) if a finding begins or ends, otherwise None."""
        result = self.check(view)
        if result is None:
            return None
        if not result.bad:
            self.first_bad = None
        elif result.patience is not None:
            self.first_bad = view.step if self.first_bad is None else self.first_bad
            if not self.active and view.step - self.first_bad < result.patience:
                return None
            result = result._replace(numbers=result.numbers | {"since": self.first_bad})
        if result.bad == self.active:  # no change
            self.in_row = 0
            return None
        if result.bad and self.in_row == 0:
            self.since = view.step
        self.in_row += 1
        needed = self.end * 2 ** min(self.findings - 1, 4) if self.active else self.begin
        if self.in_row < needed and not result.sure:
            return None
        self.active, self.in_row = result.bad, 0
        self.findings += result.bad
        return result, not result.bad


def finite_numbers(view: View, prefix: str) -> dict[str, float]:
    """Returns {name without `prefix`: number} for the numbers of the record whose names begin with `prefix`."""
    found = {}
    for name in view.record:
        if name.startswith(prefix) and (number := view.number(name)) is not None:
            found[name[len(prefix) :]] = number
    return found
