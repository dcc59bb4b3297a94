"""The rows of metrics.jsonl and abandoned.jsonl, read line by line and thinned on the way."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from jaxscale import units
from jaxscale.runtime.monitor.json_lines import LARGEST_NUMBER, read_lines

LONGEST_VALUE = 200  # characters of a text among the numbers
VITALS = ("goodput/", "device/")  # in every row, whatever else it is about: Writer's vitals
GROUP = 10  # rows, of which thinning keeps at most half
LARGEST = float(2**63)  # larger integers are not measurements

Row = dict[str, Any]


@dataclasses.dataclass
class Metrics:
    """metrics.jsonl while it is read: rows in the order of their steps, and those that later lines replaced."""

    most_values: int | None
    rows: list[Row] = dataclasses.field(default_factory=list)
    replaced: list[Row] = dataclasses.field(default_factory=list)
    values: int = 0  # in the rows
    lines: int = 0
    thinned: bool = False

    def add(self, row: Row) -> None:
        """Adds a row. A row of an earlier step replaces all rows from that step on."""
        self.lines += 1
        step, same_step = row["step"], []
        while self.rows and self.rows[-1]["step"] >= step:
            last = self.rows.pop()
            if last["step"] == step and not shared_names(last, row):
                same_step.append(last)  # a validation after the training step of the same number
                continue
            self.values -= len(last)
            self.replaced.append({"rewind": None} | last)
        self.rows += [*reversed(same_step), row]
        self.values += len(row)
        if self.most_values is not None:
            self.shrink(self.most_values)

    def shrink(self, most_values: int) -> None:
        """Thins once there are twice as many values as allowed, so that the total cost is O(lines)."""
        while self.values > 2 * most_values and len(self.rows) > GROUP:
            self.rows, self.thinned = [*thin(self.rows[:-1]), self.rows[-1]], True  # the last says how far it is
            self.values = sum(map(len, self.rows))
        if len(self.replaced) > most_values:
            self.replaced, self.thinned = thin(self.replaced), True


def shared_names(a: Row, b: Row) -> bool:
    """True if both rows have a common metric, apart from those that every row has."""
    return any(name in b for name in a if name not in ("step", "nonfinite") and not name.startswith(VITALS))


def thin(rows: list[Row]) -> list[Row]:
    """Keeps at most about half of the rows, in order: the notable ones of each group."""
    groups: dict[bool, list[tuple[int, Row]]] = {True: [], False: []}
    places: list[int] = []
    for place, row in enumerate(rows):
        group = groups["loss" in row]
        group.append((place, row))
        if len(group) == GROUP:
            places += notable(group)
            group.clear()
    places += [place for group in groups.values() for place, _ in group]
    return [rows[place] for place in sorted(places)]


def notable(group: list[tuple[int, Row]]) -> set[int]:
    """Places of the rows of a group that are kept."""
    if "loss" not in group[0][1]:
        return {place for place, _ in group[::2]}
    asks: tuple[Callable[[Row], float], ...] = (
        lambda row: -number(row, "loss"),
        lambda row: number(row, "loss"),
        lambda row: number(row, "grad_norm"),
        lambda row: number(row, "step_seconds"),
        lambda row: bool(row.get("skipped")) + 2 * bool(row.get("nonfinite")),
    )
    return {max(group, key=lambda item: ask(item[1]))[0] for ask in asks}


def number(row: Row, name: str) -> float:
    """The value, or minus infinity where there is none."""
    return row[name] if is_number(row.get(name)) else -math.inf


def read_metrics(folder: Any, most_values: int | None, problems: list[str]) -> Metrics:
    """The rows of metrics.jsonl."""
    found = Metrics(most_values)
    if not (folder / "metrics.jsonl").exists():
        problems.append("metrics.jsonl is not there yet: no step has been reported")
        return found
    for row in read_rows(folder / "metrics.jsonl", problems):
        found.add(row)
    if found.thinned:
        problems.append(
            f"metrics.jsonl has {found.lines:,} lines, of which {len(found.rows):,} are kept: of each group those with "
            "the lowest and highest loss, the largest gradient norm, the longest step, and a skipped one"
        )
    return found


def read_abandoned(folder: Any, metrics: Metrics, most_values: int | None, problems: list[str]) -> list[Row]:
    """The rows that do not count, each once: abandoned.jsonl, and what was replaced within metrics.jsonl.

    A crash amid moving them leaves them in both files; then they are taken out of the metrics.
    """
    moved = Metrics(most_values)
    seen: set[str] = set()
    for row in read_rows(folder / "abandoned.jsonl", problems) if (folder / "abandoned.jsonl").exists() else ():
        bare = fingerprint(row)
        if bare not in seen:
            seen.add(bare)
            moved.replaced.append({"rewind": None} | row)
            if most_values is not None:
                moved.shrink(most_values)
    if seen:
        metrics.rows[:] = [row for row in metrics.rows if fingerprint(row) not in seen]
    replaced = [row for row in metrics.replaced if fingerprint(row) not in seen]
    if replaced:
        steps = [row["step"] for row in replaced]
        problems.append(
            f"metrics.jsonl has steps {min(steps)} to {max(steps)} twice: the later lines count, the earlier are "
            "shown as abandoned"
        )
    in_order = lambda row: (row["rewind"] if is_number(row["rewind"]) else math.inf, row["step"])
    return sorted([*moved.replaced, *replaced], key=in_order)


def fingerprint(row: Row) -> str:
    """The row without the number of its rewind, as text: two with the same timings are one line in two files."""
    return json.dumps({name: value for name, value in row.items() if name != "rewind"}, sort_keys=True)


def read_rows(path: Any, problems: list[str]) -> Iterator[Row]:
    """Yields the lines with a step, non-finite numbers as None. Counts the others in `problems`."""
    names: dict[str, str] = {}  # one object for each name instead of one a line
    without_step = 0
    for record in read_lines(path, problems):
        step = record.get("step")
        if not is_number(step) or isinstance(step, float) and not step.is_integer() or not 0 <= step < LARGEST:
            without_step += 1
            continue
        row: Row = {"step": int(step)}
        nonfinite = [str(name) for name in listed] if isinstance(listed := record.get("nonfinite"), list) else []
        for name, value in record.items():
            kind = type(value)
            if kind is float and abs(value) <= LARGEST_NUMBER:  # nearly all there is, and a million lines are read
                row[names.setdefault(name, name)] = value
            elif name in ("step", "nonfinite"):
                continue
            elif kind is float or kind is int and abs(value) > LARGEST:
                row[names.setdefault(name, name)] = None
                nonfinite.append(name)
            elif kind in (int, bool, type(None)):
                row[names.setdefault(name, name)] = value
            elif kind is str:
                row[names.setdefault(name, name)] = value[:LONGEST_VALUE]
        row["step"] = int(step)  # it may have been 3.0
        row.pop("nonfinite", None)  # a name of ours
        if nonfinite:
            row["nonfinite"] = list(dict.fromkeys(nonfinite))
        yield row
    if without_step:
        problems.append(f"{path.name}: {units.plural(without_step, 'line')} without a step left out")


def is_number(value: Any) -> TypeGuard[float]:
    """True for a number; False for True, None and text."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
