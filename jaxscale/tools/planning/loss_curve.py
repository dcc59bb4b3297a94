"""The expected band of a run's training loss, from the forecast of its end and the curves of small runs.

Under one schedule, loss curves of runs of many sizes collapse when divided by their final loss (arXiv:2507.02119, there
for the loss above its floor and runs in proportion; here for the whole loss, since a small ladder determines the floor
worst). So the band is the smoothed curve over the held-out loss at the end, averaged over the ladder, as wide as the
prediction interval of another run.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from jaxscale.system.exits import BadInput
from jaxscale.tools.planning.loss_law import INTERVAL, Interval
from jaxscale.tools.planning.scaling_ladder import LadderRun, ScheduleShape

SMOOTHED = 0.05  # fraction of a run in the averaging window of the training loss
PARTS = np.linspace(0.15, 1.0, 35)  # of the run; before them the loss depends on steps, not on the fraction
MIN_CURVES = 3
WARMUP_TOLERANCE = 0.03  # difference of two warmup fractions with the same shape of curve


class CurveShape(NamedTuple):
    """Log of (smoothed training loss / held-out loss at the end) at PARTS of the run, float64[parts] each."""

    middle: np.ndarray
    half_width: np.ndarray  # half width of the band


class LossBand(NamedTuple):
    """Expected range of the smoothed training loss, nats per token."""

    tokens: tuple[int, ...]
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]


def smoothed(rung: LadderRun) -> np.ndarray | None:
    """Returns the log of the smoothed curve over its end, float64[parts]; None if a window of it is empty."""
    windows = [(rung.steps > part - SMOOTHED) & (rung.steps <= part + 1e-9) for part in PARTS]
    if not all(window.any() for window in windows):
        return None
    return np.log([rung.losses[window].mean() / rung.loss for window in windows])


def curve_shape(rungs: Sequence[LadderRun], schedule: ScheduleShape) -> CurveShape:
    """Returns the curves' mean, and Student's interval of one more: quantiles of a few would be too narrow."""
    same = lambda other: other.ends_as(schedule) and abs(other.warmup - schedule.warmup) <= WARMUP_TOLERANCE
    if other := [rung for rung in rungs if not same(rung.schedule)]:
        raise BadInput(
            f"the schedule of {other[0].name} is {other[0].schedule}, and that of the run to forecast is {schedule}; a "
            "band for the training loss needs the same schedule shape in all runs"
        )
    if (begin := float(PARTS[0]) - SMOOTHED) < schedule.warmup:
        raise BadInput(
            f"the warmup is {schedule.warmup:.0%} of the run, but the band starts at {begin:.0%}, and the shape of the "
            "curve is known only after warmup"
        )
    curves = [curve for rung in rungs if (curve := smoothed(rung)) is not None]
    if len(curves) < MIN_CURVES:
        raise BadInput(
            f"{len(curves)} runs have training metrics in every twentieth of the run, and a band needs {MIN_CURVES}; "
            "decrease monitor.log_every_steps in the ladder"
        )
    return student_interval(np.array(curves))


def student_interval(curves: np.ndarray) -> CurveShape:
    """Returns the mean and the prediction interval of one more curve, from float64[runs, parts]."""
    number = len(curves)
    width = float(stdtrit(number - 1, INTERVAL[1])) * math.sqrt(1 + 1 / number)
    return CurveShape(curves.mean(axis=0), width * curves.std(axis=0, ddof=1))


def coverage(rungs: Sequence[LadderRun]) -> dict[str, float]:
    """Returns {run: fraction of its curve in the band of the others}, each scaled by its own end."""
    curves = {rung.name: curve for rung in rungs if (curve := smoothed(rung)) is not None}
    if len(curves) <= MIN_CURVES:
        return {}
    found = {}
    for name, curve in curves.items():
        shape = student_interval(np.array([other for key, other in curves.items() if key != name]))
        found[name] = float(np.mean(np.abs(curve - shape.middle) <= shape.half_width))
    return found


def make_band(end: Interval, shape: CurveShape, tokens: int) -> LossBand:
    """Returns the band of a run; the errors of end and shape are added as independent."""
    below, above = math.log(end.middle / end.low), math.log(end.high / end.middle)
    middle = math.log(end.middle) + shape.middle
    column = lambda values: tuple(float(value) for value in np.exp(values))
    return LossBand(
        tuple(round(part * tokens) for part in PARTS),
        column(middle - np.hypot(shape.half_width, below)),
        column(middle),
        column(middle + np.hypot(shape.half_width, above)),
    )


def fraction_inside(band: LossBand, rung: LadderRun) -> float | None:
    """Returns the fraction of a finished run's curve in its band; None if the curve has gaps."""
    curve = smoothed(rung)
    if curve is None:
        return None
    losses = np.exp(curve) * rung.loss
    return float(np.mean((losses >= np.array(band.low)) & (losses <= np.array(band.high))))
