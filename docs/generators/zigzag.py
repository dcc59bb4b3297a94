"""A drawing of who attends to what where devices share a row, of the very table by which the step cuts rows."""

from collections.abc import Iterator

import numpy as np

from generators.svg import Ink, figure, polygon, rectangle, sentence, text
from generators.words import table
from jaxscale.core.axes.context_axis import ContextAxis

DEVICES = 4
CELL, TOP, LEFT, BETWEEN = 34, 40, 10, 150  # pixels
INKS = (Ink("#2b69ad", "#fff"), Ink("#c4691c", "#fff"), Ink("#2f7d4f", "#fff"), Ink("#8a4fa3", "#fff"))
ZIGZAG, IN_ORDER = ContextAxis(DEVICES), ContextAxis(DEVICES, zigzag=False)
CHUNKS = ZIGZAG.multiple  # of a row in zigzag order; in row order a device has two that follow each other


def owners(axis: ContextAxis) -> np.ndarray:
    """int[CHUNKS]: which device has each chunk."""
    found = np.full(CHUNKS, -1)
    long = CHUNKS // axis.multiple  # a run, in chunks
    for device, starts in enumerate(axis.chunk_starts(long)):
        for start in starts:
            found[start : start + long] = device
    assert (found >= 0).all()
    return found


def work(axis: ContextAxis) -> np.ndarray:
    """float[DEVICES]: part of all pairs of a query and a key that it sees, by device; a chunk sees half of itself."""
    seen = np.arange(CHUNKS) + 0.5
    return np.bincount(owners(axis), seen) / seen.sum()


def triangle(axis: ContextAxis, left: float) -> Iterator[str]:
    """A mark for each chunk of queries and chunk of keys that it sees."""
    edge = lambda n: TOP + n * CELL
    for i, device in enumerate(owners(axis)):
        told = [f"device {device}: queries of chunk {i} see keys of chunk {j}" for j in range(i + 1)]
        for j in range(i):
            yield rectangle((left + j * CELL, edge(i) + 0.5, CELL, CELL - 1), INKS[device], "", "seen", told[j])
        corners = [(left + i * CELL + 0.5, edge(i) + 0.5), (left + (i + 1) * CELL - 1, edge(i + 1) - 0.5),
                   (left + i * CELL + 0.5, edge(i + 1) - 0.5)]  # fmt: skip
        yield polygon(corners, INKS[device], "seen", told[i])
        yield text(left + (i + 1) * CELL + 6, edge(i) + CELL / 2, f"device {device}", anchor="start", size=12)


def drawing() -> str:
    """Both orders side by side."""
    wide = CHUNKS * CELL
    second = LEFT + wide + BETWEEN
    marks: list[str] = []
    for axis, left, name in ((ZIGZAG, LEFT, "zigzag"), (IN_ORDER, second, "contiguous")):
        load = f"{name}: busiest device has {work(axis).max():.0%} of the work"
        marks.append(text(left, 12, load, anchor="start", size=13))
        marks.append(text(left, 30, "keys to the right, queries downwards", anchor="start", size=11))
        marks += triangle(axis, left)
    told = " ".join(
        f"{name}: " + ", ".join(f"device {device} has {words(axis, device)}" for device in range(DEVICES)) + "."
        for axis, name in ((ZIGZAG, "Zigzag"), (IN_ORDER, "Contiguous"))
    )
    title = f"Keys that the queries of {DEVICES} devices attend to"
    caption = sentence(
        f"{title}. The sequence has {CHUNKS} chunks. Each triangle on the diagonal is the causal half of a chunk."
    )
    return figure(title, told, caption, (second + wide + 62, TOP + wide + 6), marks)


def words(axis: ContextAxis, device: int) -> str:
    """'chunks 0 and 7, 25% of the work'."""
    own = " and ".join(str(chunk) for chunk in np.flatnonzero(owners(axis) == device))
    return f"chunks {own}, {work(axis)[device]:.0%} of the work"


def shares() -> str:
    """What each device has in both orders."""
    rows = [[f"{device}", words(ZIGZAG, device), words(IN_ORDER, device)] for device in range(DEVICES)]
    return table(["device", "zigzag", "contiguous"], rows)
