"""Expected band of a run's training loss, from its forecast final loss and the curves of small runs.

Under one schedule, loss curves of runs of many sizes collapse when divided by their final loss. arXiv:2507.02119 shows
this for the loss above its floor and for tokens in proportion to size. Here the whole loss is divided, since a small
scaling ladder determines the floor poorly. The band is the mean over the ladder of the smoothed curve divided by the
final held-out loss, with the width of a prediction interval for one more run.
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
PARTS = np.linspace(0.15, 1.0, 35)  # fractions of the run; earlier losses depend on steps, not on the fraction
MIN_CURVES = 3
WARMUP_TOLERANCE = 0.03  # largest difference of warmup fractions that give the same curve shape


class CurveShape(NamedTuple):
    """Log of (smoothed training loss / final held-out loss) at PARTS of the run. Fields are float64[parts]."""

    middle: np.ndarray
    half_width: np.ndarray  # half width of the band


class LossBand(NamedTuple):
    """Expected range of the smoothed training loss, nats per token."""

    tokens: tuple[int, ...]
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]


def smoothed(rung: LadderRun) -> np.ndarray | None:
    """Returns log(smoothed loss / final loss) as float64[parts], or None if a smoothing window is empty."""
    windows = [(rung.steps > part - SMOOTHED) & (rung.steps <= part + 1e-9) for part in PARTS]
    if not all(window.any() for window in windows):
        return None
    return np.log([rung.losses[window].mean() / rung.loss for window in windows])


def curve_shape(rungs: Sequence[LadderRun], schedule: ScheduleShape) -> CurveShape:
    """Returns the mean curve with Student's prediction interval. Raises BadInput if the runs do not determine it."""
    same = lambda other: other.ends_as(schedule) and abs(other.warmup - schedule.warmup) <= WARMUP_TOLERANCE
    if other := [rung for rung in rungs if not same(rung.schedule)]:
        raise BadInput(
            f"the schedule of {other[0].name} is {other[0].schedule}, but the schedule of the run to forecast is "
            f"{schedule}; to forecast the training loss, use the same schedule and warmup fraction in all runs"
        )
    if (begin := float(PARTS[0]) - SMOOTHED) < schedule.warmup:
        raise BadInput(
            f"the warmup takes {schedule.warmup:.0%} of the run, but a forecast of the training loss "
            f"allows at most {begin:.0%}; use a shorter warmup"
        )
    curves = [curve for rung in rungs if (curve := smoothed(rung)) is not None]
    if len(curves) < MIN_CURVES:
        raise BadInput(
            f"{len(curves)} runs log a training loss in every 5% of the run, but a forecast of the training loss "
            f"needs {MIN_CURVES} such runs; decrease monitor.log_every_steps in the runs of the ladder"
        )
    return student_interval(np.array(curves))


def student_interval(curves: np.ndarray) -> CurveShape:
    """Returns the mean of curves float64[runs, parts], with Student's prediction interval for a new curve."""
    number = len(curves)
    width = float(stdtrit(number - 1, INTERVAL[1])) * math.sqrt(1 + 1 / number)
    return CurveShape(curves.mean(axis=0), width * curves.std(axis=0, ddof=1))


def coverage(rungs: Sequence[LadderRun]) -> dict[str, float]:
    """Returns {run: fraction of its curve inside the band of the other runs}. Curves are relative to the final loss."""
    curves = {rung.name: curve for rung in rungs if (curve := smoothed(rung)) is not None}
    if len(curves) <= MIN_CURVES:
        return {}
    found = {}
    for name, curve in curves.items():
        shape = student_interval(np.array([other for key, other in curves.items() if key != name]))
        found[name] = float(np.mean(np.abs(curve - shape.middle) <= shape.half_width))
    return found


def make_band(end: Interval, shape: CurveShape, tokens: int) -> LossBand:
    """Returns the loss band of a run. Assumes that the errors of the final loss and of `shape` are independent."""
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
    """Returns the fraction of a finished run's curve inside the band, or None if a smoothing window is empty."""
    curve = smoothed(rung)
    if curve is None:
        return None
    losses = np.exp(curve) * rung.loss
    return float(np.mean((losses >= np.array(band.low)) & (losses <= np.array(band.high))))
