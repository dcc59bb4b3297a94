"""Two runs held against each other, bit for bit: state, data position, resolved config, token ids, metrics.

    python -m jaxscale.cli.compare_runs WORKDIR OTHER STEP METRICS      by a rehearsal; METRICS: of OTHER, at its kill

No device is asked for anything but the CPU, and no more than a part of each state is held at a time.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxscale.checkpoint.config import CheckpointConfig
from jaxscale.checkpoint.manager import Checkpoints
from jaxscale.checkpoint.record import named_leaves, nest
from jaxscale.monitor.records import read_records
from jaxscale.system import paths
from jaxscale.system.exits import Exit, put, run_and_exit
from jaxscale.units import table

SHOWN_DIFFERENCES = 6
READ_BYTES = 1 << 30  # of each run at a time
CLOCKED = (
    "seconds",
    "per_second",
    "mfu",
    "bytes",
    "goodput/",
    "device/",
    "host_",
)  # parts of names of metrics that tell of time or of the machine


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs, compared."""

    rows: list[tuple[str, str, str]]  # what, how much of it, how many differ
    differences: list[str]  # one line each
    told: list[str] = dataclasses.field(default_factory=list)  # how the run was killed
    kept: str = ""  # folder of the runs, if it stays

    @property
    def exact(self) -> bool:
        """True if everything was there and equal."""
        return not self.differences

    def lines(self) -> list[str]:
        """The table and the verdict."""
        shown = [f"  {line}" for line in self.differences[:SHOWN_DIFFERENCES]]
        more = len(self.differences) - len(shown)
        shown += [f"  and {more} more"] if more else []
        kept = [f"both runs are kept in {self.kept}"] if self.kept else []
        verdict = "resume: exact" if self.exact else f"resume: NOT exact, {len(self.differences)} differences"
        return [*table([("compared", "how much", "differing"), *self.rows], indent=""), verdict, *shown, *kept]


def read_metrics(workdir: Any, *, clocked: bool = False) -> dict[int, dict[str, Any]]:
    """{step: its training metrics, those of the clock only if asked for}."""
    found = {}
    for record in read_records(paths.as_path(workdir) / "metrics.jsonl"):
        if "tokens_hash" in record:
            found[record["step"]] = {
                k: v for k, v in record.items() if clocked or not any(part in k for part in CLOCKED)
            }
    return found


def compare(one: Any, other: Any, steps: int, seen: list[dict[int, dict]] | None = None) -> Comparison:
    """The checkpoints of step `steps` and the metrics of two work folders. seen: metrics at each kill of the other."""
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
    if paths.is_remote(other):  # where a killed run may not have written its last lines out: they are no part of it
        logged = [step for step in logged if step in other_metrics]
    for what, names in (("token ids", ("tokens_hash", "batch_index")), ("metrics", None)):
        note(what, f"{len(logged)} steps", metric_differences(metrics, other_metrics, logged, names))
    again = [(step, record) for early in seen or () for step, record in early.items()]
    found = [line for step, r in again for line in metric_differences(metrics, {step: r}, [step], None)]
    note("metrics before a kill", f"{len(again)} steps", found)
    return Comparison(rows, differences)


def compare_state(one: Checkpoints, other: Checkpoints, step: int) -> Iterator[tuple[str, str, list[str]]]:
    """(group, how much of it, a line for each differing leaf); read in parts: two states need not fit at once."""
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
    """The names in groups of at most READ_BYTES, a larger one by itself."""
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
    """Bytes of a leaf as a checkpoint's record describes it."""
    return math.prod(described[0]) * jnp.dtype(described[1]).itemsize


def read_leaves(checkpoints: Checkpoints, step: int, leaves: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """{name: array on the host}."""
    blank = {name: np.empty(leaves[name][0], jnp.dtype(leaves[name][1])) for name in names}
    return named_leaves(checkpoints.restore(step, nest(blank), partial=True))


def checkpoints_of(workdir: Any) -> Checkpoints:
    """The checkpoints in a work folder, to be read."""
    return Checkpoints(paths.as_path(workdir) / "checkpoints", CheckpointConfig())


def leaf_difference(name: str, one: np.ndarray, other: np.ndarray) -> str:
    """'' if both are the same bit for bit, else what differs."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return f"{name} is {one.dtype}{list(one.shape)} and {other.dtype}{list(other.shape)}"
    if one.tobytes() == other.tobytes():
        return ""
    unequal = int(np.sum(one != other))
    largest = np.max(np.abs(one.astype(np.float64) - other.astype(np.float64)))
    return f"{name}: {unequal:,} of {one.size:,} numbers differ, by {largest:.3g} at most"


def metric_differences(one: Mapping, other: Mapping, steps: Any, names: tuple[str, ...] | None) -> list[str]:
    """One line for the differing values of each step; `names` None: all that are recorded."""
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
    """'name: value and value' for each name in which they differ."""
    pairs = {name: (one.get(name), other.get(name)) for name in sorted(one.keys() | other.keys())}
    return [f"{name} is {left!r} and {right!r}" for name, (left, right) in pairs.items() if left != right]


def main(argv: list[str]) -> int:
    """Compares two work folders at a step and prints the result; 0 if they are equal, else 1."""
    one, other, step, early = argv
    seen = {int(number): record for number, record in paths.read_json(early).items()}
    found = compare(one, other, int(step), [seen])
    put(json.dumps({"rows": found.rows, "differences": found.differences}))
    return Exit.DONE if found.exact else Exit.ERROR


if __name__ == "__main__":
    run_and_exit(main)
