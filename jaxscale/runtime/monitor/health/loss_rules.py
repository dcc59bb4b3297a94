"""Rules about the training loss."""

import collections
import math
from statistics import fmean, median

import numpy as np

from jaxscale.core.config import SIGMA_PER_MAD
from jaxscale.runtime.monitor.health import evidence
from jaxscale.runtime.monitor.health.evidence import BATCH, GRADIENT, NUMERICS, RATE, RETURN, STAGE, WARMUP
from jaxscale.runtime.monitor.health.rule import (
    HEALTHY,
    BlockMeans,
    Rule,
    RuleResult,
    View,
    absolute_deviation,
    format_ratio,
    loss_limit,
    mean_of,
    slope,
)

SPIKE_LEVELS = ((1.5, "a common rule"), (2.0, "another"), (3.0, "a third"))  # rules that disagree; all are shown
SURE_RATIO = 2.0  # ratio of a spike from which one record is enough
LOW_RATIO = 1.15  # minimum ratio of a spike that is at least 2 * spike_sigma above the median
SURE_SIGMAS = 6  # above the lowest smoothed loss, which is a minimum over many noisy values
HALF = 0.99  # second half over first half, a common rule for a plateau that is shown but does not alert
SWING = 24  # records in the window of an oscillation


class NonFinite(Rule):
    """Detects a loss or gradient norm that is not finite."""

    kind = "nonfinite"
    begin, end = 1, 5
    causes = (NUMERICS, ("the gradient exploded before", evidence.gradient), RATE, BATCH)
    advice = (
        "inspect the batch",
        "if it happens again, divide optim.peak_lr by 2 to 5 or lengthen the warmup",
        "compute in bfloat16 or float32 instead of float16, and try model.embed_compute_dtype=float32",
        "the guard skips such steps; too many consecutive ones rewind the run, or end it with exit code 17",
    )
    sources = ("common rules: a norm that is NaN is an alarm; stop at NaN",)

    def check(self, view: View) -> RuleResult | None:
        if "loss" not in view.record and not view.not_finite("validation/loss"):
            return None
        names = [name for name in ("loss", "grad_norm", "validation/loss") if view.not_finite(name)]
        if not names:
            return HEALTHY
        return RuleResult(True, f"not finite: {' and '.join(names)}", {"names": names})


class Spike(Rule):
    """Detects a loss far above the median of the accepted records before it."""

    kind = "spike"
    begin, end = 2, 3
    causes = (BATCH, WARMUP, STAGE, RATE, GRADIENT, RETURN, NUMERICS)
    advice = (
        "wait: most spikes recover within tens of steps",
        "inspect the batch, and skip it with --skip-data if its documents are bad",
        "if spikes recur: divide the learning rate by 10 for 100 steps, then restore it (a common rule; "
        "another: by 2 to 5 for 100 to 500 steps)",
        "if it does not recover: rewind to a checkpoint before it and skip the batches around it",
    )
    sources = (
        "1.5 times the rolling average: a common rule",
        "2 times the mean of the last records: another",
        "3 times the running average: a third",
        "own threshold: also a number of standard deviations of the run's own noise",
    )

    highest, usual = 0.0, 0.0

    def check(self, view: View) -> RuleResult | None:
        loss, compared = view.number("loss"), view.losses.compared
        if loss is None or compared is None or ("divergence" in view.active and not self.active):
            return None
        if self.active:
            self.highest = max(self.highest, loss)
        numbers = {"loss": loss, "usual": compared.centre}
        if view.losses.new_level:
            seen = f"the loss has not returned from {loss:.4g} to {self.usual:.4g}: {loss:.4g} is now its level"
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
        side = lambda level: "above" if compared.ratio >= level else "below"
        levels = ", ".join(f"{side(level)} {level:g} ({source})" for level, source in SPIKE_LEVELS)
        seen = (
            f"the loss is {loss:.4g}, {format_ratio(compared.ratio, 2)} times the median {compared.centre:.4g} of the "
            f"previous records: {levels}; {format_ratio(compared.sigmas, 0)} standard deviations of its noise"
        )
        numbers |= {"ratio": compared.ratio, "sigmas": compared.sigmas, "threshold": view.cfg.spike_ratio}
        return RuleResult(True, seen, numbers, sure=compared.ratio >= max(SURE_RATIO, view.cfg.spike_ratio))


