"""Bitwise comparison of two runs: state, data position, resolved config, token ids, metrics.

    python -m jaxscale.cli.compare_runs WORKDIR OTHER STEP METRICS      from a rehearsal; METRICS: of OTHER, at its kill

Uses only the CPU, and reads each state in parts.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.checkpoint.record import named_leaves, nest
from jaxscale.runtime.monitor.records import read_records
from jaxscale.system import paths
from jaxscale.system.exits import Exit, put, run_and_exit
from jaxscale.units import table

SHOWN_DIFFERENCES = 6
READ_BYTES = 1 << 30  # per part, of each run
TIMING_METRICS = (
    "seconds",
    "per_second",
    "mfu",
    "bytes",
    "goodput/",
    "device/",
    "host_",
)  # substrings of metric names that depend on time or on the machine


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of a comparison of two runs."""

    rows: list[tuple[str, str, str]]  # what was compared, its size, the number of differences
    differences: list[str]  # one line each
    kills: list[str] = dataclasses.field(default_factory=list)  # a line for each kill and restart
    folder: str = ""  # of the runs, if it was not deleted

    @property
    def exact(self) -> bool:
        """True if nothing is missing or differs."""
        return not self.differences

    def lines(self) -> list[str]:
        """Returns the table and the verdict."""
        shown = [f"  {line}" for line in self.differences[:SHOWN_DIFFERENCES]]
        more = len(self.differences) - len(shown)
        shown += [f"  and {more} more"] if more else []
        folder = [f"both runs are kept in {self.folder}"] if self.folder else []
        verdict = "resume: exact" if self.exact else f"resume: NOT exact, {len(self.differences)} differences"
        return [*table([("compared", "how much", "differing"), *self.rows], indent=""), verdict, *shown, *folder]


def read_metrics(workdir: Any, *, timing: bool = False) -> dict[int, dict[str, Any]]:
    """Returns {step: training metrics}, without TIMING_METRICS unless `timing`."""
    found = {}
    for record in read_records(paths.as_path(workdir) / "metrics.jsonl"):
        if "tokens_hash" in record:
            found[record["step"]] = {
                k: v for k, v in record.items() if timing or not any(part in k for part in TIMING_METRICS)
            }
    return found


def compare(one: Any, other: Any, steps: int, seen: list[dict[int, dict]] | None = None) -> Comparison:
    """Compares checkpoints of step `steps` and metrics of two work folders. seen: metrics at each kill of `other`."""
    checkpoints, other_checkpoints = checkpoints_of(one), checkpoints_of(other)
    run, other_run = checkpoints.read_run(steps), other_checkpoints.read_run(steps)
    rows, differences = [], []

    def note(what: str, amount: str, found: list[str]) -> None:
        rows.append((what, amount, str(len(found))))
        differences.extend(f"{what}: {line}" for line in found)

    for group, amount, found in compare_state(checkpoints, other_checkpoints, steps):
        note(f"state: {group}", amount, found)
    note("data position", ", ".join(run["data"]), dict_differences(run["data"], other_run["data"]))
    note("resolved config", "all settings", dict_differences(run["config"], other_run["config"]))

    metrics, other_metrics = read_metrics(one), read_metrics(other)
    logged = range(1, steps + 1)
    if paths.is_remote(other):  # a killed run may not have uploaded its last lines
        logged = [step for step in logged if step in other_metrics]
    for what, names in (("token ids", ("tokens_hash", "batch_index")), ("metrics", None)):
        note(what, f"{len(logged)} steps", metric_differences(metrics, other_metrics, logged, names))
    before_kill = [(step, record) for early in seen or () for step, record in early.items()]
    found = [line for step, r in before_kill for line in metric_differences(metrics, {step: r}, [step], None)]
    note("metrics before a kill", f"{len(before_kill)} steps", found)
    return Comparison(rows, differences)


