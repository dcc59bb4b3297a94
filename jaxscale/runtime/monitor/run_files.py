"""Readers of the files of a run that may still be running. Damaged parts are skipped and reported as problems.

The rows of metrics.jsonl and abandoned.jsonl are thinned while they are read. experts.jsonl has token counts per layer
and expert for windows of steps.
"""

import collections
import dataclasses
import json
import math
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

from jaxscale import units
from jaxscale.runtime.monitor.records import Damage, read_records
from jaxscale.system import paths
from jaxscale.system.exits import BadInput

LARGEST_NUMBER = 1e100  # larger numbers are not measurements
NUMBERS = tuple("step code seconds bytes to until batch number steps_won steps_lost wall_seconds".split())
OBJECTS = ("devices", "goodput", "left")

Row = dict[str, Any]
LONGEST_VALUE = 200  # characters of a string value in a row
VITALS = ("goodput/", "device/")  # prefixes of the metrics in every row (Writer.vitals)
GROUP = 10  # rows in a group; thinning keeps at most half of them
LARGEST = float(2**63)  # larger integers are not measurements
MOST_WINDOWS = 10_000  # newest windows to read; a run writes about 130


def read_lines(path: Any, problems: list[str]) -> Iterator[Row]:
    """Yields the JSON objects of a file, or nothing if it is missing. Reports damaged lines in `problems`."""
    damage = Damage()
    try:
        yield from read_records(path, damage)
    except BadInput as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{path.name} cannot be read completely: {error.strerror or error}")
    if damage.lines:
        problems.append(f"{path.name}: {units.plural(damage.lines, 'damaged line')} skipped")
    if damage.torn:
        problems.append(f"{path.name}: the last line is incomplete, such as during a write, and is skipped")


def read_object(path: Any, problems: list[str], without: str) -> dict[str, Any]:
    """Returns the JSON object in a file. On failure, returns {} and reports a problem with `without` at its end."""
    try:
        if isinstance(found := paths.read_json(path), dict):
            return finite(found)
        reason = "is not a JSON object"
    except FileNotFoundError:
        reason = "is missing"
    except BadInput:
        reason = "is damaged"
    problems.append(f"{path.name} {reason}: {without}")
    return {}


def clean_event(record: Row) -> Row | None:
    """Returns an event with its invalid fields replaced by None. Returns None if the record is not an event."""
    if not isinstance(record.get("event"), str):
        return None
    event = finite(record)
    for names, kind in ((NUMBERS, (int, float)), (OBJECTS, dict)):
        for name in names:
            if name in event and (not isinstance(event[name], kind) or isinstance(event[name], bool)):
                event[name] = None
    return event