class Divergence(Rule):
    """Detects a smoothed loss that stays above its minimum."""

    kind = "divergence"
    begin, end = 5, 5
    causes = (RATE, WARMUP, STAGE, GRADIENT, NUMERICS, RETURN)
    advice = (
        "if a stage of the mixture started, check the losses by source first",
        "rewind to the newest checkpoint before it, with optim.peak_lr divided by 2 to 10",
        "lengthen the warmup",
        "check that optim.clip_norm is 1",
    )
    sources = ("own rule: the smoothed loss relative to its minimum", "a loss that rises is a concern: a common rule")

    lowest, lowest_step = math.inf, 0

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
                f"the smoothed loss is {smoothed:.4g} after a minimum of {self.lowest:.4g} at step {self.lowest_step}: "
                f"{smoothed / self.lowest:.2f} times as high, above {view.cfg.divergence_ratio:g}"
            )
            return RuleResult(True, seen, numbers | {"threshold": view.cfg.divergence_ratio})
        if self.active and smoothed > (self.lowest + limit) / 2:
            return None
        return RuleResult(False, f"the smoothed loss is back at {smoothed:.4g}", numbers)


class FlatStart(Rule):
    """Detects a loss that has not fallen after the learning rate warmup."""

    kind = "flat_start"
    begin, end = 3, 3
    causes = (
        ("the learning rate is too low", evidence.low_rate),
        ("the learning rate is so high that the model does not learn", evidence.rate),
        ("steps are skipped, so that the model does not learn", evidence.skips),
        ("targets or weights of the data are wrong", evidence.batch),
        ("parameters are frozen by optim.groups", evidence.no_evidence),
    )
    advice = (
        "try optim.peak_lr between 1e-4 and 1e-3 on a short run",
        "read a batch with jaxscale trace: is it the intended text?",
        "overfit one batch: if the model cannot, its code or settings have an error",
    )
    sources = (
        "flat from the start: a common rule; own threshold",
        "a learning rate that is too low gives a flat or very slowly falling loss: a common rule",
    )
    records = 20
    fell = False

    def __init__(self) -> None:
        self.first: list[float] = []

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
            return RuleResult(
                False, f"the loss has started to fall: {smoothed:.4g} after {initial:.4g}", numbers, sure=True
            )
        if view.losses.records < self.records or view.step < view.facts.warmup_steps / 2:
            return None
        if smoothed < initial * (1 - view.cfg.flat_drop):
            return None
        chance = math.log(view.facts.vocab_size) if view.facts.vocab_size else None
        uniform = f"; ln {view.facts.vocab_size} = {chance:.4g} is the loss of uniform predictions" if chance else ""
        seen = (
            f"the loss was {initial:.4g} in the first records and is {smoothed:.4g} now, after {view.losses.records} "
            f"records: it has not fallen by {view.cfg.flat_drop:.0%}{uniform}"
        )
        return RuleResult(True, seen, numbers | {"threshold": view.cfg.flat_drop, "chance": chance})


