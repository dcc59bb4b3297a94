"""Rules about the course of the training loss."""

import collections
import math
from statistics import median

from jaxscale.monitor.health.finding import GOOD, Sign
from jaxscale.monitor.health.robust import Blocks, deviation, loss_limit, many, slope
from jaxscale.monitor.health.rule import Rule, View
from jaxscale.monitor.spikes import SIGMA_OF_MAD

SPIKE_LEVELS = ((1.5, "a common rule"), (2.0, "another"), (3.0, "a third"))  # they disagree: all are shown
SURE_RATIO = 2.0  # of a spike: one record is enough
LOW_RATIO = 1.15  # of a spike that twice as many standard deviations speak for
SURE_SIGMAS = 6  # above the lowest smoothed loss, which is itself a lucky one of many
HALF = 0.99  # of the first half of a window: from there on the second is a plateau by a common rule, shown alone
SWING = 24  # records in which swings are measured


class NonFinite(Rule):
    """A loss or a gradient norm that is no number."""

    kind = "nonfinite"
    begin, end = 1, 5

    def look(self, view: View) -> Sign | None:
        if "loss" not in view.record and not view.not_finite("validation/loss"):
            return None
        wrong = [name for name in ("loss", "grad_norm", "validation/loss") if view.not_finite(name)]
        if not wrong:
            return GOOD
        return Sign(True, f"{' and '.join(wrong)} not finite", {"names": wrong})


class Spike(Rule):
    """A loss far above the median of the accepted records before it."""

    kind = "spike"
    begin, end = 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.highest, self.usual = 0.0, 0.0

    def look(self, view: View) -> Sign | None:
        loss, judged = view.number("loss"), view.losses.judged
        if loss is None or judged is None or ("divergence" in view.active and not self.spoken):
            return None
        if self.spoken:
            self.highest = max(self.highest, loss)
        told = {"loss": loss, "usual": judged.centre}
        if view.losses.new_level:
            seen = f"the loss has not come back from {loss:.4g} to {self.usual:.4g}: that is taken as its level now"
            return Sign(False, seen, told, sure=True) if self.spoken else GOOD
        least = loss_limit(LOW_RATIO, judged.centre)
        high = loss >= loss_limit(view.cfg.spike_ratio, judged.centre) and judged.sigmas >= view.cfg.spike_sigma
        sharp = loss >= least and judged.sigmas >= 2 * view.cfg.spike_sigma
        if not (high or sharp):
            healed = judged.sigmas < 4 or loss < (judged.centre + least) / 2
            seen = f"the loss is back at {loss:.4g}; its highest was {self.highest:.4g}"
            return Sign(False, seen, told | {"highest": self.highest}) if healed or not self.spoken else None
        if not self.spoken:
            self.highest, self.usual = loss, judged.centre
        levels = ", ".join(
            f"{'above' if judged.ratio >= level else 'below'} {level:g} ({source})" for level, source in SPIKE_LEVELS
        )
        seen = (
            f"the loss is {loss:.4g}, {many(judged.ratio, 2)} times the median {judged.centre:.4g} of the records "
            f"before: {levels}; {many(judged.sigmas, 0)} standard deviations of its noise"
        )
        told |= {"ratio": judged.ratio, "sigmas": judged.sigmas, "threshold": view.cfg.spike_ratio}
        return Sign(True, seen, told, sure=judged.ratio >= max(SURE_RATIO, view.cfg.spike_ratio))


