"""The band that a run's training loss should stay in, from the forecast of its end and the curves of small runs.

Under one schedule the curves of runs of many sizes have one shape, once each is divided by its end (arXiv:2507.02119,
there of the loss above its floor and for runs in proportion; here of the whole loss, for the floor is what a small
ladder knows least). So: the curve over the part of the run that is done, as a multiple of the end's held-out loss,
averaged over the ladder, and as wide as another run's would fall.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from jaxscale.planning.ladder import Rung, Schedule
from jaxscale.planning.loss_law import INTERVAL, Prediction
from jaxscale.system.exits import BadInput

SMOOTHED = 0.05  # part of a run over whose last steps the training loss is averaged
PARTS = np.linspace(0.15, 1.0, 35)  # of the run; before it the loss depends on the number of steps, not on the part
LEAST_CURVES = 3


class Shape(NamedTuple):
    """Log of (smoothed training loss / held-out loss at the end) at PARTS of the run, float64[parts] each."""

    middle: np.ndarray
    off: np.ndarray  # the band of another run lies so far to either side


class Band(NamedTuple):
    """What the smoothed training loss should lie in, nats per token."""

    tokens: tuple[int, ...]
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]


def smoothed(rung: Rung) -> np.ndarray | None:
    """Log of the smoothed curve over its end, float64[parts]; None where a window of it has no line."""
    windows = [(rung.steps > part - SMOOTHED) & (rung.steps <= part + 1e-9) for part in PARTS]
    if not all(window.any() for window in windows):
        return None
    return np.log([rung.losses[window].mean() / rung.loss for window in windows])


def shape_of(rungs: Sequence[Rung], schedule: Schedule) -> Shape:
    """The shape of runs with this schedule.

    The band is Student's interval for one more run of the same kind, which a few curves give a width that quantiles of
    so few cannot. Raises BadInput where the schedules differ, or too few curves are whole.
    """
    if other := [rung for rung in rungs if not rung.schedule.runs_as(schedule)]:
        raise BadInput(
            f"the curve of {other[0].name} followed {other[0].schedule}, and the run to be forecast follows "
            f"{schedule}; a band over its curve needs the same shape of schedule in all"
        )
    if (begin := float(PARTS[0]) - SMOOTHED) < schedule.warmup:
        raise BadInput(
            f"the warmup is {schedule.warmup:.0%} of the run, and the band begins at {begin:.0%}; the shape of curves "
            "is known after the warmup alone"
        )
    curves = [curve for rung in rungs if (curve := smoothed(rung)) is not None]
    if len(curves) < LEAST_CURVES:
        raise BadInput(
            f"{len(curves)} runs have a line of training metrics in every twentieth of the run; a band over the curve "
            f"needs {LEAST_CURVES}: lower monitor.log_every_steps in the ladder"
        )
    return student(np.array(curves))


def student(curves: np.ndarray) -> Shape:
    """The mean and the interval for one more, of float64[runs, parts]."""
    number = len(curves)
    wide = float(stdtrit(number - 1, INTERVAL[1])) * math.sqrt(1 + 1 / number)
    return Shape(curves.mean(axis=0), wide * curves.std(axis=0, ddof=1))


def coverage(rungs: Sequence[Rung]) -> dict[str, float]:
    """{run: part of its curve that lies in the band made of the others}, each scaled by its own end."""
    curves = {rung.name: curve for rung in rungs if (curve := smoothed(rung)) is not None}
    if len(curves) <= LEAST_CURVES:
        return {}
    found = {}
    for name, curve in curves.items():
        shape = student(np.array([other for key, other in curves.items() if key != name]))
        found[name] = float(np.mean(np.abs(curve - shape.middle) <= shape.off))
    return found


def make_band(end: Prediction, shape: Shape, tokens: int) -> Band:
    """The band of a run of so many tokens; what the end and the shape leave open is added as independent errors."""
    below, above = math.log(end.middle / end.low), math.log(end.high / end.middle)
    middle = math.log(end.middle) + shape.middle
    column = lambda values: tuple(float(value) for value in np.exp(values))
    return Band(
        tuple(round(part * tokens) for part in PARTS),
        column(middle - np.hypot(shape.off, below)),
        column(middle),
        column(middle + np.hypot(shape.off, above)),
    )


def inside(band: Band, rung: Rung) -> float | None:
    """The part of a finished run's curve that lies in a band made for it; None where the curve has gaps."""
    curve = smoothed(rung)
    if curve is None:
        return None
    losses = np.exp(curve) * rung.loss
    return float(np.mean((losses >= np.array(band.low)) & (losses <= np.array(band.high))))
