"""Parses and formats amounts such as '2000 steps', '1%' or '1 epoch', numbers and tables."""

import bisect
import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxscale.system.exits import BadInput

Tokens = int | str  # type of settings with an amount of training, which resolve() converts to an integer

FORM = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?)\s*(%|[a-zA-Z]*)\s*")
UNITS = {"": "tokens", "token": "tokens", "tokens": "tokens", "step": "steps", "steps": "steps", "%": "%"}
UNITS |= {"row": "rows", "rows": "rows", "epoch": "epochs", "epochs": "epochs"}
MAX_AMOUNT = 1e18  # maximum in any unit, below the largest int64
YEAR = 365.25 * 86_400  # seconds
INDENT = "  "  # indentation of tables
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
PART = r"(\d+(?:\.\d+)?)([smhdw])"  # part of a duration
ROUNDED = 0.9995  # fraction of a unit from which three digits round up to the unit


def parse(name: str, amount: Tokens) -> tuple[float, str]:
    """Returns (number, unit), where the unit is tokens, steps, rows, epochs or %. name: setting for error messages."""
    found = FORM.fullmatch(str(amount))
    if not found or found[2].lower() not in UNITS:
        raise BadInput(
            f"{name}={str(amount)[:40]!r} is not an amount of training; write an integer (tokens), '2000 steps', "
            "'1%' or '1 epoch'"
        )
    number = float(found[1].replace("_", ""))
    if number > MAX_AMOUNT:
        raise BadInput(f"{name}={str(amount)[:40]} is too large; the maximum is {MAX_AMOUNT:.0e}")
    return number, UNITS[found[2].lower()]


def resolve(
    name: str,
    amount: Tokens,
    *,
    seq_len: int,
    batch_tokens: int | None = None,
    train_tokens: int | None = None,
    epoch_tokens: int | None = None,
) -> int:
    """Returns the amount in tokens. Raises BadInput if its unit depends on an argument that is None."""
    number, unit = parse(name, amount)
    size = {
        "tokens": 1,
        "rows": seq_len,
        "steps": batch_tokens,
        "%": None if train_tokens is None else train_tokens / 100,
        "epochs": epoch_tokens,
    }[unit]
    if size is None:
        needs = {"steps": "batch_tokens", "%": "train_tokens", "epochs": "the length of the data set"}[unit]
        other = "tokens or steps" if batch_tokens else "tokens or rows"
        raise BadInput(f"{name}={amount!r} needs {needs}, which is unknown; give the amount in {other}")
    if not (number * size).is_integer() and unit == "tokens":
        raise BadInput(f"{name}={amount!r} must be a whole number of tokens")
    return round(number * size)


