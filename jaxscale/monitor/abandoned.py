"""Metrics of steps that a run has gone back from: kept in abandoned.jsonl, out of the way of those that count."""

import json
from typing import Any

from jaxscale.monitor.records import read_lines, write_lines
from jaxscale.system import paths


def abandon(workdir: Any, to_step: int, rewind: int) -> int:
    """Moves the lines of metrics.jsonl behind to_step to abandoned.jsonl; the number of lines that it moved.

    Each gets "rewind": the number of the rewind that it was lost by. Done again after a crash, it moves nothing twice.
    """
    folder = paths.as_path(workdir)
    kept, moved = [], []
    for line, record in read_lines(folder / "metrics.jsonl"):
        if not isinstance(step := record.get("step"), (int, float)):
            continue  # the next start of the metrics would drop it too
        if step > to_step:
            moved.append(json.dumps({"rewind": rewind} | record).encode())
        else:
            kept.append(line)
    if moved:
        before = [line for line, _ in read_lines(folder / "abandoned.jsonl")]
        known = set(before)
        write_lines(folder / "abandoned.jsonl", [*before, *(line for line in moved if line not in known)])
        write_lines(folder / "metrics.jsonl", kept)
    return len(moved)