class Divergence(Rule):
    """A smoothed loss that stays above its lowest."""

    kind = "divergence"
    begin, end = 5, 5

    def __init__(self) -> None:
        super().__init__()
        self.lowest, self.lowest_step = math.inf, 0

    def look(self, view: View) -> Sign | None:
        smoothed, usual = view.losses.smoothed, view.losses.baseline.usual()
        if view.number("loss") is None or smoothed is None or usual is None:
            return None
        if smoothed < self.lowest:
            self.lowest, self.lowest_step = smoothed, view.step
        if self.lowest <= 0:  # no cross-entropy of a batch
            return None
        told = {"smoothed": smoothed, "lowest": self.lowest, "lowest_step": self.lowest_step}
        limit = loss_limit(view.cfg.divergence_ratio, self.lowest)
        if smoothed > limit and smoothed > self.lowest + SURE_SIGMAS * usual[1]:
            recent = list(view.losses.recent)
            if not self.spoken and median(recent[5:]) < median(recent[:5]) - usual[1]:
                return None  # on its way back, as after a spike
            seen = (
                f"the loss, smoothed, is {smoothed:.4g} and was {self.lowest:.4g} at step {self.lowest_step}: "
                f"{smoothed / self.lowest:.2f} times as high, above {view.cfg.divergence_ratio:g}"
            )
            return Sign(True, seen, told | {"threshold": view.cfg.divergence_ratio})
        if self.spoken and smoothed > (self.lowest + limit) / 2:
            return None
        return Sign(False, f"the loss, smoothed, is back at {smoothed:.4g}", told)


class FlatStart(Rule):
    """A loss that has not fallen although the rate is up."""

    kind = "flat_start"
    begin, end = 3, 3
    records = 20

    def __init__(self) -> None:
        super().__init__()
        self.first: list[float] = []
        self.fell = False

    def look(self, view: View) -> Sign | None:
        loss, smoothed = view.number("loss"), view.losses.smoothed
        if loss is None or self.fell or view.facts.branched or "divergence" in view.active:
            return None
        if len(self.first) < 3:
            self.first.append(loss)
        if smoothed is None:
            return None
        begun = median(self.first)
        told = {"loss": smoothed, "first": begun}
        if smoothed < begun * (1 - 2 * view.cfg.flat_drop):
            self.fell = True
            return Sign(False, f"the loss has begun to fall: {smoothed:.4g} after {begun:.4g}", told, sure=True)
        if view.losses.records < self.records or view.step < view.facts.warmup_steps / 2:
            return None
        if smoothed < begun * (1 - view.cfg.flat_drop):
            return None
        chance = math.log(view.facts.vocab_size) if view.facts.vocab_size else None
        beside = f"; ln {view.facts.vocab_size} = {chance:.4g} is a guess among all tokens" if chance else ""
        seen = (
            f"the loss was {begun:.4g} in the first records and is {smoothed:.4g} now, {view.losses.records} records "
            f"on: it has not fallen by {view.cfg.flat_drop:.0%}{beside}"
        )
        return Sign(True, seen, told | {"threshold": view.cfg.flat_drop, "chance": chance})


class Plateau(Rule):
    """A loss that surely falls by next to nothing over the last half of the run, while the rate is up.

    The window grows with the run: over a window of fixed length every power law comes to fall by less than any part.
    """

    kind = "plateau"
    begin, end = 3, 3

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.highest_rate = Blocks(), 0.0

    def look(self, view: View) -> Sign | None:
        loss, rate, judged = view.number("loss"), view.number("learning_rate"), view.losses.judged
        if loss is None:
            return None
        self.highest_rate = max(self.highest_rate, rate or 0.0)
        if judged and judged.sigmas > 5:  # a spike is none of the course of the loss
            return None
        if not self.blocks.add(view.step, loss) or view.losses.records < view.cfg.plateau_records:
            return None
        if view.active & {"flat_start", "divergence"}:  # which say it better
            return None
        if view.step < 4 * view.facts.warmup_steps or decaying(view, rate, self.highest_rate):
            return None
        late = [point for point in self.blocks.done if point[0] >= view.step / 2]
        if self.blocks.records == 1:
            if len(self.blocks.done) % 8:
                return None
            late = in_eights(late)
        if len(late) < 6:
            return None
        line = slope([step for step, _ in late], [loss for _, loss in late])
        width = late[-1][0] - late[0][0]
        if line.level <= 0:
            return None
        drop, error = -line.per_x * width / line.level, line.error * width / line.level
        ratio = of_halves(late)
        told = {"drop": drop, "error": error, "first_step": late[0][0], "loss": line.level, "half_ratio": ratio}
        if drop + (2 if len(late) >= 16 else 3) * error < view.cfg.plateau_drop:
            seen = (
                f"from step {late[0][0]:.0f} to {view.step} the loss has fallen by {drop:.2%} with a standard error of "
                f"{error:.2%}, surely by less than {view.cfg.plateau_drop:.0%}; it is {line.level:.4g}. Its "
                f"second half is {ratio:.4f} of its first: {'a' if ratio >= HALF else 'no'} plateau by a common rule, "
                f"from {HALF:g} on"
            )
            return Sign(True, seen, told | {"threshold": view.cfg.plateau_drop})
        seen = f"the loss falls again: by {drop:.2%} since step {late[0][0]:.0f}"
        return Sign(False, seen, told) if not self.spoken or drop > view.cfg.plateau_drop else None