class Plateau(Rule):
    """Detects a loss that hardly falls over the last half of the run while the learning rate is high."""

    kind = "plateau"
    begin, end = 3, 3
    causes = (
        ("the learning rate decayed too early, or is too low", evidence.low_rate),
        ("the capacity of the model is exhausted", evidence.schedule),
        ("the data are repeated", evidence.batch),
        ("the learning rate is too high for a lower loss", evidence.rate),
    )
    advice = (
        "check the tokens per parameter with jaxscale plan: beyond the usual ratio, a larger model gains more",
        "try twice the learning rate in a run from these weights (--init_from); if that is worse, decay it now",
        "check in data.max_epochs and the startup messages how often the data are repeated",
    )
    sources = (
        "second half of the window at least 0.99 of its first: a common rule",
        "own rule: the window grows with the run, and the fall must be certain: 100 noisy steps are not enough",
    )

    def __init__(self) -> None:
        self.blocks, self.highest_rate = BlockMeans(), 0.0

    def check(self, view: View) -> RuleResult | None:
        loss, rate, compared = view.number("loss"), view.number("learning_rate"), view.losses.compared
        if loss is None:
            return None
        self.highest_rate = max(self.highest_rate, rate or 0.0)
        if compared and compared.sigmas > 5:  # a spike
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
            # single records are too noisy for a fit: means of eight neighbours, aligned to the end
            late = [mean_of(late[i : i + 8]) for i in range(len(late) % 8, len(late), 8)]
        if len(late) < 6:
            return None
        line = slope([step for step, _ in late], [loss for _, loss in late])
        width = late[-1][0] - late[0][0]
        if line.level <= 0:
            return None
        drop, error = -line.per_x * width / line.level, line.error * width / line.level
        half = len(late) // 2
        first, second = (fmean(loss for _, loss in part) for part in (late[:half], late[half:]))
        ratio = second / first if first > 0 else math.inf
        numbers = {"drop": drop, "error": error, "first_step": late[0][0], "loss": line.level, "half_ratio": ratio}
        if drop + (2 if len(late) >= 16 else 3) * error < view.cfg.plateau_drop:
            seen = (
                f"from step {late[0][0]:.0f} to {view.step} the loss has fallen by {drop:.2%} with a standard error of "
                f"{error:.2%}, certainly by less than {view.cfg.plateau_drop:.0%}; its mean is {line.level:.4g}. "
                f"The second half is {ratio:.4f} times the first: {'a' if ratio >= HALF else 'no'} plateau by a common "
                f"rule (at least {HALF:g})"
            )
            return RuleResult(True, seen, numbers | {"threshold": view.cfg.plateau_drop})
        seen = f"the loss falls again: by {drop:.2%} since step {late[0][0]:.0f}"
        return RuleResult(False, seen, numbers) if not self.active or drop > view.cfg.plateau_drop else None


def decaying(view: View, rate: float | None, highest: float) -> bool:
    """Returns True if the learning rate has decayed so far that the loss is expected to level off."""
    done = view.step / view.facts.total_steps if view.facts.total_steps else 0.0
    late = view.facts.decay in ("cosine", "linear") and done > 0.7
    return rate is not None and rate < (0.9 if late else 0.3) * highest


class Oscillation(Rule):
    """Detects a loss that oscillates around its trend much more widely than before."""

    kind = "oscillation"
    begin, end = 3, 3
    causes = (
        RATE,
        ("sources come one after the other instead of mixed", evidence.stage),
        ("the batch is too small for this learning rate", evidence.no_evidence),
        ("the gradient is clipped in almost every step", evidence.gradient),
    )
    advice = (
        "halve optim.peak_lr, or increase the batch size",
        "lower optim.b2 to 0.95 if it is higher",
        "check the losses by source: do they oscillate one after the other?",
    )
    sources = ("learning rate, data or numerics cause oscillation, not the architecture: a common rule; own threshold",)
    every = 6  # records between checks: windows overlap by three quarters

    def __init__(self) -> None:
        self.losses: collections.deque[float] = collections.deque(maxlen=SWING)
        self.widths: collections.deque[float] = collections.deque(maxlen=16)  # widths of earlier healthy windows
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
                f"over the last {SWING} records the loss oscillates by {width:.1%} around its trend ({crossings} "
                f"crossings), {width / max(usual, 1e-9):.1f} times the {usual:.1%} before"
            )
            numbers = {"width": width, "usual": usual, "crossings": crossings, "threshold": view.cfg.oscillation_ratio}
            return RuleResult(True, seen, numbers)
        calm = usual is None or width < (view.cfg.oscillation_ratio + 1) / 2 * usual
        if calm:
            self.pending.append(width)
            if len(self.pending) > SWING // self.every:
                self.widths.append(self.pending.pop(0))
        seen = f"the loss oscillates by only {width:.1%} again"
        return RuleResult(False, seen, {"width": width, "usual": usual}) if calm or not self.active else None