def compare_state(one: Checkpoints, other: Checkpoints, step: int) -> Iterator[tuple[str, str, list[str]]]:
    """Yields (group, size, a line for each differing leaf). Reads in parts, as two states may not fit in memory."""
    leaves, other_leaves = one.read_record(step)["leaves"], other.read_record(step)["leaves"]
    groups: dict[str, list[str]] = {}
    for name in sorted(leaves | other_leaves):
        groups.setdefault(name.split("/")[0], []).append(name)
    for group, names in groups.items():
        found = [f"{name} is only in {'the second' if name in other_leaves else 'the first'} run"
                 for name in names if not (name in leaves and name in other_leaves)]  # fmt: skip
        shared = [name for name in names if name in leaves and name in other_leaves]
        for part in batches(shared, {name: num_bytes(leaves[name]) for name in shared}):
            state = read_leaves(one, step, leaves, part)
            other_state = read_leaves(other, step, other_leaves, part)
            found += [line for name in part if (line := leaf_difference(name, state[name], other_state[name]))]
        numbers = sum(math.prod(leaves[name][0]) for name in shared)
        yield group, f"{len(names)} arrays, {numbers:,} numbers", found


def batches(names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yields the names in groups of at most READ_BYTES; a larger leaf is alone in its group."""
    part, filled = [], 0
    for name in names:
        if part and filled + sizes[name] > READ_BYTES:
            yield part
            part, filled = [], 0
        part.append(name)
        filled += sizes[name]
    if part:
        yield part


def num_bytes(described: Sequence[Any]) -> int:
    """Returns the bytes of a leaf that a checkpoint's record describes as (shape, dtype)."""
    return math.prod(described[0]) * jnp.dtype(described[1]).itemsize


def read_leaves(checkpoints: Checkpoints, step: int, leaves: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns {name: array on the host}."""
    target = {name: np.empty(leaves[name][0], jnp.dtype(leaves[name][1])) for name in names}
    return named_leaves(checkpoints.restore(step, nest(target), partial=True))


def checkpoints_of(workdir: Any) -> Checkpoints:
    """Opens the checkpoints of a work folder for reading."""
    return Checkpoints(paths.as_path(workdir) / "checkpoints", CheckpointConfig())


def leaf_difference(name: str, one: np.ndarray, other: np.ndarray) -> str:
    """Returns '' if both are bitwise equal, else a description of the difference."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{name} is {one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"
    if one.tobytes() == other.tobytes():
        return ""
    unequal = int(np.sum(one != other))
    largest = np.max(np.abs(one.astype(np.float64) - other.astype(np.float64)))
    return f"{name}: {unequal:,} of {one.size:,} numbers differ, by {largest:.3g} at most"


def metric_differences(one: Mapping, other: Mapping, steps: Any, names: tuple[str, ...] | None) -> list[str]:
    """Returns one line for the differing values of each step. names: metrics to compare; None: all."""
    found = []
    for step in steps:
        if step not in one or step not in other:
            found.append(f"step {step} is missing in metrics.jsonl")
            continue
        pick = lambda record: record if names is None else {name: record.get(name) for name in names}
        if lines := dict_differences(pick(one[step]), pick(other[step])):
            found.append(f"step {step}: {'; '.join(lines)}")
    return found


def dict_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns 'NAME is VALUE and VALUE' for each differing entry."""
    pairs = {name: (one.get(name), other.get(name)) for name in sorted(one.keys() | other.keys())}
    return [f"{name} is {left!r} and {right!r}" for name, (left, right) in pairs.items() if left != right]


def main(argv: list[str]) -> int:
    """Compares two work folders at a step and prints the result. Returns 0 if they are equal, else 1."""
    one, other, step, early = argv
    seen = {int(number): record for number, record in paths.read_json(early).items()}
    found = compare(one, other, int(step), [seen])
    put(json.dumps({"rows": found.rows, "differences": found.differences}))
    return Exit.DONE if found.exact else Exit.ERROR


if __name__ == "__main__":
    run_and_exit(main)