def of_halves(points: list[tuple[float, float]]) -> float:
    """The mean of the second half by that of the first."""
    half = len(points) // 2
    first, second = (sum(y for _, y in part) / len(part) for part in (points[:half], points[half:]))
    return second / first if first > 0 else math.inf


def decaying(view: View, rate: float | None, highest: float) -> bool:
    """True late in a run whose rate falls on purpose: the loss levels off there, and is to."""
    if rate is None:
        return False
    done = view.step / view.facts.total_steps if view.facts.total_steps else 0.0
    falls = rate < 0.9 * highest
    late = view.facts.decay in ("cosine", "linear") and done > 0.7
    return falls and (late or rate < 0.3 * highest)


def in_eights(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of eight neighbours each, the last ones: single records are too noisy to count as points of a line."""
    whole = points[len(points) % 8 :]
    groups = [whole[i : i + 8] for i in range(0, len(whole), 8)]
    return [(sum(x for x, _ in group) / 8, sum(y for _, y in group) / 8) for group in groups]


class Oscillation(Rule):
    """Swings of the loss about its line that are much wider than they were, to both sides."""

    kind = "oscillation"
    begin, end = 3, 3
    every = 6  # records: the windows overlap by three quarters

    def __init__(self) -> None:
        super().__init__()
        self.losses: collections.deque[float] = collections.deque(maxlen=SWING)
        self.widths: collections.deque[float] = collections.deque(maxlen=16)  # of earlier windows that were well
        self.waiting: list[float] = []  # widths of windows that still overlap this one
        self.seen = 0

    def look(self, view: View) -> Sign | None:
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
        rest = [y - line.level - line.per_x * (x - (SWING - 1) / 2) for x, y in zip(xs, ys)]
        width = SIGMA_OF_MAD * deviation(rest, 0.0) / abs(line.level or 1.0)
        crossings = sum(a * b < 0 for a, b in zip(rest, rest[1:]))
        usual = median(self.widths) if len(self.widths) >= 4 else None
        if usual is not None and width > view.cfg.oscillation_ratio * usual and width > 0.02 and crossings >= 4:
            seen = (
                f"over the last {SWING} records the loss swings by {width:.1%} of itself, to both sides ({crossings} "
                f"crossings), {width / max(usual, 1e-9):.1f} times as wide as the {usual:.1%} before"
            )
            told = {"width": width, "usual": usual, "crossings": crossings, "threshold": view.cfg.oscillation_ratio}
            return Sign(True, seen, told)
        calm = usual is None or width < (view.cfg.oscillation_ratio + 1) / 2 * usual
        if calm:
            self.waiting.append(width)
            if len(self.waiting) > SWING // self.every:
                self.widths.append(self.waiting.pop(0))
        seen = f"the loss swings by {width:.1%} of itself again"
        return Sign(False, seen, {"width": width, "usual": usual}) if calm or not self.spoken else None
