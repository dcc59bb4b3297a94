"""Rules that compare the training loss with another curve: the validation loss, and the forecast."""

import bisect

from jaxscale.monitor.health.finding import Sign
from jaxscale.monitor.health.rule import Rule, View


class Overfitting(Rule):
    """A validation loss that rises while the training loss falls."""

    kind = "overfitting"
    begin, end = 3, 1

    def __init__(self) -> None:
        super().__init__()
        self.lowest: tuple[float, int, float | None] | None = None  # loss, step, training loss there

    def look(self, view: View) -> Sign | None:
        loss, training = view.number("validation/loss"), view.losses.smoothed
        if loss is None:
            return None
        if self.lowest is None or loss < self.lowest[0]:
            self.lowest = (loss, view.step, training)
        lowest, step, then = self.lowest
        if lowest <= 0:
            return None
        told = {"validation_loss": loss, "lowest": lowest, "lowest_step": step, "loss": training, "loss_then": then}
        if loss <= lowest * (1 + view.cfg.overfit_rise):
            return Sign(False, f"the validation loss is {loss:.4g}, its lowest {lowest:.4g}", told)
        if then is None or training is None or training >= then:
            return None  # both rise: that is no overfitting
        seen = (
            f"the validation loss is {loss:.4g} after {lowest:.4g} at step {step}, {loss / lowest - 1:.1%} higher, "
            f"while the training loss fell from {then:.4g} to {training:.4g}"
        )
        return Sign(True, seen, told | {"threshold": view.cfg.overfit_rise})


class OutOfForecast(Rule):
    """A smoothed loss outside the band of forecast.json."""

    kind = "forecast"
    begin, end = 10, 10

    def look(self, view: View) -> Sign | None:
        tokens, smoothed, band = view.number("tokens_seen"), view.losses.smoothed, view.facts.forecast
        if tokens is None or smoothed is None or len(band) < 2 or not band[0][0] <= tokens <= band[-1][0]:
            return None
        low, high = band_at(band, tokens)
        told = {"loss": smoothed, "low": low, "high": high, "tokens": tokens}
        if low <= smoothed <= high:
            return Sign(False, f"the loss is {smoothed:.4g}, within the forecast's {low:.4g} to {high:.4g}", told)
        seen = (
            f"the loss, smoothed, is {smoothed:.4g}, {'above' if smoothed > high else 'below'} the forecast's band "
            f"{low:.4g} to {high:.4g}"
        )
        return Sign(True, seen, told)


def band_at(band: tuple[tuple[float, float, float], ...], tokens: float) -> tuple[float, float]:
    """(low, high) at so many tokens, on straight lines between the band's points."""
    place = min(max(bisect.bisect_right([point[0] for point in band], tokens), 1), len(band) - 1)
    (x, low, high), (next_x, next_low, next_high) = band[place - 1], band[place]
    part = (tokens - x) / (next_x - x) if next_x > x else 0.0
    return low + part * (next_low - low), high + part * (next_high - high)