def steps(tokens: int, batch_tokens: int) -> int:
    """Returns the number of steps for at least `tokens` tokens."""
    return -(-tokens // batch_tokens)


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Sizes of the batches 0, 1, 2, ... of an endless stream, piecewise constant, in sequences or tokens.

    Converts batch numbers to stream positions and back. For sequence lengths, use only size().
    """

    stages: tuple[tuple[int, int], ...]  # (first batch, size) in order; the first stage begins at batch 0

    @classmethod
    def growing(cls, ends: Sequence[tuple[int, int]], last: int) -> "BatchSizes":
        """Returns BatchSizes with each size up to stream position `until`, for (size, until) in `ends`, then `last`.

        Raises BadInput if a size has no batch.
        """
        stages, batch, reached = [], 0, 0
        for size, until in ends:
            if until <= reached:
                raise BadInput(
                    f"no batch has size {size:,}, because earlier batches reach {reached:,} (its end is {until:,})"
                )
            stages.append((batch, size))
            number = steps(until - reached, size)
            batch, reached = batch + number, reached + number * size
        return cls((*stages, (batch, last)))

    @classmethod
    def of(cls, sizes: "BatchSizes | int") -> "BatchSizes":
        """Returns `sizes`, or for a number the same size for all batches."""
        return sizes if isinstance(sizes, BatchSizes) else cls(((0, sizes),))

    @property
    def largest(self) -> int:
        """The largest size."""
        return max(size for _, size in self.stages)

    @property
    def vary(self) -> bool:
        """True if there are several sizes."""
        return len(self.stages) > 1

    def starts(self) -> list[int]:
        """Returns the positions in the stream at which the stages begin."""
        starts, position = [0], 0
        for (first, size), (following, _) in zip(self.stages, self.stages[1:]):
            starts.append(position := position + (following - first) * size)
        return starts

    def stage(self, n: int) -> int:
        """Returns the index of the stage of batch n."""
        return bisect.bisect_right(self.stages, n, key=lambda stage: stage[0]) - 1

    def size(self, n: int) -> int:
        """Returns the size of batch n."""
        return self.stages[self.stage(n)][1]

    def begin(self, n: int) -> int:
        """Returns the position in the stream at which batch n begins."""
        first, size = self.stages[at := self.stage(n)]
        return self.starts()[at] + (n - first) * size

    def find(self, position: int) -> tuple[int, int]:
        """Returns (number of the batch that contains a stream position, offset in this batch). Inverse of begin()."""
        at = bisect.bisect_right(starts := self.starts(), position) - 1
        first, size = self.stages[at]
        batches, offset = divmod(position - starts[at], size)
        return first + batches, offset

    def holding(self, amount: int) -> int:
        """Returns the number of batches, from the beginning of the stream, that contain at least this amount."""
        batch, offset = self.find(amount)
        return batch + (offset > 0)

    def times(self, number: int) -> "BatchSizes":
        """Returns the sizes multiplied by a number, for example to convert sequences to tokens."""
        return BatchSizes(tuple((first, size * number) for first, size in self.stages))


def recorded_sizes(budget: Mapping[str, Any], row_tokens: int = 1) -> BatchSizes:
    """Returns the batch sizes in a recorded budget, in sequences of row_tokens tokens."""
    stages = tuple((int(first), int(tokens) // row_tokens) for first, tokens in budget.get("ramp") or ())
    return BatchSizes(stages or ((0, int(budget["batch_tokens"]) // row_tokens),))


def digits(number: float) -> str:
    """Rounds a number to an integer or three significant digits: 12345.6 -> '12,346', 0.1234 -> '0.123'."""
    return f"{number:,.0f}" if abs(number) >= ROUNDED * 1000 else f"{number:.3g}"


def count(number: float) -> str:
    """Formats a large number: 6.74e9 -> '6.74B', 124439808 -> '124M', 999999 -> '1M', 950 -> '950'."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(number) >= ROUNDED * size:
            return f"{digits(number / size)}{letter}"
    return f"{number / 1e3:.3g}K" if abs(number) >= 1000 else f"{number:.4g}"


def dollars(amount: float) -> str:
    """Formats dollars: '$1.23M', '$12,346', '$0.45', '$0.0031'."""
    if amount >= ROUNDED * 1e6:
        return f"${digits(amount / 1e6)}M"
    if amount >= 100:
        return f"${amount:,.0f}"
    return f"${amount:.2f}" if amount >= 0.1 or not amount else f"${amount:.2g}"


def plural(number: int, noun: str) -> str:
    """Formats '1 host', '4 hosts', '2 microbatches', '2 processes'."""
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun}{ending * (number != 1)}"


def size(num_bytes: float) -> str:
    """Formats bytes in powers of 1024: 26.2e9 -> '24.4 GiB'."""
    for unit, letter in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= unit * (1 - 0.05 / 1024):  # otherwise the smaller unit would round to 1024.0
            return f"{num_bytes / unit:.1f} {letter}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Formats seconds: 3725 -> '1h02m', 65 -> '1m05s', 4.2 -> '4.2s', 1.22e9 -> '38.7 years', -1 -> '0.0s'."""
    seconds = max(seconds, 0.0)
    if seconds >= 2 * YEAR:
        return f"{digits(seconds / YEAR)} years"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f}s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{remainder:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def step_duration(seconds: float) -> str:
    """Formats seconds, also below one: '12ms', '3.4s' or '1m20s'."""
    return duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g}ms"


def seconds_of(text: str) -> float | None:
    """Parses a duration such as '30d', '12h' or '1h30m' to seconds. Returns None if it is invalid or zero."""
    found = re.fullmatch(rf"({PART})+", text.strip().lower())
    seconds = sum(float(number) * SECONDS[unit] for number, unit in re.findall(PART, text.lower())) if found else 0.0
    return seconds or None


def divisors(number: int) -> list[int]:
    """Returns all divisors in increasing order in O(sqrt(number)) time (0.1 s for a prime near 1e12)."""
    found, remaining, factor = [1], number, 2
    while remaining > 1:
        while factor * factor <= remaining and remaining % factor:
            factor += 1
        prime, powers = factor if factor * factor <= remaining else remaining, [1]
        while remaining % prime == 0:
            remaining, powers = remaining // prime, [*powers, powers[-1] * prime]
        found = [divisor * power for divisor in found for power in powers]
    return sorted(found)


def or_list(choices: Collection[Any]) -> str:
    """Formats choices as '1, 2 or 4', or 'none' if empty."""
    if not choices:
        return "none"
    *head, last = map(str, choices)
    return f"{', '.join(head)} or {last}" if head else last


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = INDENT) -> list[str]:
    """Formats rows as indented lines with aligned columns. Columns in `right` are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines
