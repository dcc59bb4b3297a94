"""Long series made fit for a screen: fewer points, the same picture."""

import itertools
from collections.abc import Sequence

Points = list[tuple[float, float]]


def thin_columns(steps: Sequence[float], values: Sequence[float], columns: int) -> Points:
    """The points, at most four for each of so many equal parts of the range of steps: first, lowest, highest, last.

    A line through them covers the same pixels as one through all, and no spike is lost. steps: in order.
    """
    points = list(zip(steps, values))
    if len(points) <= 2 * columns:
        return points
    first, last = steps[0], steps[-1]
    width = (last - first) / columns or 1.0
    kept: Points = []
    for _, group in itertools.groupby(enumerate(points), key=lambda item: int((item[1][0] - first) / width)):
        column = list(group)
        ends = (column[0], column[-1])
        extremes = (min(column, key=lambda item: item[1][1]), max(column, key=lambda item: item[1][1]))
        kept += [point for _, point in sorted({*ends, *extremes})]
    return kept


def smooth(values: Sequence[float], half: int) -> list[float]:
    """Of each value the mean over it and up to `half` neighbours on each side.

    At the beginning, where a loss is steep, as many are taken behind as there are before; at the end all there are.
    """
    total = [0.0, *itertools.accumulate(values)]
    count = len(values)
    means = []
    for i in range(count):
        first, last = max(i - half, 0), min(i + min(half, i), count - 1)
        means.append((total[last + 1] - total[first]) / (last + 1 - first))
    return means
