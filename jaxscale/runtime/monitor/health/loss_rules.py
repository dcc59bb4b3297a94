"""Rules about the training loss."""

import collections
import math
from statistics import median

from jaxscale.core.config import SIGMA_PER_MAD
from jaxscale.runtime.monitor.health.finding import HEALTHY, RuleResult
from jaxscale.runtime.monitor.health.robust import BlockMeans, absolute_deviation, format_ratio, loss_limit, slope
from jaxscale.runtime.monitor.health.rule import Rule, View

SPIKE_LEVELS = ((1.5, "a common rule"), (2.0, "another"), (3.0, "a third"))  # they disagree: all are shown
SURE_RATIO = 2.0  # of a spike: one record is enough
LOW_RATIO = 1.15  # of a spike that is at least 2 * spike_sigma above the median
SURE_SIGMAS = 6  # above the lowest smoothed loss, which is the minimum of format_ratio noisy values
HALF = 0.99  # second half over first half: a plateau by a common rule, which is shown and does not alert
SWING = 24  # records in the window of an oscillation


class NonFinite(Rule):
    """A loss or a gradient norm is not finite."""

    kind = "nonfinite"
    begin, end = 1, 5

    def check(self, view: View) -> RuleResult | None:
        if "loss" not in view.record and not view.not_finite("validation/loss"):
            return None
        names = [name for name in ("loss", "grad_norm", "validation/loss") if view.not_finite(name)]
        if not names:
            return HEALTHY
        return RuleResult(True, f"{' and '.join(names)} not finite", {"names": names})


class Spike(Rule):
    """The loss is far above the median of the accepted records before it."""

    kind = "spike"
    begin, end = 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.highest, self.usual = 0.0, 0.0

    def check(self, view: View) -> RuleResult | None:
        loss, compared = view.number("loss"), view.losses.compared
        if loss is None or compared is None or ("divergence" in view.active and not self.active):
            return None
        if self.active:
            self.highest = max(self.highest, loss)
        numbers = {"loss": loss, "usual": compared.centre}
        if view.losses.new_level:
            seen = f"the loss has not come back from {loss:.4g} to {self.usual:.4g}: that is taken as its level now"
            return RuleResult(False, seen, numbers, sure=True) if self.active else HEALTHY
        least = loss_limit(LOW_RATIO, compared.centre)
        high = loss >= loss_limit(view.cfg.spike_ratio, compared.centre) and compared.sigmas >= view.cfg.spike_sigma
        sharp = loss >= least and compared.sigmas >= 2 * view.cfg.spike_sigma
        if not (high or sharp):
            recovered = not self.active or compared.sigmas < 4 or loss < (compared.centre + least) / 2
            seen = f"the loss is back at {loss:.4g}; its highest was {self.highest:.4g}"
            return RuleResult(False, seen, numbers | {"highest": self.highest}) if recovered else None
        if not self.active:
            self.highest, self.usual = loss, compared.centre
        levels = ", ".join(
            f"{'above' if compared.ratio >= level else 'below'} {level:g} ({source})" for level, source in SPIKE_LEVELS
        )
        seen = (
            f"the loss is {loss:.4g}, {format_ratio(compared.ratio, 2)} times the median {compared.centre:.4g} of the "
            f"records before: {levels}; {format_ratio(compared.sigmas, 0)} standard deviations of its noise"
        )
        numbers |= {"ratio": compared.ratio, "sigmas": compared.sigmas, "threshold": view.cfg.spike_ratio}
        return RuleResult(True, seen, numbers, sure=compared.ratio >= max(SURE_RATIO, view.cfg.spike_ratio))


class Divergence(Rule):
    """The smoothed loss stays above its lowest."""

    kind = "divergence"
    begin, end = 5, 5

    def __init__(self) -> None:
        super().__init__()
        self.lowest, self.lowest_step = math.inf, 0

    def check(self, view: View) -> RuleResult | None:
        smoothed, usual = view.losses.smoothed, view.losses.baseline.center_and_noise()
        if view.number("loss") is None or smoothed is None or usual is None:
            return None
        if smoothed < self.lowest:
            self.lowest, self.lowest_step = smoothed, view.step
        if self.lowest <= 0:  # not a cross-entropy
            return None
        numbers = {"smoothed": smoothed, "lowest": self.lowest, "lowest_step": self.lowest_step}
        limit = loss_limit(view.cfg.divergence_ratio, self.lowest)
        if smoothed > limit and smoothed > self.lowest + SURE_SIGMAS * usual[1]:
            recent = list(view.losses.recent)
            if not self.active and median(recent[5:]) < median(recent[:5]) - usual[1]:
                return None  # on its way back, as after a spike
            seen = (
                f"the loss, smoothed, is {smoothed:.4g} and was {self.lowest:.4g} at step {self.lowest_step}: "
                f"{smoothed / self.lowest:.2f} times as high, above {view.cfg.divergence_ratio:g}"
            )
            return RuleResult(True, seen, numbers | {"threshold": view.cfg.divergence_ratio})
        if self.active and smoothed > (self.lowest + limit) / 2:
            return None
        return RuleResult(False, f"the loss, smoothed, is back at {smoothed:.4g}", numbers)


class FlatStart(Rule):
    """The loss has not fallen although the learning rate is warmed up."""

    kind = "flat_start"
    begin, end = 3, 3
    records = 20

    def __init__(self) -> None:
        super().__init__()
        self.first: list[float] = []
        self.fell = False

    def check(self, view: View) -> RuleResult | None:
        loss, smoothed = view.number("loss"), view.losses.smoothed
        if loss is None or self.fell or view.facts.branched or "divergence" in view.active:
            return None
        if len(self.first) < 3:
            self.first.append(loss)
        if smoothed is None:
            return None
        initial = median(self.first)
        numbers = {"loss": smoothed, "first": initial}
        if smoothed < initial * (1 - 2 * view.cfg.flat_drop):
            self.fell = True
            seen = f"the loss has begun to fall: {smoothed:.4g} after {initial:.4g}"
            return RuleResult(False, seen, numbers, sure=True)
        if view.losses.records < self.records or view.step < view.facts.warmup_steps / 2:
            return None
        if smoothed < initial * (1 - view.cfg.flat_drop):
            return None
        chance = math.log(view.facts.vocab_size) if view.facts.vocab_size else None
        uniform = f"; ln {view.facts.vocab_size} = {chance:.4g} is a guess among all tokens" if chance else ""
        seen = (
            f"the loss was {initial:.4g} in the first records and is {smoothed:.4g} now, {view.losses.records} records "
            f"on: it has not fallen by {view.cfg.flat_drop:.0%}{uniform}"
        )
        return RuleResult(True, seen, numbers | {"threshold": view.cfg.flat_drop, "chance": chance})


class Plateau(Rule):
    """The loss falls by almost nothing over the last half of the run, while the learning rate is high.

    The window grows with the run: over a fixed window every power law eventually falls by less than any fraction.
    """

    kind = "plateau"
    begin, end = 3, 3

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.highest_rate = BlockMeans(), 0.0

    def check(self, view: View) -> RuleResult | None:
        loss, rate, compared = view.number("loss"), view.number("learning_rate"), view.losses.compared
        if loss is None:
            return None
        self.highest_rate = max(self.highest_rate, rate or 0.0)
        if compared and compared.sigmas > 5:  # leave spikes out
            return None
        if not self.blocks.add(view.step, loss) or view.losses.records < view.cfg.plateau_records:
            return None
        if view.active & {"flat_start", "divergence"}:  # more specific
            return None
        if view.step < 4 * view.facts.warmup_steps or decaying(view, rate, self.highest_rate):
            return None
        late = [point for point in self.blocks.done if point[0] >= view.step / 2]
        if self.blocks.records == 1:
            if len(self.blocks.done) % 8:
                return None
            late = average_by_eight(late)
        if len(late) < 6:
            return None
        line = slope([step for step, _ in late], [loss for _, loss in late])
        width = late[-1][0] - late[0][0]
        if line.level <= 0:
            return None
        drop, error = -line.per_x * width / line.level, line.error * width / line.level
        ratio = half_ratio(late)
        numbers = {"drop": drop, "error": error, "first_step": late[0][0], "loss": line.level, "half_ratio": ratio}
        if drop + (2 if len(late) >= 16 else 3) * error < view.cfg.plateau_drop:
            seen = (
                f"from step {late[0][0]:.0f} to {view.step} the loss has fallen by {drop:.2%} with a standard error of "
                f"{error:.2%}, surely by less than {view.cfg.plateau_drop:.0%}; it is {line.level:.4g}. Its "
                f"second half is {ratio:.4f} of its first: {'a' if ratio >= HALF else 'no'} plateau by a common rule, "
                f"from {HALF:g} on"
            )
            return RuleResult(True, seen, numbers | {"threshold": view.cfg.plateau_drop})
        seen = f"the loss falls again: by {drop:.2%} since step {late[0][0]:.0f}"
        return RuleResult(False, seen, numbers) if not self.active or drop > view.cfg.plateau_drop else None


