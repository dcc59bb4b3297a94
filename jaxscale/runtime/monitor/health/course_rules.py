"""Rules that compare the training loss with the validation loss or the forecast."""

import bisect

from jaxscale.runtime.monitor.health.finding import RuleResult
from jaxscale.runtime.monitor.health.rule import Rule, View


class Overfitting(Rule):
    """The validation loss rises while the training loss falls."""

    kind = "overfitting"
    begin, end = 3, 1

    def __init__(self) -> None:
        super().__init__()
        self.lowest: tuple[float, int, float | None] | None = None  # loss, step, training loss at that step

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
            return RuleResult(False, f"the validation loss is {loss:.4g}, its lowest {lowest:.4g}", numbers)
        if training_then is None or training is None or training >= training_then:
            return None  # both rise: not overfitting
        seen = (
            f"the validation loss is {loss:.4g} after {lowest:.4g} at step {step}, {loss / lowest - 1:.1%} higher, "
            f"while the training loss fell from {training_then:.4g} to {training:.4g}"
        )
        return RuleResult(True, seen, numbers | {"threshold": view.cfg.overfit_rise})


class OutOfForecast(Rule):
    """The smoothed loss is outside the band of forecast.json."""

    kind = "forecast"
    begin, end = 10, 10

    def check(self, view: View) -> RuleResult | None:
        tokens, smoothed, band = view.number("tokens_seen"), view.losses.smoothed, view.facts.forecast
        if tokens is None or smoothed is None or len(band) < 2 or not band[0][0] <= tokens <= band[-1][0]:
            return None
        low, high = interpolate_band(band, tokens)
        numbers = {"loss": smoothed, "low": low, "high": high, "tokens": tokens}
        if low <= smoothed <= high:
            seen = f"the loss is {smoothed:.4g}, within the forecast's {low:.4g} to {high:.4g}"
            return RuleResult(False, seen, numbers)
        seen = (
            f"the loss, smoothed, is {smoothed:.4g}, {'above' if smoothed > high else 'below'} the forecast's band "
            f"{low:.4g} to {high:.4g}"
        )
        return RuleResult(True, seen, numbers)


def interpolate_band(band: tuple[tuple[float, float, float], ...], tokens: float) -> tuple[float, float]:
    """Returns (low, high) at a token count, by linear interpolation."""
    index = min(max(bisect.bisect_right([point[0] for point in band], tokens), 1), len(band) - 1)
    (x, low, high), (next_x, next_low, next_high) = band[index - 1], band[index]
    fraction = (tokens - x) / (next_x - x) if next_x > x else 0.0
    return low + fraction * (next_low - low), high + fraction * (next_high - high)