class Overfitting(Rule):
    """Detects a validation loss that rises while the training loss falls."""

    kind = "overfitting"
    begin, end = 3, 1
    causes = (
        ("the data are repeated too often", evidence.batch),
        ("the validation text differs from the current training data", evidence.stage),
        ("the model is too large for the data", evidence.schedule),
    )
    advice = ("check the number of epochs", "stop here, or add data", "raise weight decay or dropout on a branch")
    sources = ("log training and validation loss together: a common rule; own threshold",)

    lowest: tuple[float, int, float | None] | None = None  # loss, step, training loss at that step

    def check(self, view: View) -> RuleResult | None:
        loss, training = view.number("validation/loss"), view.losses.smoothed
        if loss is None:
            return None
        if self.lowest is None or loss < self.lowest[0]:
            self.lowest = (loss, view.step, training)
        lowest, step, training_then = self.lowest
        if lowest <= 0:
            return None
        numbers = dict(validation_loss=loss, lowest=lowest, lowest_step=step, loss=training, loss_then=training_then)
        if loss <= lowest * (1 + view.cfg.overfit_rise):
            return RuleResult(False, f"the validation loss is {loss:.4g}, its minimum {lowest:.4g}", numbers)
        if training_then is None or training is None or training >= training_then:
            return None  # both rise: not overfitting
        seen = (
            f"the validation loss is {loss:.4g}, {loss / lowest - 1:.1%} above its minimum of {lowest:.4g} at step "
            f"{step}, while the training loss fell from {training_then:.4g} to {training:.4g}"
        )
        return RuleResult(True, seen, numbers | {"threshold": view.cfg.overfit_rise})


class OutOfForecast(Rule):
    """Detects a smoothed loss outside the band of forecast.json."""

    kind = "forecast"
    begin, end = 10, 10
    causes = (
        ("the learning rate, the batch or the warmup differs from the runs of the forecast", evidence.rate),
        STAGE,
        ("the forecast is not valid this far from its runs", evidence.schedule),
    )
    advice = (
        "above the band: compare the settings with those of the small runs before you continue",
        "below the band: check for validation text in the training data, and repeat the forecast",
    )
    sources = ("forecast.json, written by jaxscale plan --loss (arXiv:2203.15556, approach 3)",)

    def check(self, view: View) -> RuleResult | None:
        tokens, smoothed, band = view.number("tokens_seen"), view.losses.smoothed, view.facts.forecast
        if tokens is None or smoothed is None or len(band) < 2 or not band[0][0] <= tokens <= band[-1][0]:
            return None
        xs, lows, highs = zip(*band)
        low, high = float(np.interp(tokens, xs, lows)), float(np.interp(tokens, xs, highs))
        numbers = {"loss": smoothed, "low": low, "high": high, "tokens": tokens}
        if low <= smoothed <= high:
            seen = f"the loss is {smoothed:.4g}, within the forecast band, {low:.4g} to {high:.4g}"
            return RuleResult(False, seen, numbers)
        seen = (
            f"the smoothed loss is {smoothed:.4g}, {'above' if smoothed > high else 'below'} the forecast band, "
            f"{low:.4g} to {high:.4g}"
        )
        return RuleResult(True, seen, numbers)