def half_ratio(points: list[tuple[float, float]]) -> float:
    """Returns the mean of the second half over that of the first."""
    half = len(points) // 2
    first, second = (sum(y for _, y in part) / len(part) for part in (points[:half], points[half:]))
    return second / first if first > 0 else math.inf


def decaying(view: View, rate: float | None, highest: float) -> bool:
    """Returns True late in a decay of the learning rate, where the loss is expected to level off."""
    if rate is None:
        return False
    done = view.step / view.facts.total_steps if view.facts.total_steps else 0.0
    falls = rate < 0.9 * highest
    late = view.facts.decay in ("cosine", "linear") and done > 0.7
    return falls and (late or rate < 0.3 * highest)


def average_by_eight(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns means of eight neighbours, aligned to the end: single records are too noisy for a fit."""
    whole = points[len(points) % 8 :]
    groups = [whole[i : i + 8] for i in range(0, len(whole), 8)]
    return [(sum(x for x, _ in group) / 8, sum(y for _, y in group) / 8) for group in groups]


class Oscillation(Rule):
    """The loss swings about its trend to both sides, much wider than before."""

    kind = "oscillation"
    begin, end = 3, 3
    every = 6  # records: the windows overlap by three quarters

    def __init__(self) -> None:
        super().__init__()
        self.losses: collections.deque[float] = collections.deque(maxlen=SWING)
        self.widths: collections.deque[float] = collections.deque(maxlen=16)  # of earlier healthy windows
        self.pending: list[float] = []  # widths of windows that overlap the current one
        self.seen = 0

    def check(self, view: View) -> RuleResult | None:
        if (loss := view.number("loss")) is None:
            return None
        if view.active & {"spike", "divergence"}:
            self.losses.clear()
            return None
        self.losses.append(loss)
        self.seen += 1
        if len(self.losses) < SWING or self.seen % self.every:
            return None
        xs, ys = list(range(SWING)), list(self.losses)
        line = slope(xs, ys)
        residuals = [y - line.level - line.per_x * (x - (SWING - 1) / 2) for x, y in zip(xs, ys)]
        width = SIGMA_PER_MAD * absolute_deviation(residuals, 0.0) / abs(line.level or 1.0)
        crossings = sum(a * b < 0 for a, b in zip(residuals, residuals[1:]))
        usual = median(self.widths) if len(self.widths) >= 4 else None
        if usual is not None and width > view.cfg.oscillation_ratio * usual and width > 0.02 and crossings >= 4:
            seen = (
                f"over the last {SWING} records the loss swings by {width:.1%} of itself, to both sides ({crossings} "
                f"crossings), {width / max(usual, 1e-9):.1f} times as wide as the {usual:.1%} before"
            )
            numbers = {"width": width, "usual": usual, "crossings": crossings, "threshold": view.cfg.oscillation_ratio}
            return RuleResult(True, seen, numbers)
        calm = usual is None or width < (view.cfg.oscillation_ratio + 1) / 2 * usual
        if calm:
            self.pending.append(width)
            if len(self.pending) > SWING // self.every:
                self.widths.append(self.pending.pop(0))
        seen = f"the loss swings by {width:.1%} of itself again"
        return RuleResult(False, seen, {"width": width, "usual": usual}) if calm or not self.active else None