def finite(value: Any) -> Any:
    """Returns a value in which non-finite and very large numbers are replaced by None, recursively."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if is_number(value) and not abs(value) <= LARGEST_NUMBER else value


def as_list(value: Any) -> list[Any]:
    """Returns the value if it is a list, otherwise []."""
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    """Returns the value if it is a dict, otherwise {}. A damaged config.json may contain anything."""
    return value if isinstance(value, dict) else {}


@dataclasses.dataclass
class MetricRows:
    """Rows read so far from metrics.jsonl, in order of step, and earlier rows that later lines have replaced."""

    most_values: int | None
    rows: list[Row] = dataclasses.field(default_factory=list)
    replaced: list[Row] = dataclasses.field(default_factory=list)
    values: int = 0  # number of values in `rows`
    lines: int = 0
    thinned: bool = False

    def add(self, row: Row) -> None:
        """Adds a row. If its step was repeated, the row replaces all earlier rows from that step on."""
        self.lines += 1
        step, same_step = row["step"], []
        names = lambda row: {name for name in row if name not in ("step", "nonfinite") and not name.startswith(VITALS)}
        while self.rows and self.rows[-1]["step"] >= step:
            last = self.rows.pop()
            if last["step"] == step and names(last).isdisjoint(names(row)):
                same_step.append(last)  # a validation record of the same step
                continue
            self.values -= len(last)
            self.replaced.append({"rewind": None} | last)
        self.rows += [*reversed(same_step), row]
        self.values += len(row)
        if self.most_values is not None:
            self.shrink(self.most_values)

    def shrink(self, most_values: int) -> None:
        """Thins the rows when they have twice the allowed number of values, so that the total cost is O(lines)."""
        while self.values > 2 * most_values and len(self.rows) > GROUP:
            self.rows, self.thinned = [*thin(self.rows[:-1]), self.rows[-1]], True  # the last row shows the progress
            self.values = sum(map(len, self.rows))
        if len(self.replaced) > most_values:
            self.replaced, self.thinned = thin(self.replaced), True


def thin(rows: list[Row]) -> list[Row]:
    """Returns the notable rows of each group, in order. This is at most about half of all rows."""
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
    """Returns the indices of the rows to keep from a group of (index, row) pairs."""
    if "loss" not in group[0][1]:
        return {place for place, _ in group[::2]}
    number = lambda row, name: row[name] if is_number(row.get(name)) else -math.inf
    rank = lambda row: (
        -number(row, "loss"),
        *(number(row, name) for name in ("loss", "grad_norm", "step_seconds")),
        bool(row.get("skipped")) + 2 * bool(row.get("nonfinite")),
    )
    ranks = [(place, rank(row)) for place, row in group]
    return {max(ranks, key=lambda item: item[1][column])[0] for column in range(len(ranks[0][1]))}


def read_metrics(folder: Any, most_values: int | None, problems: list[str]) -> MetricRows:
    """Reads the rows of metrics.jsonl, thinned to about `most_values` values."""
    found = MetricRows(most_values)
    if not (folder / "metrics.jsonl").exists():
        problems.append("metrics.jsonl does not exist yet: no step has been reported")
        return found
    for row in read_rows(folder / "metrics.jsonl", problems):
        found.add(row)
    if found.thinned:
        problems.append(
            f"metrics.jsonl has {found.lines:,} lines, of which {len(found.rows):,} are used: in each group, the lines "
            "with the lowest and highest loss, the largest gradient norm, the longest step, and a skipped step"
        )
    return found


def read_abandoned(folder: Any, metrics: MetricRows, most_values: int | None, problems: list[str]) -> list[Row]:
    """Returns the rows of abandoned.jsonl, which it removes from `metrics`, and the replaced rows of `metrics`."""
    moved = MetricRows(most_values)
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
            f"metrics.jsonl has steps {min(steps)} to {max(steps)} more than once: the later lines are used, the "
            "earlier lines are shown as abandoned"
        )
    in_order = lambda row: (row["rewind"] if is_number(row["rewind"]) else math.inf, row["step"])
    return sorted([*moved.replaced, *replaced], key=in_order)


def fingerprint(row: Row) -> str:
    """Returns a row as JSON without its rewind number. Rows with equal fingerprints are copies."""
    return json.dumps({name: value for name, value in row.items() if name != "rewind"}, sort_keys=True)


def read_rows(path: Any, problems: list[str]) -> Iterator[Row]:
    """Yields the rows that have a step. Non-finite numbers become None. Reports other lines in `problems`."""
    names: dict[str, str] = {}  # shares one string object per metric name
    without_step = 0
    for record in read_lines(path, problems):
        step, listed = record.pop("step", None), record.pop("nonfinite", None)
        if not is_number(step) or isinstance(step, float) and not step.is_integer() or not 0 <= step < LARGEST:
            without_step += 1
            continue
        row: Row = {"step": int(step)}
        nonfinite = [str(name) for name in as_list(listed)]
        for name, value in record.items():
            kind = type(value)
            if kind is float and abs(value) <= LARGEST_NUMBER:  # most values; files may have a million lines
                row[names.setdefault(name, name)] = value
            elif kind is float or kind is int and abs(value) > LARGEST:
                row[names.setdefault(name, name)] = None
                nonfinite.append(name)
            elif kind in (int, bool, type(None)):
                row[names.setdefault(name, name)] = value
            elif kind is str:
                row[names.setdefault(name, name)] = value[:LONGEST_VALUE]
        if nonfinite:
            row["nonfinite"] = list(dict.fromkeys(nonfinite))
        yield row
    if without_step:
        problems.append(f"{path.name}: {units.plural(without_step, 'line')} without a step skipped")


def is_number(value: Any) -> TypeGuard[float]:
    """Returns True for an int or a float, but not for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class CountWindow(NamedTuple):
    """Expert loads in the steps from one record to the next."""

    step: int  # the last step of the window
    steps: int
    first_layer: int
    busiest: tuple[float | None, ...]  # per layer: load of the busiest expert over the mean, or None


class ExpertCounts(NamedTuple):
    """Expert loads of a run: all windows of steps, and the token counts in the newest window."""

    windows: tuple[CountWindow, ...]
    counts: tuple[tuple[int, ...], ...]  # token counts of the newest window, by layer and expert

    @property
    def newest(self) -> CountWindow:
        """The newest window, to which `counts` belongs."""
        return self.windows[-1]

    @property
    def layers(self) -> range:
        """Indices of the layers with experts."""
        return range(self.newest.first_layer, self.newest.first_layer + len(self.counts))


def read_expert_counts(folder: Any, problems: list[str]) -> ExpertCounts | None:
    """Returns the expert loads in experts.jsonl, or None. If steps were repeated, uses the later records."""
    windows: collections.deque[CountWindow] = collections.deque(maxlen=MOST_WINDOWS)
    counts: tuple[tuple[int, ...], ...] = ()
    for record in read_lines(folder / "experts.jsonl", problems):
        found = counts_in(record)
        if found is None:
            continue
        while windows and windows[-1].step >= record["step"]:
            windows.pop()
        busiest = tuple(max(counts) / statistics.fmean(counts) if any(counts) else None for counts in found)
        windows.append(CountWindow(record["step"], record["steps"], record["first_layer"], busiest))
        counts = found
    if not windows:
        return None
    similar = [one for one in windows if (one.first_layer, len(one.busiest)) == (windows[-1].first_layer, len(counts))]
    return ExpertCounts(tuple(similar), counts)


def counts_in(record: dict[str, Any]) -> tuple[tuple[int, ...], ...] | None:
    """Returns the token counts of a record by layer and expert, or None if the record is invalid."""
    facts = [record.get(name) for name in ("step", "steps", "first_layer")]
    table = record.get("counts")
    if not all(type(fact) is int and 0 <= fact <= LARGEST_NUMBER for fact in facts) or not isinstance(table, list):
        return None
    whole = all(isinstance(row, list) and row and len(row) == len(table[0]) for row in table)
    if not table or not whole:
        return None
    if not all(type(count) is int and 0 <= count <= LARGEST_NUMBER for row in table for count in row):
        return None
    return tuple(map(tuple, table))
